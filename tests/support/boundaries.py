"""Forked processes that die at one of their steps: an SQL statement, or a change of a directory."""

import os
import sqlite3
import traceback
from collections.abc import Callable
from typing import Any

_DIED, _FAILED = 9, 1
_CALLS = ("rename", "replace", "unlink", "fsync", "rmdir")


def _die_at(step: int) -> None:
    """Have this process die before a step; all statements of SQLite and some calls are steps."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                os._exit(_DIED)
            return function(*args, **options)

        return call

    class Connection(sqlite3.Connection):
        execute = counted(sqlite3.Connection.execute)
        executemany = counted(sqlite3.Connection.executemany)
        close = counted(sqlite3.Connection.close)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **options: connect(*args, **options, factory=Connection)
    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def dies(story: Callable[[], object], step: int = 0) -> bool:
    """Run a story in a process of its own; return whether it died at the step, if it had so many.

    Without a step, it dies at the end of the story.
    """
    if not (pid := os.fork()):
        try:
            _die_at(step)
            story()
            os._exit(0 if step else _DIED)
        except BaseException:  # noqa: BLE001 - nothing of the test may run here
            traceback.print_exc()
        finally:
            os._exit(_FAILED)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, _DIED)
    return status == _DIED
