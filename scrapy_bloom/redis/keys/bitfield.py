"""The command that records a fingerprint in Redis: one BITFIELD on one key, packed by ourselves.

    BITFIELD <key> SET u1 <bit> 1 ... GET u2 <marks>

It sets the fingerprint's bits and answers what they were before, in one atomic step, and then the
two marks of the key. The same with GET in place of SET only asks.
"""

from collections.abc import Sequence
from functools import cache

from scrapy_bloom.filters.sizing import BLOCK_BITS
from scrapy_bloom.redis.connection.client import Packed

NAME = "BITFIELD"

_HEAD = b"*%d\r\n$8\r\nBITFIELD\r\n$%d\r\n%b\r\n"
_SET = b"$3\r\nSET\r\n$2\r\nu1\r\n%b$1\r\n1\r\n"
_GET = b"$3\r\nGET\r\n$2\r\nu1\r\n%b"
_MARKS = b"$3\r\nGET\r\n$2\r\nu2\r\n%b"


class BitfieldPacker:
    """Packs the BITFIELD commands for fingerprints of one number of hashes in one key.

    >>> packer = BitfieldPacker(b"k", 2, marks_at=131_072)
    >>> packer.get(0, [7, 65_535]).split()[2::2]
    [b'BITFIELD', b'k', b'GET', b'u1', b'7', b'GET', b'u1', b'65535', b'GET', b'u2', b'131072']
    """

    def __init__(self, key: bytes, num_hashes: int, *, marks_at: int) -> None:
        self.key = key
        self._set_head = _HEAD % (2 + 4 * num_hashes + 3, len(key), key)
        self._get_head = _HEAD % (2 + 3 * num_hashes + 3, len(key), key)
        self._marks = _MARKS % _number(marks_at)
        self._sets, self._gets = _forms(_SET, num_hashes), _forms(_GET, num_hashes)

    def set(self, block: int, positions: Sequence[int]) -> Packed:
        """Set `num_hashes` bits of one of the key's blocks.

        The answer is their old values, then the two marks, which begin at the bit `marks_at`.
        """
        return Packed(self._set_head + _bits(block, positions, _SET, self._sets) + self._marks)

    def get(self, block: int, positions: Sequence[int]) -> Packed:
        """Ask for the bits; the answer is their values, then the marks."""
        return Packed(self._get_head + _bits(block, positions, _GET, self._gets) + self._marks)


@cache
def _forms(form: bytes, num_hashes: int) -> Sequence[bytes]:
    """Return the form for all bits, by the number of digits of a bit: a single formatting."""
    return [num_hashes * (form % b"$%d\r\n%%d\r\n" % length) for length in range(10)]


def _bits(block: int, positions: Sequence[int], form: bytes, forms: Sequence[bytes]) -> bytes:
    base = block * BLOCK_BITS
    if length := _digits(block):
        return forms[length] % tuple([base + position for position in positions])
    return b"".join([form % _number(base + position) for position in positions])


@cache
def _digits(block: int) -> int:
    """Return how many digits a bit's number has in a block; 0 for the few blocks with several."""
    first = len(str(block * BLOCK_BITS))
    return first if first == len(str((block + 1) * BLOCK_BITS - 1)) else 0


def _number(value: int) -> bytes:
    text = b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(text), text)
