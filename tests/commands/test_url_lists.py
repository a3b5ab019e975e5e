"""Lists of URLs that commands read: their formats, what is no URL in them, what is no list."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from scrapy_bloom.commands.shared.lists import UrlList
from scrapy_bloom.exceptions import StorageError
from tests.support.cli import bloom
from tests.support.workspace import fingerprints, make_filter, urls, write_seen, write_urls


def write_jl(path: Path, of: list[str], field: str = "url") -> Path:
    """As Scrapy exports items."""
    path.write_text(
        "".join(json.dumps({"title": "ü,\n", field: url}) + "\n" for url in of), "utf-8-sig"
    )
    return path


def write_csv(path: Path, of: list[str], field: str = "url") -> Path:
    """As Scrapy exports items, with line breaks in them, and a byte order mark as others do."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["title", field])
        writer.writerows([f'a "title",\nin {number} lines', url] for number, url in enumerate(of))
    return path


def pack(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def test_every_format_in_the_commands(tmp_path: Path) -> None:
    """The same URLs each time: what the first import records, all others find."""
    pack(write_jl(tmp_path / "items.jl", urls(range(300))))
    ran = bloom("import", "items.jl.gz", "filter", "--json", cwd=tmp_path)
    assert (ran.status, ran.err) == (0, "")
    assert [ran.json[name] for name in ("read", "new", "recorded", "skipped")] == [300, 300, 300, 0]
    lists = {
        "jl": [write_jl(tmp_path / "b.jl", urls(range(250, 400)), "link"), "--field", "link"],
        "csv": [write_csv(tmp_path / "c.csv", urls(range(250, 400)), "link"), "--field=link"],
        "csv.gz": [pack(write_csv(tmp_path / "d.csv", urls(range(250, 400))))],
        "csv by its option": [write_csv(tmp_path / "e", urls(range(250, 400))), "--format", "csv"],
        "text.gz": [pack(write_urls(tmp_path / "f.txt", urls(range(250, 400))))],
        "text with comments": [
            write_urls(tmp_path / "g", ["#" + 20_000 * "x", "", *urls(range(250, 400))])
        ],
        "json lines under another name": [write_jl(tmp_path / "i.txt", urls(range(250, 400)))],
    }
    for name, arguments in lists.items():
        ran = bloom("check", "filter", *arguments, "--json", cwd=tmp_path)
        assert ran.status == 0, (name, ran)
        assert ran.json == {"read": 150, "new": 100, "seen": 50, "skipped": 0}, name
    new = bloom("check", "filter", "i.txt", cwd=tmp_path)
    assert new.out.split() == urls(range(300, 400))
    stdin = (tmp_path / "i.txt").read_text()
    assert bloom("check", "filter", "-", cwd=tmp_path, stdin=stdin).out == new.out
    ran = bloom("import", "c.csv", "filter", "--field", "link", "--json", cwd=tmp_path)
    assert (ran.json["read"], ran.json["new"]) == (150, 100)


def test_lines_that_are_no_urls(tmp_path: Path) -> None:
    """The others are read, but nobody can take that for a success."""
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))))
    lines = [*urls(range(2)), "www.shop.example/2", "/3", *urls([4])]
    write_urls(tmp_path / "urls.txt", lines)
    ran = bloom("check", "filter", "urls.txt", cwd=tmp_path)
    assert "2 lines are not URLs and were left out; the first: line 3: Missing scheme" in ran.error
    assert ran.out.split() == urls([4])
    ran = bloom("import", "urls.txt", "filter", "--json", cwd=tmp_path)
    assert "the first: line 3: Missing scheme" in ran.error
    assert [ran.json[name] for name in ("read", "new", "skipped")] == [3, 1, 2]


def test_what_is_no_list_of_urls_changes_nothing(tmp_path: Path) -> None:
    write_jl(tmp_path / "items.jl", urls(range(20)), "link")
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"\x00\x01" * 1000)[:-30])
    write_seen(tmp_path / "requests.seen", fingerprints(urls(range(9))))
    pack(tmp_path / "requests.seen")
    (tmp_path / "array.json").write_text('[\n{"url": "https://shop.example/1"}\n]\n')
    make_filter(tmp_path / "filter", [])
    before = sorted(tmp_path.rglob("*"))
    for arguments, told in (
        (["items.jl"], "line 1: it has no text in 'url' (--field); its fields: 'title', 'link'"),
        (["items.jl", "--format", "urls"], "line 1: Missing scheme, such as https://"),
        (["items.jl", "--format", "csv"], "items.jl has no column 'url' (--field); its columns"),
        (["text.gz", "--format", "urls"], "text.gz"),
        (["requests.seen.gz"], "requests.seen.gz is a requests.seen that gzip has packed"),
        (["array.json", "--format", "urls"], "line 1: Missing scheme"),
    ):
        ran = bloom("import", *arguments, "new", cwd=tmp_path)
        assert told in ran.error, arguments
        assert ran.err.count("\n") == 1
        assert "\\x" not in ran.err
        assert not ran.out
    assert sorted(tmp_path.rglob("*")) == before


def read(path: Path, **options: str) -> tuple[list[bytes], UrlList]:
    found = UrlList(path, str.encode, **options)
    return [url for batch in found.batches() for url, _ in batch], found


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"url": ',
        "{}",
        "null",
        '"https://shop.example/"',
        '{"url": null}',
        '{"url": ["https://shop.example/"]}',
        '{"url": "/relative"}',
        '{"url": "https://shop.example/\\nhttps://shop.example/2"}',
        '{"url": "https://shop.example/\\ud800"}',
        '{"url": ' + "9" * 10_000 + "}",
        '{"URL": "https://shop.example/"}',
        "\x00\x01",
        "plain",
    ],
    ids=range(14),
)
def test_json_lines_without_a_url(line: str, tmp_path: Path) -> None:
    good = json.dumps({"url": "https://shop.example/1"})
    path = tmp_path / "items.jl"
    path.write_text(f"{good}\n\n{line}\n{good}\n{line}")
    found, reader = read(path)
    assert found == [b"https://shop.example/1"] * 2
    assert reader.count() == 4
    assert reader.skipped == 2
    assert reader.first_skipped.startswith("line 3: ")
    assert reader.first_skipped.isprintable()
    assert len(reader.first_skipped) < 250
    path.write_text(f"{line}\n{good}\n")
    with pytest.raises(StorageError, match="items.jl, line 1: .*; a list has a URL on each line"):
        read(path)


def test_rows_without_a_url(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_bytes(
        b'id,url,\xe4\r\n1,https://shop.example/1,\xe4\r\n2\r\n3,"",x\r\n4,https://\xe4/,\r\n\r\n'
        b'"5\n6", https://shop.example/5 ,\r\n'
    )
    path.write_bytes(path.read_bytes() * 2)  # as a feed that a second run appends to
    found, reader = read(path)
    assert found == [b"https://shop.example/1", b"https://shop.example/5"] * 2
    assert (reader.count(), reader.skipped) == (10, 6)
    assert reader.first_skipped == "line 3: it has no column 'url'"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", b"a;url\n1;https://shop.example/\n", "no column 'url' .*; its columns: 'a;url'"),
        ("x.csv", b'url\n"' + b"x\n" * (1 << 23), "line .* is longer than 16,777,216 bytes"),
        ("x.txt", b"x" * (1 << 25), "line 1 is longer than 16,777,216 bytes"),
        ("x.txt", "https://shop.example/".encode("utf-16"), "line 1: it is not text in UTF-8"),
        ("x.txt", gzip.compress(b"https://shop.example/\n" * 9)[:-9], "cannot be read: Compressed"),
        ("x.txt", gzip.compress(b"https://shop.example/\n")[:-8] + b"x" * 8, "cannot be read: CRC"),
        ("x.txt", b"\x1f\x8b nothing of that", "cannot be read: "),
        (".", b"", "cannot be read: Is a directory"),
        ("nowhere", b"", "cannot be read: No such file"),
    ],
    ids=range(9),
)
def test_what_cannot_be_read(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(StorageError, match=told) as caught:
        read(tmp_path / name)
    assert str(caught.value).isprintable()
