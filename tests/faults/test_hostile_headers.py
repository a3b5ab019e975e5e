"""Headers with impossible figures and a valid checksum.

A program that is broken, or hostile, writes the checksum too.
"""

import binascii
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrapy_bloom import FilterFileError
from scrapy_bloom.files.directory import FilterReader
from scrapy_bloom.files.file import HEADER_BYTES, FileGeneration, write_state
from tests.support.backends import local_backend
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import FINGERPRINTER, fingerprints, make_filter, urls, write_urls

NAME = "generation-0001.bloom"
# Where a figure is, as what, and what it cannot be.
FIGURES: dict[str, tuple[int, str, list]] = {
    "num_hashes": (14, "H", [0, 1, 65, 65_535]),
    "num_blocks": (16, "Q", [0, 2, 3, 1000, 2**40, 2**63, 2**64 - 1]),
    "capacity": (24, "Q", [0, 10**6, 10**12, 10**12 + 1, 2**64 - 1]),
    "error_rate": (
        *(32, "d"),
        [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 1e-300, 1e-19, 1e300],
    ),
    "created_at": (40, "d", [math.nan, math.inf, -math.inf, -1.0, 1e300, 1e12]),
    "number": (48, "I", [0]),
}
STATES = [
    {"count": 2**47 - 1},
    {"count": 10**7},
    {"open_until": 2**48 / 1000},
    {"oldest": 0},
    {"oldest": 2},
    {"oldest": 2**48 - 1},
]


def with_figure(good: bytes, offset: int, kind: str, value: float) -> bytes:
    raw = bytearray(good)
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
    """Yield a name for each, and the whole file."""
    for name, (offset, kind, values) in FIGURES.items():
        for value in values:
            raw = with_figure(good, offset, kind, value)
            yield f"{name} {value}", raw
            if name == "num_blocks" and value in {3, 1000}:
                yield f"{name} {value}, and as long", raw.ljust(4096 + 8192 * value, b"\0")
    for state in STATES:
        yield str(state), with_state(good, found, state)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(100))))
    return tmp_path / "job"


def test_every_figure_that_cannot_be_is_refused_and_left_as_it_is(job: Path) -> None:
    path = job / "bloom" / NAME
    good, number = path.read_bytes(), 0
    found = replace(FileGeneration.at(path), count=0)
    for what, raw in spoilt(good, found):
        path.write_bytes(raw)
        for use in (
            lambda: local_backend(
                job / "bloom", capacity=100, error_rate=1e-6, fingerprinter=FINGERPRINTER
            ).open(),
            lambda: FilterReader(job),
        ):
            with pytest.raises(FilterFileError) as told:
                use()
            message = str(told.value)
            assert message.startswith(f"{path} has "), what
            assert "it was left as it is: restore it from a backup" in message, what
            assert "\n" not in message, what
            number += 1
        assert path.read_bytes() == raw, what
        assert [each.name for each in sorted(path.parent.glob("*.bloom*"))] == [NAME], what
    assert number == 2 * (len(STATES) + 2 + sum(len(each) for *_, each in FIGURES.values()))


def test_a_crawl_and_each_subcommand_are_refused_in_one_line(job: Path, tree: Site) -> None:
    path = job / "bloom" / NAME
    offset, kind, _ = FIGURES["error_rate"]
    path.write_bytes(raw := with_figure(path.read_bytes(), offset, kind, math.nan))
    line = Crawl(tree.url, job.parent, {"JOBDIR": "job"}).refusal()
    assert f"{NAME} has impossible figures in its header (" in line
    assert not tree.hits
    write_urls(job / "urls.txt", urls(range(10)))
    for command in (
        ("info", ".", "--scan"),
        ("check", ".", "urls.txt"),
        ("import", "urls.txt", "bloom"),
        ("merge", "bloom", "bloom", "-o", "merged"),
        ("push", "bloom", "redis://127.0.0.1:1/0"),
        ("report", "bloom", "-o", "report.html"),
    ):
        ran = bloom(*command, cwd=job)
        assert f"{NAME} has impossible figures in its header (" in ran.error, command
        assert path.read_bytes() == raw, command
