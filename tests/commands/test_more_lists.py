"""Lists of URLs as people and Scrapy have them: JSON arrays, comments, long cells, pipes."""

import csv
import gzip
import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_import_trouble import peak_bytes

from scrapy_bloom.commands.shared.lists import _elements
from scrapy_bloom.exceptions import StorageError
from tests.support.cli import SCRAPY, bloom
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

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
    for number, arguments in enumerate(
        (["items.json"], ["items.json.gz"], ["-"], ["-", "--format", "json"])
    ):
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
    ("text", "told"),
    [
        ('[{"url": "https://shop.example/1"},\n{"url": "https', "line 2"),
        ('[{"url": "https://shop.example/1"}\n', "line 2"),
        ('[{"url": "https://shop.example/1"}]\nx', "line 2"),
        ("[" * 100_000, "line 1"),
        ("[\x1b]0;x\x07", "line 1"),
    ],
    ids=range(5),
)
def test_arrays_that_are_damaged(text: str, told: str, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", text)
    ran = bloom("import", "a.json", "new", cwd=tmp_path)
    assert f"a.json: {told}: " in ran.error
    assert ran.error.isprintable()
    assert not (tmp_path / "new").exists()


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
    ran = bloom("import", f"{name}.gz", "new", cwd=tmp_path)
    assert "is longer than 16,777,216 bytes" in ran.error
    assert not (tmp_path / "new").exists()
    peak = peak_bytes("import", f"{name}.gz", "new", cwd=tmp_path, status=1)
    assert peak < 400_000_000


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


def test_nothing_to_import_makes_no_filter(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "comments").write_text("# nothing yet\n\n")
    (tmp_path / "array.json").write_text("[]")
    (tmp_path / "table.csv").write_text("url\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/requests.seen").touch()
    make_filter(tmp_path / "filter", [b"x"])
    for source in ("-", "empty", "comments", "array.json", "table.csv", "job"):
        for target in ("new", "filter"):
            ran = bloom("import", source, target, cwd=tmp_path)
            assert "holds nothing to import; nothing was changed" in ran.error
            assert not ran.out
            assert not (tmp_path / "new").exists()


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    """Whether it fails when the filter is made, or before anything is recorded in it."""
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    (tmp_path / "cut.gz").write_bytes(gzip.compress("\n".join(urls(range(10))).encode())[:-9])
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for target in ("new/filter", "there", "there/bloom"):
        for source, options, limit, told in (
            ("urls.txt", ("-n", "1M"), "--fsize=100000", "cannot be created: File too large; the"),
            ("cut.gz", (), "--fsize=100000000", "cut.gz cannot be read: "),
        ):
            command = ("import", source, target, *options)
            ran = bloom(*command, cwd=tmp_path, under=["prlimit", limit])
            assert told in ran.error
            assert sorted(tmp_path.rglob("*")) == before


def test_a_size_for_a_filter_that_is_there(tmp_path: Path) -> None:
    """Repeated, a command goes on; what it cannot do any more is an error."""
    write_urls(tmp_path / "urls.txt", urls(range(10)))
    command = ("import", "urls.txt", "filter")
    size = ("-n", "5k", "-p", "1e-4")
    assert bloom(*command, *size, cwd=tmp_path).status == 0
    assert bloom(*command, *size, cwd=tmp_path).status == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for option, told in (
        (("-n", "1M"), "--expected-requests"),
        (("-p", "1e-6"), "--error-rate"),
    ):
        for source in ("urls.txt", "filter"):
            ran = bloom("import", source, "filter", *option, cwd=tmp_path)
            assert ran.status == 2, ran
            assert told in ran.err
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


# Pipes.


@pytest.mark.parametrize(
    "name",
    [
        "bloom/generation-0001.bloom",
        "bloom/logs.json",
        "bloom/forgotten.sqlite",
        "requests.sqlite",
        "requests.seen",
        "bloom.in-use",
    ],
)
@pytest.mark.parametrize("command", ["info", "import into", "import from"])
def test_a_pipe_among_the_files_of_a_job(command: str, name: str, tmp_path: Path) -> None:
    """Nobody writes to it: whoever reads it, waits for ever."""
    write_urls(tmp_path / "urls.txt", urls(range(3)))
    make_filter(tmp_path / "job/bloom", fingerprints(urls(range(3))))
    pipe = tmp_path / "job" / name
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    arguments = {
        "info": ("info", "job"),
        "import into": ("import", "urls.txt", "job"),
        "import from": ("import", "job", "new"),
    }[command]
    ran = bloom(*arguments, cwd=tmp_path, limit=30)
    if ran.status:  # else it has no need of that file
        # That it is there says that the crawl was killed.
        told = "was killed" if name == "bloom.in-use" else Path(name).name
        assert told in ran.error
    else:
        assert name not in {"bloom/generation-0001.bloom", "bloom/forgotten.sqlite"}
    assert pipe.is_fifo()


def test_blocks_of_an_array() -> None:
    """Wherever a block ends, the elements are the same."""
    text = '[{"url": "https://ü.example/\\u00fc"}, 12, "x\\\\",\n true, {"url": "b"}][{"url":"c"}]'

    def elements(blocks: list[bytes]) -> list[object]:
        return [each for each in _elements("a.json", blocks) if each is not None]

    data = text.encode()
    expected = elements([data])
    assert len(expected) == 6
    for size in range(1, len(data)):
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        assert elements(blocks) == expected, size
    with pytest.raises(StorageError, match="line 2"):
        elements([b"[1\n,", b"x]"])
