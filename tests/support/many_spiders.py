"""Many spiders in one process, each with a job directory of its own.

Arguments: how many, the site's URL. Prints what became of each, as JSON.
"""

import json
import logging
import sys

import scrapy
from scrapy.crawler import CrawlerProcess
from scrapy.linkextractors import LinkExtractor


class OneOfMany(scrapy.Spider):
    custom_settings = {  # noqa: RUF012
        "TELNETCONSOLE_ENABLED": False,
        "REMOTE_CONTROL_ENABLED": False,
        "DOWNLOAD_DELAY": 0,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 16,
        "LOG_LEVEL": "INFO",
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "BLOOM_EXPECTED_REQUESTS": 1000,
    }

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.pages = []

    def parse(self, response):
        self.pages.append(response.url)
        yield scrapy.Request(f"{self.start_urls[0]}only/for/{self.name}")
        for link in LinkExtractor().extract_links(response):
            yield scrapy.Request(link.url)


def main():
    number, url = int(sys.argv[1]), sys.argv[2]
    process = CrawlerProcess({"LOG_LEVEL": "WARNING"})
    crawlers = []
    for each in range(number):
        name = f"spider-{each}"
        settings = {**OneOfMany.custom_settings, "JOBDIR": f"jobs/{name}"}
        kind = type(name, (OneOfMany,), {"name": name, "custom_settings": settings})
        crawler = process.create_crawler(kind)
        crawlers.append(crawler)
        process.crawl(crawler, url=url)
    process.start()
    logging.disable()
    report = {
        crawler.spider.name: {
            "pages": crawler.spider.pages,
            "stats": {
                name: value
                for name, value in crawler.stats.get_stats().items()
                if name.startswith(("bloom/", "dupefilter/", "finish_reason"))
            },
        }
        for crawler in crawlers
    }
    print(json.dumps(report))


main()
