"""The documents: their code blocks are run, their figures are computed again."""

import ast
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scrapy.settings import Settings

import scrapy_bloom
import servers
import workspace
from backends import local_backend
from crawls import SHARED_SPIDER, Crawl
from scrapy_bloom.commands import SUBCOMMANDS
from scrapy_bloom.crawl import dupefilter, failures, telemetry
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.filters.sizing import (
    block_error_rate,
    choose_geometry,
    expected_false_drops,
    optimal_num_bits,
)
from scrapy_bloom.redis import backend as redis_backend
from scrapy_bloom.redis.keys.meta import CHUNK_BLOCKS
from scrapy_bloom.redis.view import MAX_MIRROR_BYTES
from scrapy_bloom.settings.settings import _SETTINGS, BloomSettings, _checked
from sites import ScriptedSite, Site

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.name, found[2])
        for path in DOCUMENTS
        for found in BLOCK.finditer(path.read_text())
        if found[1] == language
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_of_a_kind_that_is_tested(document: Path) -> None:
    text = document.read_text()
    languages = [language for language, _ in BLOCK.findall(text)]
    assert text.count("```") == 2 * len(languages)  # none is indented, or of another form
    assert set(languages) <= {"python", "sh", "text", "mermaid"}
    for before, language in zip(["", *languages], languages, strict=False):
        assert language != "text" or before == "sh"  # it shows what the commands print


COMMANDS = [path for path in PAGES if "\n```sh\n" in path.read_text()]


@pytest.mark.parametrize("document", COMMANDS, ids=lambda path: path.name)
def test_commands(document: Path, tmp_path: Path) -> None:
    """Runs them in the order in which they are there; a block of text shows what they print."""
    url = workspace.prepare(tmp_path)
    known = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    printed = ""
    found = BLOCK.findall(document.read_text())
    assert [language for language, _ in found if language == "sh"]
    for language, code in found:
        if language == "sh":
            if "bloom push" in code:
                workspace.forget_shared(url)
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code.replace(workspace.LOCAL_REDIS, url)],
                cwd=tmp_path,
                env=known,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert ran.returncode == 0, (code, ran)
            assert "scrapy bloom" in code
            printed = ran.stdout
        elif language == "text":
            assert code == printed


def test_each_subcommand_is_described() -> None:
    names = {name.removesuffix("_") for name in SUBCOMMANDS}
    sections = re.findall(r"^## (.+)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert names <= {word for section in sections for word in section.split()}
    table = (ROOT / "README.md").read_text().split("## Commands")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == names


@pytest.mark.parametrize(("document", "code"), blocks("python"))
def test_python(document: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs it; what it sets must be valid settings."""
    names: dict[str, object] = {"__name__": "settings"}
    monkeypatch.chdir(tmp_path)
    if "upload(" in code:  # needs a server, and a job
        servers.shared("valkey").client.delete("shop:bloom")
        code = code.replace("redis://localhost:6379/0", servers.shared("valkey").url)
        backend = local_backend(Path("jobs/shop/bloom"), capacity=1000, error_rate=1e-6)
        backend.open()
        backend.add(b"page")
        backend.close()
    exec(compile(code, document, "exec"), names)
    settings = Settings({key: value for key, value in names.items() if key.isupper()})
    BloomSettings.from_settings(settings)
    assert not [name for name in names if name.startswith("BLOOM_") and name not in _SETTINGS]


def test_the_set_up_commands_are_those_that_ci_runs() -> None:
    commands = [code.strip() for document, code in blocks("sh") if document == "README.md"]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    example, tests = commands
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert tests in ci
    assert any(line.startswith(example) for line in ci)


def test_the_contributors_command_installs_an_extra_that_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (command,) = [code for document, code in blocks("sh") if document == "CONTRIBUTING.md"]
    assert "'.[dev]'" in command
    assert re.search(r"^dev = \[", project, re.MULTILINE)
    environments = set(re.findall(r"^\[tool\.tox\.env\.(\w+)\]", project, re.MULTILINE))
    table = (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for line in re.findall(r"tox run -e ([\w,]+)", table) for name in line.split(",")}
    assert {name for name in named if not re.fullmatch(r"py3\d+", name)} <= environments


DEFAULTS = {f"BLOOM_{name.upper()}": value for name, value in vars(BloomSettings()).items()}


def described_settings() -> dict[str, tuple[str, str]]:
    """For each setting its default and what is allowed, as the page has it."""
    page = (ROOT / "docs/settings.md").read_text()
    return {
        name: (default, allowed)
        for name, default, allowed in re.findall(
            r"^### (BLOOM_\w+)\n\nDefault `(.+?)`; (.+)$", page, re.MULTILINE
        )
    }


def test_each_setting_is_described() -> None:
    described = described_settings()
    assert set(described) == set(_SETTINGS)
    for name, (default, _) in described.items():
        assert _checked(name, ast.literal_eval(default)) == DEFAULTS[name], name


@pytest.mark.parametrize("name", _SETTINGS)
def test_what_a_setting_may_be_is_described(name: str) -> None:
    _, allowed = described_settings()[name]
    allowed, _, texts = allowed.partition(", or a text such as ")
    assert all(_checked(name, each) > 0 for each in re.findall(r'"(\w+)"', texts))
    numbers = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:e-\d+)?", allowed)]
    if allowed.startswith("one of "):
        choices = re.findall(r'"(\w+)"', allowed)
        assert [_checked(name, each) for each in choices] == choices
        with pytest.raises(SettingError) as raised:
            _checked(name, "another")
        assert re.findall(r'"(\w+)"', str(raised.value)) == choices
    elif allowed.startswith("`True` or `False`"):
        assert [_checked(name, each) for each in (True, False)] == [True, False]
    elif "number" in allowed or allowed.startswith("seconds"):
        lowest, highest = numbers
        assert _checked(name, lowest) == lowest
        beyond = highest if "below" in allowed else highest + 1
        if "below" not in allowed:
            assert _checked(name, highest) == highest
        for value in (lowest / 2 if lowest else -1, beyond):
            with pytest.raises(SettingError):
                _checked(name, value)
    else:
        assert _checked(name, DEFAULTS[name]) == DEFAULTS[name]
        with pytest.raises(SettingError):
            _checked(name, object())
    assert allowed.endswith("or `None`.") == (DEFAULTS[name] is None)


def test_the_readme_describes_a_few_settings_alike() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(BLOOM_\w+)` \| `(.*?)` \|", readme, re.MULTILINE)
    assert len(rows) >= 4
    described = described_settings()
    for name, default in rows:
        assert default == described[name][0], name


def recipe_text(name: str) -> str:
    return (ROOT / "docs/recipes.md").read_text().split(f"\n## {name}")[1].split("\n## ")[0]


def size(nbytes: float) -> str:
    mib = nbytes / 2**20
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


SHARED = ["Two workers, one filter", "Two workers with scrapy-redis", "A Redis Cluster"]


@pytest.mark.parametrize("recipe", SHARED)
def test_the_recipes_for_many_crawlers(recipe: str, tree: Site, tmp_path: Path) -> None:
    (code,) = BLOCK.findall(recipe_text(recipe))
    settings = code[1].replace("redis://localhost:6379/0", servers.shared("valkey").url)
    settings = settings.replace("redis://localhost:7000", servers.shared_cluster().url)
    settings = settings.replace("10_000_000_000", "1_000_000")  # 35 GiB are too much here
    tree.delay = 0.02
    workers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        key = f"{tmp_path.name}:%(spider)s"
        (tmp_path / name / "scrapy.cfg").write_text("[settings]\ndefault = settings\n")
        (tmp_path / name / "settings.py").write_text(
            f"{settings}\nBLOOM_REDIS_KEY = {key!r}\nSCHEDULER_QUEUE_KEY = {key + ':queue'!r}\n"
        )
        options = {"DUPEFILTER_CLASS": None}  # that of the recipe
        workers.append(Crawl(tree.url, tmp_path / name, options, spider=SHARED_SPIDER))
    for worker in workers:
        assert worker.finish() == 0, worker.output
        assert not worker.told("WARNING") + worker.told("ERROR")
        assert "bloom/redis/round_trips" in worker.output
    assert len(tree.hits) == 150
    assert sum(count - 1 for count in tree.hits.values()) <= 1  # the start page has two addresses


LISTS = '<a class="list" href="/lists/1">1</a><a class="list" href="/lists/2">2</a>'


@pytest.fixture
def shop() -> Iterator[ScriptedSite]:
    """Two list pages of three products each, which fail."""
    site = ScriptedSite({"/": [LISTS.encode()]})
    for number in (1, 2):
        products = [f'<a class="product" href="/{number}/{each}">x</a>' for each in range(3)]
        site.answers[f"/lists/{number}"] = [(LISTS + "".join(products)).encode()]
        for each in range(3):
            site.answers[f"/{number}/{each}"] = [403]  # 404 is an answer
    yield site
    site.end()


@pytest.mark.parametrize("number", [0, 1])
def test_the_recipes_for_failed_pages(number: int, shop: ScriptedSite, tmp_path: Path) -> None:
    spider, _rules = BLOCK.findall(recipe_text("Crawl list pages once"))
    recipes = BLOCK.findall(recipe_text("Crawl failed pages again"))
    names: dict[str, object] = {}
    exec(recipes[number][1], names)
    settings = {key: value for key, value in names.items() if key.isupper()}
    assert len(settings) > 1
    code = spider[1].replace("https://shop.example/", shop.url)
    (tmp_path / "spider.py").write_text(code)
    for run in range(3):
        if run == 1:
            for path in shop.answers:
                shop.answers[path] = (
                    [()] if path.count("/") == 2 and path[1].isdigit() else shop.answers[path]
                )
        shop.hits.clear()
        crawl = Crawl(shop.url, tmp_path, settings, spider=tmp_path / "spider.py")
        assert crawl.finish() == 0, crawl.output
        assert not crawl.told("ERROR")
        assert (shop.hits["/lists/1"], shop.hits["/lists/2"]) == (1, 1)
        products = sum(count for path, count in shop.hits.items() if path[1:2].isdigit())
        assert products == [6, 6, 0][run]


def test_the_table_of_sizes_in_redis() -> None:
    table = (ROOT / "docs/scaling.md").read_text()
    rows = re.findall(r"^\| 10\^(\d+) \| (.*?) \|$", table, re.MULTILINE)
    assert [int(exponent) for exponent, _ in rows] == [7, 8, 9, 10, 11]
    for exponent, cells in rows:
        geometry = choose_geometry(10 ** int(exponent), 5e-10)
        nbytes, keys, mirror, nodes = cells.split(" | ")
        assert nbytes == size(geometry.nbytes)
        assert keys == f"{-(-geometry.num_blocks // CHUNK_BLOCKS):,}"
        assert mirror == (nbytes if geometry.nbytes <= MAX_MIRROR_BYTES else "none")
        assert nodes == str(math.ceil(geometry.nbytes * 2 / 2**36))  # of 64 GiB, half of it free


def test_the_readmes_table_of_sizes() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\d+ [mb]illion) \| (.*?) \|$", readme, re.MULTILINE))
    units = {"million": 10**6, "billion": 10**9}
    assert len(rows) == 5
    for name, cells in rows.items():
        number, unit = name.split()
        n = int(number) * units[unit]
        sizes = [size(choose_geometry(n, p / 2).nbytes) for p in (1e-4, 1e-6, 1e-9)]
        *ours, default = cells.split(" | ")
        assert ours == sizes, name
        assert default == size(91 * n)


def test_the_table_of_expected_losses() -> None:
    page = (ROOT / "docs/faq.md").read_text()
    rows = re.findall(r"^\| (1e-\d) \| ([\d.]+) \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for rate, bits, cells in rows:
        error_rate = float(rate) / 2  # a filter that may grow keeps the other half
        shown = []
        for exponent in (6, 7, 8, 9):
            geometry = choose_geometry(10**exponent, error_rate)
            lost = expected_false_drops(geometry.num_blocks, geometry.num_hashes, 10**exponent)
            shown.append(f"{lost:,.0f}" if lost >= 10 else f"{lost:.1g}")
        assert cells.split(" | ") == shown
        assert bits == f"{choose_geometry(10**8, error_rate).num_bits / 1e8:.1f}"


TWO_LISTS = "Two lists of 100 million URLs"


def test_the_table_of_two_lists() -> None:
    rows = re.findall(r"^\| (1e-\d+) \| (.*?) \|$", recipe_text(TWO_LISTS), re.MULTILINE)
    assert len(rows) == 5
    for rate, cells in rows:
        num_blocks, num_hashes, _ = geometry = choose_geometry(10**8, float(rate) / 2)
        wrong = 10**8 * block_error_rate(num_blocks, num_hashes, 10**8)
        shown = f"{wrong:,.0f}" if wrong >= 10 else f"{wrong:.1g}"
        assert cells.split(" | ") == [f"{geometry.nbytes / 1e6:.0f}", shown]


def test_the_recipe_for_two_lists_ends_with_what_is_in_both(tmp_path: Path) -> None:
    """Also where a filter errs as often as not."""
    a, b = workspace.urls(range(2000)), workspace.urls(range(1900, 4000))
    workspace.write_urls(tmp_path / "a.txt", a)
    workspace.write_urls(tmp_path / "b.txt", b)
    for _, code in BLOCK.findall(recipe_text(TWO_LISTS)):
        worst = code.replace("--error-rate 1e-9", "-n 1 -p 0.9 -s BLOOM_ON_FULL=warn")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        known = {**os.environ, "PATH": path}
        command = ["bash", "-euo", "pipefail", "-c", worst]
        subprocess.run(command, cwd=tmp_path, env=known, check=True, timeout=120)
    answers = (tmp_path / "in-both.txt").read_text().split()
    assert set(a) & set(b) < set(answers)
    assert (tmp_path / "exactly.txt").read_text().split() == sorted(set(a) & set(b))


def test_the_bits_in_the_comparison() -> None:
    page = (ROOT / "docs/comparison.md").read_text()
    (cells,) = re.findall(r"^\| bits a request, at 1e-6 \| (.*?) \|$", page, re.MULTILINE)
    *others, ours = cells.split(" | ")
    classic = optimal_num_bits(10**6, 1e-6) / 1e6  # as measured with each of the three
    assert others == [f"{classic:.1f}"] * 3
    alone, growing = (choose_geometry(10**7, p).num_bits / 1e7 for p in (1e-6, 5e-7))
    assert ours.startswith(f"{alone:.1f}; {growing:.1f} ")
    own = f"{choose_geometry(10**7, 5e-10).nbytes / 1e7:.1f}, "
    (cells,) = re.findall(r"^\| bytes a request, at 1e-9 \| (.*?) \|$", page, re.MULTILINE)
    assert [each.startswith(own) for each in cells.split(" | ")] == 4 * [False] + 2 * [True]


def without_blocks(document: Path) -> str:
    return BLOCK.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document), re.MULTILINE)
    found = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
    assert len(found) == len(set(found)), f"two headings of {document.name} have one anchor"
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(without_blocks(document)):
        other = document.parent / target if target else document
        assert other.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(other), f"{document.name} links to {target}#{anchor}"


def test_the_first_screen_of_the_readme_leads_to_each_page() -> None:
    readme = ROOT / "README.md"
    first_screen = "\n".join(readme.read_text().splitlines()[:42])
    linked = {(ROOT / target).resolve() for target, _ in LINK.findall(first_screen)}
    pages = {page for page in PAGES if not page.name.startswith("benchmarks-")}
    assert {page.resolve() for page in pages} <= linked
    assert 'DUPEFILTER_CLASS = "scrapy_bloom.BloomDupeFilter"' in first_screen
    assert "pip install" in first_screen


def strings(path: Path) -> Iterator[tuple[str, str]]:
    """Each text in a module, with "%s" and the like as a NUL; and the logger's method it is for."""
    tree = ast.parse(path.read_text())
    levels = {
        node.args[0]: node.func.attr.upper()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in {"logger", "self._logger"}
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "\0" for each in node.values]
            yield "".join(map(str, parts)), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"%\(?\w*\)?[.\d]*[sdgf]", "\0", node.value).replace("%%", "%")
            yield text, levels.get(node, "")


MODULES = sorted(Path(scrapy_bloom.__file__).parent.rglob("*.py"))


def test_the_lines_of_the_log_are_those_of_the_code() -> None:
    page = (ROOT / "docs/stats.md").read_text()
    lines = re.findall(r"^\| (INFO|WARNING|ERROR) \| `(.+?)` \|", page, re.MULTILINE)
    assert len(lines) > 15
    found = [each for path in MODULES for each in strings(path)]
    for level, line in lines:
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL)
        of = {each for text, each in found if "\0" in text and pattern.match(text)}
        assert of, line
        assert of <= {level, ""}, line


def test_the_stats_are_those_of_the_filter() -> None:
    page = (ROOT / "docs/stats.md").read_text()
    table = page[page.index("## Stats") : page.index("## Lines in the log")]
    documented = set(re.findall(r"^\| `(bloom/[\w/]+)`", table, re.MULTILINE))
    source = Path(telemetry.__file__).read_text()
    set_there = set(re.findall(r'^ +\("(\w+)", ', source, re.MULTILINE))
    for module in (dupefilter, failures, telemetry):
        set_there |= set(re.findall(r'"bloom/(\w+)"', Path(module.__file__).read_text()))
    backend = Path(redis_backend.__file__).read_text()
    set_there |= set(re.findall(r'^ +"(redis/\w+)": ', backend, re.MULTILINE))
    assert documented == {f"bloom/{name}" for name in set_there}
    everywhere = "\n".join(path.read_text() for path in DOCUMENTS)
    assert set(re.findall(r"`(bloom/[\w/]+)`", everywhere)) <= documented


def test_each_reason_for_closing_the_spider_is_described() -> None:
    page = (ROOT / "docs/stats.md").read_text()
    named = set(re.findall(r"`(bloom_\w+)`\s\(", page))
    source = "".join(path.read_text() for path in MODULES)
    given = re.findall(r"(?:close_spider\w*\(| reason = ).*", source)
    assert named == set(re.findall(r'"(bloom_\w+)"', "".join(given)))
