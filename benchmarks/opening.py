"""Resuming a paused job: what its duplicate filter costs before the first request."""

import gc
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from scrapy import Request
from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.utils.request import fingerprint

from benchmarks.shared import samples
from benchmarks.shared.machine import in_fresh_process, resident_bytes
from benchmarks.shared.report import Section, Table, at_least, at_most, quartiles
from scrapy_bloom import BloomDupeFilter

TIMES_FASTER = 100
GROWTH_MB = 5.0
TIMEOUT_SECS = 300
LAST_URL = "https://www.shop.example/the-last-one"


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    count, repetitions = (20_000, 1) if quick else (10_000_000, 5)
    ours, scrapys = [], []
    with tempfile.TemporaryDirectory() as directory:
        our_job, scrapys_job = Path(directory, "ours"), Path(directory, "scrapys")
        _pause_ours(our_job, count)
        _pause_scrapys(scrapys_job, count)
        for _ in range(repetitions):
            ours.append(in_fresh_process(TIMEOUT_SECS, _resume, BloomDupeFilter, our_job))
            scrapys.append(in_fresh_process(TIMEOUT_SECS, _resume, RFPDupeFilter, scrapys_job))
    our_secs, our_growth = zip(*ours, strict=True)
    scrapys_secs, scrapys_growth = zip(*scrapys, strict=True)
    return Section(
        title="Resuming a paused job",
        method=(
            f"`from_crawler` and `open()` on a job that was paused with {count:,} requests "
            f"recorded: our filter, made for {count:,} requests at error rate 1e-6, and Scrapy's "
            f"`requests.seen`. In turn, {repetitions} of each, each in a fresh process that "
            "has imported Scrapy and made the crawler before. Memory is how much the process (RSS) "
            "grew meanwhile."
        ),
        checks=[
            at_least(
                "times faster than RFPDupeFilter",
                median(scrapys_secs) / median(our_secs),
                TIMES_FASTER,
                "{:,.0f}",
            ),
            at_most("growth of memory, MB", median(our_growth), GROWTH_MB, "{:.2f}"),
        ],
        tables=[
            Table(
                ("figure", "lowest", "25 %", "median", "75 %", "highest"),
                [
                    _row("BloomDupeFilter, ms", [1000 * secs for secs in our_secs], "{:,.1f}"),
                    _row("RFPDupeFilter, ms", [1000 * secs for secs in scrapys_secs], "{:,.1f}"),
                    _row("BloomDupeFilter, MB", our_growth, "{:,.2f}"),
                    _row("RFPDupeFilter, MB", scrapys_growth, "{:,.1f}"),
                ],
            )
        ],
        notes=(
            "The files were written shortly before, so the system still has them in its memory; "
            "from a cold disk RFPDupeFilter has all of its file to read, and BloomDupeFilter the "
            "figures of the filter.\n"
            "Our filter's blocks come into memory as requests touch them; see the next benchmark "
            "for the memory with all of them there.\n"
            "RFPDupeFilter has the file's content in memory too while it loads; its peak is "
            "higher than the growth shown, which is what remains."
        ),
    )


def _pause_ours(job_dir: Path, count: int) -> None:
    dupefilter = BloomDupeFilter.from_crawler(
        samples.crawler(job_dir, BLOOM_EXPECTED_REQUESTS=count)
    )
    dupefilter.open()
    for recorded in samples.fingerprints(0, count - 1):
        dupefilter.backend.add(recorded)
    dupefilter.backend.add(fingerprint(Request(LAST_URL)))
    dupefilter.close("shutdown")


def _pause_scrapys(job_dir: Path, count: int) -> None:
    """Write what Scrapy 2.19 writes: each fingerprint behind its length, 2 bytes, big-endian."""
    job_dir.mkdir()
    with (job_dir / "requests.seen").open("wb") as file:
        for recorded in samples.fingerprints(0, count - 1):
            file.write(b"\0\x14" + recorded)
        file.write(b"\0\x14" + fingerprint(Request(LAST_URL)))


def _resume(kind: type[BaseDupeFilter], job_dir: Path) -> tuple[float, float]:
    """Seconds that it took to open the filter, and megabytes by which this process grew."""
    # The filter is full, as it is meant to be here, and would say so.
    logging.getLogger("scrapy_bloom").setLevel(logging.ERROR)
    crawler = samples.crawler(job_dir)
    gc.collect()
    before = resident_bytes()
    begun = perf_counter()
    dupefilter = kind.from_crawler(crawler)
    dupefilter.open()
    secs = perf_counter() - begun
    growth = resident_bytes() - before
    assert dupefilter.request_seen(Request(LAST_URL)), "the filter is not the one that was paused"
    dupefilter.close("shutdown")
    return secs, growth / 1e6


def _row(name: str, values: Sequence[float], form: str) -> Sequence[str]:
    return (name, *map(form.format, (min(values), *quartiles(values), max(values))))
