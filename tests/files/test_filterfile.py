"""A filter file: its header, its state, its changes, and the damage that it detects."""

import binascii
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from bitarray import bitarray

from scrapy_bloom import StorageError
from scrapy_bloom.files.file import FileGeneration, FilterFile, clip
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
    created_at=1_700_000_000.25,
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


def test_the_format_on_disk(path: Path) -> None:
    """Written down for other programs, and for us: this never changes for version 1."""
    raw = path.read_bytes()
    assert len(raw) == 4096 + HEADER.geometry.num_blocks * 8192
    assert raw[:8] == b"\x89BLOOM\r\n"
    assert struct.unpack(">HHHHQQddI", raw[8:52]) == (
        *(1, 1, 1, HEADER.geometry.num_hashes),
        *(HEADER.geometry.num_blocks, 20_000, 1e-6, 1_700_000_000.25, 1),
    )
    assert raw[52:68] == bytes(range(16))
    assert raw[68:72] == b"\x00\x29sc"
    assert raw[1094:1101] == b"\x00\x05n\xc3\xa4me"
    assert raw[4072:4078] == b"\x00\x00\x00\x00\x00\x01"
    assert raw[4080:4086] == b"\x00\x00\x00\x00\x00\x00"
    assert raw[4088:4094] == b"\x00\x00\x00\x00\x00\x03"


def test_the_space_is_reserved(path: Path) -> None:
    """No holes: a full disk is found out when the file is made, not when a bit is set."""
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_without_fallocate_the_space_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "some.bloom"
    FilterFile.create(at(path)).close()
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert is_read(path)


def test_state_in_use(tmp_path: Path) -> None:
    path = tmp_path / "ninth.bloom"
    file = FilterFile.create(at(path, number=9))
    changes = {"count": 20_001, "in_use": True, "open_until": 1_700_000_000.125, "oldest": 7}
    vars(file).update(changes)
    file.save()
    # Visible to others at once, without a sync: it survives the end of the process.
    assert is_read(path, number=9, **changes)
    file.close()


def test_long_names_are_clipped(tmp_path: Path) -> None:
    long = replace(HEADER.origin, spider="ä" * 1000, fingerprinter="x" * 2000)
    FilterFile.create(at(tmp_path / "long.bloom", origin=long)).close()
    header = FileGeneration.at(tmp_path / "long.bloom").origin
    assert header.spider == "ä" * 512
    assert header.fingerprinter == "x" * 1024
    assert clip("x" + "ä" * 1000) == "x" + "ä" * 511  # never half a letter


def test_names_with_invalid_utf_8_are_read_with_replacements(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[70] = raw[1096] = 0xFF  # their first bytes
    raw[4068:4072] = binascii.crc32(raw[:4068]).to_bytes(4, "big")
    path.write_bytes(raw)
    origin = FileGeneration.at(path).origin
    assert origin.fingerprinter == "\ufffdcrapy.utils.request.RequestFingerprinter"
    assert origin.spider == "\ufffdäme"


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


def test_a_file_that_is_not_in_its_place_any_more(path: Path) -> None:
    file = FilterFile.open(path)
    assert file.is_in_place()
    content = path.read_bytes()
    path.unlink()
    assert not file.is_in_place()
    path.write_bytes(content)
    assert not file.is_in_place()
    file.close()
    parent = path.parent
    file = FilterFile.open(path)
    parent.rename(parent.with_name("away"))
    parent.write_text("a file")
    assert not file.is_in_place()
    file.close()
    parent.unlink()
    parent.with_name("away").rename(parent)


def test_a_file_that_cannot_be_mapped_is_one_clear_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuses)
    with pytest.raises(StorageError, match="writing: Cannot allocate memory; fix the cause$"):
        FilterFile.open(path)
    with pytest.raises(StorageError, match="cannot be read: Cannot allocate memory$"):
        FilterFile.open(path, readonly=True)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        FilterFile.open(tmp_path / "none.bloom")


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
