"""Lists of URLs that commands read: their formats, what is no URL in them, what is no list."""

import csv
import gzip
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scrapy_bloom.commands.shared.lists import UrlList, _elements
from scrapy_bloom.exceptions import StorageError
from tests.support.cli import SCRAPY, bloom
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


def test_what_is_no_list_of_urls_changes_nothing(tmp_path: Path) -> None:
    write_jl(tmp_path / "items.jl", urls(range(20)), "link")
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"\x00\x01" * 1000)[:-30])
    write_seen(tmp_path / "requests.seen", fingerprints(urls(range(9))))
    pack(tmp_path / "requests.seen")
    (tmp_path / "array.json").write_text('[\n{"url": "https://shop.example/1"}\n]\n')
    make_filter(tmp_path / "filter", [])
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in (
        (["items.jl"], "line 1: it has no text in 'url' (--field); its fields: 'title', 'link'"),
        (["items.jl", "--format", "urls"], "line 1: Missing scheme, such as https://"),
        (["items.jl", "--format", "csv"], "items.jl has no column 'url' (--field); its columns"),
        (["text.gz", "--format", "urls"], "text.gz"),
        (["requests.seen.gz"], "requests.seen.gz is a requests.seen that gzip has packed"),
        (["array.json", "--format", "urls"], "line 1: Missing scheme"),
    ):
        ran = bloom("import", *arguments, "new", cwd=tmp_path)
        assert message in ran.error, arguments
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
        '{"url": ["https://shop.example/"]}',
        '{"url": "/relative"}',
        '{"url": "https://shop.example/\\nhttps://shop.example/2"}',
        '{"url": "https://shop.example/\\ud800"}',
        '{"url": ' + "9" * 10_000 + "}",
        "\x00\x01",
        "plain",
    ],
    ids=range(11),
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
    ("name", "content", "message"),
    [
        ("x.csv", b"a;url\n1;https://shop.example/\n", "no column 'url' .*; its columns: 'a;url'"),
        (
            "x.csv",
            b'url\n"' + (100 * b"x" + b"\n") * (1 << 18),
            "line .* is longer than 16,777,216 bytes",
        ),
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
def test_what_cannot_be_read(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(StorageError, match=message) as caught:
        read(tmp_path / name)
    assert str(caught.value).isprintable()


# Arrays, long records, pipes.

FEED_SPIDER = """
import scrapy
class Feed(scrapy.Spider):
    name = "feed"
    start_urls = ["data:,x"]
    custom_settings = {"FEED_EXPORT_INDENT": INDENT}
    def parse(self, response):
        for number in range(300):
            yield {"title": 'a "ü", [\\n]{}', "url": f"https://shop.example/{number}"}
"""


def feed(directory: Path, indent: str) -> Path:
    """A feed that Scrapy itself has written."""
    (directory / "feed.py").write_text(FEED_SPIDER.replace("INDENT}", f"{indent}}}"))
    path = directory / "items.json"
    command = [SCRAPY, "runspider", "feed.py", "-o", path.name, "-s", "LOG_ENABLED=0"]
    subprocess.run(command, cwd=directory, check=True, timeout=60)
    return path


@pytest.mark.parametrize("indent", ["0", "2", "None"])
def test_the_json_feed_of_a_crawl(indent: str, tmp_path: Path) -> None:
    """Also packed, on the standard input, and appended to by a second run."""
    path = feed(tmp_path, indent)
    assert path.read_bytes().lstrip().startswith(b"[")
    (tmp_path / "items.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    for number, arguments in enumerate((["items.json"], ["items.json.gz"], ["-"])):
        stdin = path.read_text()
        ran = bloom("import", *arguments, f"new{number}", "--json", cwd=tmp_path, stdin=stdin)
        assert (ran.status, ran.err) == (0, ""), arguments
        assert [ran.json[name] for name in ("read", "recorded", "skipped")] == [300, 300, 0]
    expected = bloom("check", "new0", "items.json", "--seen", cwd=tmp_path).out
    assert expected.split() == urls(range(300))
    path.write_bytes(40 * path.read_bytes())
    assert bloom("check", "new0", "items.json", "--seen", cwd=tmp_path).out == 40 * expected


def write_json(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_elements_of_an_array_without_a_url(tmp_path: Path) -> None:
    good = json.dumps({"url": "https://shop.example/1"})
    bad = ["{}", "null", "17", '"https://shop.example/"', '{"url": "/2"}', '{"url": 1e999}']
    bad += ['{"id": ' + 9_999 * "9" + "}", '{"url": "https://shop.example/\\ud800"}']
    path = write_json(tmp_path / "a.json", "\n[" + f"{good},\n" + ",".join([*bad, good]) + "]")
    make_filter(tmp_path / "filter", [])
    ran = bloom("check", "filter", path, cwd=tmp_path)
    assert ran.out.split() == 2 * urls([1])
    assert f"{len(bad)} lines are not URLs and were left out; the first: line 3: it " in ran.error
    path.write_text(f"[{{}},{good}]")
    assert (
        "a.json, line 1: it has no text in 'url' (--field)"
        in bloom("import", path, "new", cwd=tmp_path).error
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"url": "https://shop.example/1"},\n{"url": "https', "line 2"),
        ('[{"url": "https://shop.example/1"}\n', "line 2"),
        ('[{"url": "https://shop.example/1"}]\nx', "line 2"),
        ("[" * 100_000, "line 1"),
        ("[\x1b]0;x\x07", "line 1"),
    ],
    ids=range(5),
)
def test_arrays_that_are_damaged(text: str, message: str, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", text)
    ran = bloom("import", "a.json", "new", cwd=tmp_path)
    assert f"a.json: {message}: " in ran.error
    assert ran.error.isprintable()
    assert not (tmp_path / "new").exists()


def peak_bytes(*arguments: str, cwd: Path, status: int = 0) -> int:
    """The most memory that a command had, as the kernel counts it."""
    # From a small process: until it begins, a program counts as large as the one that starts it.
    code = (
        "import resource, subprocess, sys\n"
        f"assert subprocess.run(sys.argv[1:], stdout=-3).returncode == {status}\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, SCRAPY, "bloom", *arguments]
    ran = subprocess.run(command, cwd=cwd, capture_output=True, timeout=100, check=True)
    return int(ran.stdout) * 1024


def write_hostile(path: Path, begin: bytes, block: bytes, times: int, end: bytes = b"") -> Path:
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(begin)
        for _ in range(times):
            file.write(block)
        file.write(end)
    return path


@pytest.mark.parametrize(
    ("name", "begin", "block"),
    [
        ("x.csv", b'url\nhttps://shop.example/1\n"', 1000 * b"x\n"),
        ("x.csv", b"url,b\nhttps://shop.example/1,\n", 1000 * b'"\n",'),
        ("x.json", b'[{"url": "https://shop.example/1"}, {"x": "', 1000 * b"xx"),
    ],
    ids=range(3),
)
def test_a_record_over_many_lines_takes_little_memory(
    name: str, begin: bytes, block: bytes, tmp_path: Path
) -> None:
    """150 MB in 150 KB: it is refused once it is longer than any line may be."""
    write_hostile(tmp_path / f"{name}.gz", begin, block, 150_000_000 // len(block))
    assert peak_bytes("import", f"{name}.gz", "new", cwd=tmp_path, status=1) < 400_000_000
    assert not (tmp_path / "new").exists()


def test_a_table_with_long_cells(tmp_path: Path) -> None:
    with (tmp_path / "pages.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["page", "url"])
        writer.writerows([300_000 * "x\n", url] for url in urls(range(5)))
    ran = bloom("import", "pages.csv", "new", "--json", cwd=tmp_path)
    assert (ran.status, ran.json["read"], ran.err) == (0, 5, "")


FORMS: dict[str, tuple[str, Callable[[str], str]]] = {
    "urls": ("", "{}\n".format),
    "jl": ("", lambda url: json.dumps({"url": url}) + "\n"),
    "csv": ("n,url\n", "1,{}\n".format),
    "json": ("[\n", lambda url: json.dumps({"url": url}) + ",\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_answered_when_it_comes(form: str, tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(5))))
    begin, written = FORMS[form]
    with subprocess.Popen(
        [SCRAPY, "bloom", "check", "filter", "-", "--format", form],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(begin.encode())
        try:
            for url in urls(range(3, 9)):
                process.stdin.write(written(url).encode())
                process.stdin.flush()
                if url in urls(range(5, 9)):
                    assert select.select([process.stdout], [], [], 60)[0]
                    assert process.stdout.readline().decode() == f"{url}\n"
        finally:
            process.stdin.close()
            process.wait(60)


def test_blocks_of_an_array() -> None:
    """Wherever a block ends, the elements are the same."""
    text = '[{"url": "https://ü.example/\\u00fc"}, 12, "x\\\\",\n true, {"url": "b"}][{"url":"c"}]'

    def elements(blocks: list[bytes]) -> list[object]:
        return [each for some in _elements("a.json", blocks) for each in some]

    data = text.encode()
    expected = elements([data])
    assert len(expected) == 6
    for size in range(1, len(data)):
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        assert elements(blocks) == expected, size
    with pytest.raises(StorageError, match="line 2"):
        elements([b"[1\n,", b"x]"])
