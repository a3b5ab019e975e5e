"""Components of Scrapy, named in the settings of crawls: `tests.support.components.NAME`."""

from urllib.parse import urlsplit

from scrapy_bloom import BloomDupeFilter


class LastDigit:
    """A request fingerprinter that sees nothing but the last digit of a URL's path."""

    def fingerprint(self, request):
        return urlsplit(request.url).path[-1].encode()


class MirrorTrusting(BloomDupeFilter):
    """A filter whose mirror is trusted for an hour, so that only an idle spider asks the server."""

    def open(self) -> None:
        super().open()
        self.backend._trust_secs = 3600
