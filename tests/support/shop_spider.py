"""The spider of runs that share a filter (docs/nightly.md): list pages once a run, else new ones.

What it has crawled it appends to the file at -a done.
"""

from pathlib import Path
from urllib.parse import urlsplit

import scrapy
from scrapy.linkextractors import LinkExtractor


class ShopSpider(scrapy.Spider):
    name = "shop"
    custom_settings = {"RETRY_TIMES": 1}  # noqa: RUF012

    def __init__(self, url, done="done.txt", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.done = Path(done).open("a", buffering=1)  # noqa: SIM115 - as long as the spider
        self.extractor = LinkExtractor(allow=["/a/", "/s/"])

    def parse(self, response):
        if response.body == b"broken":
            raise ValueError("not the page that it should be")
        for link in self.extractor.extract_links(response):
            if "/s/" not in link.url:
                yield scrapy.Request(link.url.partition("?")[0])
            else:
                url = link.url.replace("sort=date&page", "page")
                yield scrapy.Request(url, meta={"bloom_filter": "run"})
        self.done.write(urlsplit(response.url).path + "\n")
