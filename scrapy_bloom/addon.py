"""The Scrapy add-on: the filter in one entry of ADDONS, with its settings checked early."""

from scrapy.settings import BaseSettings

from scrapy_bloom.settings import BloomSettings


class Addon:
    """Makes BloomDupeFilter the duplicate filter, and checks the BLOOM_* settings before the crawl.

    In `ADDONS = {"scrapy_bloom.Addon": 500}` it does what the DUPEFILTER_CLASS line does; a bad
    setting then stops the crawl with its error as the last line. A DUPEFILTER_CLASS that the
    project, the spider or the command line sets is left alone, as with every add-on.
    """

    def update_settings(self, settings: BaseSettings) -> None:
        """Scrapy's hook.

        Raises:
            SettingError: a BLOOM_* setting is not valid.
        """
        BloomSettings.from_settings(settings)
        settings.set("DUPEFILTER_CLASS", "scrapy_bloom.BloomDupeFilter", "addon")
