"""Lists of URLs that commands read: their formats, what is no URL in them, what is no list."""

import gzip
import json
import os
import select
import subprocess
from pathlib import Path

import pytest

from scrapy_bloom.commands.shared.lists import RequestList
from scrapy_bloom.exceptions import StorageError
from tests.support.cli import SCRAPY, bloom
from tests.support.workspace import fingerprints, make_filter, urls, write_urls


def write_jl(path: Path, of: list[str], field: str = "url") -> Path:
    """As Scrapy exports items."""
    path.write_text(
        "".join(json.dumps({"title": "ü,\n", field: url}) + "\n" for url in of), "utf-8-sig"
    )
    return path


def test_every_format_in_the_commands(tmp_path: Path) -> None:
    """The same URLs each time: what the first import records, all others find."""
    write_jl(tmp_path / "items.jl", urls(range(300)))
    ran = bloom("import", "items.jl", "filter", "--json", cwd=tmp_path)
    assert (ran.status, ran.err) == (0, "")
    assert ran.json == {"read": 300, "new": 300, "skipped": 0}
    mixed = write_jl(tmp_path / "j", urls(range(250, 300)))
    mixed.write_text(mixed.read_text() + "".join(f"{url}\n" for url in urls(range(300, 400))))
    lists = {
        "json lines": [write_jl(tmp_path / "b.jl", urls(range(250, 400)), "link"), "--field=link"],
        "text": [write_urls(tmp_path / "f.txt", urls(range(250, 400)))],
        "text with comments": [
            write_urls(tmp_path / "g", ["#" + 20_000 * "x", "", *urls(range(250, 400))])
        ],
        "json lines under another name": [write_jl(tmp_path / "i.txt", urls(range(250, 400)))],
        "one or the other": [mixed],
    }
    for name, arguments in lists.items():
        ran = bloom("check", "filter", *arguments, "--json", cwd=tmp_path)
        assert ran.status == 0, (name, ran)
        assert ran.json == {"read": 150, "new": 100, "seen": 50, "skipped": 0}, name
    new = bloom("check", "filter", "i.txt", cwd=tmp_path)
    assert new.out.split() == urls(range(300, 400))
    stdin = (tmp_path / "i.txt").read_text()
    assert bloom("check", "filter", "-", cwd=tmp_path, stdin=stdin).out == new.out
    ran = bloom("import", "b.jl", "filter", "--field", "link", "--json", cwd=tmp_path)
    assert (ran.json["read"], ran.json["new"]) == (150, 100)


ARRAY = "jq -c '.[]' items.json > items.jl"
TABLE = "csvjson --stream items.csv > items.jl"
NO_LISTS = {
    "items.jl": (
        b'{"title": "x", "link": "https://shop.example/1"}\n',
        "its fields: 'title', 'link'",
    ),
    "packed.gz": (gzip.compress(b"https://shop.example/1"), "line 1: 'utf-8' codec can't decode"),
    "lines.json": (b'[\n{"url": "https://shop.example/1"}\n]\n', ARRAY),
    "one-line": (b"\xef\xbb\xbf[" + 2 * (1 << 24) * b" ", ARRAY),
    "empty.json": (b"[]", ARRAY),
    "items.csv": (b"https://shop.example/1,title\n", TABLE),
    "table": (b"title,url\nx,https://shop.example/1\n", TABLE),
    "long": (b"https://shop.example/" + b"x" * (1 << 20), "its URL is longer than 1,048,576 c"),
    "endless": (b"x" * (1 << 25), "line 1 is longer than 16,777,216 bytes"),
    "text": (b"my list\nhttps://shop.example/1\n", "line 1: Missing scheme, such as https://"),
}


@pytest.mark.parametrize("name", NO_LISTS)
def test_what_is_no_list_of_urls_changes_nothing(name: str, tmp_path: Path) -> None:
    content, message = NO_LISTS[name]
    (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    ran = bloom("import", name, "new", cwd=tmp_path)
    assert message in ran.error
    assert ran.err.count("\n") == 1
    assert "\\x" not in ran.err
    assert not ran.out
    assert sorted(tmp_path.rglob("*")) == before


def read(path: Path) -> tuple[list[bytes], RequestList[bytes]]:
    found = RequestList([os.fspath(path)], lambda url, _: url.encode())
    return list(found), found


@pytest.mark.parametrize(
    "line",
    [
        '{"url": ' + "[" * 100_000,
        '{"url": ',
        "{}",
        "null",
        '{"url": ["https://shop.example/"]}',
        '{"url": "/relative"}',
        '{"url": "https://shop.example/\\nhttps://shop.example/2"}',
        '{"url": "https://shop.example/\\ud800"}',
        '{"url": ' + "9" * 10_000 + "}",
        '{"url": "https://shop.example/1", "meta": []}',
        '{"url": "https://shop.example/1", "priority": true}',
        "\x00\x01",
        "plain",
    ],
    ids=range(13),
)
def test_json_lines_without_a_url(line: str, tmp_path: Path) -> None:
    good = json.dumps({"url": "https://shop.example/1"})
    path = tmp_path / "items.jl"
    path.write_text(f"{good}\n\n{line}\n{good}\n{line}")
    found, reader = read(path)
    assert found == [b"https://shop.example/1"] * 2
    assert reader.skipped == 2
    assert reader.first_skipped.startswith("line 3: ")
    assert reader.first_skipped.isprintable()
    assert len(reader.first_skipped) < 250
    path.write_text(f"{line}\n{good}\n")
    with pytest.raises(
        StorageError, match="items.jl, line 1: .*; a list has on each line a URL, or"
    ):
        read(path)


def test_a_line_is_answered_when_it_comes(tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(5))))
    with subprocess.Popen(
        [SCRAPY, "bloom", "check", "filter", "-"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            for url in urls(range(3, 9)):
                process.stdin.write(f"{url}\n".encode())
                process.stdin.flush()
                if url in urls(range(5, 9)):
                    assert select.select([process.stdout], [], [], 60)[0]
                    assert process.stdout.readline().decode() == f"{url}\n"
        finally:
            process.stdin.close()
            process.wait(60)
