"""`scrapy bloom import` and `check`: time and memory for lists of millions."""

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import samples, servers
from benchmarks.shared.machine import in_fresh_process
from benchmarks.shared.report import Section, Table, at_most

SECS_FOR_A_MILLION = 60.0
MEMORY_MB = 100.0
TIMEOUT_SECS = 600

_KEY = "imported:bloom"
_SCRAPYS = "REQUEST_FINGERPRINTER_CLASS=scrapy.utils.request.RequestFingerprinter"


@dataclass(frozen=True)
class _Run:
    """One command: what it does, how many lines it read, and what it took."""

    what: str
    lines: int
    secs: float
    peak_mb: float
    filter_mb: float

    @property
    def beyond_mb(self) -> float:
        return self.peak_mb - self.filter_mb


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    few, many = (2000, 5000) if quick else (1_000_000, 10_000_000)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        seen, runs = _from_files(path, few, many)
        shared = [each for name in servers.programs() for each in _in_redis(path, few, name)]
    runs += shared
    return Section(
        title="Importing and checking lists",
        method=(
            f"`scrapy bloom import` of a requests.seen with {many:,} binary records and of "
            f"{few:,} URLs of 80 to 96 characters, into files at error rate 1e-6 and into Redis; "
            f"`check` of as many URLs; and `import` of a set as scrapy-redis keeps it. Each "
            "command in a process of its own, timed from outside with the start of Python and "
            "Scrapy; memory is the highest of the process (RSS), with Python and Scrapy, "
            "less the size of the filter."
        ),
        checks=[
            at_most(
                f"seconds for {few:,} lines, the slowest",
                max(each.secs for each in runs if each.lines == few),
                SECS_FOR_A_MILLION,
                "{:.1f}",
            ),
            at_most(f"MB beyond the filter, {many:,} records", seen.beyond_mb, MEMORY_MB, "{:.0f}"),
        ],
        tables=[
            Table(
                ("", "lines", "seconds", "a second", "peak MB", "filter MB"),
                [
                    (
                        each.what,
                        f"{each.lines:,}",
                        f"{each.secs:.1f}",
                        f"{each.lines / each.secs:,.0f}",
                        f"{each.peak_mb:.0f}",
                        f"{each.filter_mb:.1f}",
                    )
                    for each in [seen, *runs]
                ],
            )
        ],
        notes=(
            "Most of the time of a URL is its fingerprint: 15 to 20 µs. Server and command share "
            "the machine's processors.\n"
            "Into Redis, the memory has a mirror of the filter in it."
        ),
    )


def _from_files(path: Path, few: int, many: int) -> tuple[_Run, list[_Run]]:
    with (path / "requests.seen").open("wb") as file:
        file.writelines(b"\0\x14" + each for each in samples.fingerprints(0, many))
    with (path / "urls.txt").open("w") as text:
        text.writelines(f"{samples.url(number)}\n" for number in range(few))
    seen = _run(path, "requests.seen into files", many, "import", "requests.seen", "seen")
    return seen, [
        _run(path, "URLs into files", few, "import", "urls.txt", "urls"),
        _run(path, "check URLs", few, "check", "urls", "urls.txt", "--seen"),
    ]


def _in_redis(path: Path, few: int, name: str) -> list[_Run]:
    with servers.running(servers.programs()[name]) as server:
        pipeline = server.client().pipeline(transaction=False)
        for number, each in enumerate(samples.fingerprints(0, few), 1):
            pipeline.sadd("old:dupefilter", each.hex())
            if number % 10_000 == 0 or number == few:
                pipeline.execute()
        place = (server.url, "--key", _KEY)
        from_set = ("--source-key", "old:dupefilter", "-s", _SCRAPYS)
        return [
            _run(path, f"URLs into {name}", few, "import", "urls.txt", *place),
            _run(path, f"check URLs in {name}", few, "check", server.url, "urls.txt", *place[1:]),
            _run(path, f"set in {name} into files", few, "import", server.url, name, *from_set),
        ]


def _run(path: Path, what: str, lines: int, *arguments: str) -> _Run:
    # The kernel counts the process that starts another one with it: so from a small one.
    secs, peak = in_fresh_process(TIMEOUT_SECS, _measured, path, arguments)
    own = [each for each in arguments if (path / each).is_dir()]
    size = sum(each.stat().st_size for name in own for each in (path / name).glob("*.bloom"))
    return _Run(what, lines, secs, peak / 1e6, size / 1e6)


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
    return secs, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
