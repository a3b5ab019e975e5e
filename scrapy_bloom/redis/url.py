"""Parse the URL of a server, a Cluster or Sentinels, and keep its password out of messages."""

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from scrapy_bloom.text import LOGIN_FORM

_PLACES = {
    "": "host[:port][/database]",
    "+cluster": "host[:port]",
    "+sentinel": "host[:port][,host[:port]...]/service[/database]",
}
# The valid URLs, as messages show them, by their schemes.
_FORMS = {
    f"{base}{kind}": f"{base}{kind}://{LOGIN_FORM}{place}"
    for base in ("redis", "rediss")
    for kind, place in _PLACES.items()
} | {"unix": f"unix://{LOGIN_FORM}/path/to/socket"}
SCHEMES = tuple(_FORMS)
_ALL_FORMS = ", ".join(form for scheme, form in _FORMS.items() if not scheme.startswith("rediss"))

_LOGIN, _OPTIONS = r"(?P<login>(?:[^/?#\[\]]*@)?)", r"(?:\?(?P<options>[^@#]*))?"
_HOST = r"(?:[\w.-]+|\[[\w:.%]+\])(?::\d{0,5})?"
_OPTIONAL_HOST = rf"{_HOST}|(?::\d{{0,5}})?"
_DATABASE, _SERVICE = r"(?:/\d*)?", r"/[\w.-]+"
_PATTERNS = [
    re.compile(rf"(?P<scheme>{scheme})://{_LOGIN}(?P<place>{place})(?P<path>{path}){_OPTIONS}")
    for scheme, place, path in (
        (r"rediss?(?:\+cluster)?", _OPTIONAL_HOST, _DATABASE),
        (r"rediss?\+sentinel", rf"{_OPTIONAL_HOST}|{_HOST}(?:,{_HOST})+", _SERVICE + _DATABASE),
        ("unix", "/[^?#]+", ""),
    )
]
_MISSPELT = re.compile(r"(rediss?|valkeys?|unix)(\+\w*)?(:|//).*[@?]", re.IGNORECASE)


@dataclass(frozen=True)
class ServerURL:
    """The parts of a valid URL."""

    scheme: str  # one of `SCHEMES`
    login: str = field(repr=False)  # user and password, percent-encoded, with the "@"; or empty
    place: str  # the hosts with their ports; or the path of a socket
    path: str  # the service of the Sentinels and the database, each after a slash
    options: str = field(repr=False)  # the query

    @classmethod
    def parsed(cls, url: str) -> "ServerURL":
        """Parse a URL; raises a ValueError that shows valid forms, and no part of the URL."""
        matches = [match for pattern in _PATTERNS if (match := pattern.fullmatch(url))]
        if matches and url.isascii() and url.isprintable():
            new = cls(**{name: text or "" for name, text in matches[0].groupdict().items()})
            with suppress(ValueError):  # a port is out of range
                new.hosts()
                return new
        all_forms = f"{_ALL_FORMS} (for TLS, rediss in place of redis)"
        forms = _FORMS.get(url.partition("://")[0], all_forms)
        raise ValueError(f"{forms}, with special characters percent-encoded")

    @property
    def is_cluster(self) -> bool:
        """Whether the URL is that of a node of a Cluster."""
        return self.scheme.endswith("+cluster")

    @property
    def is_sentinel(self) -> bool:
        """Whether the URL is that of Sentinels."""
        return self.scheme.endswith("+sentinel")

    @property
    def address(self) -> str:
        """The URL without login and options, for messages.

        >>> ServerURL.parsed("rediss://me:secret@host:6380/1?ssl_password=secret").address
        'rediss://host:6380/1'
        """
        return f"{self.scheme}://{self.place}{self.path}"

    @property
    def text(self) -> str:
        """The whole URL."""
        options = f"?{self.options}" if self.options else ""
        return f"{self.scheme}://{self.login}{self.place}{self.path}{options}"

    @property
    def service(self) -> str:
        """The name of the service that the Sentinels watch."""
        return self.path.split("/")[1]

    @property
    def plain(self) -> str:
        """The URL of a single server with the same login, TLS, database and options, for redis-py.

        >>> ServerURL.parsed("rediss+sentinel://:secret@one,two/mymaster/1").plain
        'rediss://:secret@localhost/1'
        """
        if not self.is_sentinel:
            return replace(self, scheme=self.scheme.removesuffix("+cluster")).text
        database = self.path.removeprefix(f"/{self.service}")
        scheme = self.scheme.removesuffix("+sentinel")
        return replace(self, scheme=scheme, place="localhost", path=database).text

    def hosts(self) -> list[tuple[str, int]]:
        """Return host and port of each server; none for a socket.

        >>> ServerURL.parsed("redis+sentinel://one:7000,[::1]/mymaster").hosts()
        [('one', 7000), ('::1', 26379)]
        """
        if self.scheme == "unix":
            return []
        usual = 26_379 if self.is_sentinel else 6379
        servers = [urlsplit(f"//{host}") for host in self.place.split(",")]
        return [(server.hostname or "localhost", server.port or usual) for server in servers]


def looks_like_url(text: str) -> bool:
    """Return whether a text is a URL, also a misspelt one with a password, not a path or name.

    >>> [looks_like_url(text) for text in ("https://host", "redis:secret@host", "redis:bloom")]
    [True, True, False]
    """
    return "://" in text or _MISSPELT.match(text) is not None
