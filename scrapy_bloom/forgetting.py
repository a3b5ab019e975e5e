"""Forgetting requests that failed for good (BLOOM_FORGET_FAILED)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from scrapy_bloom.local import LocalBackend

MOST_TIMES = 3  # in one run, for one request
_LAST = bytes([MOST_TIMES])
_MOST_FOLLOWED = 10_000


class Forgetting:
    """Forgets failed requests, so that a later link to them is crawled again.

    A page that fails each time would be crawled in a loop. So one that has been forgotten three
    times is not crawled any more in this run; the next run will try again.

    Args:
        discard: makes the filter forget a fingerprint; see `Backend.discard`.

    Attributes:
        forgotten: how many times a request was forgotten.
    """

    def __init__(self, discard: Callable[[bytes], bool]) -> None:
        self.forgotten = 0
        self._discard = discard
        # How often each was forgotten: in a filter, since many may fail in a large crawl.
        self._times = LocalBackend(None, capacity=100_000, error_rate=1e-6)
        self._times.open()
        self._any_is_dead = False
        # What was redirected to a request whose end is not known, the latest of them.
        self._followers: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def failed(self, fingerprints: Sequence[bytes]) -> None:
        """A request failed for good: forget all that was recorded for it.

        Args:
            fingerprints: its own is the last one, those that were redirected to it come before.
        """
        for fingerprint in fingerprints:
            self._forget(fingerprint)
            for follower in self._followers.pop(fingerprint, ()):
                self._forget(follower)

    def crawled(self, fingerprints: Sequence[bytes]) -> None:
        """A request was crawled."""
        for fingerprint in fingerprints:
            self._followers.pop(fingerprint, None)

    def followed(self, target: bytes, fingerprints: Sequence[bytes]) -> None:
        """Requests were redirected to one that is filtered: they share its fate.

        A site that is down redirects each of its pages to the same one, which fails.

        Args:
            target: the fingerprint of that one.
            fingerprints: theirs.
        """
        if self.is_dead(target):
            self.failed(fingerprints)
            return
        self._followers.setdefault(target, []).extend(fingerprints)
        if len(self._followers) > _MOST_FOLLOWED:
            # Most of these have been crawled long ago.
            self._followers.popitem(last=False)

    def is_dead(self, fingerprint: bytes) -> bool:
        """Whether a request was forgotten so often that this run shall not crawl it again."""
        return self._any_is_dead and fingerprint + _LAST in self._times

    def _forget(self, fingerprint: bytes) -> None:
        if not self._discard(fingerprint):
            return
        self.forgotten += 1
        times = 1
        while times < MOST_TIMES and not self._times.add(fingerprint + bytes([times])):
            times += 1
        if times == MOST_TIMES:
            self._times.add(fingerprint + _LAST)
            self._any_is_dead = True
