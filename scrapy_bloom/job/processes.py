"""Processes: which one this is, and whether another one still lives."""

import os
import secrets
import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux's; of each start of the machine


def name_this_process() -> str:
    """Name this process among those of all machines: `machine/pid/started/random`.

    The machine is that of this boot and container (empty where that is unknown). When the process
    was started is in the kernel's units, since ids are used again. The random digits tell the runs
    of one process apart.
    """
    pid = os.getpid()
    return f"{_machine()}/{pid}/{_started(pid)}/{secrets.token_hex(4)}"


def process_lives(name: str) -> bool | None:
    """Check whether the process of that name lives; None if that cannot be known from here."""
    machine, pid, started, _ = name.rsplit("/", 3)
    if not machine or machine != _machine():
        return None
    return _started(int(pid)) == started


@cache
def _machine() -> str:
    try:
        namespace = Path("/proc/self/ns/pid").readlink()  # containers have process ids of their own
        boot = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace}" if boot else ""


def _started(pid: int) -> str:
    """Return when a process was started; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    # The name, in parentheses, may hold anything. A zombie does nothing any more.
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]
