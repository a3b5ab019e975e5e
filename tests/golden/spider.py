"""A crawl without a site: 40 pages in data: URLs, each of which leads to the next two."""

import os
import signal
from typing import ClassVar

import scrapy


class Golden(scrapy.Spider):
    name = "golden"
    custom_settings: ClassVar = {
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "BLOOM_EXPECTED_REQUESTS": 300,
        "CONCURRENT_REQUESTS": 2,
        "LOG_LEVEL": "INFO",
        "TELNETCONSOLE_ENABLED": False,
        "REMOTE_CONTROL_ENABLED": False,
    }

    def __init__(self, die_at=0, **kwargs):
        super().__init__(**kwargs)
        self.die_at = int(die_at)
        self.pages = 0

    async def start(self):
        yield scrapy.Request("data:,0")

    def parse(self, response):
        number = int(response.text)
        self.pages += 1
        if self.pages == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for link in (2 * number + 1, 2 * number + 2, number // 2):
            if link < 40:
                yield scrapy.Request(f"data:,{link}")
        yield {"page": number}
