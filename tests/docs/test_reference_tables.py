"""The tables of the documents: their figures are computed again."""

import json
import math
import re

from scrapy_bloom.filters.sizing import (
    block_error_rate,
    choose_geometry,
    expected_false_positives,
)
from scrapy_bloom.redis.backend import MAX_MIRROR_BYTES
from scrapy_bloom.redis.layout import CHUNK_BLOCKS
from tests.support.documents import ROOT, page, section


def size(nbytes: float) -> str:
    mib = nbytes / 2**20
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def test_the_table_of_sizes_in_redis() -> None:
    table = page("redis.md")
    rows = re.findall(r"^\| 10\^(\d+) \| (.*?) \|$", table, re.MULTILINE)
    assert [int(exponent) for exponent, _ in rows] == [7, 8, 9, 10]
    for exponent, cells in rows:
        geometry = choose_geometry(10 ** int(exponent), 5e-10)
        nbytes, keys, mirror, memory = cells.split(" | ")
        assert nbytes == size(geometry.nbytes)
        assert keys == f"{-(-geometry.num_blocks // CHUNK_BLOCKS):,}"
        assert mirror == (nbytes if geometry.nbytes <= MAX_MIRROR_BYTES else "none")
        assert memory == size(2 * geometry.nbytes)  # half of it is free


def test_the_table_of_sizes() -> None:
    text = page("sizing.md")
    rows = dict(re.findall(r"^\| (\d+ [mb]illion) \| (.*?) \|$", text, re.MULTILINE))
    units = {"million": 10**6, "billion": 10**9}
    assert len(rows) == 6
    for name, cells in rows.items():
        number, unit = name.split()
        n = int(number) * units[unit]
        sizes = [size(choose_geometry(n, p / 2).nbytes) for p in (1e-4, 1e-6, 1e-9)]
        *ours, default = cells.split(" | ")
        assert ours == sizes, name
        assert default == size(91 * n)


def test_the_table_of_expected_losses() -> None:
    text = page("sizing.md")
    rows = re.findall(r"^\| (1e-\d) \| ([\d.]+) \| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for rate, bits, cells in rows:
        error_rate = float(rate) / 2  # a filter that may grow keeps the other half
        shown = []
        for exponent in (6, 7, 8, 9):
            geometry = choose_geometry(10**exponent, error_rate)
            lost = expected_false_positives(geometry.num_blocks, geometry.num_hashes, 10**exponent)
            shown.append(f"{lost:,.0f}" if lost >= 10 else f"{lost:.1g}")
        assert cells.split(" | ") == shown
        assert bits == f"{choose_geometry(10**8, error_rate).num_bits / 1e8:.1f}"


def test_the_table_of_two_lists() -> None:
    rows = re.findall(r"^\| (1e-\d+) \| (.*?) \|$", section("Two lists"), re.MULTILINE)
    assert len(rows) == 5
    for rate, cells in rows:
        num_blocks, num_hashes = geometry = choose_geometry(10**8, float(rate) / 2)
        wrong = 10**8 * block_error_rate(num_blocks, num_hashes, 10**8)
        shown = f"{wrong:,.0f}" if wrong >= 10 else f"{wrong:.1g}"
        assert cells.split(" | ") == [f"{geometry.nbytes / 1e6:.0f}", shown]


def test_the_bits_in_the_comparison() -> None:
    text = page("comparison.md")
    (cells,) = re.findall(r"^\| bits per request, at 1e-6 \| (.*?) \|$", text, re.MULTILINE)
    *others, ours = cells.split(" | ")
    classic = -math.log(1e-6) / math.log(2) ** 2  # as measured with each of the three
    assert others == [f"{classic:.1f}"] * 3
    alone, growing = (choose_geometry(10**7, p).num_bits / 1e7 for p in (1e-6, 5e-7))
    assert ours.startswith(f"{alone:.1f}; {growing:.1f} ")
    own = f"{choose_geometry(10**7, 5e-10).nbytes / 1e7:.1f}, "
    (cells,) = re.findall(r"^\| bytes per request, at 1e-9 \| (.*?) \|$", text, re.MULTILINE)
    assert [word.startswith(own) for word in cells.split(" | ")] == 4 * [False] + 2 * [True]


def test_the_table_of_times_is_that_of_the_benchmark() -> None:
    kept = json.loads((ROOT / "benchmarks/results/request.json").read_text("utf-8"))
    ours, other, *_ = (table["rows"] for table in kept["section"]["tables"])
    parameters = ("1 parameter", "2 parameters", "3 parameters")
    lines = {
        "plain URL": (ours, ("plain",)),
        "URL with 1 to 3 parameters": (ours, parameters),
        "URL that w3lib has to canonicalize": (ours, ("outside",)),
        "other fingerprinter": (other, ("plain", *parameters, "outside")),
    }
    for name, (rows, kinds) in lines.items():
        cells = []
        for request in ("new", "duplicate", "repeated link"):
            ratios = [row[5] for row in rows if row[0] in kinds and row[1] == request]
            shown = [f"{float(ratio):.2f}" for ratio in (min(ratios), max(ratios))]
            cells.append(" to ".join(dict.fromkeys(shown)))
        assert f"| {name} | {' | '.join(cells)} |" in page("faq.md"), cells


def test_how_far_one_server_goes_is_that_of_the_benchmark() -> None:
    kept = json.loads((ROOT / "benchmarks/results/server.json").read_text("utf-8"))
    valkey, *_ = (table["rows"] for table in kept["section"]["tables"])
    text = section("How far one server goes")
    _, measured, computed = valkey
    for _, pending, recorded, time, duplicate, *_, memory in (measured, computed):
        assert f" | {pending} | {recorded} | {time} µs | {duplicate} µs | {memory} |" in text
    assert f"{measured[7]} bytes per recorded request and {measured[8]} bytes per pending" in text
    assert f"{measured[5]} pages per second at 100 million requests, or {computed[5]} at" in text
    assert f"one server does {computed[6]} pages per second at ten billion requests" in text


def test_the_table_of_growth() -> None:
    million = 10**6
    for n in (30, 32):  # filters for 1, 2, 4 ... million requests, each with half of the rate
        generations = [choose_geometry(million << i, 5e-10 / 2**i) for i in range(n.bit_length())]
        sized, grown = (
            choose_geometry(n * million, 5e-10).nbytes,
            sum(g.nbytes for g in generations),
        )
        cells = f"{n} times as many requests as expected | {size(sized)} | {size(grown)} |"
        assert cells in page("sizing.md"), cells
