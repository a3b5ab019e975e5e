"""`scrapy bloom report`: its figures, its page, and how that looks in a browser."""

import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from cli import bloom
from machine import REQUIRED
from scrapy_bloom import BloomFilter, CountingBloomFilter
from scrapy_bloom.analysis.alternatives import SCRAPY_SET_BYTES
from scrapy_bloom.analysis.pictures import INK, LIMIT, OTHER, OURS, load_chart
from scrapy_bloom.analysis.report import Spread, after, course, grown, measure
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.files.reader import FilterReader
from scrapy_bloom.generations.policy import Generation, Policy
from scrapy_bloom.generations.status import FilterStatus, GenerationStatus, any_errs
from scrapy_bloom.text import size_text

PATIENCE = 90.0  # seconds that a browser may take
SALT = bytes(range(100, 116))
FINGERPRINTER = "scrapy.utils.request.RequestFingerprinter"

# A page is looked at in a browser, where there is one. CI installs it and says so.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if "chromium" in REQUIRED and not CHROMIUM:
    raise RuntimeError("chromium is missing: apt-get install chromium")


def make(place: Path | None, count: int = 0, **options: object) -> LocalBackend:
    """An open filter with so many requests offered to it."""
    backend = LocalBackend(
        place,
        **{
            "capacity": 20_000,
            "error_rate": 1e-6,
            "sync_secs": 0,
            "salt": SALT,
            "fingerprinter": FINGERPRINTER,
            "spider": "shop",
            **options,
        },
    )
    backend.open()
    backend.begin()
    for number in range(count):
        backend.add(number.to_bytes(20, "big"))
    return backend


def made(place: Path, count: int = 0, **options: object) -> FilterStatus:
    """The same, closed."""
    backend = make(place, count, **options)
    status = backend.status()
    backend.close()
    return status


def report(place: Path, *more: str) -> str:
    """The page about a filter."""
    output = place.parent / f"{place.name}.html"
    ran = bloom("report", place, "-o", output, *more, cwd=place.parent)
    assert ran.status == 0, ran
    assert ran.err == ""
    page = output.read_text("utf-8")
    assert ran.out == f"{output}: {size_text(output.stat().st_size)}\n"
    return page


def text_of(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def cards(page: str) -> dict[str, tuple[str, str]]:
    """The key figures: a value and what stands below it, by name."""
    found = re.findall(
        r'<div class="card panel"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span></div>', page
    )
    return {name: (unescape(value), text_of(more)) for name, value, more in found}


def rows(page: str) -> list[dict[str, str]]:
    """The table of generations."""
    return [
        {name: text_of(cell) for name, cell in re.findall(r'data-name="(.*?)">(.*?)</td>', row)}
        for row in re.findall(r"<tr>(<td.*?)</tr>", page, re.DOTALL)
    ]


def percent(text: str) -> float:
    return float(text.removesuffix("%").replace(",", "")) / 100


def verdict(page: str) -> tuple[str, str]:
    """Whether it is good or bad, and what it says."""
    mood, text = re.search(
        r'<section class="verdict panel (\w+)".*?>(.*?)</section>', page, re.DOTALL
    ).groups()
    return mood, text_of(text)


def contents(directory: Path) -> Mapping[str, tuple[int, bytes]]:
    return {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in directory.iterdir()}


@pytest.fixture(scope="module")
def grown_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running crawl's job directory, whose filter has grown twice."""
    place = tmp_path_factory.mktemp("grown") / "job"
    backend = make(place / "bloom", 100_000)
    yield place
    assert backend.add(b"later")
    backend.close()


@pytest.fixture(scope="module")
def grown_page(grown_job: Path) -> str:
    return report(grown_job)


def test_the_figures_are_those_of_the_filter(grown_job: Path, grown_page: str) -> None:
    found = cards(grown_page)
    table = rows(grown_page)
    with closing(FilterReader(grown_job)) as reader:
        filters = [file.filter for file in reader.files]
        assert [each.capacity for each in filters] == [20_000, 40_000, 80_000]
        nbytes = sum(each.nbytes for each in filters)
        count = sum(file.state.count for file in reader.files)
        rates = [each.estimated_error_rate for each in filters]
        assert len(table) == 3
        for number, (row, file, rate) in enumerate(zip(table, reader.files, rates, strict=True)):
            assert row["Generation"] == f"{number + 1} generation-000{number + 1}.bloom"
            assert row["Recorded"] == f"{file.state.count:,}"
            assert row["Capacity"] == f"{file.header.capacity:,}"
            assert row["Size"] == size_text(file.filter.nbytes)
            assert row["Hashes"] == str(file.filter.num_hashes)
            assert percent(row["Fill"]) == pytest.approx(file.filter.fill_ratio, rel=0.01)
            assert float(row["Error rate"]) == pytest.approx(rate, rel=0.06)
        fill = sum(each.fill_ratio * each.num_bits for each in filters)
        fill /= sum(each.num_bits for each in filters)
    assert [row["State"] for row in table] == ["complete", "complete", "open"]
    assert 99_900 <= count <= 100_000
    assert found["Recorded"] == (f"{count:,}", f"of 140,000: {100 * count / 140_000:.3g} %")
    assert found["Size"] == (size_text(nbytes), f"Scrapy's set: {size_text(count * 91)}")
    assert percent(found["Fill"][0]) == pytest.approx(fill, rel=0.01)
    value, more = found["Error rate now"]
    assert float(more.split(";")[0]) == pytest.approx(sum(rates), rel=0.06)
    assert more.endswith("asked for: 1e-6")
    assert float(re.fullmatch(r"1 in ([\d.]+) million", value)[1]) == pytest.approx(
        1e-6 / sum(rates), rel=0.06
    )
    assert float(found["Bytes per request"][0]) == pytest.approx(nbytes / count, rel=0.01)
    assert found["Bytes per request"][1].endswith(f"Scrapy's set: {SCRAPY_SET_BYTES}")
    mood, text = verdict(grown_page)
    assert mood == "good"
    assert f"With {count:,.0f}"[:9] in text
    assert "of 140,000 requests recorded, one new request in " in text
    assert "Chances are " in text
    assert "At most one in 1 million was asked for." in text


def test_the_head_says_which_filter_it_is(grown_job: Path, grown_page: str) -> None:
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", grown_page))
    assert facts["Place"] == str(grown_job)
    assert facts["Spider"] == "shop"
    assert facts["Fingerprinter"] == FINGERPRINTER
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", facts["Created"])
    assert facts["State"] == "in use by a running crawl"


def test_the_salt_is_kept_out(grown_page: str) -> None:
    assert SALT.hex() not in grown_page.lower()
    assert "salt" not in grown_page.lower()


def test_it_needs_no_other_file(grown_page: str) -> None:
    assert "http:" not in grown_page
    assert "https:" not in grown_page
    assert not re.findall(r"<(script|link|img|iframe|object|embed|image|base)\b", grown_page)
    assert not re.findall(r"\bsrc(set)?\s*=|@import|@font-face|expression\(", grown_page)
    assert {each[:1] for each in re.findall(r'href="([^"]*)"', grown_page)} <= {"#"}
    assert {each[:1] for each in re.findall(r"url\(([^)]*)\)", grown_page)} <= {"#"}


def test_no_picture_takes_a_part_of_another(grown_page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', grown_page)
    assert len(ids) == len(set(ids)) > 100
    used = re.findall(r'(?:href="|url\()#([^")]*)', grown_page)
    assert used
    assert set(used) <= set(ids)


def test_a_running_crawls_files_stay_as_they_are(tmp_path: Path) -> None:
    backend = make(tmp_path / "job/bloom", 100)  # it holds the lock
    before = contents(tmp_path / "job/bloom")
    report(tmp_path / "job")
    assert contents(tmp_path / "job/bloom") == before
    assert {each.name for each in tmp_path.iterdir()} == {"job", "job.html"}
    backend.close()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = """<script>alert(1)</script><b a='"$verdict ${mood}&amp;"""
    place = tmp_path / "a<i>&"
    made(place, 10, spider=hostile, fingerprinter=hostile + "2")
    page = report(place)
    assert "<script" not in page
    assert "<b a" not in page
    assert "a<i>" not in page
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert unescape(facts["Spider"]) == hostile
    assert unescape(facts["Fingerprinter"]) == hostile + "2"
    assert unescape(facts["Place"]) == str(place)
    assert unescape(re.search("<h1>(.*?)</h1>", page)[1]) == f"Bloom filter of {hostile}"


def test_an_empty_filter(tmp_path: Path) -> None:
    made(tmp_path / "job")
    page = report(tmp_path / "job")
    found = cards(page)
    assert found["Recorded"] == ("0", "of 20,000: 0 %")
    assert found["Error rate now"][0] == "0 %"
    assert found["Expected false drops"][0] == "0"
    assert found["Bytes per request"][0] == "none yet"
    assert verdict(page)[1].startswith("Nothing is recorded yet, so no page can be taken for seen.")
    assert "There is nothing to spread" in text_of(page)
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))["State"] == "closed"


def test_a_filter_of_one_block(tmp_path: Path) -> None:
    status = made(tmp_path / "job", 900, capacity=1000, spider="")
    assert status.generations[0].geometry.num_blocks == 1
    page = report(tmp_path / "job", "-s", "BLOOM_EXPECTED_REQUESTS=1000")
    assert "With 900 of 1,000 requests recorded" in verdict(page)[1]
    assert "There is nothing to spread" in text_of(page)
    assert "<h1>Bloom filter</h1>" in page


def test_a_filter_far_over_its_capacity(tmp_path: Path) -> None:
    status = made(tmp_path / "job", 60_000, on_full="warn", capacity=10_000, error_rate=0.01)
    page = report(tmp_path / "job", "-s", "BLOOM_ON_FULL=warn", "-s", "BLOOM_ERROR_RATE=0.01")
    mood, text = verdict(page)
    assert mood == "bad"
    assert "% of the new requests are taken for seen. " in text
    assert "requests in a filter for 10,000" in text
    assert 'set BLOOM_ON_FULL = "grow"' in text
    found = cards(page)
    lost = int(found["Expected false drops"][0].replace(",", ""))
    assert lost == pytest.approx(60_000 - status.count, rel=0.05)
    # What the next run would do with other settings.
    page = report(tmp_path / "job", "--overwrite")
    assert "the rate rises no more" in verdict(page)[1]


def test_a_filter_with_a_time_window(tmp_path: Path) -> None:
    now = 1_780_000_000.0
    window = 86_400.0
    options: dict[str, Any] = {"window_secs": window, "clock": lambda: now}
    backend = make(tmp_path / "job", 4000, **options)
    now += window / 4
    for number in range(4000, 7000):
        backend.add(number.to_bytes(20, "big"))
    backend.close()
    page = report(tmp_path / "job")
    assert [row["Recorded"] for row in rows(page)] == ["4,000", "3,000"]
    assert rows(page)[0]["Created (UTC)"] == "2026-05-28 20:26"
    assert rows(page)[1]["State"] == "open until 2026-05-29 08:26"
    assert cards(page)["Recorded"] == ("7,000", "of 10,000: 70 %")
    assert "This filter forgets" in page
    assert "none expires meanwhile" in page


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    made(tmp_path / "job", 10)
    output = tmp_path / "page.html"
    output.write_text("mine")
    command = ("report", tmp_path / "job", "-o", output)
    assert "exists already; add --overwrite" in bloom(*command, cwd=tmp_path).error
    assert output.read_text() == "mine"
    assert bloom(*command, "--overwrite", cwd=tmp_path).status == 0
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert {each.name for each in tmp_path.iterdir()} == {"job", "page.html"}


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    made(tmp_path / "job", 10)
    os.mkfifo(tmp_path / "pipe")
    told: list[str] = []
    reader = threading.Thread(
        target=lambda: told.append((tmp_path / "pipe").read_text("utf-8")), daemon=True
    )
    reader.start()
    ran = bloom("report", "job", "-o", "pipe", "--overwrite", cwd=tmp_path)
    assert ran.status == 0, ran
    reader.join(10)
    assert told[0].endswith("</html>\n")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("none", "-o", "page.html"), "none holds no filter"),
        (("job", "-o", "none/page.html"), "none/page.html can't be written"),
        (("damaged", "-o", "page.html"), "is not a filter of scrapy_bloom"),
        (("job", "-o", "page.html", "-s", "BLOOM_ON_FULL=burst"), "BLOOM_ON_FULL is 'burst'"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    made(tmp_path / "job", 10)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/generation-0001.bloom").write_bytes(b"x" * 5000)
    assert told in bloom("report", *arguments, cwd=tmp_path).error
    assert {each.name for each in tmp_path.iterdir()} == {"job", "damaged"}


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "job", 10)
    (tmp_path / "away").mkdir()
    (tmp_path / "away/matplotlib.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path / "away"))
    ran = bloom("report", "job", "-o", "page.html", cwd=tmp_path)
    assert "pip install 'scrapy-bloom[report]'" in ran.error
    assert not (tmp_path / "page.html").exists()


def figures(backend: LocalBackend) -> list[tuple[object, ...]]:
    return [
        (each.number, each.geometry, each.capacity, each.error_rate, each.count)
        for each in backend.status().generations
    ]


def generations(backend: LocalBackend) -> list[Generation]:
    return [
        Generation(
            number=each.number,
            geometry=each.geometry,
            capacity=each.capacity,
            error_rate=each.error_rate,
            count=each.count,
            created_at=1.0,
        )
        for each in backend.status().generations
    ]


class TestForecast:
    @pytest.mark.parametrize("on_full", ["grow", "warn", "close"])
    def test_it_is_what_a_crawl_does(self, on_full: str) -> None:
        options = {"capacity": 200, "error_rate": 1e-9, "on_full": on_full}
        backend = make(None, 150, **options)
        policy = Policy(expected=200, error_rate=1e-9, on_full=on_full)
        for total in (150, 200, 201, 600, 601, 3000):
            forecast = grown(generations(backend), policy, 3000 if total == 150 else total)
            if total == 150:
                at_first = forecast
                continue
            for number in range(backend.status().count, total):
                assert backend.add(number.to_bytes(20, "big"))
            assert [
                (each.number, each.geometry, each.capacity, each.error_rate, each.count)
                for each in forecast
            ] == figures(backend)
        assert [each.count for each in at_first] == [each[-1] for each in figures(backend)]
        assert len(at_first) == (4 if on_full == "grow" else 1)

    def test_more_requests_expected_than_there_is_room_for(self) -> None:
        live = generations(make(None, 150, capacity=200, on_full="warn"))
        policy = Policy(expected=5000, error_rate=1e-6, on_full="warn")
        assert [each.count for each in grown(live, policy, 9000)] == [200, 8800]

    def test_what_is_there_stays_as_it_is(self) -> None:
        live = generations(make(None, 900, capacity=200, on_full="warn", error_rate=1e-9))
        policy = Policy(expected=200, error_rate=1e-9, on_full="grow")
        assert [each.count for each in grown(live, policy, 1000)] == [900, 100]
        assert [each.count for each in grown(live, policy, 10)] == [900]
        assert [each.count for each in live] == [900]

    def test_the_course_is_that_of_the_generations_filling(self) -> None:
        backend = make(None, 700, capacity=200, error_rate=1e-9)
        points = {point.requests: point for point in course(generations(backend))}
        assert min(points) == 0
        assert max(points) == 700
        assert {200, 201, 600, 601} <= set(points)
        assert points[0].error_rate == 0
        rates = [points[each].error_rate for each in sorted(points)]
        assert rates == sorted(rates)
        again = make(None, 0, capacity=200, error_rate=1e-9)
        for number in range(700):
            if number in points:
                status = again.status()
                assert points[number].error_rate == pytest.approx(status.error_rate_now)
                # At a capacity, the next one is made by the next request.
                assert points[number].nbytes == status.nbytes
            again.add(number.to_bytes(20, "big"))

    def test_the_sum_stays_below_what_was_asked_for(self) -> None:
        policy = Policy(expected=1000, error_rate=1e-4)
        later = grown(generations(make(None, 10, capacity=1000, error_rate=1e-4)), policy, 10**6)
        assert 5e-5 < after(later, 10**6).error_rate <= 1e-4


def test_rates_add_up_as_a_status_says() -> None:
    status = make(None, 3000, on_full="warn", capacity=100, error_rate=0.1).status()
    again = FilterStatus(
        location="", generations=[GenerationStatus.of(each) for each in ()], error_rate=0.1
    )
    assert any_errs([]) == again.error_rate_now == 0
    assert any_errs([status.error_rate_now]) == pytest.approx(status.error_rate_now)
    assert any_errs([1.0, 0.5]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "capacity", "error_rate", "count"),
    [
        (BloomFilter, 60_000, 1e-6, 60_000),
        (BloomFilter, 60_000, 1e-6, 300),  # next to nothing in a block
        (BloomFilter, 60_000, 0.2, 240_000),  # few hashes: the estimate's own error counts most
        (BloomFilter, 20_000, 1e-4, 60_000),  # far over its capacity
        (CountingBloomFilter, 20_000, 1e-6, 10_000),
    ],
)
def test_the_spread_of_an_even_hash(
    kind: type[BloomFilter], capacity: int, error_rate: float, count: int
) -> None:
    """Real filters of some ten blocks, several times over, show what is expected."""
    squares = blocks = 0.0
    for salt in range(6):
        bits = kind(capacity, error_rate, salt=bytes([salt] * 16))
        for number in range(count):
            bits.add(number.to_bytes(20, "big"))
        spread = Spread(count, bits.geometry)
        for fill in bits.block_fills():
            load = -math.log1p(-fill) * 65_536 / bits.num_hashes
            squares += (load - spread.mean) ** 2
            blocks += 1
    assert math.sqrt(squares / blocks) == pytest.approx(spread.deviation, rel=0.25)
    assert spread.below(count + 1e6) == pytest.approx(bits.num_blocks)
    assert spread.below(-1e6) == pytest.approx(0)
    within = spread.below(spread.mean + spread.deviation) - spread.below(
        spread.mean - spread.deviation
    )
    assert 0.6 < within / bits.num_blocks < 0.8


def test_a_generation_is_measured_as_the_filter_measures_itself(tmp_path: Path) -> None:
    made(tmp_path, 15_000)
    done: list[int] = []
    with closing(FilterReader(tmp_path)) as reader:
        (file,) = reader.files
        measured = measure(file.figures, file.filter.block_fills(), done.append, 1000)
        assert measured.contents.fill_ratio == file.filter.fill_ratio
        assert measured.contents.error_rate == file.filter.estimated_error_rate
        assert measured.contents.requests == file.filter.approximate_count
        blocks = file.filter.num_blocks
    assert sum(measured.loads.values()) == blocks
    assert done == [1000 + blocks]
    total = sum(load * number for load, number in measured.loads.items())
    assert total == pytest.approx(15_000, rel=0.02)


def test_the_bars_are_the_blocks() -> None:
    """Each as high as it has blocks: a chart that leaves one out would lie."""
    bits = BloomFilter(60_000, 1e-6, salt=SALT)
    spread = Spread(60_000, bits.geometry)
    picture = load_chart({1900: 5, 2100: 10, 2500: 5}, spread, "1")
    bars = re.findall(rf'<path d="([^"]*)"[^>]*clip-path[^>]*fill: {OURS}; opacity', picture)
    ys = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", bar)] for bar in bars]
    heights = sorted(round(max(each) - min(each), 1) for each in ys)
    assert heights[-1] > 100
    assert heights[-1] == pytest.approx(2 * heights[-2], abs=0.2)
    assert heights[-2] == heights[-3]
    assert set(heights[:-3]) == {0}


# What only a browser knows. The page is in a frame, which may be narrower than any window.
FRAME = """<!DOCTYPE html>
<body style="margin: 0">
<iframe style="border: 0; width: WIDTHpx; height: 900px" srcdoc="PAGE"></iframe>
<script>
addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const seen = element => element.getClientRects().length > 0;
  const all = selector => [...page.querySelectorAll(selector)].filter(seen);
  const box = element => element.getBoundingClientRect();
  const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1;
  const overlaps = [];
  for (const svg of all("svg")) {
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, box(each)]);
    for (const [i, [a, p]] of texts.entries())
      for (const [b, q] of texts.slice(i + 1))
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2
            && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4) overlaps.push([a, b]);
  }
  const found = {
    width: view.innerWidth,
    needed: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    headings: all("h1, h2, h3").map(each => each.textContent),
    charts: all("svg").map(each => [each.getAttribute("aria-label"), box(each).width]),
    smallest: Math.min(...all("svg text").map(each => box(each).height).filter(each => each)),
    cut: all(".panel *").filter(each => outside(box(each), box(each.closest(".panel"))))
      .map(each => each.tagName + " " + each.textContent.slice(0, 40)),
    overlaps: overlaps,
    loaded: view.performance.getEntriesByType("resource").map(each => each.name),
  };
  document.body.replaceChildren(JSON.stringify(found));
});
</script>"""


def chromium(tmp_path: Path, *options: str) -> str:
    ended = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}", *options),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return ended.stdout


def looked_at(tmp_path: Path, page: str, width: int) -> dict[str, Any]:
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", escape(page)), "utf-8")
    dom = chromium(tmp_path, "--dump-dom", "--window-size=1400,1000", frame.as_uri())
    return json.loads(unescape(re.search("<body.*?>(.*)</body>", dom)[1]))


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [1200, 420])
def test_it_looks_right_in_a_browser(tmp_path: Path, grown_page: str, width: int) -> None:
    found = looked_at(tmp_path, grown_page, width)
    assert found["width"] == width
    assert found["needed"] <= width
    assert found["cut"] == []
    assert found["overlaps"] == []
    assert found["loaded"] == []
    assert found["smallest"] >= 10  # pixels, of a line of text
    assert found["headings"] == [
        "Bloom filter of shop",
        "Generations",
        "Error rate",
        "Memory, and how evenly it is used",
        "Size against Scrapy's set",
        *(f"Requests in each block, generation {number}" for number in (1, 2, 3)),
    ]
    assert [name for name, _ in found["charts"]] == ["Error rate", "Memory", *["Block load"] * 3]
    assert min(size for _, size in found["charts"]) > 0.4 * min(width, 1080)

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(grown_page, "utf-8")
    size = f"--window-size={width},{found['height']}"
    chromium(tmp_path, f"--screenshot={picture}", size, page.as_uri())
    pixels = (255 * image.imread(picture)[..., :3]).round().astype(int)
    assert pixels.shape[:2] == (found["height"], width)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 250  # letters have soft edges
    for colour, least in (
        ("#ffffff", 0.2),
        (OURS, 2e-3),
        (OTHER, 1e-3),
        (LIMIT, 3e-5),
        (INK, 5e-3),
    ):
        near = np.abs(pixels - [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).max(axis=2) < 48
        assert near.mean() > least, colour
