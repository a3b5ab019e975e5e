"""Forgetting requests that failed for good (BLOOM_FORGET_FAILED)."""

import contextlib
from collections.abc import Callable, Sequence

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.local import LocalBackend

MOST_TIMES = 3  # in one run, for one request
_LAST = bytes([MOST_TIMES])


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
        # In filters, since there may be many: how often each was forgotten, and which have not
        # ended yet. That they err costs a page now and then, much less often than the filter does.
        self._times = _in_memory()
        self._pending = _in_memory(counting=True)
        self._any_is_dead = False
        self._followers: dict[bytes, list[bytes]] = {}  # what was redirected to a pending one
        self._waiting: list[bytes] = []  # to be forgotten when the server is back

    def scheduled(self, fingerprint: bytes) -> None:
        """A request was recorded, and is about to be crawled."""
        self._pending.add(fingerprint)

    def failed(self, fingerprints: Sequence[bytes]) -> None:
        """A request failed for good: forget all that was recorded for it.

        Args:
            fingerprints: its own, and those of what became this request.

        Raises:
            StorageError: the filter is out of reach. It is tried again.
        """
        self._waiting += self._with_followers(fingerprints)
        self._forget()

    def ended(self, fingerprints: Sequence[bytes]) -> None:
        """A request ended in another way."""
        self._with_followers(fingerprints)
        if self._waiting:
            with contextlib.suppress(StorageError):  # told already
                self._forget()

    def followed(self, target: bytes, fingerprints: Sequence[bytes]) -> None:
        """Requests were redirected to one that is filtered: they share its fate.

        A site that is down redirects each of its pages to the same one, which fails.

        Args:
            target: the fingerprint of that one.
            fingerprints: theirs.
        """
        if self.is_dead(target):
            self.failed(fingerprints)
        elif target in self._pending and target not in fingerprints:
            self._followers.setdefault(target, []).extend(fingerprints)
        else:
            self.ended(fingerprints)

    def is_dead(self, fingerprint: bytes) -> bool:
        """Whether a request was forgotten so often that this run shall not crawl it again."""
        return self._any_is_dead and fingerprint + _LAST in self._times

    def close(self) -> int:
        """Forget what was redirected to a request whose end this run does not see.

        Returns:
            How many requests could not be forgotten, because the filter is out of reach.
        """
        for followers in self._followers.values():
            self._waiting += followers
        with contextlib.suppress(StorageError):
            self._forget()
        return len(self._waiting)

    def _with_followers(self, fingerprints: Sequence[bytes]) -> list[bytes]:
        """Those that have ended with these, which are among them."""
        ended, todo = [], list(fingerprints)
        while todo:
            fingerprint = todo.pop()
            self._pending.discard(fingerprint)
            todo += self._followers.pop(fingerprint, ())
            ended.append(fingerprint)
        return ended

    def _forget(self) -> None:
        while self._waiting:
            fingerprint = self._waiting[-1]
            is_forgotten = self._discard(fingerprint)
            self._waiting.pop()
            if is_forgotten:
                self.forgotten += 1
                self._count(fingerprint)

    def _count(self, fingerprint: bytes) -> None:
        for times in range(1, MOST_TIMES + 1):
            if self._times.add(fingerprint + bytes([times])):
                break
        self._any_is_dead = self._any_is_dead or times == MOST_TIMES


def _in_memory(*, counting: bool = False) -> LocalBackend:
    new = LocalBackend(None, capacity=20_000, error_rate=1e-12, counting=counting)
    new.open()
    return new
