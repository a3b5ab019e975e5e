"""Memory per recorded fingerprint, with all of them recorded."""

import gc
import tempfile
from pathlib import Path

from benchmarks.shared import samples
from benchmarks.shared.machine import in_fresh_process, resident_bytes
from benchmarks.shared.report import Section, Table, at_least
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.generations.policy import Policy

TIMES_LESS = 20
TIMEOUT_SECS = 600


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    count = 100_000 if quick else 10_000_000
    with tempfile.TemporaryDirectory() as directory:
        ours = in_fresh_process(TIMEOUT_SECS, _filter_growth, Path(directory), count)
    scrapys = in_fresh_process(TIMEOUT_SECS, _set_growth, count)
    return Section(
        title="Memory",
        method=(
            f"Growth of the whole process (RSS) while {count:,} different fingerprints of 20 bytes "
            "are recorded: by the backend of the default settings, a filter in a file, made for "
            "as many at error rate 1e-6; and in a set of bytes, as RFPDupeFilter keeps them. Each "
            "in a fresh process; the fingerprints are made one by one and kept by nobody else."
        ),
        checks=[at_least("times less memory than the set", scrapys / ours, TIMES_LESS)],
        tables=[
            Table(
                ("", "MB", "bytes per fingerprint"),
                [
                    ("LocalBackend", f"{ours / 1e6:,.1f}", f"{ours / count:.2f}"),
                    ("set of bytes", f"{scrapys / 1e6:,.1f}", f"{scrapys / count:.2f}"),
                ],
            )
        ],
        notes=(
            "RSS counts the pages of the mapped file, and all of them have been touched. The "
            "system can take them back without swap space, unlike the set's.\n"
            "A set doubles its table at certain sizes; 10,000,000 is just before such a step, and "
            "so is a good case for the set."
        ),
    )


def _filter_growth(directory: Path, count: int) -> int:
    gc.collect()
    before = resident_bytes()
    backend = LocalBackend(directory, Policy(expected=count, error_rate=1e-6))
    backend.open()
    backend.begin()
    for fingerprint in samples.fingerprints(0, count):
        backend.add(fingerprint)
    growth = resident_bytes() - before
    backend.close()
    return growth


def _set_growth(count: int) -> int:
    gc.collect()
    before = resident_bytes()
    seen: set[bytes] = set()
    for fingerprint in samples.fingerprints(0, count):
        seen.add(fingerprint)
    return resident_bytes() - before
