"""Damaged files: the error names the file, and nothing changes it.

What the crawl then says and its exit status are in test_bad_input.py, for some damages of each
kind. Here are all of them, over the files of each kind of filter.
"""

import binascii
import contextlib
import math
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scrapy_bloom import FilterFileError, StorageError
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import HEADER_BYTES, FileGeneration, write_state
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.store import Batch, Entered
from tests.support import request_queues
from tests.support.backends import begun, local_backend
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import urls, write_urls

SEED = 2026
NEXT_STEPS = "it was left as it is: restore it from a backup, or move "
RECORDED = [b"page %d" % number for number in range(90)]


def of(directory: Path, **options: object) -> LocalBackend:
    options = {"capacity": 40, "error_rate": 1e-6, **options}
    return local_backend(directory, fingerprinter="a.B", spider="shop", **options)


def make(directory: Path, **options: object) -> LocalBackend:
    backend = of(directory, **options)
    backend.open()
    return backend


def recorded(directory: Path, **options: object) -> LocalBackend:
    return begun(of(directory, **options), RECORDED)


KINDS = {
    "plain": {"capacity": 1000},
    "grown": {},
    "window": {"capacity": 1000, "window_secs": 1e6},
}


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return KINDS[request.param]


@pytest.fixture
def directory(options: dict[str, object], tmp_path: Path) -> Path:
    recorded(tmp_path, **options).close()
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


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path: Path) -> None:
    """Bytes without a meaning count, too: a disk that flips them is not to be trusted."""
    recorded(tmp_path, capacity=1000).close()
    path = tmp_path / "generation-0001.bloom"
    good = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset in range(HEADER_BYTES):
            flip = 1 << offset % 8
            os.pwrite(file.fileno(), bytes([good[offset] ^ flip]), offset)
            with pytest.raises(FilterFileError) as raised:
                FileGeneration.at(path)
            assert str(raised.value).startswith(f"{path} "), (offset, flip)
            os.pwrite(file.fileno(), good[offset : offset + 1], offset)


def test_truncated_files_are_refused(directory: Path, options: dict[str, object]) -> None:
    """At no length is a file read as a smaller filter, or extended with zeros."""
    rng = random.Random(SEED)
    before = contents(directory)
    paths = sorted(directory.glob("*.bloom"))
    for path in paths:
        good = path.read_bytes()
        lengths = {0, 1, 7, 8, 9, 52, 68, 4068, 4072, 4095, 4096, 4097, len(good) - 1}
        lengths |= {len(good) - 4096, len(good) - 8192, len(good) // 2}
        while len(lengths) < 200 // len(paths):
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
    """One of two files is taken from another filter."""
    for name in ("one", "other"):
        recorded(tmp_path / name).close()
    (tmp_path / "other/generation-0002.bloom").replace(tmp_path / "one/generation-0002.bloom")
    before = contents(tmp_path / "one")
    with pytest.raises(FilterFileError, match="belong to different filters .*nothing was changed"):
        make(tmp_path / "one")
    assert contents(tmp_path / "one") == before


# Headers with figures that cannot be, whose checksum is right: a hostile program writes that, too.

# Where a figure is, as what, and what it cannot be.
FIGURES: dict[str, tuple[int, str, list]] = {
    "num_hashes": (14, "H", [0, 1, 65, 65_535]),
    "num_blocks": (16, "Q", [0, 2, 3, 1000, 2**40, 2**63, 2**64 - 1]),
    "capacity": (24, "Q", [0, 10**6, 10**12, 10**12 + 1, 2**64 - 1]),
    "error_rate": (
        *(32, "d"),
        [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 1e-300, 1e-19, 1e300],
    ),
    "first_run": (40, "d", [math.nan, math.inf, -math.inf, -1.0, 1e300, 1e12]),
    "number": (48, "I", [0]),
}
STATES = [
    *({"count": 2**47 - 1}, {"count": 10**7}, {"last_run": 2**48 / 1000}),
    *({"oldest": 0}, {"oldest": 2}, {"oldest": 2**48 - 1}),
]


def with_figure(good: bytes, name: str, value: float) -> bytes:
    raw, (offset, kind, _) = bytearray(good), FIGURES[name]
    struct.pack_into(f">{kind}", raw, offset, value)
    struct.pack_into(">I", raw, 4068, binascii.crc32(raw[:4068]))
    return bytes(raw)


def with_state(good: bytes, found: FileGeneration, state: dict[str, float]) -> bytes:
    raw = bytearray(good)
    with memoryview(raw)[:HEADER_BYTES] as view, view.cast("Q") as words:
        changed = replace(found, **state)
        write_state(words, changed, changed.count)
    return bytes(raw)


def spoilt(good: bytes, found: FileGeneration) -> Iterator[tuple[str, bytes]]:
    for name, (*_, values) in FIGURES.items():
        for value in values:
            raw = with_figure(good, name, value)
            yield f"{name} {value}", raw
            if name == "num_blocks" and value in {3, 1000}:
                yield f"{name} {value}, and as long", raw.ljust(4096 + 8192 * value, b"\0")
    for state in STATES:
        yield str(state), with_state(good, found, state)


def test_every_figure_that_cannot_be_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, capacity=1000).close()
    path = tmp_path / "generation-0001.bloom"
    found = replace(FileGeneration.at(path), count=0)
    for what, raw in spoilt(path.read_bytes(), found):
        path.write_bytes(raw)
        for use in (make, FilterReader):
            message = check_refused(partial(use, tmp_path), path, what)
            assert message.startswith(f"{path} has "), what


def test_a_crawl_and_each_subcommand_are_refused_in_one_line(tree: Site, tmp_path: Path) -> None:
    job, name = tmp_path / "job", "generation-0001.bloom"
    recorded(job / "bloom", capacity=1000).close()
    path = job / "bloom" / name
    path.write_bytes(raw := with_figure(path.read_bytes(), "error_rate", math.nan))
    line = Crawl(tree.url, tmp_path, {"JOBDIR": "job"}).refusal()
    assert f"{name} has impossible figures in its header (" in line
    assert not tree.hits
    write_urls(job / "urls.txt", urls(range(10)))
    for command in (
        ("info", ".", "--scan"),
        ("check", ".", "urls.txt"),
        ("import", "urls.txt", "bloom"),
        ("copy", "bloom", "../copy"),
        ("report", "bloom", "-o", "report.html"),
    ):
        ran = bloom(*command, cwd=job)
        assert f"{name} has impossible figures in its header (" in ran.error, command
        assert path.read_bytes() == raw, command


# What else is in a job directory.


def fill(path: Path, urls: Sequence[str]) -> None:
    requests = [serialized({"url": url, "body": b"x" * 200}) for url in urls]
    store = request_queues.begun(path)
    for each in requests:
        store.apply(Batch([Entered(each, slot="shop", newest_first=False)]))
    store.close()


def test_a_truncated_queue_is_not_read_as_a_shorter_one(tmp_path: Path) -> None:
    """The database is refused at once, or reading fails at the damaged page."""
    rng = random.Random(SEED)
    path = tmp_path / "requests.sqlite"
    urls = {f"https://shop.example/{number}" for number in range(300)}
    fill(path, sorted(urls))
    good = path.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {path.name}  # no log is left next to it
    lengths = {len(good) - 1, 4096, 4095, 100, 99, 50, 2}
    lengths |= {rng.randrange(2, len(good)) for _ in range(60)}
    for length in sorted(lengths):
        for each in tmp_path.iterdir():
            each.unlink()
        path.write_bytes(good[:length])
        what = f"seed {SEED}, cut off after {length}"
        try:
            store = request_queues.begun(path)
        except StorageError as error:
            assert str(path) in str(error), what
            assert "left as it was" in str(error) or "left as it is" in str(error), what
            assert path.read_bytes() == good[:length], what
            continue
        readable = spoilt = 0
        with contextlib.suppress(StorageError):  # the crawl logs it, and ends
            while one := request_queues.take(store):
                try:
                    readable += deserialized(one.data)["url"] in urls
                except Exception:  # noqa: BLE001 - the crawl logs it, too
                    spoilt += 1
            assert readable + spoilt == len(urls), what
            assert spoilt <= 1, what
        store.close()
