"""Other filters from PyPI, installed for the benchmarks alone: they are never dependencies."""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

PYBLOOMFILTER, RBLOOM = "pybloomfiltermmap3", "rbloom"
PYBLOOM_LIVE, REDIS_BLOOM = "pybloom-live", "scrapy-redis-bloomfilter"

INSTALL_SECS = 180


class Peer(NamedTuple):
    """The version to install, the module to import, and what this environment may not have."""

    version: str
    module: str
    needs: tuple[str, ...] = ()


PEERS: Mapping[str, Peer] = {
    PYBLOOMFILTER: Peer("0.6.3", "pybloomfilter"),
    RBLOOM: Peer("1.5.4", "rbloom"),
    PYBLOOM_LIVE: Peer("4.0.0", "pybloom_live", ("xxhash==4.1.0",)),
    REDIS_BLOOM: Peer("0.8.1", "scrapy_redis_bloomfilter.dupefilter"),
}


@cache
def missing() -> Mapping[str, str]:
    """Install the peers for as long as this process lives, and on its path; why some are not there.

    Each alone, so that one which cannot be installed does not take the others with it. What they
    share with this environment, such as bitarray and redis, is not replaced. Fresh processes of
    `machine.in_fresh_process` have the path of this one.
    """
    reasons = {}
    for name, peer in PEERS.items():
        directory = tempfile.TemporaryDirectory(prefix="peer-")
        _DIRECTORIES.append(directory)
        sys.path.append(directory.name)
        try:
            _install(directory.name, f"{name}=={peer.version}", *peer.needs)
            importlib.import_module(peer.module)
        except (subprocess.SubprocessError, OSError, ImportError) as error:
            sys.path.remove(directory.name)
            reasons[name] = f"it could not be installed ({type(error).__name__})."
    return reasons


# Removed when the process ends.
_DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []


def module(name: str) -> Any:
    """A peer's module; only for those that are not missing."""
    return importlib.import_module(PEERS[name].module)


def notes(*names: str) -> list[str]:
    """A line for each of the peers that is not measured."""
    return [
        f"{name} {PEERS[name].version} is not measured: {missing()[name]}"
        for name in names
        if name in missing()
    ]


def versions(*names: str) -> str:
    """The peers that are measured, with their versions."""
    return ", ".join(f"{name} {PEERS[name].version}" for name in names if name not in missing())


def _install(directory: str, *requirements: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", *options),
            *("--no-deps", "--target", directory, *requirements),
        ],
        check=True,
        timeout=INSTALL_SECS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
