"""The spider of the crawl tests: follows every link of the site at -a url."""

from urllib.parse import urlsplit

import scrapy
from scrapy.linkextractors import LinkExtractor


class LinkSpider(scrapy.Spider):
    name = "links"

    def __init__(self, url: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.host = urlsplit(url).netloc
        self.extractor = LinkExtractor()

    def parse(self, response):
        if isinstance(response, scrapy.http.HtmlResponse):
            for link in self.extractor.extract_links(response):
                if urlsplit(link.url).netloc == self.host:
                    yield scrapy.Request(link.url)
