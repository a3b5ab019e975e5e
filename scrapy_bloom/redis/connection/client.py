"""The client of redis-py, as the filter needs it: it never sends a command twice by itself.

redis-py is imported when a connection is made, not before: most crawls do without it.
"""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.redis.connection.url import first_only, hosts_of, without_secrets

_KEEP_SECS = 1.0  # a connection is used again without a look at it
_AT_ONCE = 64  # commands written at once: the server begins while the next ones are packed


class Packed(bytes):
    """A whole command, ready to be sent.

    Passed as the last argument of `execute_command` it is sent in place of all arguments; the
    others only tell redis-py which command it is and, on a Cluster, which key it concerns.
    redis-py takes 40 µs to pack the 90 arguments of a BITFIELD, a third of the round trip.
    """


Command = tuple[str, bytes, Packed]  # its name, the key that it concerns, and all of it


class _SendsPacked:
    """A connection to a node of a Cluster that takes `Packed` commands."""

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
        return self.execute_packed([args])[0]

    def execute_packed(self, commands: Iterable[Command]) -> list[Any]:
        """Send commands without a wait between them, and return their answers."""
        now = time.monotonic()
        connection = self._kept
        if connection is None or now > self._kept_until:
            # The pool looks whether the server has closed it meanwhile.
            self._put_back()
            connection = self._kept = self.connection_pool.get_connection()  # type: ignore[attr-defined]
        self._kept_until = now + _KEEP_SECS
        try:
            number = _send(connection, commands)
            return [connection.read_response() for _ in range(number)]
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


class _Pipelines:
    """A redis-py client of a Cluster that sends `Packed` commands without a wait between them.

    redis-py's own pipeline packs each command anew. Whatever goes wrong is left to redis-py, which
    asks where the keys are now: it sends a command at a time.
    """

    _has_failed = False

    def execute_packed(self, commands: Iterable[Command]) -> list[Any]:
        """Send commands to the nodes of their keys, and return their answers in order."""
        has_failed, self._has_failed = self._has_failed, True
        if has_failed:
            answers = [self.execute_command(*each) for each in commands]  # type: ignore[attr-defined]
        else:
            answers = self._answers(list(commands))
        self._has_failed = False
        return answers

    def _answers(self, commands: Sequence[Command]) -> list[Any]:
        places = defaultdict(list)
        for index, (_, key, _) in enumerate(commands):
            places[key].append(index)
        nodes: dict[str, tuple[Any, list[int]]] = {}
        for key, indexes in places.items():
            node = self.get_node_from_key(key)  # type: ignore[attr-defined]
            nodes.setdefault(node.name, (node, []))[1].extend(indexes)
        refused = import_redis().ResponseError
        found: dict[int, Any] = {}
        with ExitStack() as stack:
            connected = []
            for node, indexes in nodes.values():
                connection = stack.enter_context(self._connection(node))
                connected.append((connection, indexes))
                _send(connection, (commands[index] for index in indexes))
            for connection, indexes in connected:
                for index in indexes:
                    try:
                        found[index] = connection.read_response()
                    except refused as error:
                        found[index] = error
        # What a node has refused it has not executed: mostly, the key is elsewhere now.
        return [
            self.execute_command(*each)  # type: ignore[attr-defined]
            if isinstance(found[index], refused)
            else found[index]
            for index, each in enumerate(commands)
        ]

    @contextmanager
    def _connection(self, node: Any) -> Iterator[Any]:
        """Take a connection to a node; after an error, answers that are to come are none's."""
        pool = self.get_redis_connection(node).connection_pool  # type: ignore[attr-defined]
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


def _send(connection: Any, commands: Iterable[Command]) -> int:
    """Send commands in large pieces; return how many they were."""
    number, rest = 0, iter(commands)
    while piece := [packed for _, _, packed in islice(rest, _AT_ONCE)]:
        connection.send_packed_command([b"".join(piece)])
        number += len(piece)
    return number


def connect(
    url: str,
    params: Mapping[str, Any],
    *,
    cluster: bool,
    sentinel: str | None,
    socket_secs: float,
    connected: Callable[[Any], None] | None = None,
) -> tuple[Any, Callable[[], None]]:
    """Make a client of redis-py, and what closes it. Most kinds connect with the first command.

    `RedisServer` has the first four arguments. An answer may take `socket_secs`, unless the URL
    says otherwise. `connected` is called with each new connection: it has to log in, but not on a
    Cluster.

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
    if connected is not None:
        params["redis_connect_func"] = connected
    if sentinel is not None:
        return _master(redis, url, sentinel, params)
    if cluster:
        return _cluster(redis, url, params)
    kind: Any = type("Client", (_KeepsConnection, redis.Redis), {})
    client = kind.from_pool(redis.ConnectionPool(**params))
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
    params["connection_class"] = type("Connection", (_SendsPacked, params["connection_class"]), {})
    kind: Any = type("Client", (_Pipelines, redis.RedisCluster), {})
    client = kind(url=f"redis://{name}:{port or 6379}", **params)

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
    kind: Any = type("Client", (_KeepsConnection, redis.Redis), {})
    client = finder.master_for(service, redis_class=kind, **params)

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
