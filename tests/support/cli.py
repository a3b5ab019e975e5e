"""Running `scrapy bloom ...` as a user does: in a process of its own."""

import json
import os
import re
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.support.processes import start_scrapy

LIMIT = 120.0  # seconds
SCRAPY = Path(sys.executable).with_name("scrapy")
# Where no file may be long, coverage.py could not write its own, and would say so.
UNMEASURED = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}


@dataclass
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """Return the one error line of a command that failed."""
        assert self.status == 1, self
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if "error: " in line]
        assert len(lines) == 1, self.err
        return lines[0]


def bloom(
    *arguments: str | os.PathLike[str],
    cwd: Path,
    stdin: str = "",
    under: Sequence[str] = (),
) -> Ran:
    """Run `scrapy bloom` with these arguments, perhaps under another command."""
    patient = map(_patient, arguments)
    return scrapy("bloom", *patient, cwd=cwd, stdin=stdin, under=under)


def scrapy(
    *arguments: str,
    cwd: Path,
    stdin: str = "",
    under: Sequence[str] = (),
) -> Ran:
    """Run `scrapy` with these arguments, perhaps under another command."""
    env = UNMEASURED if under else os.environ
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        process = start_scrapy(
            arguments,
            cwd=cwd,
            given=given,
            out=out,
            err=err,
            env={key: value for key, value in env.items() if key != "SCRAPY_SETTINGS_MODULE"},
            prefix=under,
        )
        status = process.wait(LIMIT)
        if status is None:
            process.kill()
            raise AssertionError(f"it did not end: {arguments}")
        for written in (out, err):
            written.seek(0)
        return Ran(status, out.read().decode(), err.read().decode())


def _patient(argument: str | os.PathLike[str]) -> str:
    """Let a command wait for a server that is there, but has to wait for a processor.

    Otherwise, after half a second without an answer, it reports that the server is away.
    """
    text = os.fspath(argument)
    if not re.fullmatch(r"redis://127\.0\.0\.1:\d+(/\d+)?(\?[^#]*)?(#.+)?", text):
        return text
    url, mark, key = text.partition("#")
    return f"{url}{'&' if '?' in url else '?'}socket_timeout=30{mark}{key}"


def at_a_terminal(
    *arguments: str, cwd: Path, answer: bytes = b"", columns: int = 120, kind: str = "xterm"
) -> Ran:
    """Run `scrapy bloom` at a terminal, and answer its question, if there is one."""
    import fcntl  # here, since other tests run on Windows, too
    import pty
    import struct
    import termios

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    env = {**os.environ, "TERM": kind}
    env.pop("COLUMNS", None)
    with os.fdopen(terminal, "wb", buffering=0) as screen:
        process = start_scrapy(
            ["bloom", *arguments], cwd=cwd, given=screen, out=screen, err=screen, env=env
        )
    output = b""
    end = time.monotonic() + LIMIT
    try:
        while time.monotonic() < end:
            if not select.select([controller], [], [], 1)[0]:
                continue
            try:
                output += os.read(controller, 4096)
            except OSError:  # the other side is closed
                break
            if answer and b"[y/N]" in output:
                os.write(controller, answer)
                answer = b""
        status = process.wait(LIMIT)
        assert status is not None, output
        return Ran(status, output.decode(), "")
    finally:
        process.kill()
        os.close(controller)
