"""The recipes for crawls: their settings and spiders crawl a site."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import servers, workspace
from tests.support.crawls import SHARED_SPIDER, Crawl
from tests.support.documents import BLOCK, section
from tests.support.shell import run_in_shell
from tests.support.sites import ScriptedSite, Site, tree_site

SHARED = ["Set it up", "Two workers with scrapy-redis", "A Redis Cluster"]


@pytest.fixture
def slow_tree() -> Iterator[Site]:
    site = tree_site(pages=40)
    site.delay = 0.02
    yield site
    site.end()


@pytest.mark.parametrize("recipe", SHARED)
def test_the_recipes_for_many_crawlers(recipe: str, slow_tree: Site, tmp_path: Path) -> None:
    code = BLOCK.findall(section(recipe))[0]
    settings = code[1].replace("redis://localhost:6379/0", servers.shared("valkey").url)
    settings = settings.replace("redis+cluster://localhost:7000", servers.shared_cluster().url)
    settings = settings.replace("10_000_000_000", "1_000_000")  # 52 GiB are too much here
    workers = []
    for name in "ab":
        (tmp_path / name).mkdir()
        key = f"{tmp_path.name}:%(spider)s"
        (tmp_path / name / "scrapy.cfg").write_text("[settings]\ndefault = settings\n")
        (tmp_path / name / "settings.py").write_text(
            f"{settings}\nBLOOM_REDIS_KEY = {key!r}\nSCHEDULER_QUEUE_KEY = {key + ':queue'!r}\n"
        )
        options = {"DUPEFILTER_CLASS": None}  # that of the recipe
        workers.append(Crawl(slow_tree.url, tmp_path / name, options, spider=SHARED_SPIDER))
    for worker in workers:
        assert worker.finish() == 0, worker.output
        assert not worker.our_lines("WARNING") + worker.our_lines("ERROR")
        assert "bloom/redis/round_trips" in worker.output
    assert len(slow_tree.hits) == 40
    # The start page has two addresses.
    assert sum(count - 1 for count in slow_tree.hits.values()) <= 1


LISTS = '<a class="list" href="/lists/1">1</a><a class="list" href="/lists/2">2</a>'


def list_page(number: int, products: int) -> list[bytes]:
    links = [f'<a class="product" href="/{number}/{each}">x</a>' for each in range(products)]
    return [(LISTS + "".join(links)).encode()]


@pytest.fixture
def shop() -> Iterator[ScriptedSite]:
    """Two list pages of three products each."""
    site = ScriptedSite({"/": [LISTS.encode()]})
    for number in (1, 2):
        site.answers[f"/lists/{number}"] = list_page(number, 3)
    yield site
    site.end()


def test_the_recipe_for_nightly_crawls(shop: ScriptedSite, tmp_path: Path) -> None:
    (recipe,) = BLOCK.findall(section("Settings and spider"))
    names: dict[str, object] = {}
    exec(recipe[1], names)
    settings = {key: value for key, value in names.items() if key.isupper()}
    assert len(settings) > 1
    settings["BLOOM_EXPECTED_REQUESTS"] = 1000  # 50 million are too many here
    code = recipe[1].replace("https://shop.example/", shop.url)
    (tmp_path / "spider.py").write_text(code)
    for products in (6, 1, 0):
        if products == 1:
            shop.answers["/lists/2"] = list_page(2, 4)
        shop.hits.clear()
        settings["BLOOM_RUN"] = f"with {products} new products"
        crawl = Crawl.finished(shop.url, tmp_path, settings, spider=tmp_path / "spider.py")
        assert not crawl.our_lines("ERROR")
        assert (shop.hits["/lists/1"], shop.hits["/lists/2"]) == (1, 1)
        assert sum(count for path, count in shop.hits.items() if path[1:2].isdigit()) == products


def test_the_recipe_for_two_lists_ends_with_what_is_in_both(tmp_path: Path) -> None:
    """Also with a false-positive rate of one half."""
    a, b = workspace.urls(range(2000)), workspace.urls(range(1900, 4000))
    workspace.write_urls(tmp_path / "a.txt", a)
    workspace.write_urls(tmp_path / "b.txt", b)
    for _, code in BLOCK.findall(section("Two lists")):
        worst = code.replace("--error-rate 1e-9", "-n 1 -p 0.9")
        assert run_in_shell(worst, tmp_path).returncode == 0
    answers = (tmp_path / "in-both.txt").read_text().split()
    assert set(a) & set(b) < set(answers)
    assert (tmp_path / "exactly.txt").read_text().split() == sorted(set(a) & set(b))
