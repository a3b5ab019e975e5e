"""The documents: their code blocks are run, their figures are computed again."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scrapy.settings import Settings

import servers
import workspace
from crawls import SHARED_SPIDER, Crawl
from scrapy_bloom import dupefilter, redis_backend, stats
from scrapy_bloom.commands import SUBCOMMANDS
from scrapy_bloom.local import LocalBackend
from scrapy_bloom.redis_generations import MAX_MIRROR_BYTES
from scrapy_bloom.redis_meta import CHUNK_BLOCKS
from scrapy_bloom.settings import _CHECKS, BloomSettings
from scrapy_bloom.sizing import choose_geometry
from sites import ScriptedSite, Site

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.name, found[2])
        for path in DOCUMENTS
        for found in BLOCK.finditer(path.read_text())
        if found[1] == language
    ]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    languages = [m[1] for path in DOCUMENTS for m in BLOCK.finditer(path.read_text())]
    assert len(languages) >= 6
    assert set(languages) <= {"python", "sh", "text"}


COMMANDS = [ROOT / "docs/cli.md", ROOT / "docs/recipes.md", ROOT / "docs/jobs.md"]


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
    sections = re.findall(r"^## (.+)$", COMMANDS[0].read_text(), re.MULTILINE)
    assert names <= {word for section in sections for word in section.split()}
    table = (ROOT / "README.md").read_text().split("## Commands")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == names


@pytest.mark.parametrize(("document", "code"), blocks("python"))
def test_python(document: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs it; what it sets must be valid settings."""
    names: dict[str, object] = {}
    if "upload(" in code:  # needs a server, and a job
        servers.shared("valkey").client.delete("shop:bloom")
        code = code.replace("redis://localhost:6379/0", servers.shared("valkey").url)
        monkeypatch.chdir(tmp_path)
        backend = LocalBackend(Path("jobs/shop/bloom"), capacity=1000, error_rate=1e-6)
        backend.open()
        backend.add(b"page")
        backend.close()
    exec(compile(code, document, "exec"), names)
    settings = Settings({key: value for key, value in names.items() if key.isupper()})
    BloomSettings.from_settings(settings)
    assert not [name for name in names if name.startswith("BLOOM_") and name not in _CHECKS]


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


def test_the_readme_describes_each_setting() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("## Settings") : readme.index("## Stats")]
    described = re.findall(r"^\| `(BLOOM_\w+)` \| `(.*?)` \|", table, re.MULTILINE)
    assert {name for name, _ in described} == set(_CHECKS)
    defaults = BloomSettings()
    for name, default in described:
        value = getattr(defaults, name.removeprefix("BLOOM_").lower())
        assert eval(default) == value, name


def recipe_text(name: str) -> str:
    return (ROOT / "docs/recipes.md").read_text().split(f"\n## {name}")[1].split("\n## ")[0]


def size(nbytes: float) -> str:
    mib = nbytes / 2**20
    return f"{mib:.1f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


@pytest.mark.parametrize("recipe", ["Two workers, one filter", "A Redis Cluster"])
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
            site.answers[f"/{number}/{each}"] = [404]
    yield site
    site.end()


@pytest.mark.parametrize("number", [0, 1])
def test_the_recipes_for_failed_pages(number: int, shop: ScriptedSite, tmp_path: Path) -> None:
    (spider,) = BLOCK.findall(recipe_text("Always crawl list pages"))
    recipes = BLOCK.findall(recipe_text("Crawl failed pages again"))
    names: dict[str, object] = {}
    exec(recipes[number][1], names)
    settings = {key: value for key, value in names.items() if key.isupper()}
    assert len(settings) > 1
    code = spider[1].replace("https://shop.example/", shop.url)
    (tmp_path / "spider.py").write_text(
        code.replace("*args, **kwargs", "url", 1).replace(
            "super().__init__(*args, **kwargs)", "super().__init__()"
        )
    )
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
        geometry = choose_geometry(10 ** int(exponent), 5e-7)
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", document.read_text()
    ):
        other = document.parent / target if target else document
        assert other.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor in anchors, f"{document.name} links to {target}#{anchor}"


def test_the_stats_in_the_readme_are_those_of_the_filter() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("## Stats") : readme.index("## Limits")]
    documented = set(re.findall(r"^\| `(bloom/[\w/]+)`", table, re.MULTILINE))
    set_there = set(re.findall(r'^ +\("(\w+)", ', Path(stats.__file__).read_text(), re.MULTILINE))
    set_there |= set(re.findall(r'"bloom/(\w+)"', Path(dupefilter.__file__).read_text()))
    backend = Path(redis_backend.__file__).read_text()
    set_there |= set(re.findall(r'^ +"(redis/\w+)": ', backend, re.MULTILINE))
    assert documented == {f"bloom/{name}" for name in set_there}
