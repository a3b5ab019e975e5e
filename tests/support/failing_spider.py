"""The spider of pages that fail in every way a page can; their paths say how."""

import gzip

import scrapy
from scrapy import signals
from scrapy.downloadermiddlewares.retry import get_retry_request
from scrapy.exceptions import CloseSpider, DropItem, IgnoreRequest, StopDownload
from scrapy.linkextractors import LinkExtractor


class IgnoreSome:
    def process_request(self, request):
        if "ignored" in request.url:
            raise IgnoreRequest
        if "replaced" in request.url and "elsewhere" not in request.url:
            return request.replace(url=request.url + "-elsewhere")
        return None

    def process_response(self, request, response):
        if "vetoed" in request.url:
            raise IgnoreRequest
        if response.body == b"captcha" and "by-middleware" in request.url:
            return scrapy.Request(response.url, dont_filter=True)
        if "rewrapped" in request.url:  # as what renders pages by requests of its own
            return response.replace(request=request.replace(url=request.url + "#"))
        return response


class Packed:
    def process_response(self, request, response):
        if response.body != b"bomb":
            return response
        body = gzip.compress(bytes(10**6))
        return response.replace(headers={"Content-Encoding": "gzip"}, body=body)


class IgnoreSomeResponses:
    def process_spider_input(self, response):
        if "refused" in response.url:
            raise IgnoreRequest
        if "bad-input" in response.url:
            raise ValueError("bad")

    def process_spider_exception(self, response, exception):
        return [] if "swallowed" in response.url else None


class Pipeline:
    def process_item(self, item):
        if "item-error" in item["url"]:
            raise ValueError("the database is away")
        if "item-dropped" in item["url"]:
            raise DropItem("on purpose")
        return item


class FailingSpider(scrapy.Spider):
    name = "failing"
    allowed_domains = ["127.0.0.1"]  # noqa: RUF012
    custom_settings = {  # noqa: RUF012
        "RETRY_TIMES": 1,
        "ROBOTSTXT_OBEY": True,
        "REDIRECT_MAX_TIMES": 3,
        "DOWNLOAD_MAXSIZE": 100_000,
        "DOWNLOADER_MIDDLEWARES": {IgnoreSome: 10, Packed: 900},
        "SPIDER_MIDDLEWARES": {IgnoreSomeResponses: 10},
        "ITEM_PIPELINES": {Pipeline: 10},
        "HTTPERROR_ALLOWED_CODES": [410],
    }

    def __init__(self, url, **kwargs):
        super().__init__(**kwargs)
        self.url = url
        self.extractor = LinkExtractor()

    @classmethod
    def from_crawler(cls, crawler, *args, **kwargs):
        spider = super().from_crawler(crawler, *args, **kwargs)
        crawler.signals.connect(spider.stop_download, signals.headers_received)
        return spider

    async def start(self):
        yield scrapy.Request(self.url, dont_filter=True)

    def stop_download(self, request):
        if "stopped" in request.url:
            raise StopDownload(fail="quietly" not in request.url)

    def parse(self, response):
        for link in self.extractor.extract_links(response):
            handled = "errback" in link.url
            # All pages answer, in the end. A slot may be a number.
            meta = {"download_timeout": 120, "download_slot": 5}
            if "copied" in link.url:
                meta |= response.meta  # as spiders do
            yield response.follow(
                link,
                callback=self.parse_async if "async" in link.url else self.parse_page,
                errback=self.failed if handled else None,
                meta=meta,
                dont_filter="unfiltered" in link.url,
            )

    def parse_page(self, response):
        url = response.url
        if response.body == b"captcha":  # solved meanwhile: once more, and nothing is copied
            first, *_ = response.meta.get("redirect_urls", [url])
            yield scrapy.Request(first, self.parse_page, errback=self.failed, dont_filter=True)
            return
        if "raises-at-once" in url:
            raise ValueError("no price")
        if "retried" in url and (
            again := get_retry_request(
                response.request, spider=self, reason="empty", max_retry_times=1
            )
        ):
            yield again
            return
        if "form" in url and response.request.method == "GET":
            yield scrapy.FormRequest(url, formdata={"page": "2"}, dont_filter=True)
        yield {"url": url}
        yield from self.parse(response)
        if "raises-later" in url:
            raise ValueError("no price")
        if "closes" in url:
            raise CloseSpider

    async def parse_async(self, response):
        yield {"url": response.url}
        if "raises" in response.url:
            raise ValueError("no price")

    def failed(self, failure):
        url = failure.request.url
        if "raises" in url:
            raise TypeError("no response")
        if "items" in url:
            yield {"url": url}
        if "again" in url:
            yield failure.request.replace(dont_filter=True)
        if "fresh" in url and "by-errback" not in failure.request.meta:
            meta = {"by-errback": True}
            yield scrapy.Request(url, self.parse_page, meta=meta, dont_filter=True)
