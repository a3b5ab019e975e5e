"""Connect to Redis: the URL of a server, and a client of redis-py that never repeats a command.

redis-py is imported only when a connection is made, because most crawls do not need it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from scrapy_bloom.exceptions import SettingError
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


def connect(
    url: str,
    params: Mapping[str, Any],
    *,
    cluster: bool,
    sentinel: str | None,
    socket_secs: float,
) -> tuple[Any, Callable[[], None]]:
    """Make a client of redis-py, and a function that closes it.

    Most kinds of clients connect with the first command. `RedisServer` documents the first four
    arguments; `socket_secs` is the time-out for a reply, unless the URL has one.

    Raises:
        SettingError: redis-py is missing, or the URL or an option is not valid.
    """
    redis = import_redis()
    try:
        options = redis.connection.parse_url(first_only(url))
    except ValueError as error:
        raise SettingError(f"the URL {without_secrets(url)} is not valid: {error}") from None
    options.setdefault("connection_class", redis.connection.Connection)
    params = {
        "socket_timeout": socket_secs,
        "socket_connect_timeout": socket_secs,
        "protocol": 2,
        **params,
        **options,
        "decode_responses": False,
    }
    # A command must not be repeated by redis-py after a lost reply: its second reply would report a
    # new request as a duplicate.
    for name in ("retry_on_error", "retry_on_timeout", "redis_cls", "url"):
        params.pop(name, None)
    params["retry"] = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    if sentinel is not None:
        return _master(redis, url, sentinel, params)
    if cluster:
        return _cluster(redis, url, params)
    client = redis.Redis.from_pool(redis.ConnectionPool(**params))
    return client, client.close


def _cluster(redis: Any, url: str, params: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    address = without_secrets(url)
    if params.pop("db", 0):
        raise SettingError(f"{address}: a Cluster has only database 0")
    # RedisCluster ignores unknown options, and one of them might be about encryption.
    known = {*redis.cluster.REDIS_ALLOWED_KEYS, *inspect.signature(redis.RedisCluster).parameters}
    if unknown := sorted(params.keys() - known):
        raise SettingError(
            f"{address}: redis-py's RedisCluster does not take the options {', '.join(unknown)}; "
            "remove them from BLOOM_REDIS_URL or REDIS_PARAMS"
        )
    for name in ("host", "port"):
        params.pop(name, None)
    ((host, port),) = hosts_of(address)
    name = f"[{host}]" if ":" in host else host
    # With a URL, each node gets a pool of its own with these options. The class of the connection
    # says whether it is encrypted.
    client = redis.RedisCluster(url=f"redis://{name}:{port or 6379}", **params)

    def close() -> None:
        client.disconnect_connection_pools()
        client.close()

    return client, close


def _master(
    redis: Any, url: str, service: str, params: dict[str, Any]
) -> tuple[Any, Callable[[], None]]:
    for name in ("host", "port"):
        params.pop(name, None)
    alike = ("socket_timeout", "socket_connect_timeout")
    of_sentinel = {
        **{name: params[name] for name in params if name in alike or name.startswith("ssl_")},
        **params.pop("sentinel_kwargs", {}),
        "retry": params["retry"],
    }
    params["ssl"] = issubclass(params.pop("connection_class"), redis.connection.SSLConnection)
    if params["ssl"]:
        of_sentinel.setdefault("ssl", True)
    addresses = [(host, port or 26_379) for host, port in hosts_of(without_secrets(url))]
    finder = redis.sentinel.Sentinel(addresses, sentinel_kwargs=of_sentinel)
    client = finder.master_for(service, **params)

    def close() -> None:
        for each in (client, *finder.sentinels):
            each.close()

    return client, close


def import_redis() -> Any:
    """Return the module redis with all submodules that are used; raises SettingError."""
    try:
        import redis.backoff  # noqa: PLC0415 - an extra, and slow to import
        import redis.cluster  # noqa: PLC0415
        import redis.retry  # noqa: PLC0415
        import redis.sentinel  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(
            "a filter in Redis needs redis-py 6.1 or later, which is not installed: "
            "pip install 'redis[hiredis]>=6.1'"
        ) from error
    return redis


def without_secrets(url: str) -> str:
    """Return a URL without user, password and options.

    >>> without_secrets("rediss://me:secret@host:6380/1?ssl_password=secret")
    'rediss://host:6380/1'

    Raises:
        ValueError: the URL is not valid; the message shows valid forms, and no part of the URL.
    """
    match = _URL.fullmatch(url)
    if match is None or not (url.isascii() and url.isprintable()):
        raise ValueError(_ALLOWED)
    return "".join(filter(None, match.groups()))


def looks_like_url(text: str) -> bool:
    """Return whether a text is a URL, also a misspelt one with a password, not a path or name.

    >>> [looks_like_url(text) for text in ("https://host", "redis:secret@host", "redis:bloom")]
    [True, True, False]
    """
    return "://" in text or _MISSPELT.match(text) is not None


def hosts_of(address: str) -> list[tuple[str, int | None]]:
    """Return host and port of each server in an address without secrets.

    >>> hosts_of("redis://one:26379,two/0")
    [('one', 26379), ('two', None)]

    Raises ValueError if a port is not valid.
    """
    each = [urlsplit(f"//{part}") for part in urlsplit(address).netloc.split(",")]
    return [(part.hostname or "localhost", part.port) for part in each]


def with_login_of(url: str, known: str) -> str:
    """Return a URL with login and options of a known one, if that names the same server.

    Parts that `url` has are kept. If it has a password, or another user, nothing is added.

    >>> with_login_of("redis://host/1", "redis://:secret@host:6379/0?ssl_ca_certs=ca.pem")
    'redis://:secret@host/1?ssl_ca_certs=ca.pem'

    Raises ValueError if one of the URLs is not valid.
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
        query="&".join([*filter(None, [new.query]), *others]),  # the first of two values is used
    ).geturl()


def _servers(address: str) -> set[tuple[str, str, int]]:
    scheme, _, path, _, _ = urlsplit(address)
    if scheme == "unix":
        return {(scheme, path, 0)}
    return {(scheme, host, port or 6379) for host, port in hosts_of(address)}


def first_only(url: str) -> str:
    """Return a URL with only the first of several servers, which redis-py can parse.

    >>> first_only("redis://:secret@one:26379,two:26379/0")
    'redis://:secret@one:26379/0'
    """
    login, at, hosts = urlsplit(url).netloc.rpartition("@")
    first, _, _ = hosts.partition(",")
    return url.replace(f"{login}{at}{hosts}", f"{login}{at}{first}", 1)
