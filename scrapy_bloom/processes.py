"""Which process this is, and whether another one still lives."""

import os
import secrets
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scrapy_bloom.jobdir import boot_id


@dataclass(frozen=True)
class Process:
    """A process among those of all machines.

    Attributes:
        machine: the machine since it was started, and its container; empty where that is unknown.
        pid: the process id there.
        started: when it was started, in the kernel's units: ids are used again.
        random: tells runs in one process apart.
    """

    machine: str
    pid: int
    started: str
    random: str

    @classmethod
    def this(cls) -> "Process":
        """Return this process, with another random part each time."""
        return cls(_machine(), os.getpid(), _started(os.getpid()), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.machine}/{self.pid}/{self.started}/{self.random}"

    @staticmethod
    def lives(text: str) -> bool | None:
        """Check whether a process lives, given as text; None if that cannot be known from here."""
        machine, pid, started, _ = text.rsplit("/", 3)
        if not machine or machine != _machine():
            return None
        return _started(int(pid)) == started


@cache
def _machine() -> str:
    try:
        namespace = Path("/proc/self/ns/pid").readlink()  # containers have process ids of their own
    except OSError:
        return ""
    boot = boot_id()
    return f"{socket.gethostname()} {boot} {namespace}" if boot else ""


def _started(pid: int) -> str:
    """Return when a process was started; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name, in parentheses, may hold anything. A zombie does nothing any more.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]
