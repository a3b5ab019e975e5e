"""What tests of several packages share; the benchmarks import the last group, too.

Crawls and commands, each in a process of its own:

- `crawls`: start, hold, pause, stop and kill a crawl; run a script. `*_spider.py`: its spiders.
- `cli`: run a command of `scrapy bloom`; `workspace`: the files, filters and queues that commands
  work on; `shell`: run commands of the documents in bash.
- `processes`, `preloaded`, `forked`: they are forked from a process that has imported Scrapy.
- `shared_crawls`: workers that share a queue. `components`: what their settings name.

Sites, servers, disks, machines:

- `sites`: on loopback, which count what they are asked for, and hold back answers.
- `servers`: Redis and Valkey, Sentinel, Clusters; `connections`: with passwords and TLS; `proxies`:
  that lose replies; `redis_faults`: what goes wrong with a server in mid-crawl.
- `disks`: whose power is cut, or that fail to write. `like_windows`: a process without what Windows
  lacks. `machine`: what there is here.

Filters and queues without a crawl:

- `backends`, `local_filters`, `crashing_filters`, `logged_filters`, `redis_filters`, `crowds`: in
  files, in memory, with a log, in Redis, and used by many processes. `clock`: that they are given.
- `request_queues`, `batches`: the stores of requests, and what is stored.
- `simulation`, `simulated`, `states`, `exploration`: all schedules of a small crawl.
- `hostile_values`: what a filter in Redis should never hold. `reports`: pages of `report`.
- `documents`: the pages of docs/, and their code blocks.

Crawls of the example project that are disturbed at random, by soak tests and benchmarks:

- `example_sites`, `example_crawls`, `example_workers`: the site, a job, and workers.
- `job_kills`, `worker_faults`, `server_losses`: what is done to them, and what came of it.
"""
