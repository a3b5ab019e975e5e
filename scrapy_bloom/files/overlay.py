"""Changes that the log of a filter has, or is about to get, and the filter has not yet.

They lie over the filter's own answers. A checkpoint takes them over into the filter, in a thread,
once the log is on the disk.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scrapy_bloom.files.forgotten import ForgottenFile
from scrapy_bloom.files.local import LocalGeneration
from scrapy_bloom.files.log import Change, FilterLog
from scrapy_bloom.generations.lookup import Lookup


class _Pending(NamedTuple):
    forgets: bool | None
    fingerprint: bytes
    newest: LocalGeneration  # that it is to be recorded in
    is_counted: bool  # in that generation's count already


class Overlay:
    """The changes of a filter that are not in it yet.

    They are collected until the store has them: see `collected` and `stored`. Then `take` hands
    them to a checkpoint, in another thread, and `prune` forgets what that has done.
    """

    def __init__(self, log: FilterLog) -> None:
        self.log = log
        self.failure: Exception | None = None  # of a checkpoint: there will be no further one
        self._latest: dict[bytes, _Pending] = {}
        self._collected: list[_Pending] = []
        self._stored: deque[tuple[int, Sequence[_Pending]]] = deque()
        self._applied: deque[Sequence[_Pending]] = deque()
        self._known: Lookup
        self._newest: LocalGeneration

    def lie_over(self, known: Lookup, newest: LocalGeneration) -> None:
        """Lie over these generations from now on, and record in the newest of them."""
        self._known, self._newest = known, newest

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._latest or fingerprint in self._known

    def is_forgotten(self, fingerprint: bytes) -> bool | None:
        """Return whether the latest change forgets a fingerprint; None if it does not say so."""
        latest = self._latest.get(fingerprint)
        return None if latest is None else latest.forgets

    def forgotten(self) -> list[bytes]:
        """Return the fingerprints whose latest change forgets them."""
        return [each for each, latest in self._latest.items() if latest.forgets]

    def add(self, fingerprint: bytes) -> bool:
        """Record a fingerprint, unless it is recorded; True if it was new."""
        if fingerprint in self._latest or fingerprint in self._known:
            return False
        self._change(None, fingerprint, True)
        self._newest.unapplied += 1
        return True

    def keep(self, fingerprint: bytes) -> None:
        """Record a fingerprint that is recorded already, but forgotten, or in an older quarter."""
        self._change(False, fingerprint, False)

    def forget(self, fingerprints: Iterable[bytes]) -> None:
        """Let fingerprints be forgotten."""
        for fingerprint in fingerprints:
            self._change(True, fingerprint, False)

    def _change(self, forgets: bool | None, fingerprint: bytes, is_counted: bool) -> None:  # noqa: FBT001 - called often
        new = _Pending(forgets, fingerprint, self._newest, is_counted)
        self._latest[fingerprint] = new
        self._collected.append(new)

    # Towards the store.

    @property
    def number(self) -> int:
        """Return how many changes are collected."""
        return len(self._collected)

    @property
    def last(self) -> bytes:
        """Return the fingerprint of the change that was collected last."""
        return self._collected[-1].fingerprint

    def collected(self) -> list[Change]:
        """Return the changes that are not stored yet, in order."""
        return [Change(each.forgets, each.fingerprint) for each in self._collected]

    def stored(self, seq: int) -> None:
        """Note that all changes that were collected are stored, in that batch."""
        if self._collected:
            self._stored.append((seq, self._collected))
            self._collected = []
        self.prune()

    def hold(self, since: int) -> list[_Pending]:
        """Take out the changes that were collected after the first ones: they are stored later."""
        held = self._collected[since:]
        del self._collected[since:]
        return held

    def release(self, held: Sequence[_Pending]) -> None:
        """Collect changes that were held."""
        self._collected += held

    # Towards the filter.

    def take(self) -> tuple[int, Sequence[_Pending]]:
        """Return the changes to be applied, and the number of the last batch; in any thread."""
        seq = 0
        taken: list[_Pending] = []
        while self._stored:
            seq, some = self._stored.popleft()
            taken += some
        return seq, taken

    def applied(self, taken: Sequence[_Pending]) -> None:
        """Note that changes are in the filter now; in any thread."""
        self._applied.append(taken)

    def prune(self) -> None:
        """Forget the changes that the filter has."""
        while self._applied:
            for each in self._applied.popleft():
                each.newest.unapplied -= each.is_counted
                if self._latest.get(each.fingerprint) is each:
                    del self._latest[each.fingerprint]


class ForgottenOverlay:
    """The forgotten requests of a filter with a log; see `ForgottenStore`. Nothing is claimed.

    Taking a fingerprint out is a change of the log, as forgetting it is.
    """

    claims = False

    def __init__(self, file: ForgottenFile, overlay: Overlay) -> None:
        self._file = file
        self._overlay = overlay
        self.news, self.expire = file.news, file.expire

    def all(self) -> Iterable[bytes]:
        """See `ForgottenStore`. Those that were just taken out may be among them."""
        return [*self._file.all(), *self._overlay.forgotten()]

    def add(self, fingerprints: Sequence[bytes]) -> None:
        """See `ForgottenStore`."""
        self._overlay.forget(fingerprints)

    def has(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`."""
        is_forgotten = self._overlay.is_forgotten(fingerprint)
        return self._file.has(fingerprint) if is_forgotten is None else is_forgotten

    def take(self, fingerprint: bytes) -> bool:
        """See `ForgottenStore`."""
        is_forgotten = self.has(fingerprint)
        if is_forgotten:
            self._overlay.keep(fingerprint)
        return is_forgotten

    def remove(self, fingerprint: bytes) -> None:
        """Do nothing: it was taken out when it was scheduled."""

    def close(self) -> None:
        """See `ForgottenStore`."""
        self._file.close()
