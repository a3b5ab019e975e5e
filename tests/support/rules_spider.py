"""The spider of `link_spider` as a CrawlSpider, which has an object in the meta of each request."""

from urllib.parse import urlsplit

from lxml import etree
from scrapy.linkextractors import LinkExtractor
from scrapy.spiders import CrawlSpider, Rule


class LinkSpider(CrawlSpider):
    name = "links"
    rules = (Rule(LinkExtractor(), callback="parse_page", follow=True, process_links="own_links"),)

    def __init__(self, url: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.start_urls = [url]
        self.host = urlsplit(url).netloc

    def own_links(self, links):
        return [link for link in links if urlsplit(link.url).netloc == self.host]

    def parse_page(self, response):
        if type(response.meta["link_text"]) is not etree._ElementUnicodeResult:
            raise TypeError(response.meta["link_text"])
