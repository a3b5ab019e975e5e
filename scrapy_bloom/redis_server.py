"""The connection to Redis or Valkey: how it is made, and how outages are waited out.

redis-py is imported when a connection is made, not before: most crawls do without it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from scrapy_bloom.exceptions import BloomError, OutageError, SettingError, StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_SOCKET_SECS = 5.0  # for one answer, unless the URL says otherwise

# Replies that say "not now" rather than "no": a server that starts, saves, fails over, is full.
_PASSING = ("LOADING", "MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY ", "READONLY", "OOM ")


class Packed(bytes):
    """A whole command, ready to be sent.

    Passed as the last argument of `execute_command` it is sent in place of all arguments; the
    others only tell redis-py which command it is and, on a Cluster, which key it concerns.
    redis-py takes 40 µs to pack the 90 arguments of a BITFIELD, a third of the round trip.
    """


class _SendsPacked:
    """A redis-py connection that takes `Packed` commands."""

    def send_command(self, *args: Any, **kwargs: Any) -> None:
        if type(args[-1]) is Packed:
            self.send_packed_command([args[-1]])  # type: ignore[attr-defined]
        else:
            super().send_command(*args, **kwargs)  # type: ignore[misc]


class RedisServer:
    """A Redis or Valkey server, a Cluster of them, or the master that a Sentinel names.

    Args:
        url: in the form of redis-py: redis://, rediss:// or unix://, with its options.
        params: options of redis-py's connections, for what the URL does not say.
        cluster: the URL is that of a node of a Cluster.
        sentinel: the URL is that of a Sentinel, or of several (host:port,host:port), and this the
            name of the service they watch.
        deadline_secs: how long a call waits out an outage.

    Attributes:
        address: the URL without user, password and options, for people.
        round_trips: calls answered or failed.
        retries: calls made again after a failure.
    """

    def __init__(
        self,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        cluster: bool = False,
        sentinel: str | None = None,
        deadline_secs: float = 30.0,
    ) -> None:
        self.address = without_secrets(url)
        self.round_trips = self.retries = 0
        self._url = url
        self._hosts = urlsplit(url).netloc.rpartition("@")[2]
        self._params = dict(params or {})
        self._cluster = cluster
        self._sentinel = sentinel
        self._deadline_secs = deadline_secs
        self._client: Any = None
        self._down_since: float | None = None
        self._next_attempt = 0.0

    def call(self, function: Callable[[Any], _T]) -> _T:
        """Call a function with the client; after a failure of the server again, with pauses.

        The function may thus have been executed by the server more than once: compare `retries`
        before and after. Once a call has waited for the deadline, the following ones fail at
        once, but for one attempt every now and then, until the server is back.

        Args:
            function: takes redis-py's client and sends commands that may be repeated.

        Returns:
            What the function returns.

        Raises:
            OutageError: the server could not be reached within the deadline.
            StorageError: it refused the command.
        """
        begun = time.monotonic()
        if self._down_since is not None and begun < self._next_attempt:
            raise OutageError(
                f"{self.address} is out of reach; it is tried again soon", goes_on=True
            )
        pause = _FIRST_PAUSE
        while True:
            self.round_trips += 1
            attempt = time.monotonic()
            try:
                result = function(self._connected())
            except BloomError:
                raise
            except Exception as error:
                now = time.monotonic()
                if not _is_passing(error):
                    raise self._explained(error) from error
                if self._down_since is not None or now + pause > begun + self._deadline_secs:
                    goes_on = self._down_since is not None
                    self._down_since = self._down_since or begun
                    # A server that hangs costs its time-out: that may be a tenth of our time.
                    self._next_attempt = now + max(1.0, 10 * (now - attempt))
                    raise self._gone(error, goes_on=goes_on) from error
                self.retries += 1
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if self._down_since is not None:
                    secs, self._down_since = time.monotonic() - self._down_since, None
                    logger.info("%s is back after %.0f seconds", self.address, secs)
                return result

    def now(self) -> float:
        """The server's time, seconds since 1970: one clock for all crawlers."""

        def ask(client: Any) -> tuple[int, int]:
            options = {"target_nodes": client.get_default_node()} if self._cluster else {}
            answer: tuple[int, int] = client.time(**options)
            return answer

        seconds, microseconds = self.call(ask)
        return seconds + microseconds / 1e6

    def eviction_policy(self) -> str | None:
        """The maxmemory-policy that may remove our keys, None if there is none or it is hidden."""

        def ask(client: Any) -> str | None:
            options = {"target_nodes": client.get_default_node()} if self._cluster else {}
            info = client.info("memory", **options)
            policy = str(info.get("maxmemory_policy", "noeviction"))
            # The volatile-* policies remove keys with an expiry only, and ours have none.
            return policy if policy.startswith("allkeys") and info.get("maxmemory") else None

        try:
            return self.call(ask)
        except OutageError:
            raise
        except StorageError:
            return None  # an ACL need not allow INFO

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        redis = _imported()
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        secs = max(0.2, min(_SOCKET_SECS, self._deadline_secs / 3 or _SOCKET_SECS))
        params = {
            "socket_timeout": secs,
            "socket_connect_timeout": secs,
            "protocol": 2,
            **self._params,
            "decode_responses": False,
        }
        # A command whose reply was lost must come back to us, or it would be answered "seen".
        for name in ("retry", "retry_on_error", "retry_on_timeout", "redis_cls", "url"):
            params.pop(name, None)
        first, *_ = self._hosts.split(",")
        try:
            options = redis.connection.parse_url(self._url.replace(self._hosts, first))
        except ValueError as error:
            raise SettingError(f"the URL {self.address} is not valid: {error}") from None
        for name in ("retry_on_timeout", "decode_responses"):
            options.pop(name, None)
        plain = options.pop("connection_class", redis.connection.Connection)
        params.update(options)
        if self._sentinel is not None:
            return self._master(redis, plain, params, retry)
        params["connection_class"] = type("Connection", (_SendsPacked, plain), {})
        if self._cluster:
            if params.pop("db", 0):
                raise SettingError(f"{self.address}: a Cluster has only database 0")
            params.pop("host", None)
            params.pop("port", None)
            # With a URL, each node gets a pool of its own with these options; that it is
            # encrypted is in the class of the connection already.
            return redis.cluster.RedisCluster(url=f"redis://{first}", retry=retry, **params)
        pool = redis.ConnectionPool(retry=retry, **params)
        return redis.Redis(connection_pool=pool)

    def _master(self, redis: Any, plain: Any, params: dict[str, Any], retry: Any) -> Any:
        for name in ("host", "port"):
            params.pop(name, None)
        places = [place.partition(":") for place in self._hosts.split(",")]
        addresses = [(host, int(port or 26379)) for host, _, port in places]
        of_sentinel = dict(params.pop("sentinel_kwargs", {}))
        for name in ("socket_timeout", "socket_connect_timeout"):
            of_sentinel.setdefault(name, params[name])
        if issubclass(plain, redis.connection.SSLConnection):
            of_sentinel.setdefault("ssl", True)
            managed = redis.sentinel.SentinelManagedSSLConnection
        else:
            managed = redis.sentinel.SentinelManagedConnection
        finder = redis.sentinel.Sentinel(addresses, sentinel_kwargs=of_sentinel)
        params["connection_class"] = type("Connection", (_SendsPacked, managed), {})
        return finder.master_for(self._sentinel, retry=retry, **params)

    def _gone(self, error: Exception, *, goes_on: bool) -> OutageError:
        return OutageError(
            f"{self.address} cannot be used: {_text(error)} (waited up to {self._deadline_secs:g} "
            "seconds, BLOOM_REDIS_DEADLINE_SECS); check that the server runs, has room, and that "
            "BLOOM_REDIS_URL is right",
            goes_on=goes_on,
        )

    def _explained(self, error: Exception) -> StorageError:
        hint = ""
        if _is_login(error):
            hint = "; check user and password in BLOOM_REDIS_URL"
        elif "NOPERM" in str(error) or type(error).__name__ == "NoPermissionError":
            hint = "; the user needs the keys of BLOOM_REDIS_KEY, and +@read +@write +@connection"
        elif "cluster" in str(error).lower():
            hint = "; BLOOM_REDIS_CLUSTER = True is for a Cluster, and only for one"
        return StorageError(f"{self.address} refused the filter's request: {_text(error)}{hint}")


def without_secrets(url: str) -> str:
    """A URL without user, password and options.

    >>> without_secrets("rediss://me:secret@host:6380/1?ssl_password=secret")
    'rediss://host:6380/1'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "(a URL without ://)"
    place, _, _ = rest.partition("?")
    # The last @: a password that was not quoted may hold one, and a slash, too.
    return f"{scheme}://{place.rpartition('@')[2]}"


def _imported() -> Any:
    try:
        import redis.backoff  # noqa: PLC0415 - an extra, and slow to import
        import redis.cluster  # noqa: PLC0415
        import redis.retry  # noqa: PLC0415
        import redis.sentinel  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(
            'BLOOM_BACKEND is "redis", and redis-py 6 or later is not installed: '
            "pip install 'scrapy-bloom[redis]'"
        ) from error
    return redis


def _is_login(error: Exception) -> bool:
    name = type(error).__name__
    return name.startswith(("Authentication", "Authorization")) or "NOAUTH" in str(error)


def _is_passing(error: Exception) -> bool:
    """Whether the same command may well succeed a little later."""
    if _is_login(error):
        return False
    errors = _imported().exceptions
    passing = (
        errors.ConnectionError,
        errors.TimeoutError,
        errors.ClusterDownError,
        errors.ClusterError,
        errors.TryAgainError,
        errors.ReadOnlyError,
        errors.OutOfMemoryError,
        OSError,
    )
    if isinstance(error, passing):
        return True
    if isinstance(error, errors.RedisClusterException):
        # "cannot be connected", "not all slots are covered": not so "cluster mode is disabled".
        return "mode is not enabled" not in str(error)
    return isinstance(error, errors.ResponseError) and str(error).startswith(_PASSING)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
