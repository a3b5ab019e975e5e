"""The import path under which filters have stored the name of `ScrapyRedisFingerprinter`."""

from scrapy_bloom.crawl.fingerprinting import ScrapyRedisFingerprinter

__all__ = ["ScrapyRedisFingerprinter"]
