"""The reference: each setting, command, stat and line of the log is that of the code."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import scrapy_bloom
from scrapy_bloom.commands import SUBCOMMANDS
from scrapy_bloom.crawl import dupefilter, telemetry
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.redis import backend as redis_backend
from scrapy_bloom.settings import _SETTINGS, BloomSettings, _checked
from tests.support import messages
from tests.support.documents import DOCUMENTS, ROOT, lines_of_log, page


def test_each_subcommand_is_described() -> None:
    names = {name.removesuffix("_") for name in SUBCOMMANDS}
    text = page("cli.md")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert names <= {word for section in sections for word in section.split()}
    rows = re.findall(r"^\| (\[.+?\)) \|", text, re.MULTILINE)
    assert set(re.findall(r"\[(\w+)\]", " ".join(rows))) == names


DEFAULTS = {f"BLOOM_{name.upper()}": value for name, value in vars(BloomSettings()).items()}


def described_settings() -> dict[str, tuple[str, str]]:
    """For each setting its default and what is allowed, as the page has it."""
    text = page("settings.md")
    return {
        name: (default, allowed)
        for name, default, allowed in re.findall(
            r"^### (BLOOM_\w+)\n\nDefault `(.+?)`; (.+)$", text, re.MULTILINE
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
    assert all(_checked(name, text) > 0 for text in re.findall(r'"(\w+)"', texts))
    numbers = [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:e-\d+)?", allowed)]
    if allowed.startswith("one of "):
        choices = re.findall(r'"(\w+)"', allowed)
        assert [_checked(name, choice) for choice in choices] == choices
        with pytest.raises(SettingError) as raised:
            _checked(name, "another")
        assert re.findall(r'"(\w+)"', str(raised.value)) == choices
    elif allowed.startswith("`True` or `False`"):
        assert [_checked(name, number) for number in (True, False)] == [True, False]
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
            parts = [
                value.value if isinstance(value, ast.Constant) else "\0" for value in node.values
            ]
            yield "".join(map(str, parts)), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"%\(?\w*\)?[.\d]*[sdgf]", "\0", node.value).replace("%%", "%")
            yield text, levels.get(node, "")


MODULES = sorted(Path(scrapy_bloom.__file__).parent.rglob("*.py"))


def test_the_lines_of_the_log_are_those_of_the_code() -> None:
    lines = lines_of_log()
    assert len(lines) > 15
    found = [string for path in MODULES for string in strings(path)]
    for line, pattern in lines.items():
        of = {level for text, level in found if pattern.match(text)}
        assert of, line
        assert of <= {"INFO", ""}, line


def test_each_line_of_the_log_is_described() -> None:
    patterns = lines_of_log().values()
    logged = [text for path in MODULES for text, level in strings(path) if level == "INFO"]
    assert not [text for text in logged if not any(pattern.match(text) for pattern in patterns)]


def test_the_stats_are_those_of_the_filter() -> None:
    text = page("stats.md")
    table = text[text.index("## Stats") : text.index("## Reasons for closing")]
    documented = set(re.findall(r"^\| `(bloom/[\w/]+)`", table, re.MULTILINE))
    source = Path(telemetry.__file__).read_text()
    set_there = set(re.findall(r'^ +\("(\w+)", ', source, re.MULTILINE))
    for module in (dupefilter, telemetry):
        set_there |= set(re.findall(r'"bloom/(\w+)"', Path(module.__file__).read_text()))
    backend = Path(redis_backend.__file__).read_text()
    set_there |= set(re.findall(r'^ +"(redis/\w+)": ', backend, re.MULTILINE))
    assert documented == {f"bloom/{name}" for name in set_there}
    everywhere = "\n".join(path.read_text() for path in DOCUMENTS)
    assert set(re.findall(r"`(bloom/[\w/]+)`", everywhere)) <= documented


def test_each_reason_for_closing_the_spider_is_described() -> None:
    named = set(re.findall(r"^\| `(bloom_\w+)` \|", page("stats.md"), re.MULTILINE))
    source = "".join(path.read_text() for path in MODULES)
    given = re.findall(r"(?:close_spider\w*\(| reason = ).*", source)
    assert named == set(re.findall(r'"(bloom_\w+)"', "".join(given)))


def test_each_public_name_is_described() -> None:
    """Classes by their docstrings, errors in a table."""
    named = re.findall(r"^(?:::: [\w.]+\.|\| `)([A-Z]\w+[a-z])\b", page("api.md"), re.MULTILINE)
    assert {*named, "BloomError"} == {*scrapy_bloom.__all__}


def test_messages_name_the_requirements_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    texts = "".join(path.read_text("utf-8") for path in MODULES)
    named = set(re.findall(r"pip install (?:--upgrade )?'([\w\[\]]+>=[\d.]+)'", texts))
    assert len(named) == 2
    assert all(f'= ["{requirement}"' in project for requirement in named)


# docs/troubleshooting.md explains each error and warning of the source, literally.


def test_each_error_and_warning_is_explained_once() -> None:
    entries = Counter(messages.entries())
    assert len(entries) > 150
    assert (messages.missing(), messages.stale()) == ([], [])
    assert not [text for text, count in entries.items() if count > 1]
