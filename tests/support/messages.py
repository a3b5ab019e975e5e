"""The errors and warnings in the source of scrapy_bloom, against the page on troubleshooting.

`python -m tests.support.messages` prints the messages that docs/troubleshooting.md lacks, and the
entries that the source does not have.
"""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import scrapy_bloom
from tests.support.documents import page

GAP = "…"  # stands for a value on the page
_PACKAGE = Path(scrapy_bloom.__file__).parent
_PAGE = "troubleshooting.md"
ENTRY = re.compile(r"^- (`+) ?(.+?) ?\1$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-+,.\d]*[sdgfr]")
_LOG_METHODS = ("warning", "error", "critical", "exception", "log")
_ERRORS = {entry for entry in scrapy_bloom.__all__ if entry.endswith("Error")}
_ERRORS |= {"UsageError", "ArgumentTypeError"}  # of the command line
_ERRORS |= {"MissingError"}  # of a place
_ERRORS |= {"NoRoomError"}  # its text is a part of what is logged
_PYTHON_API = {"ValueError", "TypeError"}  # of the package filters
_LEAST_WORDS = 3  # a message with fewer words of its own passes on the text of another error


def messages() -> dict[str, str]:
    """Return where each message of the source is, by its text with GAP in place of the values."""
    return {
        text: f"{path.relative_to(_PACKAGE.parent)}:{line}"
        for path in sorted(_PACKAGE.rglob("*.py"))
        for line, text in _Module(path).messages()
        if len(re.findall(r"\b[A-Za-z]{2,}\b", text)) >= _LEAST_WORDS
    }


def entries() -> list[str]:
    """Return the messages that the page explains."""
    return [text for _, text in ENTRY.findall(page(_PAGE))]


def missing() -> list[str]:
    """Return the messages that the page lacks, each with its place in the source."""
    explained = set(entries())
    return [f"{place}: {text}" for text, place in messages().items() if text not in explained]


def stale() -> list[str]:
    """Return the entries of the page that the source does not have."""
    return sorted(set(entries()) - set(messages()))


class _Module:
    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text("utf-8"))
        self._errors = _ERRORS | {"cls"} if path.name == "exceptions.py" else _ERRORS
        if path.parent.name == "filters":
            self._errors = self._errors | _PYTHON_API
        self._values: dict[str, list[ast.expr]] = {}  # of variables, and what functions return
        self._open: set[str] = set()  # names that are being resolved
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._values.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.FunctionDef):
                self._values[node.name] = [
                    each_node.value
                    for each_node in ast.walk(node)
                    if isinstance(each_node, ast.Return) and each_node.value
                ]
        self._passed = self._find_passed()

    def _find_passed(self) -> dict[ast.expr, list[ast.expr]]:
        """Return, for each parameter in a function that makes errors, what `raise` passes to it."""
        raised: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                raised.setdefault(name, []).append(node.exc)
        passed: dict[ast.expr, list[ast.expr]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and node.name in raised:
                names = [arg.arg for arg in node.args.args if arg.arg != "self"]
                for use in ast.walk(node):
                    if isinstance(use, ast.Name) and use.id in names:
                        place = names.index(use.id)
                        passed[use] = [call.args[place] for call in raised[node.name]]
        return passed

    def messages(self) -> Iterator[tuple[int, str]]:
        for hint in self._values.get("_HINTS", []):  # what follows the text of the server
            for text in self._texts(hint):
                yield hint.lineno, text
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner.endswith("logger") and name in _LOG_METHODS:
                arguments = node.args[name == "log" :]
            elif self._errors & {name, owner}:
                arguments = node.args[:1]
            else:
                continue
            for number, argument in enumerate(arguments):
                if number == 0 or isinstance(argument, ast.Name):
                    for text in self._texts(argument):
                        yield node.lineno, re.sub(rf"{GAP}+", GAP, text)

    def _texts(self, node: ast.expr) -> Iterator[str]:  # noqa: C901 - a case for each kind
        """Yield each text that an expression may be."""
        if isinstance(node, ast.IfExp):
            yield from self._texts(node.body)
            yield from self._texts(node.orelse)
        elif isinstance(node, ast.Dict):
            for value in node.values:
                yield from self._texts(value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _PLACEHOLDER.sub(GAP, node.value).replace("%%", "%")
        elif isinstance(node, ast.JoinedStr):
            for parts in product(*map(self._parts, node.values)):
                yield "".join(parts)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for left in [*self._texts(node.left)] or [GAP]:
                for right in [*self._texts(node.right)] or [GAP]:
                    yield left + right
        elif isinstance(node, ast.Name | ast.Call | ast.Subscript):
            named = node.func if isinstance(node, ast.Call) else node
            name = ast.unparse(named.value if isinstance(named, ast.Subscript) else named)
            if name not in self._open:  # it may be recursive
                self._open.add(name)
                for value in self._values.get(name, []):
                    yield from self._texts(value)
                self._open.remove(name)

    def _parts(self, node: ast.expr) -> list[str]:
        """Return each text that a part of an f-string may be; GAP for a value."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        value = node.value if isinstance(node, ast.FormattedValue) else node
        names = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
        if all(isinstance(name, ast.Name) and name.id.isupper() for name in names):  # constants
            texts = [text for name in names for text in self._texts(name)]
            if texts and all(len(text.split()) > _LEAST_WORDS for text in texts):
                return texts
        called = [value] if isinstance(value, ast.Call) else []  # a function of this module
        passed = [[*self._texts(entry)] for entry in self._passed.get(value, called)]
        texts = [entry[0] if len(entry) == 1 else GAP for entry in passed]
        return [
            each_text if len(each_text.split()) > _LEAST_WORDS else GAP for each_text in texts
        ] or [GAP]


if __name__ == "__main__":
    for title, lines in (("Missing", missing()), ("Stale", stale())):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
