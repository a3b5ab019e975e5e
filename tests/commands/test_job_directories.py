"""A JOBDIR as the destination of a filter: it goes where the next crawl uses it."""

from pathlib import Path

import pytest

from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import write_urls

SAFE = "scrapy_bloom.CrashSafeScheduler"
SCRAPYS = "scrapy.core.scheduler.Scheduler"


def reset_job(site: Site, path: Path, scheduler: str) -> dict[str, object]:
    """A job that was crawled to its end, and whose filter was deleted; its settings."""
    settings: dict[str, object] = {"JOBDIR": "job", "SCHEDULER": scheduler}
    assert Crawl(site.url, path, settings).finish() == 0
    assert bloom("reset", "job", "--yes", cwd=path).status == 0
    return settings


@pytest.mark.parametrize("scheduler", [SAFE, SCRAPYS])
def test_import_into_a_job_that_was_reset(scheduler: str, tree: Site, tmp_path: Path) -> None:
    settings = reset_job(tree, tmp_path, scheduler)
    crawled = [f"{tree.url}p/{page}?a=2&b=1" for page in range(150)]
    write_urls(tmp_path / "urls.txt", crawled)
    ran = bloom("import", "urls.txt", "job", cwd=tmp_path)
    assert ran.status == 0, ran
    assert not list((tmp_path / "job").glob("*.bloom"))
    tree.hits.clear()
    crawl = Crawl(tree.url, tmp_path, settings)
    assert crawl.finish() == 0
    assert set(tree.hits) == {"/p/0"}  # the start page, which is not filtered
    for command in (("info", "job"), ("check", "job", "urls.txt"), ("reset", "job", "--yes")):
        assert bloom(*command, cwd=tmp_path).status == 0, command
