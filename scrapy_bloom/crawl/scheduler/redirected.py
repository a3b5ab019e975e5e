"""Requests that were redirected to pages that are in the queue already, or have failed.

The filter drops such a redirect as a duplicate. The request must end as the page ends: a site in
maintenance redirects all pages to one that fails, and none of them is done.
"""

import time
from collections import defaultdict
from collections.abc import Sequence

from scrapy_bloom.crawl.scheduler.in_flight import Flight
from scrapy_bloom.queues.store import Fate, Reply

_LONGEST_WAIT_SECS = 600.0


class Redirected:
    """Requests in flight that wait for the ends of pages, by the fingerprints of the pages."""

    def __init__(self) -> None:
        # Each with the time until which it waits, on a monotonic clock.
        self._waiting: defaultdict[bytes, list[tuple[float, Flight]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pages(self) -> Sequence[bytes]:
        """The fingerprints whose fate the store has to tell."""
        return list(self._waiting)

    def add(self, fingerprint: bytes, flight: Flight) -> None:
        """Let a request wait for the end of a page."""
        self._waiting[fingerprint].append((time.monotonic() + _LONGEST_WAIT_SECS, flight))

    def clear(self) -> None:
        """Forget all requests: they are pending again."""
        self._waiting.clear()

    def settled(self, reply: Reply) -> list[Flight]:
        """Return the requests whose pages have ended, as failed if the pages have failed.

        If nothing else is left, or after a long time, the page will not end in this run: it is
        unreadable, for example. Then the requests have failed, so that the next run crawls them.
        """
        ended = []
        is_stuck = not reply.taken and reply.left <= sum(map(len, self._waiting.values()))
        for fingerprint, fate in reply.fates.items():
            waiting = self._waiting.get(fingerprint, [])
            is_late = is_stuck or any(time.monotonic() >= until for until, _ in waiting[:1])
            if fate is Fate.UNFINISHED and not is_late:
                continue
            for _, flight in self._waiting.pop(fingerprint, []):
                if fate is not Fate.OTHER:
                    flight.refusal = "it was redirected to a page that failed"
                ended.append(flight)
        return ended
