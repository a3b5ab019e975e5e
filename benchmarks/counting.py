"""What it costs that a filter can forget: the counting filter against the plain one."""

from statistics import median

from benchmarks.shared import samples
from benchmarks.shared.report import Check, Section, Table, at_most, quartiles
from benchmarks.shared.timing import timed
from scrapy_bloom import BloomFilter, CountingBloomFilter

ADD_LIMIT, DISCARD_LIMIT, SPACE_LIMIT, RATE_LIMIT = 3.0, 4.0, 4.0, 1.15
ERROR_RATES = (1e-2, 1e-4, 1e-6)
PASSES = ("add", "add again", "discard")


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    capacity, rounds = (20_000, 10) if quick else (1_000_000, 50)
    checks: list[Check] = []
    rows = []
    for p in ERROR_RATES:
        plain, counting = _measured(capacity, rounds, p)
        for what in PASSES:
            # There is no plain discard: it is compared with the plain add.
            base = plain["add" if what == "discard" else what]
            ratios = [mine / theirs for mine, theirs in zip(counting[what], base, strict=True)]
            rows.append(
                (
                    f"p = {p:g}: {what}",
                    f"{median(base):.2f}",
                    f"{median(counting[what]):.2f}",
                    *map("{:.2f}".format, quartiles(ratios)),
                )
            )
            limit = DISCARD_LIMIT if what == "discard" else ADD_LIMIT
            if what != "add again":
                name = f"{what} relative to the plain add, p = {p:g}"
                checks.append(at_most(name, median(ratios), limit, "{:.2f}"))
    checks.append(at_most("space relative to the plain filter", _space(capacity), SPACE_LIMIT))
    checks.append(_error_rate(capacity))
    return Section(
        title="Counting",
        method=(
            f"CountingBloomFilter and BloomFilter for {capacity:,} requests, filled up in {rounds} "
            "rounds of the same fingerprints: each round times both, as new ones and then again. "
            "At last the counting one discards all of them, in rounds, too, after which all of its "
            "bits are 0."
        ),
        checks=checks,
        tables=[
            Table(("figure", "plain, µs", "counting, µs", "ratio, 25 %", "median", "75 %"), rows),
        ],
    )


def _measured(
    capacity: int, rounds: int, error_rate: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Microseconds of each round, by pass, of both filters."""
    plain = BloomFilter(capacity, error_rate)
    counting = CountingBloomFilter(capacity, error_rate, salt=plain.salt)
    # Of the same bits: it tells which ones are new to both, but for false positives.
    scratch = BloomFilter(capacity, error_rate, salt=plain.salt)
    times: list[dict[str, list[float]]] = [{what: [] for what in PASSES} for _ in range(2)]
    size = capacity // rounds
    parts = [list(samples.fingerprints(number * size, size)) for number in range(rounds)]
    recorded = []
    for part in parts:
        fresh = [each for each in part if scratch.add(each)]
        recorded.append(fresh)
        for what in ("add", "add again"):
            for known, seen in zip(times, (plain, counting), strict=True):
                secs, new = timed(seen.add, fresh)
                known[what].append(secs / len(fresh) * 1e6)
                assert new == (0 if what == "add again" else len(fresh))
    for part in recorded:
        secs, gone = timed(counting.discard, part)
        assert gone == len(part)
        times[1]["discard"].append(secs / len(part) * 1e6)
    assert counting.fill_ratio == 0
    return times[0], times[1]


def _space(capacity: int) -> float:
    return max(
        CountingBloomFilter(capacity, p).nbytes / BloomFilter(capacity, p).nbytes
        for p in ERROR_RATES
    )


def _error_rate(capacity: int) -> Check:
    seen = CountingBloomFilter(capacity, 1e-3)
    for fingerprint in samples.fingerprints(0, capacity):
        seen.add(fingerprint)
    wrong = sum(fingerprint in seen for fingerprint in samples.fingerprints(capacity, capacity))
    return at_most("error rate relative to 1e-3", wrong / capacity / 1e-3, RATE_LIMIT)
