"""`scrapy bloom report`: its figures, its page, and how that looks in a browser."""

import os
import re
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from scrapy_bloom.job.reader import FilterReader
from scrapy_bloom.text import size_text
from tests.support.cli import bloom
from tests.support.crawls import SPIDER
from tests.support.jobs import PLACES, Job
from tests.support.local_filters import file_size_limit
from tests.support.reports import FINGERPRINTER, SALT, made, make, report
from tests.support.sites import ScriptedSite


def text_of(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def cards(page: str) -> dict[str, tuple[str, str]]:
    """The key figures: a value and what stands below it, by name."""
    found = re.findall(
        r'<div class="card panel"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span></div>', page
    )
    return {name: (unescape(value), text_of(more)) for name, value, more in found}


def rows(page: str) -> list[dict[str, str]]:
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


def test_the_figures_are_those_of_the_filter(grown_job: Path, grown_page: str) -> None:
    found = cards(grown_page)
    table = rows(grown_page)
    with closing(FilterReader(grown_job / "bloom.sqlite")) as reader:
        live = reader.generations
        assert [entry.capacity for entry in live] == [20_000, 40_000, 80_000]
        nbytes = sum(entry.geometry.nbytes for entry in live)
        count = sum(entry.count for entry in live)
        rates = [entry.error_rate_now for entry in live]
        assert len(table) == 3
        for number, (row, entry, rate) in enumerate(zip(table, live, rates, strict=True), 1):
            assert row["Generation"] == str(number)
            assert row["Recorded"] == f"{entry.count:,}"
            assert row["Capacity"] == f"{entry.capacity:,}"
            assert row["Size"] == size_text(entry.geometry.nbytes)
            assert row["Hashes"] == str(entry.geometry.num_hashes)
            assert percent(row["Fill"]) == pytest.approx(entry.fill_ratio, rel=0.01)
            assert float(row["Error rate"]) == pytest.approx(rate, rel=0.06)
    assert 99_900 <= count <= 100_000
    assert found["Recorded"] == (f"{count:,}", f"of 140,000: {100 * count / 140_000:.3g} %")
    assert found["Size"] == (size_text(nbytes), f"Scrapy's set: {size_text(count * 91)}")
    mood, text = verdict(grown_page)
    assert mood == "good"
    assert f"With {count:,.0f} of 140,000 requests recorded, the probability that a new" in text
    value = re.search(r"is mistaken for a duplicate is ([\d.e-]+)\. ", text)
    assert float(value[1]) == pytest.approx(sum(rates), rel=0.06)
    assert "Target: at most 1e-06." in text


def test_the_head_says_which_filter_it_is(grown_job: Path, grown_page: str) -> None:
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", grown_page))
    assert facts["Place"] == str(grown_job)
    assert facts["Spider"] == "shop"
    assert facts["Fingerprinter"] == FINGERPRINTER
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", facts["First run"])
    assert facts["State"] == "in use by a running crawl"
    assert SALT.hex() not in grown_page.lower()


def test_it_needs_no_other_file(grown_page: str) -> None:
    assert "http:" not in grown_page
    assert "https:" not in grown_page
    assert not re.findall(r"<(script|link|img|iframe|object|embed|image|base)\b", grown_page)
    assert not re.findall(r"\bsrc(set)?\s*=|@import|@font-face|expression\(", grown_page)
    assert {text[:1] for text in re.findall(r'href="([^"]*)"', grown_page)} <= {"#"}
    assert {text[:1] for text in re.findall(r"url\(([^)]*)\)", grown_page)} <= {"#"}


@pytest.mark.parametrize("where", PLACES)
def test_the_queue_of_a_crawl(where: str, tmp_path: Path) -> None:
    pages = [f"/{number}" for number in range(200)]
    with ScriptedSite({"/": [(*pages, "/bad")], "/bad": [503]}) as site:
        job = Job(where, tmp_path, site, SPIDER)
        crawls = job.hold(20)
        job.bloom("report", "-o", "page.html")
        page = (tmp_path / "page.html").read_text("utf-8")
        found = {name: value for name, (value, _) in cards(page).items()}
        counts = job.counts
        assert int(found["Pending"]) == counts["pending"] > 0
        assert int(found["In flight"]) == counts["in_flight"]
        host = {"Host": "127.0.0.1", "Pending": found["Pending"]}
        assert host in rows(page)
        job.finish(crawls)
        job.bloom("report", "-o", "page.html", "--overwrite")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert cards(page)["Failed"][0] == "1"
    assert any(
        row.get("State") == "failed"
        and row["Request"].endswith("/bad")
        and row["Runs"] == "1"
        and row["Reason"].endswith("503")
        for row in rows(page)
    )


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
    assert found["Expected false positives"][0] == "0"
    assert verdict(page)[1].startswith("Nothing is recorded yet, so there are no false positives.")
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))["State"] == "closed"


def test_a_filter_far_over_its_capacity(tmp_path: Path) -> None:
    backend = make(tmp_path / "job", capacity=10_000, error_rate=0.02)
    with file_size_limit(5000):  # so that it cannot grow
        backend.add_many([number.to_bytes(20, "big") for number in range(60_000)])
    status = backend.status()
    backend.close()
    page = report(tmp_path / "job", "-s", "BLOOM_ERROR_RATE=0.02")
    mood, text = verdict(page)
    assert mood == "bad"
    assert "If there is room for a new generation, the next run continues in it" in text
    found = cards(page)
    lost = int(found["Expected false positives"][0].replace(",", ""))
    assert lost == pytest.approx(60_000 - status.count, rel=0.05)


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    made(place, 10)
    ran = bloom("report", place, "-o", "page.html", cwd=tmp_path)
    assert ran.status == 0, ran
    page = (tmp_path / "page.html").read_text("utf-8")
    assert f"<dd>{tmp_path}/caf\\udce9</dd>" in page
    assert bloom("report", place, "-o", place / "page.html", cwd=tmp_path).status == 0
    assert (place / "page.html").stat().st_size == (tmp_path / "page.html").stat().st_size


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    made(tmp_path / "job", 10)
    output = tmp_path / "page.html"
    output.write_text("mine")
    command = ("report", tmp_path / "job", "-o", output)
    assert "exists already; add --overwrite" in bloom(*command, cwd=tmp_path).error
    assert output.read_text() == "mine"
    assert bloom(*command, "--overwrite", cwd=tmp_path).status == 0
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert {file.name for file in tmp_path.iterdir()} == {"job", "page.html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", "-o", "page.html"), "none does not exist"),
        (("job", "-o", "pipe", "--overwrite"), "pipe cannot be written"),
        (("job", "-o", "none/page.html"), "none/page.html cannot be written"),
        (("damaged", "-o", "page.html"), "damaged holds no filter"),
    ],
)
def test_an_error_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    made(tmp_path / "job", 10)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/bloom.sqlite").write_bytes(b"x" * 5000)
    assert message in bloom("report", *arguments, cwd=tmp_path).error
    assert {file.name for file in tmp_path.iterdir()} == {"job", "damaged", "pipe"}


def test_without_jinja(tmp_path: Path) -> None:
    made(tmp_path / "job", 10)
    (tmp_path / "away").mkdir()
    (tmp_path / "away/jinja2.py").write_text("import missing_part")
    away = ["env", f"PYTHONPATH={tmp_path / 'away'}"]
    ran = bloom("report", "job", "-o", "page.html", cwd=tmp_path, under=away)
    assert "Jinja2, which cannot be imported (No module named 'missing_part')" in ran.error
    assert "pip install 'jinja2>=3.1'" in ran.error
    assert not (tmp_path / "page.html").exists()
