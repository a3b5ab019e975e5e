"""Send commands to a Redis or Valkey server, and wait during its outages.

redis-py is imported only when a connection is made, because most crawls do not need it. It never
repeats a command by itself.
"""

import functools
import hashlib
import inspect
import logging
import math
import re
import time
from _signal import SIGINT, getsignal  # type: ignore[import-not-found]  # `signal` takes 4 us more
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qs

from scrapy_bloom.exceptions import BloomError, OutageError, RefusedError, SettingError
from scrapy_bloom.redis.lua_scripts import packed, reply_of, script
from scrapy_bloom.redis.url import ServerURL
from scrapy_bloom.text import escaped

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Closers = Sequence[Callable[[], object]]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_SOCKET_SECS = 5.0  # time-out for a reply, unless the URL has one
_SHORT_SECS, _SILENT_SECS = 1.0, 2.0  # shorter outages, and shorter waits, are not logged
_OF_SENTINEL = "sentinel_"  # before the names of options of the connections to Sentinels
_CLOSING_SECS = 5.0  # deadline while the crawl is being closed

# Replies of a server that is temporarily unable: it starts, saves, fails over, or is full. In a
# script, Redis 6 puts other words before such a reply.
_PASSING = ("LOADING", "MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY ", "READONLY", "OOM ")
_IN_PIPELINE = "of pipeline caused error: "  # redis-py puts the whole command before this
_IN_SCRIPT = re.compile(r"^ACL failure in script: |\.? script: (\S+, )?on @\S+$")

_IN_LUA = re.compile(r"^.*\buser_script:\d+: .*$")
_NONE_OF_OURS = "a script has found a value of another form"

_NO_LOGIN = ("Authentication", "Authorization", "NOAUTH")
# Advice for errors whose class or text contains one of the words.
_HINTS = {
    ("MasterNotFound",): (
        "if the Sentinels have a login of their own, add it to the options of the URL: "
        "?sentinel_username=...&sentinel_password=..."
    ),
    _NO_LOGIN: (
        "check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS; for a command, "
        "its URL or REDISCLI_AUTH)"
    ),
    ("NoPermission", "NOPERM", "no permissions"): (
        "the user needs ~KEY and ~{KEY}* (KEY: BLOOM_REDIS_KEY) and, in this order, +@connection "
        "+@transaction +@string +@bitmap +@hash +@sortedset -@dangerous +time +exists "
        "+unlink +eval +evalsha, for a Cluster +cluster|slots"
    ),
    ("WRONGTYPE", _NONE_OF_OURS): (
        "the key contains something else: set BLOOM_REDIS_KEY to another name, or remove what was "
        "written by another program"
    ),
    ("DB index is out of range",): (
        "the server has no such database: end the URL with the number of another one, such as /0"
    ),
    ("SENTINEL", "unknown command"): (
        "redis+sentinel:// is for the address of a Sentinel, and only for one"
    ),
    ("cluster", "MovedError", "AskError", "CrossSlotError"): (
        "redis+cluster:// is for the address of a node of a Cluster, and only for one"
    ),
    ("CERTIFICATE",): "check the host in BLOOM_REDIS_URL, and its option ssl_ca_certs",
    ("Protocol error",): "the server there is not Redis: check BLOOM_REDIS_URL",
    ("keyword argument",): "check the options in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS)",
}


class RedisServer:
    """A Redis or Valkey server, a Cluster of them, or the master that a Sentinel names.

    The URL may have options of redis-py; `params` are those that it does not have. For a Sentinel,
    login and options are those of the server; `sentinel_` before the name of an option makes it one
    of the connections to the Sentinels. During an outage, a call waits for `deadline_secs`.

    Attributes:
        address: the URL without user, password and options, for messages.
        round_trips: how many calls had a reply or failed.
        retries: how many calls were repeated after a failure.
    """

    def __init__(
        self,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        deadline_secs: float = 30.0,
    ) -> None:
        try:
            self._url = ServerURL.parsed(url)
        except ValueError as error:
            raise SettingError(f"the URL of Redis is not valid; use {error}") from None
        self.address = self._url.address
        self.round_trips = self.retries = 0
        self._params = dict(params or {})
        self.deadline_secs = deadline_secs
        self._closing_at = math.inf  # on a monotonic clock
        self._socket_secs = max(0.2, min(_SOCKET_SECS, deadline_secs / 3 or _SOCKET_SECS))
        self._client: Any = None
        self._closers: _Closers = ()
        self._since: float | None = None  # when the outage began that was logged or raised
        self._outage: OutageError | None = None  # what the last call has raised
        self._next_attempt = 0.0

    def call(self, function: Callable[[Any], _T], *, key: str = "") -> _T:
        """Call a function with redis-py's client, and repeat it after temporary failures.

        So the server may have executed the commands more than once. After a call has waited until
        the deadline, further calls fail at once, except for occasional attempts, until the server
        is back. Raises an OutageError, or a RefusedError whose message may name the key.
        """
        begun, handler = time.monotonic(), getsignal(SIGINT)
        if self._outage is not None and begun < self._next_attempt:
            raise OutageError(str(self._outage), since=self._outage.since)
        pause = _FIRST_PAUSE
        while True:
            self.round_trips += 1
            attempt = time.monotonic()
            try:
                result = function(self._connected())
            except BloomError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failure = _reason(error)
            else:
                self._log_return()
                return result
            # Not in the handler above: an error of redis-py may contain a password, and would be
            # printed as the cause of ours.
            now = time.monotonic()
            if not _is_passing(failure):
                place = f"{self.address}, key {escaped(key)}" if key else self.address
                text = f"{type(failure).__name__}: {_short_text(failure)}"
                raise RefusedError(f"{place}: {text}{_hint(failure)}")
            if getsignal(SIGINT) != handler:
                # Scrapy has installed another one at the first Ctrl-C, and does nothing more while
                # the call blocks the event loop.
                self.shorten_deadline()
            if not self._url.is_cluster:  # whose client looks for the servers by itself
                self.close()  # so that the name is resolved again: it may be another server's now
            if self._outage is not None or now + pause > self.deadline(begun):
                self._since = begun if self._since is None else self._since
                self._outage = self._gone(failure, self._since)
                self._next_attempt = next_attempt(attempt, 1.0)
                raise self._outage
            self._log_outage(failure, begun, now)
            self.retries += 1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def send(self, *words: Any) -> Any:
        """Send one command, and return its reply; raises OutageError or RefusedError."""
        key = str(words[1]) if len(words) > 1 else ""
        return self.call(lambda client: client.execute_command(*words), key=key)

    def run(self, name: str, keys: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script of the package, and return its reply."""
        return reply_of(self.script(script(name), keys, packed(values)))

    def script(self, text: str, keys: Sequence[str], *args: Any) -> Any:
        """Run a Lua script on the server, and return its reply."""

        def run(client: Any) -> Any:
            try:
                return _executed(client, "EVALSHA", _sha1(text), len(keys), *keys, *args)
            except _import_redis().exceptions.NoScriptError:
                # The server does not have the script yet.
                return _executed(client, "EVAL", text, len(keys), *keys, *args)

        return self.call(run, key=keys[0] if keys else "")

    def transaction(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands, each a sequence of words, as one transaction; return their replies."""

        def send(client: Any) -> list[Any]:
            pipeline = client.pipeline()
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

        return self.call(send, key=commands[0][1]) if commands else []

    def _log_outage(self, error: Exception, begun: float, now: float) -> None:
        """Log a warning once per outage, but not for a single lost reply."""
        is_long = now >= begun + _SHORT_SECS and self.deadline(begun) - now > _SILENT_SECS
        if is_long and self._since is None and self._closing_at == math.inf:
            self._since = begun
            logger.warning(
                "%s does not answer: %s. The crawl waits for it, up to %g seconds "
                "(BLOOM_REDIS_DEADLINE_SECS)",
                self.address,
                _short_text(error),
                self.deadline_secs,
            )

    def _log_return(self) -> None:
        if self._since is not None:
            secs = time.monotonic() - self._since
            self._since = self._outage = None
            logger.info("%s is back after %.0f seconds", self.address, secs)

    def now(self) -> float:
        """Return the server's time in seconds since 1970, a common clock for all crawlers."""

        def ask(client: Any) -> Any:
            # In a Cluster, one node executes a command that has no key.
            node = {"target_nodes": client.get_default_node()} if self._url.is_cluster else {}
            return client.time(**node)

        seconds, microseconds = self.call(ask)
        return float(seconds + microseconds / 1e6)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            for close in self._closers:
                close()
            self._client = None

    def forget_outage(self) -> None:
        """Let the next call try again at once: a server without memory can still remove keys."""
        self._since = self._outage = None

    def shorten_deadline(self) -> None:
        """Wait for at most 5 seconds from now on, because the crawl is being closed.

        Another thread may be waiting in `call`.
        """
        self._closing_at = min(self._closing_at, time.monotonic())

    def deadline(self, begun: float) -> float:
        """Return until when a call waits that has begun at this time."""
        closing = max(begun, self._closing_at) + _CLOSING_SECS
        return min(begun + self.deadline_secs, closing)

    def _connected(self) -> Any:
        if self._client is None:
            connected = _connect(self._url, self._params, socket_secs=self._socket_secs)
            self._client, self._closers = connected
        return self._client

    def _gone(self, error: Exception, since: float) -> OutageError:
        secs, origin = self.deadline_secs, "BLOOM_REDIS_DEADLINE_SECS"
        if self._closing_at < math.inf and secs > _CLOSING_SECS:
            secs, origin = _CLOSING_SECS, "the crawl is closing"
        return OutageError(
            f"{self.address} cannot be used: {_short_text(error)} (waited up to {secs:g} seconds, "
            f"{origin}); check that the server runs, has room, and that BLOOM_REDIS_URL is right",
            since=since,
        )


@functools.cache
def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - Redis names scripts by it


def _executed(client: Any, *words: Any) -> Any:
    """Send a command on the connection of a client that has one, which saves 10 us."""
    if (connection := getattr(client, "connection", None)) is None:
        return client.execute_command(*words)
    connection.send_command(*words)
    return connection.read_response()


def next_attempt(begun: float, pause: float = 0.0) -> float:
    """Return when to try again after an attempt that began then and failed, at least after a pause.

    With a server that hangs, each attempt takes its whole time-out. So attempts may take at most a
    tenth of the time.
    """
    now = time.monotonic()
    return now + max(pause, 10 * (now - begun))


def _hint(error: Exception) -> str:
    """Return advice about a refusal, to be appended to its text; empty if there is none."""
    text = f"{type(error).__name__}: {_short_text(error)}"
    hints = (hint for words, hint in _HINTS.items() if any(word in text for word in words))
    return next((f"; {hint}" for hint in hints), "")


def _reason(error: Exception) -> Exception:
    """Return the error of the node that an error of a Cluster's client wraps."""
    redis = _import_redis()
    inner = error.__cause__ or error.__context__
    if isinstance(error, redis.exceptions.RedisClusterException) and isinstance(
        inner, (redis.RedisError, redis.exceptions.RedisClusterException, TypeError)
    ):
        return _reason(inner)
    return error


def _is_passing(error: Exception) -> bool:
    """Return whether the same command is likely to succeed a little later."""
    about = f"{type(error).__name__} {error}"
    if any(word in about for word in (*_NO_LOGIN, "CERTIFICATE")):
        return False
    errors = _import_redis().exceptions
    of_connection = errors.ConnectionError, errors.TimeoutError, OSError
    of_cluster = errors.ClusterError, errors.RedisClusterException, errors.TryAgainError
    of_state = errors.ReadOnlyError, errors.OutOfMemoryError
    if isinstance(error, (*of_connection, *of_cluster, *of_state)):
        return True
    text = _short_text(error)
    return isinstance(error, errors.ResponseError) and (
        # The slot of a script moves to another node, which does not have all keys yet.
        "access a non local key" in text
        or text.startswith(_PASSING)
        or any(f": -{word}" in text for word in _PASSING)
    )


def _short_text(error: Exception) -> str:
    """Return the text of an error in one line, without the command."""
    _, _, text = " ".join(str(error).split()).rpartition(_IN_PIPELINE)
    text, _, _ = text.partition(" : <")  # details of each Sentinel
    text, _, _ = text.partition(", with args beginning with")  # which may be a password
    text = _IN_SCRIPT.sub("", text)  # name and line of the script
    text = _IN_LUA.sub(_NONE_OF_OURS, text)
    text = escaped(text).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _connect(
    url: ServerURL, params: Mapping[str, Any], *, socket_secs: float
) -> tuple[Any, _Closers]:
    """Make a client of redis-py, and functions that close it; raises SettingError.

    A client of a single server connects at once, the others with the first command.
    """
    redis, failure = _import_redis(), ""
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
    parsers, options = redis.connection.URL_QUERY_ARGUMENT_PARSERS, {}
    for name, (value, *_) in parse_qs(url.options).items():
        if name.startswith(_OF_SENTINEL):
            own = name.removeprefix(_OF_SENTINEL)
            with suppress(TypeError, ValueError):
                options[own] = parsers.get(own, str)(value)
                continue
            raise ValueError(f"the value of {name} is not valid")
    return options


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


def _import_redis() -> Any:
    """Return the module redis, which imports its submodules; raises SettingError."""
    try:
        import msgpack  # noqa: F401, PLC0415 - for the scripts
        import redis  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise SettingError(
            "a filter in Redis needs redis-py 6.1 or later and msgpack, which are not installed: "
            "pip install 'redis[hiredis]>=6.1' msgpack"
        ) from error
    return redis
