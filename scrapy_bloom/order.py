"""In which order Scrapy's scheduler takes requests of one priority."""

from dataclasses import dataclass

from queuelib.queue import FifoDiskQueue, LifoDiskQueue
from scrapy import Request
from scrapy.crawler import Crawler
from scrapy.pqueues import ScrapyPriorityQueue
from scrapy.settings import BaseSettings
from scrapy.squeues import FifoMemoryQueue
from scrapy.utils.misc import load_object

from scrapy_bloom.exceptions import SettingError


@dataclass(frozen=True)
class Order:
    """The order that the settings and the version of Scrapy ask for.

    Attributes:
        newest_first: or oldest first.
        start_newest_first: of start requests; None if they have no queue of their own.
        start_rank: 1 if start requests go after others of their priority, -1 if before.
    """

    newest_first: bool
    start_newest_first: bool | None
    start_rank: int

    @classmethod
    def of(cls, crawler: Crawler) -> "Order":
        """Return that of a crawler; raises SettingError if that of its disk queues is unknown."""
        settings, start = crawler.settings, "SCHEDULER_START_DISK_QUEUE"
        return cls(
            _is_lifo(settings, "SCHEDULER_DISK_QUEUE"),
            _is_lifo(settings, start) if settings[start] else None,
            _start_rank(crawler),
        )

    def place(self, request: Request) -> tuple[int, bool]:
        """Return a request's rank among those of its priority, and whether the newest is first."""
        if self.start_newest_first is None or not request.meta.get("is_start_request"):
            return 0, self.newest_first
        return self.start_rank, self.start_newest_first


def _is_lifo(settings: BaseSettings, name: str) -> bool:
    path = settings[name]
    queue = load_object(path)
    for kind, is_lifo in ((LifoDiskQueue, True), (FifoDiskQueue, False)):
        if isinstance(queue, type) and issubclass(queue, kind):
            return is_lifo
    raise SettingError(
        f"{name} is {path!r}, whose order is unknown to CrashSafeScheduler; allowed are Scrapy's "
        '"scrapy.squeues.PickleLifoDiskQueue" (newest first) and '
        '"scrapy.squeues.PickleFifoDiskQueue" (oldest first), and what is made of them'
    )


def _start_rank(crawler: Crawler) -> int:
    """Try it out: Scrapy changed it."""
    queue = ScrapyPriorityQueue(crawler, FifoMemoryQueue, "", start_queue_cls=FifoMemoryQueue)
    queue.push(Request("data:,other"))
    queue.push(Request("data:,start", meta={"is_start_request": True}))
    first = queue.pop()
    return -1 if first is not None and first.url == "data:,start" else 1
