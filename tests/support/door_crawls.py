"""Crawl a small site in this process, in many variants of spiders and settings, under two filters.

Prints a JSON object: for each variant, what the crawl did under Scrapy's own filter, and under
ours.

Page /n links to its children /2n and /2n+1, to all its ancestors, and more, depending on the
variant. A page is found by its parent first, so that depth and duplicates do not depend on timing.
"""

import json
import logging
import sys
import tempfile
from collections import Counter

import scrapy
from scrapy import Request, signals
from scrapy.core.scheduler import Scheduler
from scrapy.crawler import AsyncCrawlerProcess
from scrapy.downloadermiddlewares.offsite import OffsiteMiddleware
from scrapy.dupefilters import RFPDupeFilter
from scrapy.exceptions import CloseSpider
from scrapy.http import HtmlResponse
from scrapy.linkextractors import LinkExtractor
from scrapy.spidermiddlewares.depth import DepthMiddleware
from scrapy.spiders import CrawlSpider, Rule
from scrapy.utils.request import RequestFingerprinter

from scrapy_bloom import BloomDupeFilter

LAST = 15  # page
SAFE = "scrapy_bloom.CrashSafeScheduler"
FILTERS = {"scrapy": RFPDupeFilter, "bloom": BloomDupeFilter}


class Site:
    """A downloader middleware that answers all requests."""

    def process_request(self, request, spider=None):
        if request.url.startswith("http://fails/"):
            raise OSError("no such host")
        number = int(request.url.split("/")[3].partition("?")[0] or "1")
        links = [str(entry) for entry in (2 * number, 2 * number + 1) if entry <= LAST]
        while number > 1:
            number //= 2
            links.append(str(number))
        anchors = "".join(f"<a href='/{link}'>{link}</a>" for link in links)
        return HtmlResponse(request.url, body=anchors.encode(), request=request)


class Tree(scrapy.Spider):
    name = "tree"

    async def start(self):
        self.pages = Counter()
        self.seen_by_others = Counter()
        yield Request("http://site/1")

    def links(self, response, **options):
        self.pages[response.url] += 1
        for href in response.css("a::attr(href)").getall():
            yield response.follow(href, **options)

    def parse(self, response):
        yield from self.links(response)


VARIANTS = {}


def variant(name, **settings):
    """Register a variant: a subclass of a spider, with settings."""

    def register(function_or_class):
        if isinstance(function_or_class, type):
            spider = function_or_class
        else:
            spider = type(name, (Tree,), {"parse": function_or_class})
        VARIANTS[name] = (spider, settings)
        return function_or_class

    return register


def plain(name, **settings):
    VARIANTS[name] = (Tree, settings)


# Settings of Scrapy.

plain("default")
plain("DEPTH_LIMIT", DEPTH_LIMIT=2, DEPTH_STATS_VERBOSE=True, DEPTH_PRIORITY=1)
plain("DUPEFILTER_DEBUG", DUPEFILTER_DEBUG=True)
plain("no Referer", REFERER_ENABLED=False)
plain("URLLENGTH_LIMIT", URLLENGTH_LIMIT=len("http://site/9"))
plain("no DepthMiddleware", SPIDER_MIDDLEWARES={DepthMiddleware: None})

# Fingerprints.


class OfReferer(RequestFingerprinter):
    def fingerprint(self, request):
        referer = request.headers.get("Referer", b"")
        return super().fingerprint(request) + referer[-2:]


plain("fingerprinter reads the Referer", REQUEST_FINGERPRINTER_CLASS=OfReferer)

# Spider middlewares.


class Component:
    """What knows its crawler, and may listen to a signal."""

    signal = None

    @classmethod
    def from_crawler(cls, crawler):
        new = cls()
        new.crawler = crawler
        if cls.signal:
            crawler.signals.connect(new.listen, cls.signal)
        return new


class Middleware(Component):
    async def process_spider_output(self, response, result):
        async for entry in result:
            if not isinstance(entry, Request):
                yield entry
                continue
            for request in self.changed(entry):
                yield request


class Rewrites(Middleware):
    def changed(self, request):
        if "?" not in request.url:  # else each page has a new address
            request = request.replace(url=f"{request.url}?s=1")
        yield request


class Counts(Middleware):
    def changed(self, request):
        self.crawler.spider.seen_by_others[request.url] += 1
        yield request


class StopsEarly:
    async def process_spider_output(self, response, result):
        number = 0
        async for entry in result:
            yield entry
            number += 1
            if number == 3:
                break


class MyDepth(DepthMiddleware):
    def get_processed_request(self, request, response):
        self.stats.inc_value("my_depth")
        return super().get_processed_request(request, response)


for kind in (Rewrites, Counts, StopsEarly):
    plain(f"middleware {kind.__name__}", SPIDER_MIDDLEWARES={kind: 543})
plain("subclass of DepthMiddleware", SPIDER_MIDDLEWARES={DepthMiddleware: None, MyDepth: 900})


# Signals.


class Listens(Component):
    def listen(self, request, spider):
        spider.seen_by_others[request.url] += 1


class ListensToScheduled(Listens):
    signal = signals.request_scheduled


class ListensToDropped(Listens):
    signal = signals.request_dropped


class LateListener(Listens):
    signal = signals.spider_opened

    def listen(self, spider):
        self.crawler.signals.connect(super().listen, signals.request_dropped, weak=False)


for kind in (ListensToScheduled, ListensToDropped, LateListener):
    plain(f"extension {kind.__name__}", EXTENSIONS={kind: 0})

# Other sites.


class OddSites(OffsiteMiddleware):
    def should_follow(self, request, spider):
        return super().should_follow(request, spider) or request.url == "http://other-3/2"


class Offsite(Tree):
    allowed_domains = ("site",)

    def parse(self, response):
        yield from self.links(response)
        number = response.url.rpartition("/")[2]
        for entry in ("http://other/1", f"http://other-{number}/2", "http://site.other/3"):
            yield Request(entry)
        yield Request("http://other/2", meta={"allow_offsite": True})


VARIANTS["other sites"] = (Offsite, {})
VARIANTS["other sites, after a middleware"] = (Offsite, {"SPIDER_MIDDLEWARES": {Counts: 1}})
VARIANTS["subclass of OffsiteMiddleware"] = (
    Offsite,
    {"DOWNLOADER_MIDDLEWARES": {OffsiteMiddleware: None, OddSites: 50}},
)


# Schedulers and filters.


class MyScheduler(Scheduler):
    def enqueue_request(self, request):
        self.stats.inc_value("my_enqueue")
        return super().enqueue_request(request)


class SeenFilter:
    def request_seen(self, request):
        self.calls = getattr(self, "calls", 0) + 1
        return super().request_seen(request) or request.url.endswith("/5")


plain("subclass of the scheduler", SCHEDULER=MyScheduler)
plain("subclass with request_seen", filter=SeenFilter)
plain("a crash-safe job", JOBDIR=True, SCHEDULER=SAFE)

# Callbacks.


@variant("asynchronous generator")
async def parse_async(self, response):
    for link in self.links(response):
        yield link


@variant("items and None in between")
def parse_items(self, response):
    for link in self.links(response):
        yield {"url": link.url}
        yield link
        yield None


@variant("exception in mid-generator")
def parse_exception(self, response):
    for number, link in enumerate(self.links(response)):
        yield link
        if number == 3:
            raise ValueError("in mid-generator")


@variant("CloseSpider in mid-generator")
def parse_close(self, response):
    yield from self.links(response)
    if response.url.endswith("/1"):
        raise CloseSpider("enough")


@variant("own Request object, many times")
class SameObject(Tree):
    async def start(self):
        self.same = Request("http://site/1")
        async for entry in super().start():
            yield entry

    def parse(self, response):
        yield from self.links(response)
        yield self.same
        yield self.same


@variant("errback")
class Errback(Tree):
    custom_settings = {"RETRY_ENABLED": False}  # noqa: RUF012

    def parse(self, response):
        yield from self.links(response)
        number = response.url.rpartition("/")[2]
        yield Request(f"http://fails/{number}", errback=self.parse_failure)

    def parse_failure(self, failure):
        for url in ("http://site/1", "http://site/2", "http://site/2?new"):
            yield Request(url)


@variant("rules")
class Rules(Tree, CrawlSpider):
    rules = (Rule(LinkExtractor(), callback="parse_page", follow=True),)

    def parse(self, response, **kwargs):
        return CrawlSpider._parse(self, response, **kwargs)

    def parse_page(self, response):
        self.pages[response.url] += 1
        yield {"url": response.url}


class CountsAsked(Component):
    """Counts what the scheduler is asked to queue."""

    signal = signals.spider_opened

    def listen(self, spider):
        scheduler = self.crawler.engine._slot.scheduler
        method = scheduler.enqueue_request
        spider.asked = 0

        def counted(request):
            spider.asked += 1
            return method(request)

        scheduler.enqueue_request = counted


BASE = {
    "CONCURRENT_REQUESTS": 1,
    "DOWNLOADER_MIDDLEWARES": {Site: 1000},
    "LOG_LEVEL": "DEBUG",
    "LOG_ENABLED": False,
    "TELNETCONSOLE_ENABLED": False,
    "REMOTE_CONTROL_ENABLED": False,
    "LOGSTATS_INTERVAL": 0,
    "CLOSESPIDER_PAGECOUNT": 1000,
    "EXTENSIONS": {CountsAsked: 0},
}
COMPARED = (
    "dupefilter/", "request_depth", "depth/", "offsite/", "urllength/", "item_", "finish_reason",
    "spider_exceptions/", "response_received_count", "my_",
)  # fmt: skip


class Places(logging.Handler):
    """Where known duplicates are dropped, as the log says."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.places = {}

    def emit(self, record):
        if record.name == "scrapy_bloom.crawl.door":
            self.places[record.spider] = record.args[0]


def main():
    places = Places()
    logging.getLogger().addHandler(places)
    logging.getLogger("scrapy_bloom").setLevel(logging.DEBUG)
    process = AsyncCrawlerProcess(BASE)
    crawlers = {}
    directory = tempfile.mkdtemp()
    for number, (name, (spider, given)) in enumerate(VARIANTS.items()):
        for filter_name, df in FILTERS.items():
            settings = {**(spider.custom_settings or {}), **given}
            mixin = settings.pop("filter", None)
            settings["DUPEFILTER_CLASS"] = type("Filter", (mixin, df), {}) if mixin else df
            for key in {"DOWNLOADER_MIDDLEWARES", "EXTENSIONS"} & settings.keys():
                settings[key] = {**BASE[key], **settings[key]}
            if "JOBDIR" in settings:
                settings["JOBDIR"] = f"{directory}/{number}-{filter_name}"
            if filter_name == "scrapy" and settings.get("SCHEDULER") == SAFE:
                del settings["SCHEDULER"]
            cls = type(spider.__name__, (spider,), {"custom_settings": settings})
            crawler = process.create_crawler(cls)
            crawlers[name, filter_name] = crawler
            process.crawl(crawler)
    process.start()
    results = {}
    for (name, filter_name), crawler in crawlers.items():
        spider = crawler.spider
        stats = crawler.stats.get_stats()
        results.setdefault(name, {})[filter_name] = {
            "pages": spider.pages,
            "seen_by_others": spider.seen_by_others,
            "place": places.places.get(spider),
            "asked": spider.asked,
            "stats": {key: value for key, value in stats.items() if key.startswith(COMPARED)},
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
