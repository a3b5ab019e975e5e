"""The hash scheme: it is a stored format, so its results are pinned down."""

import random
from collections import Counter

import pytest

from scrapy_bloom.filters.hashing import block_of, make_hasher

SALT = bytes(range(16))


# Written down from the first release. If one of these fails, every filter in the world has
# become unreadable: add a new scheme instead.
@pytest.mark.parametrize(
    ("fingerprint", "num_blocks", "num_hashes", "block", "positions"),
    [
        (b"", 1, 1, 0, "18756"),
        (b"page", 440, 5, 229, "49764 17802 25409 16550 49721"),
        (
            b"\x00" * 20,
            4_399_698,
            13,
            2083795,
            "13984 6492 38379 6102 26926 52591 13754 60040 57896 55824 54617 132 40097",
        ),
        (
            b"\xff" * 65_535,
            2**40,
            21,
            133117099987,
            (
                "11617 9944 64630 9425 43400 40456 19915 35683 43645 11414 37785 38910 49433 13199 "
                "24607 13455 5196 15657 7670 53079 6533"
            ),
        ),
        (
            b"page",
            1000,
            22,
            521,
            (
                "49764 17802 25409 16550 49721 3349 39871 58298 36164 35829 18624 57799 60575 "
                "12279 31704 24927 8868 49433 13122 36366 2831 55924"
            ),
        ),
    ],
)
def test_golden_values(
    fingerprint: bytes, num_blocks: int, num_hashes: int, block: int, positions: str
) -> None:
    block_hash, found = make_hasher(SALT, num_hashes)(fingerprint)
    assert block_of(block_hash, num_blocks) == block
    assert found == [int(position) for position in positions.split()]


@pytest.mark.parametrize("num_hashes", [1, 5, 6, 13, 14, 20, 21, 22, 64])
def test_more_hashes_only_add_positions(num_hashes: int) -> None:
    block_hash, positions = make_hasher(SALT, num_hashes)(b"page")
    assert len(positions) == num_hashes
    assert 0 <= block_hash < 2**48
    assert all(0 <= position < 65_536 for position in positions)
    most = make_hasher(SALT, 64)(b"page")
    assert most == (block_hash, most[1])
    assert most[1][:num_hashes] == positions


@pytest.mark.parametrize("num_blocks", [1, 3, 100, 440])
def test_blocks_and_positions_are_even(num_blocks: int) -> None:
    rng, n = random.Random(7), 20_000
    locate = make_hasher(SALT, 4)
    hashed = [locate(rng.randbytes(20)) for _ in range(n)]
    found = [(block_of(block_hash, num_blocks), positions) for block_hash, positions in hashed]
    for counts, cells in (
        (Counter(block for block, _ in found), num_blocks),
        (Counter(positions[0] // 1024 for _, positions in found), 64),
        (Counter(positions[3] % 64 for _, positions in found), 64),
    ):
        assert set(counts) == set(range(cells))
        expected = n / cells
        chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_square < cells + 6 * (2 * cells) ** 0.5  # six standard deviations


def test_the_salt_changes_everything() -> None:
    rng = random.Random(7)
    one, two = make_hasher(SALT, 13), make_hasher(bytes(16), 13)
    for _ in range(100):
        fingerprint = rng.randbytes(20)
        assert one(fingerprint)[0] != two(fingerprint)[0]
        assert len(set(one(fingerprint)[1]) & set(two(fingerprint)[1])) <= 1


@pytest.mark.parametrize("fingerprint", ["page", None, 7, ["page"]])
def test_only_bytes_can_be_hashed(fingerprint: object) -> None:
    with pytest.raises(TypeError, match="a fingerprint must be bytes, not") as caught:
        make_hasher(SALT, 10)(fingerprint)
    message, _, hint = str(caught.value).partition(";")
    assert message.endswith(type(fingerprint).__name__)
    assert bool(hint) == isinstance(fingerprint, str)
