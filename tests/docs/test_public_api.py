"""What `import scrapy_bloom` offers, and that its types are right."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import scrapy_bloom


def test_the_exported_names() -> None:
    assert sorted(scrapy_bloom.__all__) == scrapy_bloom.__all__
    assert all(hasattr(scrapy_bloom, name) for name in scrapy_bloom.__all__)


def test_errors_are_a_tree() -> None:
    for name in scrapy_bloom.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(scrapy_bloom, name), scrapy_bloom.BloomError)
    assert issubclass(scrapy_bloom.SettingError, ValueError)
    assert issubclass(scrapy_bloom.LockedError, scrapy_bloom.StorageError)


def test_the_examples_in_the_docstrings() -> None:
    modules = [info.name for info in pkgutil.walk_packages(scrapy_bloom.__path__, "scrapy_bloom.")]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in modules}
    assert not [name for name, result in results.items() if result.failed]
    assert sum(result.attempted for result in results.values()) > 10


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
