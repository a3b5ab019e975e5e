"""Scrapy's own tests of fingerprints and of its filter, with our function in place of its own."""

import os
import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import scrapy

from tests.support.machine import REQUIRED

MODULES = ["tests/test_utils_request.py", "tests/test_dupefilters.py"]
LIMIT_SECS = 120
# It looks into Scrapy's cache with an entry for each request object, which ours does without.
OF_THE_CACHE = "tests/test_utils_request.py::TestFingerprint::test_caching"

CONFTEST = """
from scrapy.utils.reactor import install_reactor

install_reactor("twisted.internet.asyncioreactor.AsyncioSelectorReactor")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests of the Scrapy that is installed: they are in its sdist alone."""
    directory = tmp_path_factory.mktemp("scrapy")
    wanted = [
        "--retries",
        "1",
        "--no-deps",
        "--no-binary",
        "scrapy",
        f"scrapy=={scrapy.__version__}",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", directory, *wanted],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        check=False,
    )
    if ran.returncode and "scrapy-sdist" not in REQUIRED:
        pytest.skip("the package index cannot be reached")
    assert ran.returncode == 0, ran.stderr
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        for member in files:
            inside = member.name.partition("/")[2]
            if inside in {"tests/__init__.py", "tests/spiders.py", *MODULES}:
                (directory / "tests").mkdir(exist_ok=True)
                content = files.extractfile(member)
                assert content is not None
                (directory / inside).write_bytes(content.read())
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "conftest.py").write_text(CONFTEST)
    texts = [(directory / module).read_text() for module in MODULES]
    if any("testfixtures" in text for text in texts) and find_spec("testfixtures") is None:
        missing = "the tests of this Scrapy need the package testfixtures"
        assert "scrapy-sdist" not in REQUIRED, missing
        pytest.skip(missing)
    return directory


def outcomes(directory: Path, *options: str) -> tuple[dict[str, str], str]:
    """What became of each test, and all that was printed."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--color=no", *options, *MODULES],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    assert found, ran
    return {test: outcome for outcome, test in found}, ran.stdout + ran.stderr


def test_scrapys_own_tests_pass_with_our_function(sources: Path) -> None:
    before, output = outcomes(sources)
    assert set(before.values()) == {"PASSED"}, output
    assert len(before) >= 30
    after, output = outcomes(sources, "-p", "our_fingerprints")
    assert after == {**before, OF_THE_CACHE: "FAILED"}, output
    (made,) = re.findall(r"^ours has made (\d+) fingerprints$", output, re.MULTILINE)
    assert int(made) >= 30
