"""No text has a home-made term: documents, messages, docstrings."""

import ast
import re
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
# In documents, the settings, keys and columns of that name are code.
TERMS_OF_DOCUMENTS = {r"\berror rates?\b": "false-positive rate"}


def found_in(text: str, terms: dict[str, str]) -> list[str]:
    text = " ".join(text.split())
    return [
        f"{text[max(found.start() - 30, 0) : found.end() + 20]!r}: write {instead!r}"
        for term, instead in terms.items()
        for found in re.finditer(term, text, re.IGNORECASE)
    ]


def strings_of(module: Path) -> str:
    """Return the strings of a module, docstrings among them."""
    nodes = ast.walk(ast.parse(module.read_text("utf-8")))
    return "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


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
    "module", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_has_home_made_terms(module: Path) -> None:
    assert not found_in(strings_of(module), TERMS)


def test_no_text_points_to_a_file_that_an_installed_user_lacks() -> None:
    found = {
        str(module.relative_to(ROOT))
        for module in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Call)
        for each_node in ast.walk(node)
        if isinstance(each_node, ast.Constant)
        and re.search(r"(?<!main/)docs/\w+\.md", str(each_node.value))
    }
    assert not found
