"""Scrapy's own tests, with our scheduler and our filter as its defaults."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import scrapy

from tests.support.crawls import with_modules

LIMIT_SECS = 1800
FEWEST_PASSED = 4000
# What they need that neither Scrapy nor we do.
PACKAGES = [
    *("botocore", "pexpect", "psutil", "pyftpdlib", "pytest-rerunfailures", "pytest-timeout"),
    *("pytest-twisted", "sybil"),
]
DEFAULTS = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
}
_NO_JOBDIR = "they count WARNINGs, and CrashSafeScheduler warns that there is no JOBDIR"
_NOT_OPENED = "without a scheduler, nobody opens the filter of a job of CrashSafeScheduler"
EXPECTED = {
    "TestAddonManager.test_fallback_workflow": "the default of SCHEDULER is not Scrapy's",
    "TestEngine.test_start_request_processing_exception": "request_seen() never raises",
    "TestRFPDupeFilter.test_dupefilter_path": _NOT_OPENED,
    "TestRFPDupeFilter.test_fingerprints_deprecation": "an attribute of RFPDupeFilter",
    "TestRFPDupeFilter.test_log_debug[None]": "the logger has our name",
    "TestRFPDupeFilter.test_seenreq_truncated": _NOT_OPENED,
    "TestAsyncCrawlerProcessSubprocess.test_reactorless_datauri": _NO_JOBDIR,
    "TestAsyncCrawlerProcessSubprocess.test_reactorless_simple": _NO_JOBDIR,
    "TestAsyncCrawlerRunnerSubprocess.test_reactorless_datauri": _NO_JOBDIR,
    "TestAsyncCrawlerRunnerSubprocess.test_reactorless_simple": _NO_JOBDIR,
}


@pytest.mark.soak
def test_scrapys_own_tests(tmp_path: Path) -> None:
    sources, packages = sources_in(tmp_path), tmp_path / "packages"
    run("pip", "install", "--target", packages, *PACKAGES, cwd=tmp_path)
    settings = sources / "scrapy/settings/default_settings.py"
    text = settings.read_text()
    for name, value in DEFAULTS.items():
        text, changed = re.subn(rf"(?m)^{name} = .*$", f'{name} = "{value}"', text)
        assert changed == 1
    settings.write_text(text)
    options = [
        "-m",
        "not requires_internet",
        "-W",
        "ignore::pytest.PytestWarning",
    ]  # a newer pytest
    options += ["--numprocesses=auto", "--timeout=120", "--reruns=2", "--junitxml=report.xml", "-q"]
    ran = run("pytest", "tests", *options, cwd=sources, paths=[sources, packages], may_fail=True)
    cases = list(ET.parse(sources / "report.xml").iter("testcase"))
    failed = {
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert failed == set(EXPECTED), ran.stdout[-20_000:]
    assert len([case for case in cases if not len(case)]) >= FEWEST_PASSED


def sources_in(directory: Path) -> Path:
    """Download the sources of the installed Scrapy, with its tests."""
    which = ["--no-deps", "--no-binary=scrapy", f"scrapy=={scrapy.__version__}"]
    run("pip", "download", *which, cwd=directory)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def run(
    module: str, *arguments: object, cwd: Path, paths: Sequence[Path] = (), may_fail: bool = False
) -> subprocess.CompletedProcess[str]:
    command = [*with_modules(*paths), sys.executable, "-m", module, *map(str, arguments)]
    ran = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECS, check=False
    )
    assert may_fail or ran.returncode == 0, ran.stdout + ran.stderr
    return ran
