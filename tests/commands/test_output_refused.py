"""Output that cannot be written, or that nobody reads: one line at most, and status 1."""

from pathlib import Path

import pytest

from tests.support.shell import run_in_shell
from tests.support.workspace import fingerprints, make_filter, urls, write_urls


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    make_filter(tmp_path / "filter", fingerprints(urls(range(100))))
    write_urls(tmp_path / "urls.txt", urls(range(200)))
    write_urls(tmp_path / "bad.txt", [*urls(range(50, 200)), "no URL"])
    return tmp_path


@pytest.mark.parametrize(
    "command",
    ["info filter", "check filter bad.txt", ""],
)
def test_a_full_disk(command: str, filled: Path) -> None:
    ran = run_in_shell(f"unset PYTHONUNBUFFERED; scrapy bloom {command} > /dev/full", filled)
    assert ran.returncode == 1
    (told,) = ran.stderr.splitlines()
    assert told.startswith("scrapy bloom: error: ")
    assert "No space left on device" in told


@pytest.mark.parametrize("command", ["info filter", "check filter bad.txt"])
def test_nobody_reads(command: str, filled: Path) -> None:
    code = f"set +o pipefail; scrapy bloom {command} | sleep 0; exit ${{PIPESTATUS[0]}}"
    ran = run_in_shell(f"unset PYTHONUNBUFFERED; {code}", filled)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert not ran.stderr  # nobody reads the output any more


def test_nobody_can_be_told(filled: Path) -> None:
    for command in ("info nowhere", "check filter bad.txt"):
        ran = run_in_shell(f"scrapy bloom {command} > out.txt 2> /dev/full", filled)
        assert ran.returncode == 1, command
        assert not ran.stderr
