"""Members of the sorted sets of a shared queue: a request, and where it is in the order.

`scrapy_bloom.queues.scripts` says how they look.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

WORKER_BYTES, POSITION_BYTES = 16, 8
NEWEST_FIRST = 2**53  # less the number of the push: the position, if the newest comes first

_LARGEST = 2**63 - 1  # a priority
_ORDER = struct.Struct(">QB")  # priority and rank


class Member(NamedTuple):
    """A pending request: see `RequestQueue.push`."""

    slot: str
    priority: int
    rank: int
    position: int  # lower ones are taken first within priority and rank
    data: bytes

    @property
    def packed(self) -> bytes:
        """The member of the set of those that are pending."""
        return prefix(self.slot, self.priority, self.rank) + _position(self.position) + self.data


def prefix(slot: str, priority: int, rank: int) -> bytes:
    """Return what a member begins with, up to its position."""
    priority = max(-_LARGEST, min(priority, _LARGEST))
    return slot_name(slot) + b"\0" + _ORDER.pack(_LARGEST - priority, rank + 128)


def slot_name(slot: str) -> bytes:
    """Return the name of a slot as members have it: without NUL, which ends it there."""
    return slot.encode(errors="surrogatepass").replace(b"\0", b"\1")


def parsed(member: bytes) -> Member:
    """Return what a member of the set of those that are pending says."""
    slot, _, rest = member.partition(b"\0")
    priority, rank = _ORDER.unpack_from(rest)
    start = _ORDER.size + POSITION_BYTES
    position = int.from_bytes(rest[_ORDER.size : start], "big")
    name = slot.decode(errors="surrogatepass")
    return Member(name, _LARGEST - priority, rank - 128, position, rest[start:])


def parsed_leased(member: bytes) -> tuple[bytes, bytes, Member]:
    """Return what a member of the other set says: the worker, the request's id, and the rest."""
    start = WORKER_BYTES + POSITION_BYTES
    return member[:WORKER_BYTES], member[WORKER_BYTES:start], parsed(member[start:])


def keys_of_queue(key: str) -> Sequence[str]:
    """Return all keys of a queue: pending, leased, workers, state; and that of its filter."""
    return (*(f"{{{key}}}:queue:{name}" for name in ("pending", "leased", "workers", "state")), key)


def _position(position: int) -> bytes:
    return position.to_bytes(POSITION_BYTES, "big")
