"""Far beyond the expected number of requests: time, space, errors, and kills."""

import gc
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, all_of, at_most
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.generations.policy import Policy

ERROR_RATE = 1e-3
TIMES_SLOWER = 3.0
TIMES_LARGER = 1.8
KILLS = 20
TIMEOUT_SECS = 300

# Adds fingerprints from the given number on, and tells after each thousand how far it is.
RECORDER = """
import sys
from pathlib import Path
from benchmarks.shared import samples
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Policy

directory, expected, start, end = Path(sys.argv[1]), *map(int, sys.argv[2:])
backend = LocalBackend(
    directory, Policy(expected=expected, error_rate=1e-3)
)
backend.open()
backend.begin()
for number, fingerprint in enumerate(samples.fingerprints(start, end - start), start + 1):
    backend.add(fingerprint)
    if number % 1000 == 0:
        print(number, flush=True)
backend.close()
"""


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    expected = 2_000 if quick else 100_000
    total = 30 * expected
    with tempfile.TemporaryDirectory() as directory:
        growing = _opened(Path(directory, "growing"), expected, "grow")
        single = _opened(Path(directory, "single"), total, "warn")
        ratios, micros = _timed(growing, single, total)
        status = growing.status()
        queries = total // 3
        wrong = sum(fp in growing for fp in samples.fingerprints(10 * total, queries))
        for backend in (growing, single):
            backend.close()
        found = _through_kills(Path(directory, "killed"), expected, total)
    size = status.nbytes / choose_geometry(total, ERROR_RATE).nbytes
    ours, theirs = (sum(values) / len(values) for values in zip(*micros, strict=True))
    return Section(
        title="Growth",
        method=(
            f"A filter for {expected:,} requests at error rate {ERROR_RATE:g}, of which "
            f"{total:,} are recorded, beside one that was made for {total:,}. Both in files; "
            "`add` of new fingerprints, in turn for each thirtieth part. Then "
            f"{queries:,} fingerprints that were never added. Then the same once more, killed by "
            f"SIGKILL at {KILLS} random moments and opened again each time."
        ),
        checks=[
            at_most(
                "time of a new request, to that with one generation", ours / theirs, TIMES_SLOWER
            ),
            at_most("space, to that of one generation", size, TIMES_LARGER),
            at_most("measured error rate", wrong / queries, ERROR_RATE, "{:.2e}"),
            all_of(f"recorded before a kill and found at the end, of {KILLS} kills", *found),
        ],
        tables=[
            Table(
                ("figure", "value"),
                [
                    ("generations", str(len(status.generations))),
                    ("`add` with growth, µs, mean", f"{ours:.2f}"),
                    ("`add` with one generation, µs, mean", f"{theirs:.2f}"),
                    ("ratio in one part, median", f"{median(ratios):.2f}"),
                    ("ratio in the last part", f"{ratios[-1]:.2f}"),
                    ("error rate by the counts", f"{status.error_rate_now:.2e}"),
                ],
            )
        ],
        notes="The time is that of the filter alone: a request and its fingerprint take far more.",
    )


def _opened(directory: Path, capacity: int, on_full: str) -> LocalBackend:
    backend = LocalBackend(
        directory, Policy(expected=capacity, error_rate=ERROR_RATE, on_full=on_full)
    )
    backend.open()
    backend.begin()
    return backend


def _timed(
    growing: LocalBackend, single: LocalBackend, total: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """Ratios and microseconds per `add`, of each thirtieth part."""
    ratios, micros = [], []
    size = total // 30
    for part in range(30):
        fingerprints = list(samples.fingerprints(part * size, size))
        took = {}
        backends = (growing, single) if part % 2 else (single, growing)
        for backend in backends:
            add = backend.add
            gc.collect()
            begun = perf_counter()
            for fingerprint in fingerprints:
                add(fingerprint)
            took[backend] = (perf_counter() - begun) / size * 1e6
        micros.append((took[growing], took[single]))
        ratios.append(took[growing] / took[single])
    return ratios, micros


def _through_kills(directory: Path, expected: int, total: int) -> tuple[int, int]:
    """How many fingerprints are found at the end, and how many were recorded."""
    rng = random.Random(1)
    known = 0
    for target in [*sorted(rng.sample(range(total // 100, total - total // 100), KILLS)), total]:
        arguments = [os.fspath(directory), str(expected), str(known), str(total)]
        process = subprocess.Popen(
            [sys.executable, "-c", RECORDER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # each run warns of the kill before
            text=True,
        )
        assert process.stdout is not None
        with process.stdout as told:
            for line in told:
                known = int(line)
                if known >= target and target < total:
                    process.kill()
        process.wait(TIMEOUT_SECS)
    backend = _opened(directory, expected, "grow")
    found = sum(fingerprint in backend for fingerprint in samples.fingerprints(0, known))
    backend.close()
    return found, known
