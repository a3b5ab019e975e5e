"""Make a client of redis-py for a URL, which never repeats a command by itself.

redis-py is imported only when a connection is made, because most crawls do not need it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.redis.connection.url import ServerURL

_Closers = Sequence[Callable[[], object]]

_OF_SENTINEL = "sentinel_"  # before the names of options of the connections to Sentinels


def connect(
    url: ServerURL, params: Mapping[str, Any], *, socket_secs: float
) -> tuple[Any, _Closers]:
    """Make a client of redis-py, and functions that close it; raises SettingError.

    A client of a single server connects at once, the others with the first command.
    """
    redis, failure = import_redis(), ""
    try:
        options = redis.connection.parse_url(url.plain)
        of_sentinel = _options_of_sentinel(redis, url)
    except ValueError as error:
        failure = str(error)
    if failure:  # not in the handler, because the context of the error may contain a password
        raise SettingError(f"the URL {url.address} is not valid: {failure}")
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
    if url.is_sentinel:
        return _master(redis, url, params, of_sentinel)
    if url.is_cluster:
        return _cluster(redis, url, params)
    pool = redis.ConnectionPool(**params)
    # One connection for all commands that are not in a pipeline. Taking it out of the pool for each
    # command would take 14 % of the time of a new request (13 of 90 us, with a local server).
    client = redis.Redis(connection_pool=pool, single_connection_client=True)
    return client, [client.close, pool.disconnect]


def _options_of_sentinel(redis: Any, url: ServerURL) -> dict[str, Any]:
    """Return the options of the URL that are for the connections to Sentinels."""
    # Not by `parse_url`, which decodes options twice in some versions of redis-py.
    parsers, found = redis.connection.URL_QUERY_ARGUMENT_PARSERS, {}
    for name, (value, *_) in parse_qs(url.options).items():
        if name.startswith(_OF_SENTINEL):
            own = name.removeprefix(_OF_SENTINEL)
            with suppress(TypeError, ValueError):
                found[own] = parsers.get(own, str)(value)
                continue
            raise ValueError(f"the value of {name} is not valid")
    return found


def _cluster(redis: Any, url: ServerURL, params: dict[str, Any]) -> tuple[Any, _Closers]:
    if params.pop("db", 0):
        raise SettingError(f"{url.address}: a Cluster has only database 0")
    # RedisCluster ignores unknown options, and one of them might be about encryption.
    known = {*redis.cluster.REDIS_ALLOWED_KEYS, *inspect.signature(redis.RedisCluster).parameters}
    if unknown := sorted(params.keys() - known):
        raise SettingError(
            f"{url.address}: redis-py's RedisCluster does not take the options "
            f"{', '.join(unknown)}; remove them from BLOOM_REDIS_URL or REDIS_PARAMS"
        )
    for name in ("host", "port"):
        params.pop(name, None)
    ((host, port),) = url.hosts()
    name = f"[{host}]" if ":" in host else host
    # With a URL, each node gets a pool of its own with these options. The class of the connection
    # says whether it is encrypted.
    client = redis.RedisCluster(url=f"redis://{name}:{port}", **params)
    return client, [client.disconnect_connection_pools, client.close]


def _master(
    redis: Any, url: ServerURL, params: dict[str, Any], of_sentinel: Mapping[str, Any]
) -> tuple[Any, _Closers]:
    for name in ("host", "port", *(_OF_SENTINEL + name for name in of_sentinel)):
        params.pop(name, None)
    alike = ("socket_timeout", "socket_connect_timeout")
    of_sentinel = {
        **{name: params[name] for name in params if name in alike or name.startswith("ssl_")},
        **of_sentinel,
        "retry": params["retry"],
    }
    params["ssl"] = issubclass(params.pop("connection_class"), redis.connection.SSLConnection)
    if params["ssl"]:
        of_sentinel["ssl"] = True
    finder = redis.sentinel.Sentinel(url.hosts(), sentinel_kwargs=of_sentinel)
    client = finder.master_for(url.service, **params)
    return client, [one_client.close for one_client in (client, *finder.sentinels)]


def import_redis() -> Any:
    """Return the module redis with all submodules that are used; raises SettingError."""
    try:
        import msgpack  # noqa: F401, PLC0415 - for the scripts
        import redis.backoff  # noqa: PLC0415 - an extra, and slow to import
        import redis.cluster  # noqa: PLC0415
        import redis.retry  # noqa: PLC0415
        import redis.sentinel  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(
            "a filter in Redis needs redis-py 6.1 or later and msgpack, which are not installed: "
            "pip install 'redis[hiredis]>=6.1' msgpack"
        ) from error
    return redis
