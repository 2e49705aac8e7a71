"""What every module of the package keeps to: no circles of imports, and no two classes of one name."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fusionlayer"
PUBLIC_TWICE = {"ReduceOp"}
"""A name that users of Horovod know, which another class has too."""


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports anywhere, imports for types included."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level] + tuple((node.module or "").split(".") if node.module else ())
            for name in [a.name for a in node.names]:
                inner = PACKAGE.parent.joinpath(*base, name)
                yield ".".join(base + (name,) if inner.with_suffix(".py").exists() or inner.is_dir() else base)


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of two or more nodes that reach each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            at = stack.index(node)
            if len(stack) > at + 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in number:
            visit(node)
    return found


def test_modules_import_each_other_in_no_circle() -> None:
    edges = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        edges[name.removesuffix(".__init__")] = set(imported(path))
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert len(edges) > 300 and sum(map(len, edges.values())) > 1000
    assert circles(edges) == []


def test_no_class_has_the_name_of_another() -> None:
    """A leading underscore makes no other name: readers say both alike."""
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 300
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in PUBLIC_TWICE}
    assert not twice
