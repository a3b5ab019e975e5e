"""The connection to Redis or Valkey: how it is made, and how outages are waited out.

redis-py is imported when a connection is made, not before: most crawls do without it.
"""

import inspect
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from scrapy_bloom.exceptions import BloomError, OutageError, SettingError, StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_KEEP_SECS = 1.0  # a connection is used again without a look at it
_SOCKET_SECS = 5.0  # for one answer, unless the URL says otherwise

# Replies that say "not now" rather than "no": a server that starts, saves, fails over, is full.
_PASSING = ("LOADING", "MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY ", "READONLY", "OOM ")
_IN_PIPELINE = "of pipeline caused error: "  # redis-py puts the whole command in front of it

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

_NO_LOGIN = ("Authentication", "Authorization", "NOAUTH")
# What to do about an error whose class or text has one of the words.
_HINTS = {
    ("MasterNotFound",): (
        "the Sentinels have a password of their own: it goes to REDIS_PARAMS (sentinel_kwargs), "
        "beside REDIS_URL in place of BLOOM_REDIS_URL"
    ),
    _NO_LOGIN: "check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS)",
    ("NoPermission", "NOPERM"): (
        "the user needs ~KEY* and ~{KEY*, where KEY is BLOOM_REDIS_KEY, and +@read +@write "
        "+@connection +@transaction +time, on a Cluster also +cluster|slots"
    ),
    ("WRONGTYPE",): "something else has that key: set BLOOM_REDIS_KEY to another name",
    ("SENTINEL", "unknown command"): (
        "BLOOM_REDIS_SENTINEL is for the URL of a Sentinel, and only for one"
    ),
    ("cluster", "MovedError", "AskError", "CrossSlotError"): (
        "BLOOM_REDIS_CLUSTER = True is for a Cluster, and only for one"
    ),
    ("CERTIFICATE",): "check the host in BLOOM_REDIS_URL, and its option ssl_ca_certs",
    ("keyword argument",): "check the options in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS)",
}


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


class _KeepsConnection:
    """A redis-py client that sends `Packed` commands one after another on one connection.

    redis-py takes a connection from its pool and puts it back for each command, with retries and
    metrics around it: 18 µs, more than all that we do ourselves. Whatever else is sent goes
    through the pool, and gets the same connection from there.
    """

    _kept: Any = None
    _kept_until = 0.0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if type(args[-1]) is not Packed:
            self._put_back()
            return super().execute_command(*args, **options)  # type: ignore[misc]
        now = time.monotonic()
        connection = self._kept
        if connection is None or now > self._kept_until:
            # The pool looks whether the server has closed it meanwhile.
            self._put_back()
            connection = self._kept = self.connection_pool.get_connection()  # type: ignore[attr-defined]
        self._kept_until = now + _KEEP_SECS
        try:
            connection.send_packed_command(args[-1:])
            return connection.read_response()
        except BaseException:
            # Its answer, if there is one still to come, is none to the next command.
            connection.disconnect()
            self._put_back()
            raise

    def pipeline(self, *args: Any, **options: Any) -> Any:
        self._put_back()
        return super().pipeline(*args, **options)  # type: ignore[misc]

    def close(self) -> None:
        self._put_back()
        super().close()  # type: ignore[misc]

    def _put_back(self) -> None:
        if self._kept is not None:
            connection, self._kept = self._kept, None
            self.connection_pool.release(connection)  # type: ignore[attr-defined]


class RedisServer:
    """A Redis or Valkey server, a Cluster of them, or the master that a Sentinel names.

    Args:
        url: in the form of redis-py: redis://, rediss:// or unix://, with its options.
        params: options of redis-py's connections, for what the URL does not say.
        cluster: the URL is that of a node of a Cluster.
        sentinel: the URL is that of a Sentinel, or of several (host:port,host:port), and this the
            name of the service they watch. User and password are the service's; those of the
            Sentinels are in `params`, as `sentinel_kwargs`.
        deadline_secs: how long a call waits out an outage.

    Attributes:
        address: the URL without user, password and options, for people.
        round_trips: calls answered or failed.
        retries: calls made again after a failure.

    Raises:
        SettingError: the URL is not valid.
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
        try:
            self.address = without_secrets(url)
            places = [urlsplit(f"//{each}") for each in urlsplit(self.address).netloc.split(",")]
            self._places = [(each.hostname or "localhost", each.port) for each in places]
        except ValueError as error:
            raise SettingError(f"the URL of Redis is not valid: {error}") from None
        if url.startswith("unix:") and (cluster or sentinel is not None):
            raise SettingError(f"{self.address}: a Cluster or Sentinel needs redis:// or rediss://")
        if len(places) > 1 and sentinel is None:
            raise SettingError(
                f"{self.address}: several hosts can only be Sentinels (BLOOM_REDIS_SENTINEL)"
            )
        self.round_trips = self.retries = 0
        self._url = url
        self._params = dict(params or {})
        self._cluster = cluster
        self._sentinel = sentinel
        self._deadline_secs = deadline_secs
        self._client: Any = None
        self._sentinels: list[Any] = []
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
                    raise self._explained(_reason(error)) from error
                if self._down_since is not None or now + pause > begun + self._deadline_secs:
                    goes_on = self._down_since is not None
                    self._down_since = self._down_since or begun
                    # A server that hangs costs its time-out: that may be a tenth of our time.
                    self._next_attempt = now + max(1.0, 10 * (now - attempt))
                    raise self._gone(_reason(error), goes_on=goes_on) from error
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
            if self._cluster:
                self._client.disconnect_connection_pools()
            for each in (self._client, *self._sentinels):
                each.close()
            self._client, self._sentinels = None, []

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def _connect(self) -> Any:
        redis = _imported()
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        secs = max(0.2, min(_SOCKET_SECS, self._deadline_secs / 3 or _SOCKET_SECS))
        url = self._url
        if len(self._places) > 1:
            login, at, hosts = urlsplit(url).netloc.rpartition("@")
            first, _, _ = hosts.partition(",")
            url = url.replace(f"{login}{at}{hosts}", f"{login}{at}{first}", 1)
        try:
            options = redis.connection.parse_url(url)
        except ValueError as error:
            raise SettingError(f"the URL {self.address} is not valid: {error}") from None
        plain = options.pop("connection_class", redis.connection.Connection)
        params = {
            "socket_timeout": secs,
            "socket_connect_timeout": secs,
            "protocol": 2,
            **self._params,
            **options,
            "decode_responses": False,
        }
        # A command whose reply was lost must come back to us, or it would be answered "seen".
        for name in ("retry", "retry_on_error", "retry_on_timeout", "redis_cls", "url"):
            params.pop(name, None)
        if self._sentinel is not None:
            return self._master(redis, plain, params, retry)
        params["connection_class"] = type("Connection", (_SendsPacked, plain), {})
        if self._cluster:
            return self._cluster_of(redis, params, retry)
        client: Any = type("Client", (_KeepsConnection, redis.Redis), {})
        return client.from_pool(redis.ConnectionPool(retry=retry, **params))

    def _cluster_of(self, redis: Any, params: dict[str, Any], retry: Any) -> Any:
        if params.pop("db", 0):
            raise SettingError(f"{self.address}: a Cluster has only database 0")
        # RedisCluster ignores what it does not know, and that might be about encryption.
        known = {
            *redis.cluster.REDIS_ALLOWED_KEYS,
            *inspect.signature(redis.RedisCluster).parameters,
        }
        if unknown := sorted(params.keys() - known):
            raise SettingError(
                f"{self.address}: redis-py's RedisCluster does not take the options "
                f"{', '.join(unknown)}; remove them from BLOOM_REDIS_URL or REDIS_PARAMS"
            )
        for name in ("host", "port"):
            params.pop(name, None)
        ((host, port),) = self._places
        place = f"[{host}]" if ":" in host else host
        # With a URL, each node gets a pool of its own with these options; that it is encrypted is
        # in the class of the connection already.
        return redis.RedisCluster(url=f"redis://{place}:{port or 6379}", retry=retry, **params)

    def _master(self, redis: Any, plain: Any, params: dict[str, Any], retry: Any) -> Any:
        for name in ("host", "port"):
            params.pop(name, None)
        alike = ("socket_timeout", "socket_connect_timeout")
        of_sentinel = {
            **{name: params[name] for name in params if name in alike or name.startswith("ssl_")},
            **params.pop("sentinel_kwargs", {}),
            "retry": retry,
        }
        managed = redis.sentinel.SentinelManagedConnection
        if issubclass(plain, redis.connection.SSLConnection):
            of_sentinel.setdefault("ssl", True)
            managed = redis.sentinel.SentinelManagedSSLConnection
        finder = redis.sentinel.Sentinel(
            [(host, port or 26_379) for host, port in self._places], sentinel_kwargs=of_sentinel
        )
        self._sentinels = finder.sentinels
        params["connection_class"] = type("Connection", (_SendsPacked, managed), {})
        client: Any = type("Client", (_KeepsConnection, redis.Redis), {})
        return finder.master_for(self._sentinel, redis_class=client, retry=retry, **params)

    def _gone(self, error: Exception, *, goes_on: bool) -> OutageError:
        return OutageError(
            f"{self.address} cannot be used: {_text(error)} (waited up to {self._deadline_secs:g} "
            "seconds, BLOOM_REDIS_DEADLINE_SECS); check that the server runs, has room, and that "
            "BLOOM_REDIS_URL is right",
            goes_on=goes_on,
        )

    def _explained(self, error: Exception) -> StorageError:
        text = f"{type(error).__name__}: {_text(error)}"
        hints = [hint for words, hint in _HINTS.items() if any(word in text for word in words)]
        return StorageError("; ".join([f"{self.address}: {text}", *hints[:1]]))


def without_secrets(url: str) -> str:
    """A URL without user, password and options.

    >>> without_secrets("rediss://me:secret@host:6380/1?ssl_password=secret")
    'rediss://host:6380/1'

    Raises:
        ValueError: it is not valid. The message says what is, and shows nothing of it.
    """
    match = _URL.fullmatch(url)
    if match is None or not (url.isascii() and url.isprintable()):
        raise ValueError(_ALLOWED)
    return "".join(filter(None, match.groups()))


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


def _reason(error: Exception) -> Exception:
    """What is behind an error of a Cluster's client: it wraps what a node answered."""
    redis = _imported()
    inner = error.__cause__ or error.__context__
    if isinstance(error, redis.exceptions.RedisClusterException) and isinstance(
        inner, (redis.RedisError, redis.exceptions.RedisClusterException, TypeError)
    ):
        return _reason(inner)
    return error


def _is_passing(error: Exception) -> bool:
    """Whether the same command may well succeed a little later."""
    error = _reason(error)
    about = f"{type(error).__name__} {error}"
    if any(word in about for word in (*_NO_LOGIN, "CERTIFICATE")):
        return False
    errors = _imported().exceptions
    passing = (
        errors.ConnectionError,
        errors.TimeoutError,
        errors.ClusterError,
        errors.RedisClusterException,
        errors.TryAgainError,
        errors.ReadOnlyError,
        errors.OutOfMemoryError,
        OSError,
    )
    if isinstance(error, passing):
        return True
    return isinstance(error, errors.ResponseError) and _text(error).startswith(_PASSING)


def _text(error: Exception) -> str:
    _, _, text = " ".join(str(error).split()).rpartition(_IN_PIPELINE)
    text, _, _ = text.partition(" : <")  # all about each Sentinel that was asked
    text = text.rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
