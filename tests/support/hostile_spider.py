"""The spider of hostile URLs: the links of its start page, and those in the file urls.json.

What it has crawled it appends to the file done, as JSON, a URL on each line.
"""

import json
from pathlib import Path

import scrapy
from scrapy.linkextractors import LinkExtractor


class HostileSpider(scrapy.Spider):
    name = "hostile"

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.urls = json.loads(Path("urls.json").read_text())
        self.done = Path("done").open("a", buffering=1)  # noqa: SIM115 - as long as the spider

    def parse(self, response):
        self.done.write(json.dumps(response.url) + "\n")
        if response.url not in self.start_urls:
            return
        for link in LinkExtractor().extract_links(response):
            yield from self.followed(link.url)
        for url in self.urls:
            # Each of them twice: the second one is to be filtered.
            yield from self.followed(url)
            yield from self.followed(url)

    def followed(self, url):
        try:
            request = scrapy.Request(url, errback=self.failed)
        except (ValueError, TypeError):
            return  # Scrapy itself refuses it
        yield request

    def failed(self, failure):
        self.done.write(json.dumps([failure.request.url, failure.type.__name__]) + "\n")
