"""Damaged files: the error names the file, and nothing changes it.

What the crawl then says and its exit status are in test_bad_input.py, for some damages of each
kind. Here are all of them, over the files of each kind of filter.
"""

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scrapy_bloom import BloomError, FilterFileError, StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import HEADER_BYTES, FileGeneration, FilterFile
from scrapy_bloom.job.recovery import Job
from scrapy_bloom.queues.batch import Batch, Found, deserialized, serialized
from scrapy_bloom.queues.sqlite import RequestDatabase
from tests.support.backends import local_backend

SEED = 2026
NEXT_STEPS = "it was left as it is: restore it from a backup, or move "
RECORDED = [b"page %d" % number for number in range(90)]
ABSENT = [b"other %d" % number for number in range(200)]


def make(directory: Path, **options: object) -> LocalBackend:
    options = {"capacity": 40, "error_rate": 1e-6, "sync_secs": 0, **options}
    backend = local_backend(directory, fingerprinter="a.B", spider="shop", **options)
    backend.open()
    return backend


def recorded(directory: Path, **options: object) -> LocalBackend:
    backend = make(directory, **options)
    backend.begin()
    for fingerprint in RECORDED:
        backend.add(fingerprint)
    return backend


KINDS = {
    "plain": {"capacity": 1000},
    "other": {"capacity": 5000, "error_rate": 1e-12},
    "grown": {},
    "grown too": {},
    "window": {"capacity": 1000, "window_secs": 1e6},
}


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return KINDS[request.param]


@pytest.fixture(params=["closed", "killed"])
def directory(request: pytest.FixtureRequest, options: dict[str, object], tmp_path: Path) -> Path:
    """A filter in one or two files: closed, or with the mark of a run that was killed."""
    backend = recorded(tmp_path, **options)
    if request.param == "killed":
        backend.unlock()  # as a kill does
    else:
        backend.close()
    return tmp_path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def check_refused(open_it: Callable[[], object], path: Path, what: str) -> str:
    """Check that opening a file fails with the line that a user needs, and changes nothing."""
    before = contents(path.parent)
    try:
        opened = open_it()
    except StorageError as error:
        message = str(error)
    else:
        raise AssertionError(f"{what}: opened as {opened}")
    assert message.startswith(f"{path} "), f"{what}: {message}"
    assert NEXT_STEPS in message or "upgrade scrapy_bloom to use it" in message, (
        f"{what}: {message}"
    )
    assert "\n" not in message, what
    assert contents(path.parent) == before, f"{what}: a file was changed"
    return message


@pytest.mark.parametrize("directory", ["closed"], indirect=True)
def test_every_flipped_bit_and_byte_of_a_header_is_noticed(directory: Path) -> None:
    """Bytes without a meaning count, too: a disk that flips them is not to be trusted."""
    for path in sorted(directory.glob("*.bloom")):
        good = path.read_bytes()
        number = 0
        with path.open("r+b", buffering=0) as file:
            for offset in range(HEADER_BYTES):
                for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                    os.pwrite(file.fileno(), bytes([good[offset] ^ flip]), offset)
                    try:
                        found: object = FileGeneration.at(path)
                    except FilterFileError as error:
                        found = str(error)
                        number += 1
                    assert str(found).startswith(f"{path} "), (offset, flip, found)
                os.pwrite(file.fileno(), good[offset : offset + 1], offset)
        assert number == HEADER_BYTES * 9
        assert path.read_bytes() == good


def test_a_flipped_byte_of_the_bits_changes_no_other_answer(
    directory: Path, options: dict[str, object]
) -> None:
    """The bits have no checksum, which would change with each request. Other answers stay right."""
    rng = random.Random(SEED)
    path = max(directory.glob("*.bloom"))
    good, header = path.read_bytes(), vars(FileGeneration.at(path))
    for _ in range(1000):
        offset, flip = rng.randrange(HEADER_BYTES, len(good)), rng.randrange(1, 256)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([good[offset] ^ flip]), offset)
            assert vars(FileGeneration.at(path)) == header
            looked = FilterFile.open(path, readonly=True)
            # A page has a handful of bits among 8 KiB: one byte can't hold all of them.
            assert sum(page in looked.filter for page in ABSENT[:20]) == 0, (SEED, offset, flip)
            looked.close()
            os.pwrite(file.fileno(), good[offset : offset + 1], offset)
    reader = FilterReader(directory)
    assert all(reader.are_seen(RECORDED))
    assert not any(reader.are_seen(ABSENT))
    reader.close()


@pytest.mark.parametrize("directory", ["closed"], indirect=True)
def test_truncated_files_are_refused(directory: Path, options: dict[str, object]) -> None:
    """At no length is a file read as a smaller filter, or extended with zeros."""
    rng = random.Random(SEED)
    before = contents(directory)
    paths = sorted(directory.glob("*.bloom"))
    for path in paths:
        good = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, 52, 68, 4068, 4072, 4095, 4096, 4097, len(good) - 1}
        lengths |= {len(good) - 4096, len(good) - 8192, len(good) // 2}
        while len(lengths) < 1000 // len(paths):
            lengths.add(rng.randrange(rng.choice([HEADER_BYTES, len(good)])))
        for length in sorted(lengths, reverse=True):
            os.truncate(path, length)
            what = f"seed {SEED}, cut off after {length}"
            message = check_refused(lambda: make(directory, **options), path, what)
            assert "is cut off" in message or "its header says" in message
            assert (f"{length:,}" in message) or (f"{length}" in message) or length == 0, message
        for more in (b"\0", good[:1], good[HEADER_BYTES:], bytes(1 << 20)):
            path.write_bytes(good + more)
            what = f"longer by {len(more)}"
            assert "header says" in check_refused(lambda: make(directory, **options), path, what)
        path.write_bytes(good)
    assert contents(directory) == before
    backend = make(directory, **options)
    assert all(page in backend for page in RECORDED)
    backend.close()


def test_mixed_up_files_are_refused(tmp_path: Path) -> None:
    """A header from one file and bits from another: their sizes differ, or their salts do."""
    for name, options in KINDS.items():
        recorded(tmp_path / name, **options).close()
    first = {name: min((tmp_path / name).glob("*.bloom")).read_bytes() for name in KINDS}
    mixed = tmp_path / "mixed/generation-0001.bloom"
    mixed.parent.mkdir()
    for header, bits in (("plain", "other"), ("other", "plain")):
        mixed.write_bytes(first[header][:HEADER_BYTES] + first[bits][HEADER_BYTES:])
        message = check_refused(lambda: make(mixed.parent), mixed, f"{header} and {bits}")
        assert "but its header says" in message
    # One of two files taken from another filter.
    mixed.write_bytes(first["grown"])
    other = (tmp_path / "grown too/generation-0002.bloom").read_bytes()
    (mixed.parent / "generation-0002.bloom").write_bytes(other)
    with pytest.raises(FilterFileError, match="belong to different filters .*nothing was changed"):
        make(mixed.parent)
    assert mixed.read_bytes() == first["grown"]


# What else is in a job directory.


def queue_of(path: Path, urls: Sequence[str]) -> RequestDatabase:
    database = RequestDatabase(path, by_slot=False)
    database.begin()
    for url in urls:
        request = serialized({"url": url, "body": b"x" * 200})
        database.apply(Batch(found=[Found(request, slot="shop", newest_first=False)]))
    return database


def test_a_truncated_queue_is_not_read_as_a_shorter_one(tmp_path: Path) -> None:
    """The database is refused at once, or reading fails at the damaged page."""
    rng = random.Random(SEED)
    path = tmp_path / "requests.sqlite"
    urls = {f"https://shop.example/{number}" for number in range(300)}
    queue_of(path, sorted(urls)).close()
    good = path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {path.name}  # no log is left beside it
    lengths = {len(good) - 1, 4096, 4095, 100, 99, 50, 2}
    lengths |= {rng.randrange(2, len(good)) for _ in range(200)}
    for length in sorted(lengths):
        for each in tmp_path.iterdir():
            each.unlink()
        path.write_bytes(good[:length])
        what = f"seed {SEED}, cut off after {length}"
        try:
            database = RequestDatabase(path, by_slot=False)
            database.begin()
        except StorageError as error:
            assert str(path) in str(error), what
            assert "left as it was" in str(error) or "left as it is" in str(error), what
            assert path.read_bytes() == good[:length], what
            continue
        readable = spoilt = 0
        with contextlib.suppress(sqlite3.DatabaseError):  # of which the crawl tells, and ends
            while one := database.take(Batch()):
                try:
                    readable += deserialized(one.data)["url"] in urls
                except Exception:  # noqa: BLE001 - of which the crawl tells, too
                    spoilt += 1
            assert readable + spoilt == len(urls), what
            assert spoilt <= 1, what
        database.close()


def test_a_job_with_a_damaged_mark_is_still_one_that_was_killed(tmp_path: Path) -> None:
    """Its presence counts, whatever the content of the file."""
    for content in (b"", b"\0" * 100, b"\xff\xfe\n\xff", b"one line"):
        job = tmp_path / content.hex()
        (job / "requests.queue").mkdir(parents=True)
        (job / "bloom.in-use").write_bytes(content)
        backend = local_backend(job / "bloom", capacity=10, error_rate=1e-3, job=Job(job, "stop"))
        with pytest.raises(BloomError, match="did not close"):
            backend.open()
        assert (job / "bloom.in-use").read_bytes() == content
