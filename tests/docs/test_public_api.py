"""What `import scrapy_bloom` offers, and that its types are right."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import scrapy_bloom

MODULES = [info.name for info in pkgutil.walk_packages(scrapy_bloom.__path__, "scrapy_bloom.")]


def test_the_exported_names() -> None:
    assert sorted(scrapy_bloom.__all__) == scrapy_bloom.__all__
    assert all(hasattr(scrapy_bloom, name) for name in scrapy_bloom.__all__)


def test_errors_are_a_tree() -> None:
    for name in scrapy_bloom.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(scrapy_bloom, name), scrapy_bloom.BloomError)
    assert issubclass(scrapy_bloom.SettingError, ValueError)
    assert issubclass(scrapy_bloom.LockedError, scrapy_bloom.StorageError)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_some_docstrings_have_examples() -> None:
    modules = (importlib.import_module(name) for name in MODULES)
    assert sum(doctest.testmod(module).attempted for module in modules) > 10


def test_types_are_shipped() -> None:
    assert "py.typed" in {path.name for path in importlib.resources.files("scrapy_bloom").iterdir()}


def test_importing_it_installs_no_reactor_and_needs_no_extra() -> None:
    script = (
        "import sys\n"
        "from scrapy_bloom import *\n"
        "assert 'twisted.internet.reactor' not in sys.modules\n"
        "assert not {'redis', 'jinja2', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
