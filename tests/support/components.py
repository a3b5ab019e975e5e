"""Components of Scrapy, named in the settings of crawls: `tests.support.components.NAME`."""

from urllib.parse import urlsplit


class LastDigit:
    """A request fingerprinter that sees nothing but the last digit of a URL's path."""

    def fingerprint(self, request):
        return urlsplit(request.url).path[-1].encode()
