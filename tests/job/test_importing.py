"""Reading requests.seen, in both of Scrapy's formats."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrapy_bloom import SeenFileError
from scrapy_bloom.job.requests_seen import SeenFile


def binary(fingerprints: list[bytes]) -> bytes:
    return b"".join(len(fp).to_bytes(2, "big") + fp for fp in fingerprints)


def text(fingerprints: list[bytes]) -> bytes:
    return b"".join(fp.hex().encode() + b"\n" for fp in fingerprints)


def read(path: Path) -> tuple[list[bytes], bool]:
    seen = SeenFile(path)
    found = list(seen)
    assert seen.position == seen.size == path.stat().st_size
    return found, seen.is_truncated


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.seen"


FINGERPRINTS = [random.Random(n).randbytes(20) for n in range(100)]


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=20), st.integers(0, 20))
@settings(max_examples=100)
def test_scrapy_was_upgraded_between_two_runs(
    tmp_path_factory, fingerprints: list[bytes], as_text: int
) -> None:
    """Also with all in one of the formats, and with nothing."""
    path = tmp_path_factory.mktemp("seen") / "requests.seen"
    path.write_bytes(text(fingerprints[:as_text]) + binary(fingerprints[as_text:]))
    assert read(path) == (fingerprints, False)
    assert SeenFile(path).count() == len(fingerprints)


@pytest.mark.parametrize("write", [binary, text])
@pytest.mark.parametrize("cut", [1, 2, 5, 19, 20, 21])
def test_a_cut_off_last_record_is_ignored_and_counted(path: Path, write, cut: int) -> None:
    content = write(FINGERPRINTS)
    path.write_bytes(content[:-cut])
    found, truncated = read(path)
    if write is text and cut == 1:  # all its digits are there
        assert (found, truncated) == (FINGERPRINTS, False)
    else:
        assert (found, truncated) == (FINGERPRINTS[:-1], True)


def test_a_single_cut_off_record(path: Path) -> None:
    path.write_bytes(b"\x00\x14abc")
    assert read(path) == ([], True)


def test_lines_of_windows(path: Path) -> None:
    path.write_bytes(text(FINGERPRINTS).replace(b"\n", b"\r\n"))
    assert read(path) == (FINGERPRINTS, False)


@pytest.mark.parametrize(
    "content",
    [
        b"https://example.com/\n",
        b'{"version": 1}',
        b"PK\x03\x04",
        b"\xef\xbb\xbf00ff\n",
        b"\x00\x00" * 40,
        b"\x01\x00" + bytes(256),
        binary(FINGERPRINTS) + b"\xff\xff" + bytes(30),
        text(FINGERPRINTS) + b"not hex\n",
        text(FINGERPRINTS) + b"not hex",
        text(FINGERPRINTS) + b"\n\n",
        b"abc\n",
        b"ab cd\n",
        b"0123456789" * 100_000,
        b"\n",
    ],
)
def test_neither_format_is_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SeenFileError, match="in neither format .* move it away"):
        list(SeenFile(path))
    assert path.read_bytes() == content
