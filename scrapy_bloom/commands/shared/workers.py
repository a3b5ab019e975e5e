"""Processes that do a part of a command's work: results in order, and none is left behind.

They are forked, so that a project's objects need not be importable or made again, and share this
process's memory. A fork is safe only in a process of one thread: elsewhere there are no workers.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

from scrapy_bloom.commands.shared.readiness import readiness
from scrapy_bloom.exceptions import StorageError

_ENDING_SECS = 1.0  # for what the workers are still doing, before they are killed
_WITHOUT = "repeat the command with --jobs 1, which needs no further processes"

_THREADS = Path("/proc/self/task")

_Work = Callable[[Any], Any]
_Results = Callable[[Iterator[Any], BinaryIO], Iterator[Any]]


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_fork() -> bool:
    """Return whether this process has one thread: a lock of another one would stay locked.

    Only Linux tells. Elsewhere a fork may break what libraries keep, too.
    """
    try:
        return len(list(_THREADS.iterdir())) == 1
    except OSError:
        return False


@contextmanager
def workers(work: _Work, number: int) -> Iterator[_Results]:
    """Start processes that all do the same work; after the block they have ended.

    Args:
        work: takes a chunk, which can be pickled, and returns what can be, too.
        number: of processes.

    Yields:
        A function that takes chunks and the file that they come from, and yields their results in
        order. Each process has one chunk at a time; what is done is handed out before the file is
        waited for.

    Raises:
        StorageError: they cannot be started, or one was ended by somebody else.
    """
    started: list[_Worker] = []
    try:
        try:
            for _ in range(number):
                started.append(_Worker(work, started))
        except OSError as error:
            raise StorageError(
                f"{number} processes to compute fingerprints cannot be started: {error.strerror}; "
                f"{_WITHOUT}"
            ) from error
        yield partial(_results, started)
    finally:
        for each in started:
            each.connection.close()
        deadline = time.monotonic() + _ENDING_SECS
        for each in started:
            each.end(deadline)


def _results(
    started: Sequence["_Worker"], chunks: Iterator[Any], source: BinaryIO
) -> Iterator[Any]:
    is_ready = readiness(source)
    idle, busy, done = deque(started), deque[_Worker](), deque[Any]()
    failure: Exception | None = None
    is_over = False
    while busy or done or not is_over:
        while idle and not is_over and (is_ready(0) or not (busy or done)):
            try:
                chunk = next(chunks, None)
            except Exception as error:  # noqa: BLE001 - raised after what stood before it
                chunk, failure = None, error
            is_over = chunk is None
            if chunk is not None:
                busy.append(idle.popleft())
                busy[-1].send(chunk)
        if done:
            yield done.popleft()
        if busy:
            done.append(busy[0].receive())
            idle.append(busy.popleft())
    if failure is not None:
        raise failure


class _Worker:
    connection: Connection
    _process: BaseProcess

    def __init__(self, work: _Work, others: Sequence["_Worker"]) -> None:
        if sys.platform == "win32":
            raise NotImplementedError("see can_fork")
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        # Who is left alone reads the end of its pipe, once its chunk is done, if nobody else has
        # the other side.
        not_theirs = [*(each.connection for each in others), self.connection]
        self._process = context.Process(target=_serve, args=(work, theirs, not_theirs), daemon=True)
        # Ctrl-C reaches all processes at a terminal: this one ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def send(self, chunk: Any) -> None:
        try:
            self.connection.send(chunk)
        except OSError:
            raise self._lost() from None

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def end(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _lost(self) -> StorageError:
        self._process.join(_ENDING_SECS)
        code = self._process.exitcode
        how = f"signal {-code}" if code and code < 0 else f"exit status {code}"
        return StorageError(
            f"a process that computed fingerprints has died ({how}), perhaps for want of memory; "
            f"{_WITHOUT}"
        )


def _serve(work: _Work, connection: Connection, not_ours: Sequence[Connection]) -> None:
    for each in not_ours:
        each.close()
    with suppress(EOFError, OSError):  # nobody asks any more
        while True:
            chunk = connection.recv()
            connection.send(work(chunk))
