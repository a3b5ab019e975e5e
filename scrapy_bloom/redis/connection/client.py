"""The client of redis-py, as the filter needs it: it never sends a command twice by itself.

redis-py is imported when a connection is made, not before: most crawls do without it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.redis.connection.url import first_only, hosts_of, without_secrets


def connect(
    url: str,
    params: Mapping[str, Any],
    *,
    cluster: bool,
    sentinel: str | None,
    socket_secs: float,
) -> tuple[Any, Callable[[], None]]:
    """Make a client of redis-py, and what closes it. Most kinds connect with the first command.

    `RedisServer` has the first four arguments. An answer may take `socket_secs`, unless the URL
    says otherwise.

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
    # A command whose reply was lost must come back to us, or it would be answered "seen".
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
    # RedisCluster ignores what it does not know, and that might be about encryption.
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
    # With a URL, each node gets a pool of its own with these options; that it is encrypted is in
    # the class of the connection already.
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
    """Return the module redis, with all that is used of it; raises SettingError."""
    try:
        import redis.backoff  # noqa: PLC0415 - an extra, and slow to import
        import redis.cluster  # noqa: PLC0415
        import redis.retry  # noqa: PLC0415
        import redis.sentinel  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(
            "a filter in Redis needs redis-py 6.1 or later, which is not installed: "
            "pip install 'scrapy-bloom[redis]'"
        ) from error
    return redis
