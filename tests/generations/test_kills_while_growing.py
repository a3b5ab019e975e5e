"""kill -9 while a filter records and grows: nothing is forgotten."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.local_filters import fps, make

RECORDER = """
import signal, sys
from pathlib import Path
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Policy

backend = LocalBackend(
    Path(sys.argv[1]), Policy(expected=5000, error_rate=1e-3)
)
backend.open()
known, last = map(int, sys.argv[2:4])
for number in range(known):
    assert number.to_bytes(20, "big") in backend, number
backend.begin()
number = known
while number < last:
    backend.add(number.to_bytes(20, "big"))
    number += 1
    if number % 50 == 0:
        print(number, flush=True)
if sys.argv[4] == "wait":
    signal.pause()
backend.close()
"""


@pytest.mark.parametrize(
    ("kills", "number"), [(6, 40_000), pytest.param(20, 150_000, marks=pytest.mark.soak)]
)
def test_nothing_is_forgotten_through_kills_and_growth(
    tmp_path: Path, kills: int, number: int
) -> None:
    rng = random.Random(20)
    targets = [*sorted(rng.sample(range(100, number * 9 // 10), kills)), number]
    known = 0
    for target in targets:
        # Killed while it records. Should we be late, it waits for that, and has told something.
        dies = target < number
        numbers = [known, max(target, known) + 500 if dies else number]
        arguments = [os.fspath(tmp_path), *map(str, numbers), "wait" if dies else "end"]
        process = subprocess.Popen(
            [sys.executable, "-c", RECORDER, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        for line in process.stdout:
            known = int(line)
            if dies and known >= target:
                process.kill()
                break
        for line in process.stdout.read().split("\n")[:-1]:
            known = int(line)  # told before it died
        process.stdout.close()
        status = process.wait(60)
        assert status == (-signal.SIGKILL if dies else 0)
    assert known == number
    backend = make(tmp_path, capacity=5000, error_rate=1e-3)
    assert all(fingerprint in backend for fingerprint in fps(number))
    assert len(backend.status().generations) == (4 if number == 40_000 else 5)
    # Some fingerprints look seen, at the error rate, and the counts of kills are a little low.
    assert backend.status().count == pytest.approx(number, rel=0.01)
    backend.close()


@pytest.mark.parametrize(
    ("where", "grown"),
    [
        ("os.posix_fallocate", False),
        ("os.fsync", False),
        ("pathlib.Path.rename", False),
        ("scrapy_bloom.files.file.sync_directory", True),
        ("scrapy_bloom.generations.lifecycle.LifeCycle.plan", True),
    ],
)
def test_a_kill_while_growing(tmp_path: Path, where: str, grown: bool) -> None:
    """The filter is as it was before, or as it is after: never between."""
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from pkgutil import resolve_name
        from scrapy_bloom.files.backend import LocalBackend
        from scrapy_bloom.generations.policy import Policy

        policy = Policy(expected=100, error_rate=1e-9)
        backend = LocalBackend(Path(sys.argv[1]), policy, sync_secs=0)
        backend.open()
        for number in range(100):
            assert backend.add(number.to_bytes(20, "big"))
        owner, name = sys.argv[2].rpartition(".")[::2]
        dies = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        setattr(resolve_name(owner), name, dies)
        backend.add(b"one more")
        raise SystemExit("survived")
    """)
    process = subprocess.run(
        [sys.executable, "-c", script, os.fspath(tmp_path), where], timeout=60, check=False
    )
    assert process.returncode == -signal.SIGKILL
    backend = make(tmp_path, error_rate=1e-9)
    assert backend.status().count == 100
    assert len(backend.status().generations) == (2 if grown else 1)
    assert all(fingerprint in backend for fingerprint in fps(100))
    assert backend.add(b"one more")
    assert len(backend.status().generations) == 2
    backend.close()
