"""The command that records a fingerprint in Redis: one BITFIELD on one key, packed by ourselves.

    BITFIELD <key> SET u1 <bit> 1 ... GET u2 <marks>

It sets the fingerprint's bits and answers what they were before, in one atomic step, and then the
two marks of the key. The same with GET in place of SET only asks.
"""

from collections.abc import Sequence

from scrapy_bloom.filters.sizing import BLOCK_BITS
from scrapy_bloom.redis.connection.client import Packed

NAME = "BITFIELD"

_SET = b"$3\r\nSET\r\n$2\r\nu1\r\n%b$1\r\n1\r\n"
_GET = b"$3\r\nGET\r\n$2\r\nu1\r\n%b"
_MARKS = b"$3\r\nGET\r\n$2\r\nu2\r\n%b"


class BitfieldPacker:
    """Packs the BITFIELD commands for fingerprints of one number of hashes.

    >>> packer = BitfieldPacker(2)
    >>> packer.get(b"k", 0, [7, 65_535], marks_at=131_072).split()[2::2]
    [b'BITFIELD', b'k', b'GET', b'u1', b'7', b'GET', b'u1', b'65535', b'GET', b'u2', b'131072']
    """

    def __init__(self, num_hashes: int) -> None:
        # Written for each number of digits that a bit's number can have: a single formatting.
        self._sets = [num_hashes * (_SET % _digits(length)) for length in range(10)]
        self._gets = [num_hashes * (_GET % _digits(length)) for length in range(10)]

    def set(self, key: bytes, block: int, positions: Sequence[int], marks_at: int) -> Packed:
        """Set `num_hashes` bits of one of a key's blocks.

        The answer is their old values, then the two marks, which begin at the bit `marks_at`.
        """
        bits = _bits(block * BLOCK_BITS, positions, _SET, self._sets)
        return _packed(2 + 4 * len(positions) + 3, key, bits, marks_at)

    def get(self, key: bytes, block: int, positions: Sequence[int], marks_at: int) -> Packed:
        """Ask for the bits; the answer is their values, then the marks."""
        bits = _bits(block * BLOCK_BITS, positions, _GET, self._gets)
        return _packed(2 + 3 * len(positions) + 3, key, bits, marks_at)


def _bits(base: int, positions: Sequence[int], form: bytes, forms: Sequence[bytes]) -> bytes:
    length = len(str(base))
    if len(str(base + BLOCK_BITS - 1)) == length:
        return forms[length] % tuple([base + position for position in positions])
    # One of the few blocks whose bits' numbers are of several lengths.
    return b"".join([form % _number(base + position) for position in positions])


def _packed(words: int, key: bytes, bits: bytes, marks_at: int) -> Packed:
    return Packed(
        b"*%d\r\n$8\r\nBITFIELD\r\n$%d\r\n%b\r\n%b%b"
        % (words, len(key), key, bits, _MARKS % _number(marks_at))
    )


def _digits(length: int) -> bytes:
    return b"$%d\r\n%%d\r\n" % length


def _number(value: int) -> bytes:
    text = b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(text), text)
