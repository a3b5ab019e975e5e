from pathlib import Path
from urllib.parse import urlsplit

import scrapy
from example.site import serve
from scrapy import signals
from scrapy.linkextractors import LinkExtractor
from scrapy.utils.job import job_dir
from w3lib.url import url_query_cleaner

TRACKING_PARAMETERS = ["utm_source", "utm_medium", "utm_campaign", "fbclid", "gclid"]
DEFAULT_FILTER_BYTES = 91  # per request, in Scrapy's own set of fingerprints


class DocsSpider(scrapy.Spider):
    """Follows every link of one site: the bundled one, or -a url=https://..."""

    name = "docs"
    handle_httpstatus_list = [404, 500]
    custom_settings = {"RETRY_ENABLED": False}

    @classmethod
    def from_crawler(cls, crawler, *args, **kwargs):
        spider = super().from_crawler(crawler, *args, **kwargs)
        crawler.signals.connect(spider.summarize, signals.spider_closed)
        return spider

    def __init__(self, url=None, **kwargs):
        super().__init__(**kwargs)
        self.url = url
        self.extract_links = LinkExtractor(process_value=strip_tracking).extract_links

    async def start(self):
        if self.url is None:
            self.url = self.serve_bundled_site()
        self.host = urlsplit(self.url).netloc
        yield scrapy.Request(self.url)

    def serve_bundled_site(self):
        """A paused job knows its pages by URL, so its site must come back on the same port."""
        directory = job_dir(self.settings)
        known = Path(directory, "site-port") if directory else None
        port = int(known.read_text()) if known and known.exists() else 0
        self.server, url = serve(port)
        if known:
            known.write_text(str(self.server.server_address[1]))
        self.logger.info("The bundled site is served at %s", url)
        return url

    def parse(self, response):
        if response.status != 200 or not isinstance(response, scrapy.http.HtmlResponse):
            return
        yield {"url": response.url, "title": response.css("title::text").get()}
        for link in self.extract_links(response):
            if urlsplit(link.url).netloc == self.host:
                yield scrapy.Request(link.url)

    def summarize(self, reason):
        stat = self.crawler.stats.get_value
        known = self.crawler.stats.get_value("bloom/known", 0) + stat("bloom/added", 0)
        print(
            f"""
Crawl {reason}: {stat("item_scraped_count", 0):,} pages in this run
  duplicates filtered   {stat("dupefilter/filtered", 0):,}
  requests recorded     {known:,}
  Bloom filter          {stat("bloom/bytes", 0):,} bytes, {stat("bloom/bytes", 0) * 8 / max(1, known):.1f} bits each
  error rate now        {stat("bloom/error_rate", 0):.2g} ({stat("bloom/expected_false_drops", 0):.2g} pages lost expected)
  Scrapy's own filter   {known * DEFAULT_FILTER_BYTES:,} bytes of memory, and no error"""
        )
        if reason == "shutdown" and job_dir(self.settings):
            print("Paused. The same command goes on from here.")


def strip_tracking(url):
    return url_query_cleaner(url, TRACKING_PARAMETERS, remove=True, keep_fragments=True)
