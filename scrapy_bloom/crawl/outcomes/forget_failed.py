"""Forgetting requests that failed for good (BLOOM_FORGET_FAILED)."""

import contextlib
from collections.abc import Callable, Sequence
from itertools import chain

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.backend import notes_in_memory
from scrapy_bloom.filters.bloom import BloomFilter

MOST_TIMES = 3  # in one run, for one request
_MOST_WAITING = 100_000  # requests that wait for the end of the one they were redirected to
_RECENT = 500_000  # ends that are remembered, at least


class ForgetFailed:
    """Forgets failed requests, so that a later link to them is crawled again.

    A page that always fails would be crawled in a loop. So a page that was forgotten three times is
    not crawled any more in this run. The next run tries again.

    The functions are `add` and `remove` of `Forgotten`, or call them. `forgotten` counts how many
    times a request was forgotten.
    """

    def __init__(
        self,
        forget: Callable[[Sequence[bytes]], None],
        settle: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.forgotten = 0
        self._forget_now = forget
        self._settle = settle
        # In filters, since there may be many: how often each was forgotten, and which have ended.
        # That they err costs a page now and then, much less often than the filter does.
        self._times = notes_in_memory()
        self._ended = _Recent()
        self._any_is_dead = False
        self._followers: dict[bytes, list[bytes]] = {}  # by what they were redirected to
        self._num_followers = 0
        self._waiting: list[bytes] = []  # to be forgotten when the server is back

    def failed(self, fingerprints: Sequence[bytes]) -> None:
        """Forget what was recorded for a failed request; after a StorageError it is tried again."""
        self._waiting += self._with_followers(fingerprints)
        self._forget()

    def ended(self, fingerprints: Sequence[bytes]) -> None:
        """Note that a request ended in another way; raises StorageError."""
        ended = self._with_followers(fingerprints)
        for fingerprint in ended:
            self._ended.add(self._attempt(fingerprint))
        if self._waiting:
            with contextlib.suppress(StorageError):  # told already
                self._forget()
        self._settle(ended)

    def followed(self, target: bytes, fingerprints: Sequence[bytes]) -> None:
        """Note that requests were redirected to one that is filtered: they share its fate.

        A site that is down redirects each of its pages to the same one, which fails.
        """
        if self.is_dead(target) or target in self._waiting:
            self.failed(fingerprints)
        elif target in fingerprints or self._attempt(target) in self._ended:
            self.ended(fingerprints)
        else:
            # It is under way, or waits in the queue, perhaps since an earlier run.
            self._followers.setdefault(target, []).extend(fingerprints)
            self._num_followers += len(fingerprints)
            if self._num_followers > _MOST_WAITING:
                self._forget_the_longest_waiting()

    def _forget_the_longest_waiting(self) -> None:
        """Make room: nobody knows whether their target fails, so rather twice than never."""
        while self._num_followers > _MOST_WAITING:
            followers = self._followers.pop(next(iter(self._followers)))
            self._num_followers -= len(followers)
            self._waiting += followers
        self._forget()

    def is_dead(self, fingerprint: bytes) -> bool:
        """Return whether a request was forgotten so often that this run gives it up."""
        return self._any_is_dead and fingerprint + bytes([MOST_TIMES]) in self._times

    def close(self, *, is_finished: bool) -> int:
        """Forget what was redirected to a request whose end this run does not see.

        If the run is finished, nothing is queued any more: an earlier run has seen that end. Return
        how many requests could not be forgotten, because the filter is out of reach.
        """
        rest = list(chain.from_iterable(self._followers.values()))
        with contextlib.suppress(StorageError):
            if is_finished:
                self._settle(rest)
            else:
                self._waiting += rest
            self._forget()
        return len(self._waiting)

    def _with_followers(self, fingerprints: Sequence[bytes]) -> list[bytes]:
        """Return these requests, and those that have ended with them."""
        ended, todo = [], list(fingerprints)
        while todo:
            fingerprint = todo.pop()
            followers = self._followers.pop(fingerprint, ())
            self._num_followers -= len(followers)
            todo += followers
            ended.append(fingerprint)
        return ended

    def _forget(self) -> None:
        if not self._waiting:
            return
        self._forget_now(self._waiting)
        forgotten, self._waiting = self._waiting, []
        self.forgotten += len(forgotten)
        for fingerprint in forgotten:
            for times in range(1, MOST_TIMES + 1):
                if self._times.add(fingerprint + bytes([times])):
                    break
            self._any_is_dead = self._any_is_dead or times == MOST_TIMES

    def _attempt(self, fingerprint: bytes) -> bytes:
        """Return a name for one crawl of a request: it may be forgotten and crawled again."""
        times = 0
        if self.forgotten:
            while times < MOST_TIMES and fingerprint + bytes([times + 1]) in self._times:
                times += 1
        return fingerprint + bytes([times])


class _Recent:
    """A set of names that remembers the last half a million of them, and up to twice as many."""

    def __init__(self) -> None:
        self._new = self._old = BloomFilter(_RECENT, 1e-6)
        self._length = 0

    def add(self, name: bytes) -> None:
        if self._length >= _RECENT:
            self._old, self._new, self._length = self._new, BloomFilter(_RECENT, 1e-6), 0
        self._length += self._new.add(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._new or name in self._old
