"""Whatever opens the package to others stands in ``sinks.txt``, with what guards it; and no secret is in the tree."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests import sinks
from tests.loops import looped


def test_every_opening_is_listed_with_its_guard() -> None:
    lacks, extra = sinks.differences()
    assert not lacks, f"new openings; say in {sinks.TABLE} what guards each: {lacks}"
    assert not extra, f"rows of {sinks.TABLE} for what is no longer there, or not so often: {extra}"
    assert all(len(guard) > 10 for _, guard in sinks.listed().values())


@looped(
    "kind, code",
    [
        *(("listen", code) for code in ("end.bind(('', 0))", "make().listen(5)", "socket.create_server(x)")),
        ("listen", "dist.TCPStore('0.0.0.0', 0, None, True)"),
        *(("unpickle", code) for code in ("pickle.loads(x)", "torch.load(f)", "torch.load(f, weights_only=False)")),
        *(("unpickle", code) for code in ("dcp.FileSystemReader(x).read_metadata()", "dcp.load(x, checkpoint_id=y)")),
        *(("unpickle", code) for code in ("dist.broadcast_object_list(x)", "dist.all_gather_object(x, y)", "eval(x)")),
        *(("program", code) for code in ("subprocess.run(x)", "os.system(x)", "os.execvp(x, y)")),
        *(
            ("file", code)
            for code in ("tempfile.mktemp()", "os.open(p, os.O_CREAT)", "open(p, 'wb')", "Path(p).open('a')")
        ),
        *(("file", code) for code in ("Path(p).write_text('')", "open(p, mode='r+' if x else 'w')")),
        *(("size", code) for code in ("json.loads(x)", "struct.unpack('<q', x)", "_HEAD.unpack_from(x)")),
        *((None, code) for code in ("torch.load(f, weights_only=True)", "open(p)", "open(p, 'rb')", "bound(x)")),
    ],
)
def test_openings_are_recognized(kind: str | None, code: str) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert sinks._kind(call) == kind


# How what must never be committed begins, and goes on. In two parts, so that this file has none of them.
SECRETS = [
    *(("-----BEGIN", r" ([A-Z]+ )*PRIVATE KEY"), ("PuTTY-User-Key", "-File-"), ('"private_key_id"', ":")),
    *((form, r"[0-9A-Z]{16}\b") for form in ("AKIA", "ASIA")),
    *((form, r"[0-9A-Za-z]{36}") for form in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    *(("github_pat_", r"\w{60}"), ("glpat-", r"[\w-]{20}"), ("pypi-AgE", r"[\w-]{30}"), ("hf_", r"[A-Za-z]{34}\b")),
    *((f"xox{kind}-", r"[0-9A-Za-z-]{10}") for kind in "abprs"),
    *(("hooks.slack.com/services/T", r"\w+"), ("AIza", r"[\w-]{35}"), ("sk-", r"(ant-|proj-)?[\w-]{32}")),
    ("eyJ", r"[\w-]{20,}\.eyJ[\w-]{20,}\."),
    *((form, r"[^\s/:@'\"<>{}\[\]$]+:[^\s/:@'\"<>{}$]{6,}@") for form in ("http://", "https://", "ssh://", "ftp://")),
]
KEY_FILES = re.compile(r"(^|/)(id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pypirc|\.env|.*\.(pem|key|p12|pfx|keystore|kdbx))$")


def leaks(name: str, text: str) -> list[str]:
    found = [f"{name}: a file of keys"] if KEY_FILES.search(name) else []
    for begin, rest in SECRETS:
        form = re.escape(begin) if not begin[0].isalnum() else rf"(?<!\w){re.escape(begin)}"
        if begin in text and re.search(form + rest, text):
            found.append(f"{name}: {begin}...")
    return found


def test_no_secret_is_committed() -> None:
    try:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=sinks.ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone of the repository")
    found = []
    for name in filter(None, names):
        path = Path(sinks.ROOT, name)
        if path.is_file() and not path.is_symlink():
            found += leaks(name, path.read_bytes().decode("utf-8", "replace"))
    assert not found


@looped(
    "text",
    [
        *("-----BEGIN" + f" {kind}PRIVATE KEY-----" for kind in ("", "RSA ", "OPENSSH ", "EC ")),
        *("AKIA" + "A1" * 8, "ghp_" + "a" * 36, "glpat-" + "a" * 20, "xoxb-" + "1" * 12, "pypi-" + "AgE" + "a" * 40),
        *("hf_" + "a" * 34, "sk-" + "ant-" + "a" * 40, "AIza" + "a" * 35, "https://me:" + "geheim99" + "@host/x"),
    ],
)
def test_secrets_are_recognized(text: str) -> None:
    assert leaks("a.txt", f"x = '{text}'") and not leaks("a.txt", text[: len(text) // 3])
    assert leaks("keys/id_ed25519", "") and leaks("a/server.pem", "") and not leaks("a/keys.py", "")
