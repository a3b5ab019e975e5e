"""No text has a home-made term: documents, messages, docstrings, comments, names of tests."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import scrapy_bloom
from tests.support.documents import BLOCK, DOCUMENTS, ROOT

PACKAGE = Path(scrapy_bloom.__file__).parent
# Each with what to write instead.
TERMS = {
    r"t(?:aken?|ook) for seen|looks? seen": "false positive; recorded but never crawled",
    r"false drops?|false_drops?": "expected false positives",
    r"\berrs?\b": "has false positives; its false-positive rate",
    r"\brepeats (?:are|is|of)\b": "duplicates",
    r"whoever dies|twice rather than never": "at-least-once delivery",
    r"signs? of life": "heartbeat",
    r"leases? (?:is|was|are|were|has been) over": "the lease has expired",
    r"sent (?:twice|again) changes nothing": "idempotent",
    r"hosts? (?:take|takes|taking) turns|hosts? in turn": "round-robin by host",
    r"(?:cannot|can't|could not) be made again": "cannot be deserialized",
    r"what (?:waits|waited|is waiting)\b": "the pending requests",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\btold of\b|\bof late\b|\bmade anew\b|\bat home\b|\blest\b": "reported, recently, recreated",
    r"\bbeside\b": "next to",
    r"window is over|window was over|end of the window": "expires",
    r"\b(?:bytes|bits|B|MB) a request\b": "per request",
    r"stand_before|bury_the_dead|QueueFate|QueueVerdict": "a name that says what it does",
}
# In tests, for `logged`, `reported`, `printed`, `sent`.
TERMS_OF_TESTS = {r"\btold\b|\bsaid\b|\bkept by\b|\btook for seen\b": "a verb with one meaning"}
# In documents, the settings, keys and columns of that name are code.
TERMS_OF_DOCUMENTS = {r"\berror rates?\b": "false-positive rate"}


def found_in(text: str, terms: dict[str, str]) -> list[str]:
    text = " ".join(text.split())
    return [
        f"{text[max(found.start() - 30, 0) : found.end() + 20]!r}: write {instead!r}"
        for term, instead in terms.items()
        for found in re.finditer(term, text, re.IGNORECASE)
    ]


def comments_of(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT]


def texts_of(module: Path, *, is_test: bool = False) -> str:
    """Return the comments and strings of a module; of a test, names in place of other strings."""
    source = module.read_text("utf-8")
    texts = comments_of(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_test:
            texts.append(node.value)
        elif isinstance(node, ast.Name) and is_test and not node.id.endswith("err"):  # a stream
            texts.append(node.id.replace("_", " "))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and is_test:
            name = getattr(node, "name", "").replace("_", " ")
            texts += [name, ast.get_docstring(node) or ""]
    return "\n".join(texts)


@pytest.mark.parametrize(
    "document",
    # The text of the others is that of the benchmarks' results.
    [path for path in DOCUMENTS if not path.name.startswith("benchmarks")],
    ids=lambda path: path.name,
)
def test_no_document_has_home_made_terms(document: Path) -> None:
    prose = re.sub(r"(`+).+?\1", "", BLOCK.sub("", document.read_text("utf-8")))
    assert not found_in(prose, {**TERMS, **TERMS_OF_DOCUMENTS})


@pytest.mark.parametrize(
    "module",
    [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_module_has_home_made_terms(module: Path) -> None:
    if module != Path(__file__):
        is_test = PACKAGE not in module.parents
        terms = {**TERMS, **TERMS_OF_TESTS} if is_test else TERMS
        assert not found_in(texts_of(module, is_test=is_test), terms)


def test_no_text_points_to_a_file_that_an_installed_user_lacks() -> None:
    found = {
        str(module.relative_to(ROOT))
        for module in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Call)
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and re.search(r"(?<!main/)docs/\w+\.md", str(each.value))
    }
    assert not found
