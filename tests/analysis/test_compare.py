"""`scrapy bloom compare`, run as a user does."""

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.cli import bloom

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def urls(tmp_path: Path) -> Path:
    path = tmp_path / "urls.txt"
    path.write_bytes(b"".join(b"https://example.com/\xff/%d\n" % (n % 3000) for n in range(4000)))
    return path


SMALL = ["--bitmap-bits", "30k", "--bloom-bits", "14_425", "--bloom-hashes", "3"]


def test_tables(urls: Path) -> None:
    ran = bloom("compare", urls, *SMALL, cwd=urls.parent)
    assert (ran.status, ran.err) == (0, "")
    assert "\x1b" not in ran.out
    first, last = ran.out.split("\nIn the end\n")
    title, head, *rows = first.splitlines()
    assert title == "New URLs taken for seen ones, so far"
    assert head.split("  ", 1)[0] == "URLs read"
    assert len(rows) == 10
    assert rows[-1].split()[:2] == ["4,000", "3,000"]
    assert rows[6].split()[:2] == ["2,800", "2,800"]
    # The figures at the tables' ends are the same ones.
    head, *memories = last.splitlines()
    assert " ".join(head.split()) == "memory of size bytes/URL wrongly seen % theory %"
    names = ["exact set", "MD5 set", "bitmap", "Bloom filter", "this package"]
    assert [line[: len(name)] for line, name in zip(memories, names, strict=True)] == names
    wrong, per_cent, theory = memories[2].split()[-3:]
    assert f" {wrong} ({per_cent} %)" in rows[-1]
    assert float(per_cent) == pytest.approx(4.84, abs=1.5)
    assert theory == "4.84"
    assert "30,000 bits, 1 hash " in memories[2]
    assert "14,425 bits, 3 hashes" in memories[3]


def test_json(urls: Path) -> None:
    ran = bloom("compare", urls, "--json", *SMALL, "--error-rate", "0.1%", cwd=urls.parent)
    assert (ran.status, ran.err) == (0, "")
    figures = ran.json
    assert (figures["urls"], figures["different"], figures["error_rate"]) == (4000, 3000, 0.001)
    assert [row["read"] for row in figures["rows"]] == list(range(400, 4001, 400))
    exact, md5, bitmap, classic, ours = figures["contestants"]
    assert exact["bytes"] > md5["bytes"] > ours["bytes"] > 0
    assert (bitmap["bytes"], classic["bytes"]) == (3750, 1804)
    assert bitmap["theory_per_cent"] == pytest.approx(4.837, abs=0.001)
    assert classic["theory_per_cent"] == pytest.approx(2.998, abs=0.001)
    for each in figures["contestants"]:
        row = figures["rows"][-1]
        assert each["wrongly_seen"] == row["wrongly_seen"][each["name"]]
        assert each["per_cent"] == row["per_cent"][each["name"]] == each["wrongly_seen"] / 30
        assert each["bytes_per_url"] == each["bytes"] / 3000
        spread = each["theory_wrongly_seen"] ** 0.5
        assert each["wrongly_seen"] == pytest.approx(
            each["theory_wrongly_seen"], abs=5 * spread + 1
        )


def test_the_error_rate_of_the_settings(urls: Path) -> None:
    def size(*more: str) -> int:
        ran = bloom("compare", urls, "--json", *more, cwd=urls.parent)
        assert ran.status == 0
        return ran.json["contestants"][-1]["bytes"]

    planned = bloom("plan", "4000", "1e-15", "--json", cwd=urls.parent).json[0]["bytes"]
    assert size("-s", "BLOOM_ERROR_RATE=1e-15") == planned > size("--error-rate", "1e-3")


def test_fewer_lines_than_ten(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("http://a/\nhttp://b/\n\nhttp://a/\n")
    ran = bloom("compare", "urls", "--json", cwd=tmp_path)
    assert [(row["read"], row["different"]) for row in ran.json["rows"]] == [(1, 1), (2, 2), (3, 2)]


def test_a_picture(urls: Path) -> None:
    picture = urls.with_name("compare.PNG")
    ran = bloom("compare", urls, "--plot", picture, cwd=urls.parent)
    assert ran.status == 0
    assert ran.err == f"The picture is in {picture}\n"
    drawn = picture.read_bytes()
    assert drawn.startswith(PNG)
    assert len(drawn) > 20_000
    again = bloom("compare", urls, "--plot", picture, cwd=urls.parent)
    assert again.error.endswith(f"{picture} exists already; add --overwrite to replace it")
    assert again.out == ""
    picture.write_bytes(b"old")
    assert bloom("compare", urls, "--plot", picture, "--overwrite", cwd=urls.parent).status == 0
    assert picture.read_bytes() == drawn


def test_a_drawing(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("http://a/\n")
    ran = bloom("compare", "urls", "--plot", "one.svg", "--json", cwd=tmp_path)
    assert ran.json["different"] == 1
    assert ET.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, told in [
        ("missing", "missing can't be read: No such file or directory; give a file of URLs"),
        ("directory", "directory can't be read: Is a directory; give a file of URLs"),
        ("x" * 300, f"{'x' * 300} can't be read: File name too long; give a file of URLs"),
        ("empty", "empty has no URLs in it: give a file of URLs"),
        ("-", "- can't be read twice, as a comparison has to; write the URLs to a file"),
        ("pipe", "pipe can't be read twice, as a comparison has to; write the URLs to a file"),
    ]:
        ran = bloom("compare", name, cwd=tmp_path, stdin="http://a/\n", limit=30)
        assert f"error: {told}" in ran.error
        assert ran.out == ""


def test_where_no_picture_can_be_written(urls: Path) -> None:
    ran = bloom("compare", urls, "--plot", "nowhere/one.png", cwd=urls.parent)
    assert "nowhere/one.png can't be written" in ran.error
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bitmap-bits", "0"], "'0' is no number of bits; allowed is a whole number from 1"),
        (["--bloom-bits", "1.5"], "'1.5' is no number of bits"),
        (
            ["--bloom-hashes", "65"],
            "'65' is no number of hashes; allowed is a whole number from 1 ",
        ),
        (["--bloom-hashes", "-1"], "'-1' is no number of hashes"),
        (["--error-rate", "2"], "'2' is no error rate"),
        (
            ["--plot", "one.jpeg"],
            "--plot is one.jpeg; allowed are names that end with .png or .svg",
        ),
    ],
)
def test_usage_errors(urls: Path, arguments: list[str], told: str) -> None:
    ran = bloom("compare", urls, *arguments, cwd=urls.parent)
    assert ran.status == 2
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_help_says_what_it_takes(tmp_path: Path) -> None:
    ran = bloom("compare", "--help", cwd=tmp_path)
    assert ran.status == 0
    assert "keep all different URLs in memory" in ran.out
    assert "Examples:" in ran.out
