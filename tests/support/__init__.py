"""What tests of several packages share; the benchmarks import the last group, too.

Crawls and commands, each in a process of its own:

- `crawls`: start, hold, pause, stop and kill a crawl; run a script. `*_spider`: their spiders.
  `components`: what their settings name.
- `cli`: run a command of `scrapy bloom`; `workspace`: the files, filters and queues that commands
  use; `shell`: run commands of the documents in bash.
- `processes`, `preloaded`, `forked`: fork crawls and commands from a process that has imported
  Scrapy.
- `shared_crawls`: workers that share a queue.

Sites, servers, disks, machines:

- `sites`: sites on loopback, which count requests, and hold back answers.
- `servers`: Redis and Valkey, Sentinel, Clusters; `connections`: with passwords and TLS; `proxies`:
  lose replies.
- `disks`: cut the power of a disk, or have it fail to write. `machine`: what this machine has.

Filters and queues without a crawl:

- `backends`: backends of all kinds, opened. `local_filters`, `redis_filters`:
  filters in files, in memory, with a log, and in Redis. `clock`: their clock. `reports`: pages of
  `report`.
- `request_queues`, `batches`: steps of stores, and what is stored. `stores`: each store, and the
  simplest one, `memory_store`.
- `simulated`: random schedules of a small crawl by several workers.
- `documents`: the pages of docs/, and their code blocks. `browser`: Chromium, which shows the site.

Crawls that are disturbed at random, by soak tests and benchmarks:

- `example_crawls`: the example project's site, and crawls of it.
- `worker_faults`: kills of workers, and faults of their server.
- `server_losses`: workers of scrapy-redis whose server loses something.
"""
