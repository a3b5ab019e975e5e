"""The URL of a Redis server: which ones are valid, and the parts that people may see."""

import re
from urllib.parse import parse_qs, urlsplit

from scrapy_bloom.text import LOGIN_FORM

_LOGIN, _OPTIONS = r"(?:[^/?#\[\]]*@)?", r"(?:\?[^@#]*)?"
_HOST = r"(?:[\w.-]*|\[[\w:.%]+\])(?::\d{0,5})?"
_URL = re.compile(
    rf"(rediss?://){_LOGIN}({_HOST}(?:,{_HOST})*(?:/\d*)?){_OPTIONS}"
    rf"|(unix://){_LOGIN}(/[^?#]+){_OPTIONS}"
)
_ALLOWED = (
    f"redis://{LOGIN_FORM}host[:port][/database], rediss://... for TLS, or "
    f"unix://{LOGIN_FORM}/path/to/socket, with special characters percent-encoded"
)
_MISSPELT = re.compile("(rediss?|valkeys?|unix)(:|//).*[@?]", re.IGNORECASE)


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


def looks_like_url(text: str) -> bool:
    """Return whether a text is a URL, or a misspelt one with a password, and no path or name.

    >>> [looks_like_url(text) for text in ("https://host", "redis:secret@host", "redis:bloom")]
    [True, True, False]
    """
    return "://" in text or _MISSPELT.match(text) is not None


def hosts_of(address: str) -> list[tuple[str, int | None]]:
    """Return host and port of each server in an address without secrets.

    >>> hosts_of("redis://one:26379,two/0")
    [('one', 26379), ('two', None)]

    Raises ValueError if a port is none.
    """
    each = [urlsplit(f"//{part}") for part in urlsplit(address).netloc.split(",")]
    return [(part.hostname or "localhost", part.port) for part in each]


def with_login_of(url: str, known: str) -> str:
    """Return a URL with login and options of a known one, if that names the same server.

    What it says itself stays as it is. If it has a password, or another user, nothing is added.

    >>> with_login_of("redis://host/1", "redis://:secret@host:6379/0?ssl_ca_certs=ca.pem")
    'redis://:secret@host/1?ssl_ca_certs=ca.pem'

    Raises ValueError if one of them is not valid.
    """
    same_server = _servers(without_secrets(url)) & _servers(without_secrets(known))
    new, old = urlsplit(url), urlsplit(known)
    options = parse_qs(new.query)
    user = new.username or options.get("username", [""])[0]
    if not same_server or new.password or "password" in options or user not in {"", old.username}:
        return url
    login, at, _ = old.netloc.rpartition("@")
    others = [each for each in old.query.split("&") if each.partition("=")[0] not in {"", "db"}]
    return new._replace(
        netloc=login + at + new.netloc.rpartition("@")[2],
        query="&".join([*filter(None, [new.query]), *others]),  # of two, the first counts
    ).geturl()


def _servers(address: str) -> set[tuple[str, str, int]]:
    scheme, _, path, _, _ = urlsplit(address)
    if scheme == "unix":
        return {(scheme, path, 0)}
    return {(scheme, host, port or 6379) for host, port in hosts_of(address)}


def first_only(url: str) -> str:
    """Return the URL with the first of several servers, as redis-py can read it.

    >>> first_only("redis://:secret@one:26379,two:26379/0")
    'redis://:secret@one:26379/0'
    """
    login, at, hosts = urlsplit(url).netloc.rpartition("@")
    first, _, _ = hosts.partition(",")
    return url.replace(f"{login}{at}{hosts}", f"{login}{at}{first}", 1)
