"""The URL of a Redis server: which ones are valid, and the parts that people may see."""

import re
from urllib.parse import urlsplit

_LOGIN, _OPTIONS = r"(?:[^/?#\[\]]*@)?", r"(?:\?[^@#]*)?"
_HOST = r"(?:[\w.-]*|\[[\w:.%]+\])(?::\d{0,5})?"
_URL = re.compile(
    rf"(rediss?://){_LOGIN}({_HOST}(?:,{_HOST})*(?:/\d*)?){_OPTIONS}"
    rf"|(unix://){_LOGIN}(/[^?#]+){_OPTIONS}"
)
_ALLOWED = (
    "redis://[[user]:password@]host[:port][/database], rediss://... for TLS, or "
    "unix://[[user]:password@]/path/to/socket, with special characters percent-encoded"
)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and options.

    >>> without_secrets("rediss://me:secret@host:6380/1?ssl_password=secret")
    'rediss://host:6380/1'

    Raises:
        ValueError: it is not valid; the message says what would be, and shows nothing of the URL.
    """
    match = _URL.fullmatch(url)
    if match is None or not (url.isascii() and url.isprintable()):
        raise ValueError(_ALLOWED)
    return "".join(filter(None, match.groups()))


def hosts_of(address: str) -> list[tuple[str, int | None]]:
    """Return host and port of each server in an address without secrets.

    >>> hosts_of("redis://one:26379,two/0")
    [('one', 26379), ('two', None)]

    Raises ValueError if a port is none.
    """
    each = [urlsplit(f"//{part}") for part in urlsplit(address).netloc.split(",")]
    return [(part.hostname or "localhost", part.port) for part in each]


def first_only(url: str) -> str:
    """Return the URL with the first of several servers, as redis-py can read it.

    >>> first_only("redis://:secret@one:26379,two:26379/0")
    'redis://:secret@one:26379/0'
    """
    login, at, hosts = urlsplit(url).netloc.rpartition("@")
    first, _, _ = hosts.partition(",")
    return url.replace(f"{login}{at}{hosts}", f"{login}{at}{first}", 1)
