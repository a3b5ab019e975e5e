"""A duplicate filter for Scrapy that uses a Bloom filter.

Switch it on in the settings: DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrapy_bloom.crawl.dupefilter import BloomDupeFilter
    from scrapy_bloom.crawl.fingerprinting import ScrapyRedisFingerprinter
    from scrapy_bloom.crawl.scheduler.scheduler import CrashSafeScheduler
    from scrapy_bloom.exceptions import (
        BloomError,
        FingerprinterMismatchError,
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
    "BloomDupeFilter",
    "BloomError",
    "BloomFilter",
    "CountingBloomFilter",
    "CrashSafeScheduler",
    "FingerprinterMismatchError",
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
    "BloomDupeFilter": "crawl.dupefilter",
    "BloomFilter": "filters.bloom",
    "CountingBloomFilter": "filters.counting",
    "CrashSafeScheduler": "crawl.scheduler.scheduler",
    "ScrapyRedisFingerprinter": "crawl.fingerprinting",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("scrapy-bloom")
    # Every scrapy command imports this package for `scrapy bloom`, also in projects that do not use
    # the filter. So it must be imported quickly, and even if a dependency cannot be imported.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'exceptions')}"), name)
    globals()[name] = value
    return value
