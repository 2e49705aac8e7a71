"""Where the package opens itself to others: listening sockets, unpickling, programs, files, sizes that others tell.

``python -m tests.sinks`` prints the rows that ``sinks.txt`` lacks, and those that it has for nothing.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("sinks.txt")

Sink = tuple[str, str, str, int]
"""Kind, place (file and function), call, and how often the function has it."""

_CALLS = {
    "listen": r"(.*\.)?(bind|listen|create_server|TCPStore|HTTPServer|TCPServer|start_server|start_http_server)",
    "unpickle": r"(.*\.)?(pickle|cloudpickle|dill|marshal|ForkingPickler|_pickle)\.loads?|(.*\.)?Unpickler|eval|exec"
    r"|yaml\.(unsafe_|full_)?load(_all)?|(.*\.)?(broadcast|all_?gather|gather|scatter|send|recv)_object(_list)?"
    r"|shelve\.open|(np|numpy)\.load|(.*\.)?(FileSystemReader|read_metadata)|(dcp|checkpoint)\.load",
    "program": r"subprocess\.\w+|(.*\.)?Popen|os\.(exec\w*|system|popen|spawn\w*|posix_spawn\w*|fork|forkpty)|pty\.\w+",
    "file": r"tempfile\.\w+|mk[sd]temp|NamedTemporaryFile|os\.(open|mkfifo|mknod|symlink|link|memfd_create)"
    r"|(.*\.)?(write_text|write_bytes|symlink_to|hardlink_to|touch)|shutil\.(copy\w*|move)",
    "size": r"json\.loads?|(struct|Header|(cls\.)?_[A-Z_]+)\.(unpack|unpack_from|iter_unpack)|int\.from_bytes"
    r"|(np|numpy)\.frombuffer",
}
_NATIVE = re.compile(
    r"(?<![\w.>])(?:::)?(socket|bind|listen|accept4?|open|openat|fopen|shm_open|mkstemp|memfd_create|dlopen|system|popen"
    r"|exec[lv]\w*|(?:std::)?[io]?fstream)\s*\("
)


def found() -> dict[tuple[str, str, str], int]:
    """Return how often each function of the package makes each call that opens it to others."""
    package = ROOT / "fusionlayer"
    counts: Counter[tuple[str, str, str]] = Counter()
    for path in sorted([*package.rglob("*.py"), ROOT / "_fusionlayer_autoload.py"]):
        name = path.relative_to(ROOT).as_posix()
        for place, call in _calls(ast.parse(path.read_text())):
            kind = _kind(call)
            if kind is not None:
                counts[kind, f"{name}:{place}", _name(call.func)] += 1
    for path in sorted((package / "csrc").rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            text = re.sub(r"//.*", "", path.read_text())
            for match in _NATIVE.finditer(text):
                counts["native", path.relative_to(ROOT).as_posix(), match[1]] += 1
    return dict(counts)


def _calls(tree: ast.AST, place: str = "") -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _calls(node, f"{place}.{node.name}" if place else node.name)
        else:
            if isinstance(node, ast.Call):
                yield place or "module", node
            yield from _calls(node, place)


def _name(function: ast.expr) -> str:
    """Return the name of what is called; what is no name in front of it is left out."""
    if isinstance(function, ast.Attribute):
        return f"{_name(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _kind(call: ast.Call) -> str | None:
    """Return what the call opens; None: nothing."""
    name = _name(call.func)
    if re.fullmatch(r"(.*\.)?torch\.load", name):
        safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in call.keywords)
        return None if safe else "unpickle"
    if (name in ("open", "os.fdopen") or name.endswith(".open")) and name not in ("os.open", "shelve.open"):
        texts = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
        if any(
            isinstance(text, str) and re.fullmatch(r"[rwaxbt+]{1,3}", text) and {*text} & {*"wax+"} for text in texts
        ):
            return "file"
    return next((kind for kind, names in _CALLS.items() if re.fullmatch(names, name)), None)


def listed() -> dict[tuple[str, str, str], tuple[int, str]]:
    """Return the rows of the table: how often, and what guards it."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            front, _, guard = line.partition(" | ")
            kind, place, call, count = front.split()
            assert (kind, place, call) not in rows, f"{front} stands twice in {TABLE.name}"
            rows[kind, place, call] = int(count), guard.strip()
    return rows


def differences() -> tuple[list[str], list[str]]:
    """Return the rows that the table lacks, and those that it has for nothing."""
    now, known = found(), listed()
    lacks = [" ".join([*key, str(count)]) for key, count in now.items() if known.get(key, (0,))[0] != count]
    extra = [" ".join([*key, str(count)]) for key, (count, _) in known.items() if now.get(key) != count]
    return lacks, extra


if __name__ == "__main__":
    for title, rows in zip(("lacks", "has for nothing"), differences(), strict=True):
        print(f"{TABLE.name} {title}:", *rows, sep="\n")
    sys.exit(any(differences()))
