"""Ctrl-C: one line, and status 130 in a shell, so that a loop of the shell stops, too."""

import fcntl
import os
import select
import signal
import subprocess
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.cli import SCRAPY, UNMEASURED
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

MESSAGE = "scrapy bloom: error: interrupted\n"
# Interrupts itself while our modules are imported.
AT_AN_IMPORT = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "scrapy_bloom.commands.plan":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scrapy.cfg").write_text("[settings]\ndefault = own\n")
    make_filter(tmp_path / "filter", fingerprints(urls(range(100))))
    write_urls(tmp_path / "urls.txt", urls(range(200)))
    return tmp_path


def ran(command: list[str | Path], cwd: Path) -> tuple[int, str]:
    """The status of a command that interrupts itself, and its error output."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=UNMEASURED,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        # A shell that starts us in the background lets us ignore it, and so would it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    return ended.returncode, ended.stderr


def test_before_a_command_runs(project: Path) -> None:
    (project / "own.py").write_text(AT_AN_IMPORT)
    assert ran([SCRAPY, "bloom", "plan"], project) == (-signal.SIGINT, MESSAGE)


def _at_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_loop_of_a_shell_stops(project: Path) -> None:
    """A shell stops only if its command is ended by the signal, not if it exits with 130."""
    (project / "own.py").touch()
    os.mkfifo(project / "fifo")
    check = f"{SCRAPY} bloom check filter fifo"
    loop = f"for each in a b c; do echo begin $each; {check}; done; echo after"
    terminal, inside = os.openpty()
    shell = subprocess.Popen(
        ["bash", "-c", loop],
        cwd=project,
        env=UNMEASURED,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=_at_the_terminal,  # noqa: PLW1509
    )
    os.close(inside)
    out, end, given = b"", time.monotonic() + 60, -1
    try:
        while time.monotonic() < end and b"begin b" not in out:
            if given < 0:
                with suppress(OSError):  # nobody reads it yet
                    given = os.open(project / "fifo", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(terminal, b"\x03")
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    out += os.read(terminal, 1 << 16)
                except OSError:  # the shell has ended
                    break
    finally:
        os.close(terminal)  # hangs up on what still runs
        shell.wait(60)
    assert given >= 0
    os.close(given)
    assert out.decode().replace("\r", "") == f"begin a\n^C{MESSAGE}"
