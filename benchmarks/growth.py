"""Far beyond the expected number of requests: time, space and errors."""

import gc
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, at_most
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.filters.sizing import choose_geometry
from scrapy_bloom.generations.policy import Policy

ERROR_RATE = 1e-3
TIMES_SLOWER = 3.0
TIMES_LARGER = 1.8


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
    size = status.nbytes / choose_geometry(total, ERROR_RATE).nbytes
    ours, theirs = (sum(values) / len(values) for values in zip(*micros, strict=True))
    return Section(
        title="Growth",
        method=(
            f"A filter for {expected:,} requests at error rate {ERROR_RATE:g}, of which "
            f"{total:,} are recorded, beside one that was made for {total:,}. Both in files; "
            "`add` of new fingerprints, in turn for each thirtieth part. Then "
            f"{queries:,} fingerprints that were never added."
        ),
        checks=[
            at_most(
                "time of a new request, to that with one generation", ours / theirs, TIMES_SLOWER
            ),
            at_most("space, to that of one generation", size, TIMES_LARGER),
            at_most("measured error rate", wrong / queries, ERROR_RATE, "{:.2e}"),
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
