"""A request fingerprinter that sees nothing but the last digit of a URL's path."""

from urllib.parse import urlsplit


class LastDigit:
    def fingerprint(self, request):
        return urlsplit(request.url).path[-1].encode()
