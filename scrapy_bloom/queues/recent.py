"""The last requests that a worker has pushed: a server may lose what it has not passed on yet."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_MOST, _MOST_BYTES = 1000, 8 << 20


class Push(NamedTuple):
    """A request as it is pushed: slot to rank, 1 if the newest comes first, and the request."""

    prefix: bytes
    newest_first: int
    data: bytes
    is_again: bool = False  # the server has lost it, and the filter may have, too


class RecentPushes:
    """Pushes that the server has acknowledged, by their numbers: at most 1,000, and 8 MiB."""

    def __init__(self) -> None:
        self._pushes: deque[tuple[int, Push]] = deque()
        self._bytes = 0

    def add(self, number: int, push: Push) -> None:
        """Remember a push, and forget the oldest ones if they are too many."""
        self._pushes.append((number, push))
        self._bytes += len(push.data)
        while len(self._pushes) > _MOST or self._bytes > _MOST_BYTES:
            self._bytes -= len(self._pushes.popleft()[1].data)

    def drop_last(self) -> None:
        """Forget the last push, if it is remembered: it was taken back."""
        if self._pushes:
            self._bytes -= len(self._pushes.pop()[1].data)

    def since(self, number: int) -> Sequence[Push]:
        """Return the pushes after that number, as they are to be pushed again."""
        return [push._replace(is_again=True) for each, push in self._pushes if each > number]
