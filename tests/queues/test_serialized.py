"""Serialized requests begin with a line, so that lists run no code and read no pickle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrapy_bloom.queues.serialized import (
    deserialized,
    line_of,
    serialized,
    url_of,
    with_line,
)

UNREADABLE = "a request that cannot be read"


@given(st.text(), st.text())
def test_any_method_and_url_are_shown_as_they_are(method: str, url: str) -> None:
    """A method may contain a line break."""
    values = {"method": method, "url": url}
    data = serialized(values)
    assert line_of(data) == (method, url)
    assert deserialized(data) == values
    assert data.partition(b"\n")[2][:2] == b"\x80\x04"  # for every Python that Scrapy runs on


def test_no_pickle_is_read() -> None:
    assert (
        url_of(with_line("GET", "https://shop.example/", b"no pickle")) == "https://shop.example/"
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"\xff\n", b'["GET"]\n', b"1\n", b"[" * 100_000 + b"\n", b'["GET", "https://'],
)
def test_damaged_lines(data: bytes) -> None:
    assert url_of(data) == UNREADABLE


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    assert url_of(data)
