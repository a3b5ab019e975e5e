"""Identity of a server: is it the same process, with the same history, as before?"""

import re
from typing import Any

from scrapy_bloom.redis.connection.client import import_redis

_IDENTITY = re.compile(rb"^(?:run_id|master_replid):\S+", re.MULTILINE)


class Identity:
    """Notices that another server answers now, or one with another history.

    A server that was restarted has another run id, a replica that was promoted another replication
    id. A connection ends with the process at its other end, so asking each new one is enough. In a
    Cluster a connection may be older than the promotion: there, the masters are compared as well.
    """

    def __init__(self, *, cluster: bool) -> None:
        self.has_changed = False  # whoever acts upon it sets it back
        self._cluster = cluster
        self._known: dict[object, object] = {}
        self._primaries: frozenset[str] = frozenset()

    def ask(self, connection: Any) -> None:
        """Ask at the other end of a new connection: redis-py's `redis_connect_func`."""
        if not self._cluster:  # whose client has done it already
            connection.on_connect()
        connection.send_command("INFO", check_health=False)
        answer: object
        try:
            answer = tuple(_IDENTITY.findall(connection.read_response()))
        except import_redis().exceptions.ResponseError:  # an ACL need not allow INFO
            answer = ()
        # Elsewhere than in a Cluster, one address may become another server, and the other way.
        node = (connection.host, connection.port) if self._cluster else None
        answer = answer or object()  # none tells: it may be another one each time
        if self._known.setdefault(node, answer) != answer:
            self.has_changed = True
        self._known[node] = answer

    def look_at(self, client: Any) -> None:
        """Compare the masters of a Cluster with those of the last time."""
        if not self._cluster:
            return
        primaries = frozenset(node.name for node in client.get_primaries())
        if self._primaries and primaries - self._primaries:
            self.has_changed = True
        self._primaries = primaries
