"""The Scrapy add-on: the filter in one entry of ADDONS, with its settings checked early."""

import logging

from scrapy.crawler import Crawler
from scrapy.settings import BaseSettings

from scrapy_bloom.crawl.engine import fail_at_the_start
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.settings.settings import BloomSettings

logger = logging.getLogger(__name__)


class Addon:
    """Makes BloomDupeFilter the duplicate filter, and checks the BLOOM_* settings before the crawl.

    In `ADDONS = {"scrapy_bloom.Addon": 500}` it does what the DUPEFILTER_CLASS line does; a bad
    setting then stops the crawl with its error as the last line. A DUPEFILTER_CLASS that the
    project, the spider or the command line sets is left alone, as with every add-on.
    """

    def __init__(self, crawler: Crawler | None = None) -> None:
        self._crawler = crawler

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> "Addon":
        """Build it, for Scrapy."""
        return cls(crawler)

    def update_settings(self, settings: BaseSettings) -> None:
        """Check the settings, and set DUPEFILTER_CLASS.

        Raises:
            SettingError: a BLOOM_* setting is not valid.
        """
        try:
            BloomSettings.from_settings(settings)
        except SettingError as error:
            if self._crawler is None:
                raise
            fail_at_the_start(self._crawler, error, logger)
        settings.set("DUPEFILTER_CLASS", "scrapy_bloom.BloomDupeFilter", "addon")
