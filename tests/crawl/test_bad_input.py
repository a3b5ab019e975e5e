"""Crawls that must not begin: one clear line, an exit status, and every file as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crawls import Crawl, unprivileged
from tests.support.sites import Site, tree_site
from tests.support.workspace import contents, fingerprints, make_filter, urls

FILTER = "job/bloom.sqlite"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tree_site(pages=40) as site:
        yield site


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The directory of a crawl that was paused, to be spoilt."""
    make_filter(tmp_path / "job", fingerprints(urls(range(15))))
    return tmp_path


def snapshot(path: Path) -> dict[str, object]:
    """Every file of the job; the lock says nothing, and comes and goes."""
    return {name: file for name, file in contents(path).items() if "lock" not in name}


def refused(site: Site, work_dir: Path, settings: dict[str, object], **kwargs: object) -> str:
    """Run a crawl that is refused; checks all that is common, and returns the error's line."""
    site.forget()
    before = snapshot(work_dir / "job")
    crawl = Crawl(site.url, work_dir, {"JOBDIR": "job", **settings}, **kwargs)
    error = crawl.refusal()
    assert not site.hits
    assert snapshot(work_dir / "job") == before
    return error


def test_other_fingerprinter(
    site: Site, job: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"REQUEST_FINGERPRINTER_CLASS": "own_fingerprinter.OwnFingerprinter"}
    modules = tmp_path_factory.mktemp("modules")  # Python may write its cache next to it
    (modules / "own_fingerprinter.py").write_text(
        "class OwnFingerprinter:\n"
        "    def fingerprint(self, request):\n"
        "        return request.url.encode()\n"
    )
    line = refused(site, job, settings, prefix=["env", f"PYTHONPATH={modules}"])
    assert "REQUEST_FINGERPRINTER_CLASS = 'scrapy.utils.request.RequestFingerprinter'" in line
    assert "'own_fingerprinter.OwnFingerprinter'" in line


def test_read_only_directory(site: Site, job: Path) -> None:
    (job / "job").chmod(0o555)
    try:
        line = refused(site, job, {}, prefix=unprivileged())
    finally:
        (job / "job").chmod(0o755)
    assert "job cannot be written to: Permission denied" in line


def test_read_only_file(site: Site, job: Path) -> None:
    (job / FILTER).chmod(0o444)
    line = refused(site, job, {}, prefix=unprivileged())
    assert f"{FILTER} is not writable; nothing was changed" in line
