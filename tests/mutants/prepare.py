"""The sources as mutmut sees them: a copy in which it mutates what counts, and nothing else.

It leaves out decorated functions, so properties are spelled out; and results that are cached would
be those of before the mutation. What a message says is not mutated: messages are tested for what
they name, not word by word.
"""

import ast
from pathlib import Path

_CACHES = ("lru_cache", "cache")
_MUTATED_AS_THEY_ARE = ("staticmethod", "classmethod")
_NO_MUTATION = "  # pragma: no mutate"


def prepare(source: Path, target: Path) -> None:
    """Copy a package, prepared."""
    for path in sorted(source.rglob("*.py")):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(prepared(path.read_text("utf-8")), "utf-8")
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
