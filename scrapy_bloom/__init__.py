"""A Bloom filter in place of Scrapy's set of seen requests.

DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
    from scrapy_bloom.crawl.fingerprinting import ScrapyRedisFingerprinter
    from scrapy_bloom.crawl.scheduler.scheduler import CrashSafeScheduler
    from scrapy_bloom.crawl.startup import Addon
    from scrapy_bloom.exceptions import (
        BloomError,
        FilterFileError,
        FingerprinterMismatchError,
        GeometryMismatchError,
        LockedError,
        OutageError,
        RefusedError,
        SeenFileError,
        SettingError,
        StorageError,
        UncleanShutdownError,
    )
    from scrapy_bloom.filters.bloom import BloomFilter
    from scrapy_bloom.filters.counting import CountingBloomFilter

__all__ = [
    "Addon",
    "BloomDupeFilter",
    "BloomError",
    "BloomFilter",
    "CountingBloomFilter",
    "CrashSafeScheduler",
    "FilterFileError",
    "FingerprinterMismatchError",
    "GeometryMismatchError",
    "LockedError",
    "OutageError",
    "RefusedError",
    "ScrapyRedisFingerprinter",
    "SeenFileError",
    "SettingError",
    "StorageError",
    "UncleanShutdownError",
]

_HOMES = {
    "Addon": "crawl.startup",
    "BloomDupeFilter": "crawl.dupefilter",
    "BloomFilter": "filters.bloom",
    "CountingBloomFilter": "filters.counting",
    "CrashSafeScheduler": "crawl.scheduler.scheduler",
    "ScrapyRedisFingerprinter": "crawl.fingerprinting",
}


def __getattr__(name: str) -> Any:
    # Every scrapy command, also of projects without this filter, imports this package for
    # `scrapy bloom`. They shall not wait for all of it, nor end where a part cannot be imported.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'exceptions')}"), name)
    globals()[name] = value
    return value
