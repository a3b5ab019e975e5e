from pathlib import Path
from urllib.parse import urlsplit

import scrapy
from scrapy import signals
from scrapy.linkextractors import LinkExtractor
from scrapy.utils.job import job_dir
from w3lib.url import url_query_cleaner

from example.site import serve

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
            if urlsplit(link.url).netloc == urlsplit(self.url).netloc:
                yield scrapy.Request(link.url)

    def summarize(self, reason):
        if hasattr(self, "server"):
            self.server.shutdown()
        stats = self.crawler.stats.get_stats()
        if "bloom/count" not in stats:
            return  # another DUPEFILTER_CLASS
        recorded = stats["bloom/count"]
        pages = stats.get("item_scraped_count", 0)
        print(
            f"""
Crawl {"paused" if reason == "shutdown" else reason}: {pages:,} pages in this session
  duplicates filtered   {stats.get("dupefilter/filtered", 0):,} in this session
  requests recorded     {recorded:,}
  Bloom filter          {stats["bloom/bytes"]:,} bytes for {stats["bloom/capacity"]:,} requests
  false-positive rate   {stats["bloom/error_rate"]:.2g}: the chance that a new request is skipped
  false positives       {stats["bloom/expected_false_positives"]:.2g} expected
  Scrapy's own filter   {recorded * DEFAULT_FILTER_BYTES:,} bytes of memory, no false positives"""
        )
        is_shared = self.settings["BLOOM_REDIS_URL"] is not None
        if reason == "shutdown" and (job_dir(self.settings) or is_shared):
            print("To resume it, run the same command.")


def strip_tracking(url):
    return url_query_cleaner(url, TRACKING_PARAMETERS, remove=True, keep_fragments=True)
