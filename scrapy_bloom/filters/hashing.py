"""The hash schemes, which turn a fingerprint into a block and the bits in it.

A hash scheme is part of the stored format, because a filter can be read only with the scheme that
wrote it. Add new schemes, and never change an existing one.

Scheme 1: MurmurHash3 (x64, 128 bits, A. Appleby) of salt + fingerprint with the seeds 0, 1, 2, ...
gives as many digests as are needed. Their bytes are read as big-endian 16-bit words: the first
three words are the block hash (48 bits), and each further word is one bit position in the block. So
every position is independent of the others.
"""

import secrets
import struct
from collections.abc import Callable

from mmh3 import mmh3_x64_128_digest

SALT_BYTES = 16
HASH_SCHEME = 1

BLOCK_HASH_BITS = 48
_BLOCK_HASH_WORDS = 3
_WORDS_PER_DIGEST = 8

Hashed = tuple[int, list[int]]  # a fingerprint's block hash and bit positions


def checked_salt(salt: bytes | None) -> bytes:
    """Check a salt of 16 bytes, or return a random one for None; raises TypeError, ValueError."""
    if salt is None:
        return secrets.token_bytes(SALT_BYTES)
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be {SALT_BYTES} bytes, not {type(salt).__name__}")
    if len(salt) != SALT_BYTES:
        raise ValueError(f"salt must have {SALT_BYTES} bytes; this one has {len(salt)}")
    return salt


def make_hasher(salt: bytes, num_hashes: int) -> Callable[[bytes], Hashed]:
    """Build the hash function of filters with one salt (scheme 1).

    As long as the salt is secret, nobody can craft URLs whose digests, such as Scrapy's
    fingerprints, share bits. (MurmurHash3 of 32 chosen bytes has collisions with any salt.)

    The function returns the block hash, 0 to 2**48 - 1, and `num_hashes` bit positions in the
    block, 0 to 65,535, two of which may coincide. A filter with fewer hashes uses the first ones.
    """
    words = _BLOCK_HASH_WORDS + num_hashes
    rounds = -(-words // _WORDS_PER_DIGEST)
    padding = 2 * (rounds * _WORDS_PER_DIGEST - words)
    unpack = struct.Struct(f">HI{num_hashes}H{padding}x").unpack
    more_seeds = tuple(range(1, rounds))
    digest = mmh3_x64_128_digest

    # This function dominates the time per request, so it makes as few calls as possible.
    def locate(fingerprint: bytes) -> Hashed:
        try:
            data = salt + fingerprint
        except TypeError:
            kind = type(fingerprint).__name__
            hint = "; encode a str first, for example url.encode()" if kind == "str" else ""
            raise TypeError(f"a fingerprint must be bytes, not {kind}{hint}") from None
        digests = digest(data, 0)
        for seed in more_seeds:
            digests += digest(data, seed)
        high, low, *positions = unpack(digests)
        return high << 32 | low, positions

    return locate


def block_of(block_hash: int, num_blocks: int) -> int:
    """Return the number of the block for a block hash, distributed as evenly as by a modulo.

    >>> block_of(0, 440), block_of(2**47, 440), block_of(2**48 - 1, 440)
    (0, 220, 439)
    """
    return (block_hash * num_blocks) >> BLOCK_HASH_BITS
