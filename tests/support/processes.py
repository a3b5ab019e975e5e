"""Scrapy in processes of their own, each forked from one that has imported it already.

An interpreter that imports Scrapy takes longer than most crawls of the tests.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

from tests.support import forked

FORKING = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    from multiprocessing import forkserver

    FORKING.set_forkserver_preload(["tests.support.preloaded", "tests.support.forked"])


def warm_up() -> None:
    """Start the process that forks the others, ahead of the first of them."""
    if sys.platform == "linux":
        with pytest.MonkeyPatch.context() as patch:  # older Pythons do not hand sys.path down to it
            patch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[2]))
            forkserver.ensure_running()


def do_not_ignore(*signals: signal.Signals) -> None:
    """Have crawls receive signals that this process ignores, as it does under nohup.

    Processes inherit that a signal is ignored, but not a handler.
    """
    for number in signals:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class Scrapy(Protocol):
    """A process of Scrapy."""

    pid: int

    def status(self) -> int | None:
        """Return how it ended, a signal as its negative number; None while it runs."""

    def wait(self, limit: float) -> int | None:
        """Return its status once it has ended, or None after so many seconds."""

    def kill(self) -> None:
        """End it at once, if it has not ended, and wait for that."""


def start_scrapy(
    arguments: Sequence[str],
    *,
    cwd: Path,
    out: IO[Any],
    err: IO[Any],
    given: IO[Any] | None = None,
    env: Mapping[str, str] = os.environ,
    prefix: Sequence[str] = (),
) -> Scrapy:
    """Start `scrapy ARGUMENTS`, which reads and writes these files.

    With a prefix, the command of another program, it is started as that program does it.
    Elsewhere than on Linux, nothing is forked.
    """
    with Path(os.devnull).open("rb") as nothing:
        streams = given or nothing, out, err
        if prefix or sys.platform != "linux" or _of_python(env) != _of_python(os.environ):
            return _Executed(
                [*prefix, sys.executable, "-m", "scrapy", *arguments], cwd, env, streams
            )
        return _Forked(list(arguments), cwd, env, streams)


def _of_python(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("PYTHON")}


class _Executed:
    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str], streams: Any) -> None:
        given, out, err = streams
        self._process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=given, stdout=out, stderr=err
        )
        self.pid = self._process.pid

    def status(self) -> int | None:
        return self._process.poll()

    def wait(self, limit: float) -> int | None:
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Forked:
    def __init__(
        self, arguments: list[str], cwd: Path, env: Mapping[str, str], streams: Any
    ) -> None:
        connections = [Connection(os.dup(stream.fileno())) for stream in streams]
        self._process = FORKING.Process(
            target=forked.run, args=(arguments, cwd, dict(env), connections)
        )
        self._process.start()
        for connection in connections:
            connection.close()
        assert self._process.pid
        self.pid = self._process.pid

    def status(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit: float) -> int | None:
        self._process.join(limit)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
