"""Filters to be reported, and the page that is made of them."""

from pathlib import Path

from scrapy_bloom.generations.policy import FilterStatus
from scrapy_bloom.job.filter import LocalBackend
from scrapy_bloom.text import size_text
from tests.support.backends import begun, local_backend
from tests.support.cli import bloom

SALT = bytes(range(100, 116))
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"


def make(place: Path | None, count: int = 0, **options: object) -> LocalBackend:
    """Open a filter, and add so many requests."""
    backend = local_backend(
        place,
        **{
            "capacity": 20_000,
            "error_rate": 1e-6,
            "salt": SALT,
            "fingerprinter": FINGERPRINTER,
            "spider": "shop",
            **options,
        },
    )
    return begun(backend, (number.to_bytes(20, "big") for number in range(count)))


def made(place: Path, count: int = 0, **options: object) -> FilterStatus:
    """Make a filter with so many requests, and close it; return its status."""
    backend = make(place, count, **options)
    status = backend.status()
    backend.close()
    return status


def report(place: Path, *more: str) -> str:
    """Return the page that `scrapy bloom report` writes about a filter."""
    output = place.parent / f"{place.name}.html"
    ran = bloom("report", place, "-o", output, *more, cwd=place.parent)
    assert ran.status == 0, ran
    assert ran.err == ""
    page = output.read_text("utf-8")
    assert ran.out == f"{output}: {size_text(output.stat().st_size)}\n"
    return page
