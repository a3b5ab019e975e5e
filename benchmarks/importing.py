"""`scrapy bloom import` and `check`: time and memory for lists of millions."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import samples
from benchmarks.shared.machine import in_fresh_process
from benchmarks.shared.report import Check, Section, Table, at_most
from tests.support.servers import PROGRAMS, Server

SECS_FOR_A_MILLION = 60.0  # of any lines, anywhere
SECS_FOR_PLAIN_URLS = {"files": 8.0, "Valkey": 20.0}
MEMORY_MB = 100.0
TIMEOUT_SECS = 600

_SCRAPYS = "REQUEST_FINGERPRINTER_CLASS=scrapy.utils.request.RequestFingerprinter"


@dataclass(frozen=True)
class _Run:
    """One command: what it does, how many lines it read, and what it took."""

    what: str
    lines: int
    secs: float
    peak_mb: float
    filter_mb: float
    place: str = ""  # of plain URLs

    @property
    def beyond_mb(self) -> float:
        return self.peak_mb - self.filter_mb


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    few, many = (2000, 5000) if quick else (1_000_000, 10_000_000)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with (path / "requests.seen").open("wb") as file:
            file.writelines(
                b"\0\x14" + fingerprint for fingerprint in samples.fingerprints(0, many)
            )
        with (path / "urls.txt").open("w") as plain, (path / "other.txt").open("w") as other:
            for number in range(few):
                url = samples.url(number)
                plain.write(f"{url}\n")
                other.write(f"{url.replace('.html', '%c3%a9.html')}\n")  # w3lib writes %C3%A9
        seen = _run(path, "requests.seen into files", many, "import", "requests.seen", "seen")
        runs = _from_files(path, few)
        for program in PROGRAMS:
            runs += _in_redis(path, few, program)
    return Section(
        title="Importing and checking lists",
        method=(
            f"`scrapy bloom import` of a requests.seen with {many:,} binary records and of "
            f"{few:,} URLs of 80 to 96 characters, into files and into Redis, at the default error "
            "rate of 1e-9; `check` of as many; and `import` of a set as scrapy-redis keeps it. "
            "Plain URLs are canonical already; other URLs have an escape in small letters, which "
            "w3lib changes. Each command is timed from outside, with the start of Python and "
            "Scrapy. Memory is the highest of its process (RSS), with Python and Scrapy."
        ),
        checks=[
            *_checks_of_plain(runs, few),
            at_most(
                f"seconds for {few:,} lines, the slowest",
                max(each_run.secs for each_run in runs),
                SECS_FOR_A_MILLION,
                "{:.1f}",
            ),
            at_most(f"MB beyond the filter, {many:,} records", seen.beyond_mb, MEMORY_MB, "{:.0f}"),
            at_most(
                f"MB beyond the filter, {few:,} URLs",
                max(each_run.beyond_mb for each_run in runs if each_run.place == "files"),
                MEMORY_MB,
                "{:.0f}",
            ),
        ],
        tables=[
            Table(
                ("", "lines", "seconds", "a second", "peak MB", "filter MB"),
                [
                    (
                        each_run.what,
                        f"{each_run.lines:,}",
                        f"{each_run.secs:.1f}",
                        f"{each_run.lines / each_run.secs:,.0f}",
                        f"{each_run.peak_mb:.0f}",
                        f"{each_run.filter_mb:.1f}",
                    )
                    for each_run in [seen, *runs]
                ],
            )
        ],
        notes=(
            "Most of the time of a URL that is not plain is its fingerprint: 15 to 20 µs. Server "
            "and command share the machine's processors.\n"
            "Into Redis, the memory has a mirror of the filter in it."
        ),
    )


def _checks_of_plain(runs: Sequence[_Run], few: int) -> list[Check]:
    return [
        at_most(
            f"seconds for {few:,} plain URLs, {place}, the slower of import and check",
            max(each_run.secs for each_run in runs if each_run.place == place),
            limit,
            "{:.1f}",
        )
        for place, limit in SECS_FOR_PLAIN_URLS.items()
    ]


def _from_files(path: Path, few: int) -> list[_Run]:
    plain, other = (few, "import", "urls.txt"), (few, "import", "other.txt")
    check = (few, "check", "plain", "urls.txt", "--seen")
    return [
        _run(path, "plain URLs into files", *plain, "plain", place="files"),
        _run(path, "check plain URLs", *check, place="files"),
        _run(path, "other URLs into files", *other, "other"),
    ]


def _in_redis(path: Path, few: int, program: str) -> list[_Run]:
    name = program.capitalize()
    with Server(program) as server:
        place = f"{server.url}#imported:bloom"
        record = ("import", "urls.txt", place)
        check = ("check", place, "urls.txt", "--seen")
        return [
            _run(path, f"plain URLs into {name}", few, *record, place=name),
            _run(path, f"check plain URLs in {name}", few, *check, place=name),
        ]


def _run(path: Path, what: str, lines: int, *arguments: str, place: str = "") -> _Run:
    # The kernel counts the process that starts another one with it: so from a small one.
    secs, peak = in_fresh_process(TIMEOUT_SECS, _measured, path, arguments)
    own = [argument for argument in arguments if (path / argument).is_dir()]
    size = sum(file.stat().st_size for name in own for file in (path / name).glob("bloom.sqlite"))
    return _Run(what, lines, secs, peak / 1e6, size / 1e6, place)


def _measured(path: Path, arguments: tuple[str, ...]) -> tuple[float, int]:
    begun = time.perf_counter()
    subprocess.run(
        [str(Path(sys.executable).with_name("scrapy")), "bloom", *arguments],
        cwd=path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_SECS,
        check=True,
    )
    secs = time.perf_counter() - begun
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return secs, peak
