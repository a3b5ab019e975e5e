"""Count the requests that are being downloaded, by slot of the downloader."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scrapy import Request
from scrapy.core.downloader import Downloader
from scrapy.crawler import Crawler
from scrapy.pqueues import DownloaderInterface

from scrapy_bloom.queues.store import Limits, Taken

Release = Callable[[Taken, float], object]


class ActiveDownloads(Mapping[str, int]):
    """How many downloads each slot of the downloader has, counted when it is asked for."""

    def __init__(self, downloader: DownloaderInterface, slots: Mapping[Any, Any]) -> None:
        self._downloader = downloader
        self._slots = slots

    def __getitem__(self, slot: str) -> int:
        return self._downloader.stats([slot])[0][0]

    def __iter__(self) -> Iterator[str]:
        return map(str, self._slots)

    def __len__(self) -> int:
        return len(self._slots)


class Downloads:
    """The requests that a worker has handed out and not downloaded yet, for shared limits.

    Args:
        crawler: the crawler, which has an engine.
        limits: the limits of slots.
        release: called with a request that does not count in its slot of the store any more, and
            for how many seconds other workers may take no request of the slot.
    """

    def __init__(self, crawler: Crawler, limits: Limits, release: Release) -> None:
        engine: Any = crawler.engine
        self.downloader: Downloader = engine.downloader
        self.release = release
        self.numbers: Counter[str] = Counter()
        self._limits = limits

    def is_busy(self, slot: str) -> bool:
        """Return whether a request of a slot would have to wait in the downloader.

        Scrapy counts a download only when it has begun, and so begins too many with asyncio.
        """
        return 0 < self._limits.of(slot).concurrency <= self.numbers[slot] or self.is_delayed(slot)

    def is_delayed(self, slot: str) -> bool:
        """Return whether requests of a slot wait in the downloader for its delay."""
        found = self.downloader.slots.get(slot)
        return bool(found and found.delay and found.queue)


class Download:
    """A request that is handed out, until it is downloaded.

    Until it reaches the downloader, it counts in the slot under which the store has it. If a
    downloader middleware has chosen another slot, as those for rotating proxies do, it counts only
    in that one from then on, and not for other workers.
    """

    def __init__(self, downloads: Downloads, taken: Taken) -> None:
        self._downloads = downloads
        self._taken: Taken | None = taken  # None: it does not count in the slot of the store
        self._slot = taken.slot
        downloads.numbers[self._slot] += 1

    def reach(self, request: Request) -> None:
        """Count the request in the slot that the downloader uses."""
        slot = str(request.meta.get(Downloader.DOWNLOAD_SLOT, self._slot))
        if slot != self._slot:
            self._leave(0.0)
            self._slot = slot
            self._downloads.numbers[slot] += 1

    def end(self) -> None:
        """Count the request no more, because it is downloaded, or is not going to be."""
        found = self._downloads.downloader.slots.get(self._slot)
        self._leave(found.delay if found else 0.0)

    def _leave(self, pause: float) -> None:
        numbers = self._downloads.numbers
        numbers[self._slot] -= 1
        if not numbers[self._slot]:
            del numbers[self._slot]
        taken, self._taken = self._taken, None
        if taken is not None:
            self._downloads.release(taken, pause)
