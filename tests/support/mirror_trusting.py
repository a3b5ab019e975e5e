"""A filter whose mirror is trusted for an hour, so that only an idle spider asks the server."""

from scrapy_bloom import BloomDupeFilter


class MirrorTrusting(BloomDupeFilter):
    def open(self) -> None:
        super().open()
        self.backend._trust_secs = 3600
