"""Every command of the pages and of ``--help`` is one that its program understands; those that need no job run."""

import argparse
import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from docs.site.commands_page import parsers
from fusionlayer import codecs
from fusionlayer.cli import doctor, fusionrun, main, make_parser
from fusionlayer.transport import local
from tests.cli.test_trace import step_spans
from tests.examples.places import EXAMPLES, ROOT
from tests.loops import looped
from tests.pages import PAGES
from tests.tiers import tiered

HELP = "fusionlayer --help"
OURS = ("fusionlayer", "fusionrun", "torchrun", "mpirun", "deepspeed", "python")
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(OURS)}) +[\w-]")
USAGE = re.compile(r"\[(?:options|argument|-h)")
OF_USERS = ("train.py", "train_ddp.py", "train_ray.py")
IMPORT_MUCH = tuple(f"docs/{page}.md" for page in ("deepspeed", "fsdp", "horovod", "megatron", "model_parallel")) + (
    "benchmarks/README.md",
)


def commands(page: str) -> list[list[str]]:
    """Return the words of each command in the blocks of a page."""
    if page == HELP:
        texts = [re.sub(r"\\\n *", "", parser.format_help()) for parser in [make_parser(), *parsers()]]
        found = [line.strip() for text in texts for line in text.splitlines()]
    else:
        blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        found = [line for block in blocks for line in re.sub(r"\\\n *", "", block).splitlines()]
    lines = [line.removeprefix("$ ").replace("[--json]", "--json") for line in found]
    lines = [line for line in lines if COMMAND.match(line) and not USAGE.search(line)]
    return [without_variables(shlex.split(line, comments=True)) for line in lines]


def mentions(page: str) -> list[list[str]]:
    """Return the words of each command that the sentences of a page name; arguments may be missing."""
    text = "" if page == HELP else (ROOT / page).read_text()
    return [shlex.split(line) for line in re.findall(r"`((?:python -m|torchrun --\S+) [^`\n]+)`", text)]


def without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


class _Understood(BaseException):
    """A program has read its command line, and would now begin."""


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no program do more than read its command line."""
    read = argparse.ArgumentParser.parse_args

    def understand(self: Any, args: Any = None, namespace: Any = None) -> None:
        read(self, args, namespace)
        raise _Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understand)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def try_to_start(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of a command line read their parts of it, one after the other; raise what they refuse."""
    program, rest = words[0], words[1:]
    if program == "fusionlayer":
        with pytest.raises(_Understood):
            main(rest)
    elif program == "fusionrun":
        options = fusionrun.make_parser().parse_known_args(rest)[0]
        if not options.check_build:
            try_to_start(options.command, monkeypatch)
    elif program == "torchrun":
        options = get_args_parser().parse_known_args(rest)[0]
        job = [options.training_script, *options.training_script_args]
        try_to_start(job if options.no_python else ["python", *job], monkeypatch)
    elif program in ("mpirun", "deepspeed", "env"):
        while rest[0].startswith("-"):  # each has a value
            rest = rest[2:]
        rest = without_variables(rest)
        try_to_start(rest if program != "deepspeed" else ["python", *rest], monkeypatch)
    else:
        assert program == "python", words
        start_python(rest, monkeypatch)


def start_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script or module read its options; those that have none are only looked for."""
    module = words[1] if words[0] == "-m" else ""
    path = ROOT / (module.replace(".", "/") if module else words[0])
    if module == "pytest":
        assert (ROOT / words[2]).exists(), words
    elif words[0] not in OF_USERS:
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.exists(), words
        own, job = cut(words[2 if module else 1 :])
        monkeypatch.setattr(sys, "argv", [str(file), *own, *(["--", *job] if job else [])])
        if module.startswith("benchmarks."):
            with pytest.raises(_Understood):
                importlib.import_module(f"{module}.__main__" if path.is_dir() else module).main()
        elif "def parse_options" in file.read_text():
            with pytest.raises(_Understood):
                runpy.run_path(str(file))["parse_options"]()
        if job[:1] and job[0] in OURS:
            try_to_start(job, monkeypatch)


def cut(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before and behind "--"."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@pytest.mark.usefixtures("no_start")
@looped("page", tiered([HELP, *PAGES], lambda page: page not in IMPORT_MUCH))
def test_every_command_is_understood(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "docs/deepspeed.md" and find_spec("deepspeed") is None:
        return
    whole, refused = commands(page), []
    with monkeypatch.context() as patch:
        if page == "docs/adding_a_codec.md":
            patch.setattr(codecs, "names", lambda: ["e5m2"])  # test_plugins.py installs it
        for words in [*whole, *mentions(page)]:
            try:
                try_to_start(words, patch)
            except SystemExit:
                told = capsys.readouterr().err
                if words in whole or "arguments are required" not in told:
                    refused.append(f"{shlex.join(words)}: {told}")
    assert not refused, "\n".join(refused)


def test_commands_are_found() -> None:
    found = {page: commands(page) for page in [HELP, *PAGES]}
    assert sum(map(len, found.values())) > 90
    ours = {words[1] for words in found[HELP] if words[0] == "fusionlayer"}
    assert ours >= {"doctor", "bench", "plan", "trace", "status", "profile"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands name."""
    monkeypatch.chdir(tmp_path)
    measured = min((ROOT / "profiles").glob("gpt_*.yaml"))
    shutil.copytree(ROOT / "profiles", "profiles")
    for path in ("profile.yaml", "profiles/PROFILE.yaml"):
        Path(path).write_text(measured.read_text())
    Path("trace.json").write_text(json.dumps([span for step in range(5) for span in step_spans(step, 1000.0 * step)]))
    monkeypatch.setattr(doctor, "diagnose", lambda _: [])  # tests/cli/test_doctor.py runs it


# Other tests run these pages: test_documents.py and test_guides.py.
ELSEWHERE = ("docs/operations.md", "docs/adding_a_planner.md")
SLOW = ("--compare",)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("slow", tiered([False, True], lambda slow: not slow))
def test_the_commands_that_need_no_job_run(slow: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the pages: what one makes, a later one reads."""
    pages = [page for page in [HELP, *PAGES] if page not in ELSEWHERE]
    lines = {tuple(words[1:]): page for page in pages for words in commands(page) if words[0] == "fusionlayer"}
    lines = {line: page for line, page in lines.items() if slow or not {*line} & {*SLOW}}
    few = ["--calls", "1", "--warmup", "1", "--min", "4K", "--max", "4K"]
    ran = set()
    for line, page in lines.items():
        if line[0] in ("profile", "status"):  # cli/test_plan.py measures, in small; status needs a job
            continue
        ranks = 2 if line[0] == "bench" else 1
        words = [word for word in line if word not in ("-np", "2")] + few if ranks == 2 else [*line]
        statuses = local.run(lambda rank, words=words: main(words), ranks)
        assert {*statuses} == {0}, f"{page}: fusionlayer {shlex.join(line)}: {capsys.readouterr().err}"
        ran.add(line[0])
    assert ran == {"doctor", "bench", "plan", "explain", "simulate", "trace", "--version"}
