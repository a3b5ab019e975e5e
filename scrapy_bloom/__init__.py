"""A Bloom filter in place of Scrapy's set of seen requests.

DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"
"""

from scrapy_bloom.addon import Addon
from scrapy_bloom.counting import CountingBloomFilter
from scrapy_bloom.dupefilter import BloomDupeFilter
from scrapy_bloom.exceptions import (
    BloomError,
    FilterFileError,
    FingerprinterMismatchError,
    GeometryMismatchError,
    LockedError,
    OutageError,
    SeenFileError,
    SettingError,
    StorageError,
    UncleanShutdownError,
)
from scrapy_bloom.filters import BloomFilter

__all__ = [
    "Addon",
    "BloomDupeFilter",
    "BloomError",
    "BloomFilter",
    "CountingBloomFilter",
    "FilterFileError",
    "FingerprinterMismatchError",
    "GeometryMismatchError",
    "LockedError",
    "OutageError",
    "SeenFileError",
    "SettingError",
    "StorageError",
    "UncleanShutdownError",
]
