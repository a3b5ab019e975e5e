"""A filter file: its header, its state, its changes, and the damage that it detects."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bitarray import bitarray

from scrapy_bloom import StorageError
from scrapy_bloom.files.file import FileGeneration, FilterFile
from scrapy_bloom.filters.hashing import block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES, choose_geometry
from scrapy_bloom.generations.policy import Origin

HEADER = FileGeneration(
    path=Path("some.bloom"),
    geometry=choose_geometry(20_000, 1e-6),
    capacity=20_000,
    error_rate=1e-6,
    origin=Origin(
        salt=bytes(range(16)),
        fingerprinter="scrapy.utils.request.RequestFingerprinter",
        spider="näme",
    ),
    first_run=1_700_000_000.25,
    last_run=1_700_000_000.25,
    number=1,
)


def at(path: Path, header: FileGeneration = HEADER, **changes: object) -> FileGeneration:
    return replace(header, path=path, **changes)


def is_read(path: Path, header: FileGeneration = HEADER, **changes: object) -> bool:
    return vars(FileGeneration.at(path)) == vars(at(path, header, **changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A filter file that was closed with 3 requests in it."""
    path = tmp_path / "some.bloom"
    file = FilterFile.create(at(path))
    for fingerprint in (b"a", b"b", b"c"):
        file.filter.add(fingerprint)
    file.count = 3
    file.save()
    file.close()
    return path


def test_everything_comes_back(path: Path) -> None:
    assert is_read(path, count=3)
    file = FilterFile.open(path)
    assert [fp in file.filter for fp in (b"a", b"b", b"c", b"d")] == [True, True, True, False]
    assert (file.filter.capacity, file.filter.error_rate) == (20_000, 1e-6)
    file.close()


def test_the_space_is_reserved(path: Path) -> None:
    """No holes: a full disk is found out when the file is made, not when a bit is set."""
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_state_in_use(tmp_path: Path) -> None:
    path = tmp_path / "ninth.bloom"
    file = FilterFile.create(at(path, number=9))
    changes = {"count": 20_001, "in_use": True, "last_run": 1_700_000_000.125, "oldest": 7}
    vars(file).update(changes)
    file.save()
    # Visible to others at once, without a sync: it survives the end of the process.
    assert is_read(path, number=9, **changes)
    file.close()


def test_an_existing_file_is_never_replaced(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(StorageError, match="exists already, and was not replaced"):
        FilterFile.create(at(path))
    assert path.read_bytes() == before


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    def fill(new) -> int:
        new.add(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FilterFile.create(at(tmp_path / "some.bloom"), fill)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_bits_whose_numbers_need_more_than_32_bits_are_at_their_places(tmp_path: Path) -> None:
    """A filter of 3.8 GB: its last blocks are read without its code."""
    blocks, salt = 16, HEADER.origin.salt
    geometry = choose_geometry(1_000_000_000, 1e-6)
    first = geometry.num_blocks - blocks
    assert first > 2**32 // BLOCK_BITS
    locate = make_hasher(salt, geometry.num_hashes)
    located = ((each, locate(each)) for each in (b"%d" % number for number in range(2_000_000)))
    places = {
        each: [block * BLOCK_BITS + position for position in positions]
        for each, (block_hash, positions) in located
        if (block := block_of(block_hash, geometry.num_blocks)) >= first
    }
    added, others = list(places)[::2], list(places)[1::2]
    assert len(added) > 20
    header = at(tmp_path / "some.bloom", geometry=geometry, capacity=1_000_000_000)
    file = FilterFile.create(header)
    assert all(map(file.filter.add, added))
    file.close()
    file = FilterFile.open(header.path)
    assert all(each in file.filter for each in added)
    assert not any(each in file.filter for each in others)
    file.close()
    with header.path.open("rb") as stored:
        stored.seek(-blocks * BLOCK_BYTES, os.SEEK_END)
        bits = bitarray(endian="big")
        bits.frombytes(stored.read())
    expected = {place for each in added for place in places[each]}
    assert {first * BLOCK_BITS + number for number in bits.search(1)} == expected
