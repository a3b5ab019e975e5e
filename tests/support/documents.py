"""The documents, and what they are made of."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")


def page(name: str) -> str:
    """Return the text of a page of docs/."""
    return (ROOT / "docs" / name).read_text("utf-8")


def lines_of_log() -> dict[str, re.Pattern[str]]:
    """Return each INFO line that stats.md describes, with a pattern for it."""
    lines = re.findall(r"^\| INFO \| `+ ?(.+?) ?`+ \|", page("stats.md"), re.MULTILINE)
    return {
        line: re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL) for line in lines
    }


def section(name: str) -> str:
    """Return the only section whose heading begins so, whatever page it is on."""
    texts = [path.read_text("utf-8") for path in PAGES]
    (found,) = [text.split(f"\n## {name}")[1] for text in texts if f"\n## {name}" in text]
    return found.split("\n## ")[0]


def blocks(language: str) -> list[tuple[str, str]]:
    """Return each block of code of a language, after the name of its document."""
    return [
        (path.name, found[2])
        for path in DOCUMENTS
        for found in BLOCK.finditer(path.read_text("utf-8"))
        if found[1] == language
    ]
