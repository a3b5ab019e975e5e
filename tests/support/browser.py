"""Chromium without a window, driven by its own protocol over two pipes."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.machine import REQUIRED

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if "chromium" in REQUIRED and not CHROMIUM:
    raise RuntimeError("chromium is missing: apt-get install chromium")
LIMIT = 30.0  # seconds, for an answer of the browser


class Browser:
    """A page in it; each method waits for the browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._read = 0, b""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def send(self, method: str, **params: Any) -> Any:
        """Return the result of a method of the Chrome DevTools Protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while (answer := self._receive(end)).get("id") != self._number:
            pass  # an event
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            left = max(end - time.monotonic(), 0)
            assert select.select([self._answers], [], [], left)[0], "the browser does not answer"
            self._read += os.read(self._answers, 1 << 16)
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Return what a script in the page results in."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, (script, result)
        return result["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of an expression in the page once it is true."""
        end = time.monotonic() + LIMIT
        while not (value := self.run(condition)):
            assert time.monotonic() < end, f"not true: {condition}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        """Load a page, and wait until it is complete."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")


# Chromium reads commands from descriptor 3, and writes answers to 4.
_EXEC = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile, and end it afterwards."""
    assert CHROMIUM
    (read, commands), (answers, write) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(entry, fcntl.F_DUPFD, 10) for entry in (read, write)]
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _EXEC, *map(str, theirs), CHROMIUM),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-extensions", "--no-first-run"),
            *(f"--user-data-dir={profile}", "--remote-debugging-pipe"),
        ],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for their in (read, write, *theirs):
        os.close(their)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # it ends by that
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT)
        os.close(answers)
