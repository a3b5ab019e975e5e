"""kill -9 while a filter records and grows: nothing is forgotten."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.local_filters import fps, make


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
