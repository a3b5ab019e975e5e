"""The filter's size against the classic formula, and its error rate when it is full."""

from math import sqrt

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, at_most
from scrapy_bloom import BloomFilter
from scrapy_bloom.filters.sizing import bits_per_element, choose_geometry

SIZE_LIMIT = 1.01
RATE_LIMIT = 1.15
CAPACITIES = (10**6, 10**7, 10**8, 10**9)
ERROR_RATES = (1e-2, 1e-3, 1e-4, 1e-6)
QUERIES = {1e-2: 1_000_000, 1e-3: 1_000_000, 1e-4: 3_000_000}


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    capacity, share = (50_000, 10) if quick else (1_000_000, 1)
    sizes = {n: [_relative_size(n, p) for p in ERROR_RATES] for n in CAPACITIES}
    checks = [
        at_most("size relative to the formula, largest", max(map(max, sizes.values())), SIZE_LIMIT)
    ]
    rows = []
    for p, queries in QUERIES.items():
        asked = queries // share
        wrong = _false_positives(capacity, p, asked)
        relative = wrong / asked / p
        spread = 2 * sqrt(wrong) / asked / p
        checks.append(at_most(f"error rate relative to {p:g}", relative, RATE_LIMIT))
        rows.append(
            (
                f"{p:g}",
                f"{asked:,}",
                f"{wrong:,}",
                f"{wrong / asked:.3g}",
                f"{relative:.3f} ± {spread:.3f}",
            )
        )
    return Section(
        title="Space and error rate",
        method=(
            "Size: the filter's bits relative to the classic n ln(1/p) / (ln 2)². Error rate: a "
            f"filter for {capacity:,} requests is filled with as many, and then asked for others "
            "that were never added; relative to the rate it was made for."
        ),
        checks=checks,
        tables=[
            Table(
                ("size relative to the formula", *(f"p = {p:g}" for p in ERROR_RATES)),
                [(f"n = {n:,}", *map("{:.4f}".format, row)) for n, row in sizes.items()],
            ),
            Table(("made for", "asked", "false positives", "error rate", "relative"), rows),
        ],
        notes=(
            "± is twice the standard error of counting so many false positives. The filter's salt "
            "is random, so each run draws anew."
        ),
    )


def _relative_size(capacity: int, error_rate: float) -> float:
    num_bits = choose_geometry(capacity, error_rate).num_bits
    return num_bits / (capacity * bits_per_element(error_rate))


def _false_positives(capacity: int, error_rate: float, queries: int) -> int:
    seen = BloomFilter(capacity, error_rate)
    for fingerprint in samples.fingerprints(0, capacity):
        seen.add(fingerprint)
    return sum(fingerprint in seen for fingerprint in samples.fingerprints(capacity, queries))
