"""What a schedule of a small crawl has led to, and when two schedules have led to the same."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.simulated import KEY

WORKERS, LEASED = f"{{{KEY}}}:workers", f"{{{KEY}}}:leased".encode()


class Stored(NamedTuple):
    """What the server has: a dump of each key, and its content."""

    dumps: Mapping[bytes, bytes]
    contents: Mapping[bytes, Any]


class View(NamedTuple):
    """What a worker knows and has between two turns."""

    worker: bytes
    number: int
    tokens: Mapping[bytes, int]  # of the pages in flight
    unsent: tuple[Any, ...]
    unanswered: tuple[Any, ...]
    rest: tuple[Any, ...]


class Copy(NamedTuple):
    """A call that was sent twice: which one, by whom, and after which batch."""

    call: Callable[[], Any]
    number: int
    worker: bytes
    batch: int


@dataclass(frozen=True)
class Life:
    """A worker.

    Attributes:
        told: the outcomes of its calls.
        leaves_at: how many these were when it was told to leave.
        is_over: it has ended, or was killed.
    """

    told: tuple[Any, ...] = ()
    leaves_at: int | None = None
    is_over: bool = False
    is_killed: bool = False
    visits: frozenset[int] = frozenset()
    view: View | None = None


@dataclass(frozen=True)
class State:
    """Where a schedule has led to.

    Attributes:
        had_fault: no further one comes.
        copy: of a call, which may arrive later.
        saved: what the server may be set back to.
        waits: for leases of a worker that was killed.
    """

    stored: Stored
    lives: tuple[Life, ...]
    now: int = 1_700_000_000_000
    had_fault: bool = False
    copy: Copy | None = None
    saved: Stored | None = None
    waits: bool = False


def key_of(state: State) -> bytes:
    """Return what states have in common that differ in names and numbers only."""
    names = _Names(state)
    copy = None
    if state.copy is not None:
        since = names.batches.get(state.copy.worker, 10**6) - state.copy.batch
        copy = (state.copy.number, min(2, since))
    words = (
        *(names.of_stored(state.stored), names.of_stored(state.saved), copy),
        [names.of_life(each) for each in state.lives],
        *(state.now, state.had_fault, state.waits),
    )
    return hashlib.blake2b(repr(words).encode(), digest_size=16).digest()


class _Names:
    """Names of tokens and batches that do not depend on how often workers have asked in vain."""

    def __init__(self, state: State) -> None:
        views = [each.view for each in state.lives if each.view]
        tokens: dict[bytes, set[bytes]] = {}
        for view in views:
            batches = [*view.unsent, *([view.unanswered] if view.unanswered else [])]
            done = [token for batch in batches for token in batch[1]]
            for each in (*view.tokens, *done):
                tokens.setdefault(each[:16], set()).add(each[16:])
        for stored in filter(None, (state.stored, state.saved)):
            for each in stored.contents.get(LEASED, []):
                tokens.setdefault(each[:16], set()).add(each[16:24])
        self._ranks = {
            worker + token: rank
            for worker, some in tokens.items()
            for rank, token in enumerate(sorted(some))
        }
        self.batches = {view.worker: view.number for view in views}

    def of_stored(self, stored: Stored | None) -> Any:
        return stored and sorted(
            (name, self._of_content(name, content)) for name, content in stored.contents.items()
        )

    def _of_content(self, name: bytes, content: Any) -> Any:
        if name == LEASED:
            return [(each[:16], self._ranks[each[:24]], each[24:]) for each in content]
        if name not in {WORKERS.encode(), KEY.encode()}:
            return content
        fields = zip(content[::2], content[1::2], strict=True)
        return sorted((field, self._of_field(field, value)) for field, value in fields)

    def _of_field(self, field: bytes, value: bytes) -> Any:
        if field.endswith(b":number"):
            gone, _, number = value.rpartition(b" ")
            return gone, int(number) - self.batches.get(field[:16], 0)
        return self._ranks.get(field[:16] + value, value)

    def of_life(self, life: Life) -> Any:
        view = life.view
        return (
            *(life.is_over, life.leaves_at is not None, sorted(life.visits)),
            view
            and (
                view.worker,
                [(self._ranks[token], page) for token, page in sorted(view.tokens.items())],
                [self._of_batch(each) for each in view.unsent],
                view.unanswered and self._of_batch(view.unanswered),
                view.rest,
            ),
        )

    def _of_batch(self, batch: tuple[Any, ...]) -> Any:
        found, done, *rest = batch
        return found, [self._ranks.get(token, token) for token in done], rest
