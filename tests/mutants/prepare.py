"""The sources as mutmut sees them: a copy in which it mutates what counts, and nothing else.

It leaves out decorated functions, so properties are spelled out; and results that are cached would
be those of before the mutation. What a message says is not mutated: messages are tested for what
they name, not word by word. It leaves out texts in triple quotes, so all of several words get them.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

_CACHES = ("lru_cache", "cache")
_MUTATED_AS_THEY_ARE = ("staticmethod", "classmethod")
_NO_MUTATION = "  # pragma: no mutate"
_WORDS = re.compile(r"""(["'])([^"'\\]* [^"'\\]*)\1""")  # a text of several


def prepare(source: Path, target: Path) -> None:
    """Copy a package, prepared."""
    for path in sorted(source.rglob("*.py")):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = prepared(path.read_text("utf-8"))
        if not copy.exists() or copy.read_text("utf-8") != text:  # else its mutants stay
            copy.write_text(text, "utf-8")
    (target / "py.typed").touch()


def prepared(text: str) -> str:
    """Return a module with plain functions in place of decorated ones, and messages marked.

    >>> print(prepared("class A:\\n    @property\\n    def b(self):\\n        return 1"))
    class A:
    <BLANKLINE>
        def b(self):
            return 1
        b = property(b)
    """
    tree = ast.parse(text)
    lines = text.split("\n")
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.STRING and (words := _WORDS.fullmatch(token.string)):
            (row, start), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = f'{line[:start]}"""{words[2]}"""{line[end:]}'
    for node in ast.walk(tree):
        if _is_message(node):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] += _NO_MUTATION
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in sorted(functions, key=lambda each: each.end_lineno, reverse=True):
        for decorator in node.decorator_list:
            name = ast.unparse(decorator)
            if name in _MUTATED_AS_THEY_ARE:
                continue
            lines[decorator.lineno - 1] = ""
            if name.partition("(")[0].rpartition(".")[2] not in _CACHES:
                wrapped = f"{' ' * node.col_offset}{node.name} = {name}({node.name})"
                lines.insert(node.end_lineno, wrapped)
    return "\n".join(lines)


def _is_message(node: ast.AST) -> bool:
    """Return whether a statement raises an error or writes to the log, or makes a text for it."""
    if isinstance(node, ast.Raise):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger.")
