BOT_NAME = "example"
SPIDER_MODULES = ["example.spiders"]

# The one line. A job directory (scrapy crawl docs -s JOBDIR=job) makes it last.
DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
# With a second one, the job also continues after a kill -9.
SCHEDULER = "scrapy_bloom.CrashSafeScheduler"

# How many different requests the crawl is expected to schedule, and how often a new one may be
# mistaken for a duplicate: here, one in a billion, the default.
BLOOM_EXPECTED_REQUESTS = 5_000
BLOOM_ERROR_RATE = 1e-9

ROBOTSTXT_OBEY = True
CONCURRENT_REQUESTS_PER_DOMAIN = 16
DOWNLOAD_DELAY = 0
TELNETCONSOLE_ENABLED = False
REMOTE_CONTROL_ENABLED = False
LOG_LEVEL = "INFO"
