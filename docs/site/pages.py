"""The pages that are made from code. ``make docs`` writes them anew, by ``python -m docs.site.pages``."""

from __future__ import annotations

import argparse
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import torch
import yaml

from docs.site import kernel_runs
from fusionlayer import cli, codecs, collectives, launch
from fusionlayer.base import config
from fusionlayer.base.errors import ConfigError
from fusionlayer.cli import environment, fusionrun
from fusionlayer.codecs import Codec, PartsCodec, StatefulCodec, TensorState, VariableSizeCodec
from fusionlayer.launch import allocations

ROOT = Path(__file__).resolve().parents[2]
_ELEMENTS = 1 << 20  # of the tensor whose bits are counted
_FEW = 4  # choices that are shown beside an option; more stand in its meaning
_RANKS = 8  # for which a collective is chosen
_COMMON = ("help", "columns")  # options that the introduction of docs/commands.md describes


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown; a bar within a cell is no border."""
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


def as_code(names: Iterable[str]) -> str:
    """Return "`a`, `b`"."""
    return ", ".join(f"`{name}`" for name in names)


def as_page(*lines: str | list[str]) -> str:
    """Return a page of these paragraphs, headings and tables."""
    return "\n\n".join("\n".join(part) if isinstance(part, list) else part for part in lines) + "\n"


# ---- environment variables ------------------------------------------------------------------------------------------

BUILD = {
    "CXX": "the C++ compiler; `g++`, else `c++`, without it",
    "CUDA_HOME": "where the CUDA toolkit is; see `FUSIONLAYER_NVCC`",
}
"""Variables of other programs that setup.py reads."""

MORE = {
    "torchrun": (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        *("PET_NNODES", "PET_NPROC_PER_NODE"),
    ),
    "mpirun": ("PMIX_RANK", "PMIX_NAMESPACE"),
}
"""What else fusionlayer reads of launchers."""

SLURM = (
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
)
"""What fusionlayer.launch.slurm reads."""


def configuration() -> str:
    """Return docs/config.md: all settings and variables."""
    launchers = [
        *(f"- {name}: {as_code([*places, *MORE.get(name, ())])}" for name, places in launch.VARIABLES.items()),
        f"- srun: {as_code(SLURM)}",
    ]
    keys = {f"FUSIONLAYER_{name.upper()}" for name in config.flat(config.Config())}
    more = {name: meaning for name, meaning in config.VARIABLES.items() if name not in keys}
    builds = [name for name, meaning in more.items() if meaning.startswith("when building")]
    return as_page(
        "# Settings and environment variables",
        "Which settings and environment variables are there, and which one counts? Precedence, highest first: an\n"
        "argument in code, such as `codec=` of `fl.DistributedOptimizer`; an environment variable; the file that\n"
        "`FUSIONLAYER_CONFIG` names; the default. So another codec needs no edit of the script:",
        "```\nFUSIONLAYER_CODEC=int4 torchrun --nproc-per-node 2 examples/train_gpt.py\n```",
        "`fusionlayer doctor` explains the variables that are set. `fl.init()` warns of unknown names that begin with\n"
        "`FUSIONLAYER_`.",
        "## Keys of the file",
        "The file is YAML. An unknown key is an error. The variable of a key is `FUSIONLAYER_` and the key in\n"
        "capitals, such as `FUSIONLAYER_LANES`. Its value is YAML too: `FUSIONLAYER_CODEC_OPTIONS='{bits: 4}'`;\n"
        "yes and on mean true, no and off false. An empty variable changes nothing. Brackets hold type and default.",
        [*_settings(config.Config())],
        "### Planning",
        "These keys stand below `planning`, or at the top.",
        [*_settings(config.PlanningSettings())],
        "### Keys that depend on each other",
        table(
            ["given", "also replaces, from the file"],
            [
                ["`FUSIONLAYER_CODEC`", "`codec_options`, `policy`, `plan`"],
                ["`FUSIONLAYER_POLICY`", "`plan`"],
                ["`FUSIONLAYER_PLANNER`", "`planner_options`, `plan`"],
            ],
        ),
        "A plan takes precedence over a codec, even over one named in code, because a plan names codecs itself. The\n"
        "codec `auto` is for optimizers: calls on single tensors without a codec send them uncompressed.",
        "## Other variables of fusionlayer",
        _variables({name: meaning for name, meaning in more.items() if name not in builds}),
        f"When building: {as_code([*builds, *BUILD])} ([installing](install.md#what-is-built)).",
        "## Variables of other programs",
        _variables(environment.OTHERS),
        "## Variables of launchers",
        "Rank, number of ranks, local rank and local number of ranks come from the first of these that is set\n"
        "([starting a job](operations.md#start-a-job)). If none is set, fusionlayer asks Ray Train, where the program\n"
        "has imported it.",
        launchers,
        "`PET_NNODES` and `PET_NPROC_PER_NODE`, which Kubeflow sets for torchrun, only show that torchrun was\n"
        "forgotten. `PMI_RANK` and `PMI_SIZE` that srun itself has set do not count.",
        "A process without a rank would train alone. It is refused where one of the following variables reports\n"
        "several hosts or tasks: no launcher started it, or a container has dropped variables. `RANK=0` and\n"
        "`WORLD_SIZE=1` let it train alone.",
        as_code(allocations.VARIABLES),
        "## Horovod's variables",
        "`fusionlayer.torch` reads these, so that jobs of Horovod keep their settings.",
        _variables({n: m for n, m in environment.HOROVOD.items() if n not in launch.VARIABLES["horovodrun"]}),
        f"These have no effect here; `fusionlayer doctor` prints why: {as_code(environment.HOROVOD_UNUSED)}.",
    )


def _variables(meanings: Mapping[str, str]) -> list[str]:
    """Return a list of variables; those of one meaning share a line."""
    names: dict[str, list[str]] = {}
    for name, meaning in meanings.items():
        names.setdefault(meaning, []).append(name)
    return [f"- {as_code(same)}: {meaning}" for meaning, same in names.items()]


def _settings(defaults: config.Config | config.PlanningSettings) -> Iterator[str]:
    for field in fields(defaults):
        kind, default = str(field.type).replace(" | None", " or null"), getattr(defaults, field.name)
        if field.name == "planning":
            kind, default = "mapping", {}
        shown = yaml.safe_dump(default, default_flow_style=True).splitlines()[0]
        yield f"- `{field.name}` (`{kind}`; `{shown}`): {field.metadata['help']}"


# ---- commands -------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return docs/commands.md: what every command and option means, from the parsers themselves."""
    parts: list[str | list[str]] = []
    links = []
    for parser in [*_leaves(cli.make_parser()), fusionrun.make_parser()]:
        about = " ".join((parser.description or "").split())
        links.append(f"[`{parser.prog}`](#{parser.prog.replace(' ', '-')})")
        parts += [f"## {parser.prog}", about, f"```\n{_usage(parser)}\n```"]
        for group in parser._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            rows = [(_flags(action), _meaning(parser, action)) for action in shown if action.dest not in _COMMON]
            if rows:
                usual = group.title in ("options", "positional arguments", "optional arguments")
                parts += [] if usual else [f"{str(group.title)[0].upper()}{str(group.title)[1:]}:"]
                parts.append([f"- {flags}: {meaning}" for flags, meaning in rows])
        parts += _prose(parser.epilog or "")
    return as_page(
        "# Commands",
        "Which commands does the package install, and what do their options mean? Each has `--help`. The exit status\n"
        "is 0; 1 after a failure; 2 for an unusable argument, file or setting. `--columns NAME,NAME` chooses columns\n"
        "of printed tables, or all (default: those that fit the terminal or COLUMNS; all in pipes).",
        ", ".join(links),
        *parts,
    )


def _prose(text: str) -> list[str | list[str]]:
    """Return paragraphs; lines that are indented, or aligned in columns, become blocks of code."""

    def is_code(line: str) -> bool:
        return bool(re.search(r"\S {2}", line)) or line.startswith("    ")

    parts: list[str | list[str]] = []
    for paragraph in text.strip("\n").split("\n\n"):
        for code, lines in groupby(paragraph.splitlines(), is_code):
            shown = "\n".join(lines)
            parts.append(f"```\n{dedent(shown)}\n```" if code else shown)
    return parts


def _leaves(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for child in action.choices.values():
            yield from _leaves(child)


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return parser.usage
    needed = [
        _value(action, action.option_strings[-1])
        for action in parser._actions
        if action.required and action.option_strings
    ]
    places = [
        f"[{_value(action)}]" if action.nargs == "?" else _value(action) + (" ..." if action.nargs == "+" else "")
        for action in parser._actions
        if not action.option_strings
    ]
    return " ".join([parser.prog, *places, *needed, "[options]"])


def _value(action: argparse.Action, flag: str = "") -> str:
    if action.nargs == 0:
        return flag
    few = action.choices and len([*action.choices]) <= _FEW
    shown = action.metavar or ("|".join(map(str, action.choices or ())) if few else action.dest.upper())
    return f"{flag} {shown}".strip()


def _flags(action: argparse.Action) -> str:
    return as_code(_value(action, flag) for flag in action.option_strings or [""])


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    help = parser._get_formatter()._expand_help(action) if action.help else ""
    listed = action.choices and (action.metavar or len([*action.choices]) > _FEW)
    listed = listed and not all(str(choice) in help for choice in action.choices or ())
    choices = f"one of {as_code(map(str, action.choices or ()))}" if listed else ""
    return "; ".join(filter(None, [help, choices]))


# ---- codecs ---------------------------------------------------------------------------------------------------------


def codec_table() -> str:
    """Return docs/codecs.md."""
    known = {name: codecs.get(name) for name in codecs.names()}
    families: dict[str, list[str]] = {"Lossless": [], "Quantizers": [], "Low rank": [], "Sparsifiers": []}
    for name, codec in known.items():
        families[_family(codec)].append(name)
    parts: list[str | list[str]] = []
    for family, names in families.items():
        usual = Counter(_use(known[name]) for name in names).most_common(1)[0][0]
        parts += [f"## {family}", f"Unless a line says otherwise: {'; '.join(usual)}."]
        parts.append([_codec_line(name, known[name], usual) for name in names])
    pairs: dict[str, list[str]] = {}
    for name in collectives.names():
        fitting = {n for n, codec in known.items() if _fits(name, codec)}
        pairs.setdefault(
            "; ".join(_of_family(*each, fitting) for each in families.items() if fitting & {*each[1]}), []
        ).append(name)
    return as_page(
        "# Codecs",
        INTRODUCTION.strip(),
        *parts,
        "## Which collective takes which codec",
        f"For {_RANKS} ranks. A pair that is not here is refused when an optimizer, a rule or a plan names it.",
        table(["collective", "codecs"], ([as_code(names), fitting] for fitting, names in pairs.items())),
    )


def _use(codec: Codec) -> tuple[str, str]:
    """Return what a codec keeps, and its default collective."""
    collective = collectives.choose(codec, (_RANKS,), ahead=None)
    return f"keeps {_keeps(codec)}", f"sent by `{collective}`"


def _codec_line(name: str, codec: Codec, usual: Sequence[str]) -> str:
    """Return an item of a list, which leaves out what is usual."""
    source = _paper(name, codec).partition(" (")[0]
    known = {"", re.sub(r"\W", "", codec.name)}
    facts = [_bits(codec), *(fact for fact in _use(codec) if fact not in usual)]
    facts += [f"from {source}"] if re.sub(r"\W", "", source).lower() not in known else []
    return f"- `{name}`: {_summary(name, codec)} ({'; '.join(facts)})"


def _of_family(family: str, names: Sequence[str], fitting: Collection[str]) -> str:
    """Return which codecs of a family are fitting: "all quantizers but `thc`"."""
    others = [name for name in names if name not in fitting]
    if len(others) > len(names) // 2:
        return as_code(name for name in names if name in fitting)
    return f"all of {family.lower()}" + (f" but {as_code(others)}" if others else "")


def _family(codec: Codec) -> str:
    if codec.lossless:
        return "Lossless"
    if codec.ahead:
        return "Sparsifiers"
    return "Low rank" if isinstance(codec, PartsCodec) else "Quantizers"


INTRODUCTION = """
Which codecs are there, what does each send, and what does it cost? A codec turns gradients into messages and back. Give
its name where gradients are reduced: `fl.DistributedOptimizer(optimizer, model, codec="int8")`. Options follow the
name: `codec="int", bits=4, group_size=128`. [Choosing](choosing.md) recommends one for your network and optimizer. It
does not name these:

| you have | use |
|---|---|
| a network for which `int4` sends too much | `int3` (a tenth of the bytes), `int2` (a fourteenth); measure your loss |
| a result that must not change by a bit | `raw`, or `zip` where the network is very slow |
| matrices, and a network for which four bits are too many | `powersgd` |
| local steps on such a network | `chunked_topk`: fewer bytes than `topk` |
| activations of tensor parallelism, of a pipeline | `taco`, `tahquant` ([model parallelism](model_parallel.md)) |

A line of the lists has:

- the **bits** for each element of f32, metadata included, for a million elements and the codec's defaults. A codec of
  variable size has the bits of normal random values.
- what a rank **keeps** of each tensor between steps. A *residual* is f32, as large as the gradient. It is the default;
  `error_feedback=False` leaves it out where the codec can do without.
- the default **collective** on 8 ranks of one node. Several nodes of several ranks use `two_level` instead of
  `two_shot`. Two ranks use `one_shot` instead of `two_shot`, `butterfly` and `integer_sum`. `butterfly` becomes
  `ring` if the number of ranks is no power of two. Sparse codecs without a collective of their own are encoded
  [ahead](glossary.md) and gathered.
- the source, if it has another name. [Papers](papers.md) says what differs here, and what checks it.
"""


def _summary(name: str, codec: Codec) -> str:
    """Return a preset's options, or the first sentence of a codec's docstring without the paper, which has a column."""
    if name != codec.name:
        base = codecs.get(codec.name).options
        differ = as_code(f"{key}={value!r}" for key, value in codec.options.items() if value != base[key])
        return f"`{codec.name}` with {differ or 'its defaults'}"
    first = (inspect.getdoc(type(codec)) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    return re.sub(r" \((?=[^)]*(\d{4}|section|MX))[^()]*(\([^()]*\))*[^()]*\)", "", first).rstrip(".")


def _bits(codec: Codec) -> str:
    if isinstance(codec, PartsCodec) and not codec.ahead:
        return "bits by shape and rank"
    if isinstance(codec, VariableSizeCodec):
        x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
        payload = torch.zeros(codec.bare.wire(_ELEMENTS).capacity, dtype=torch.uint8)
        codec.bare.encode_tensor(x, payload, TensorState(residual=None))
        size = codec.bare.used_bytes(payload, _ELEMENTS)
    else:
        size = codec.bare.wire(_ELEMENTS).capacity
    digits = f"{8 * size / _ELEMENTS:.2f}".rstrip("0").rstrip(".")
    return f"{digits} bits at density {codec.options['density']:.2g}" if codec.ahead else f"{digits} bits"


def _keeps(codec: Codec) -> str:
    kept = []
    if codec.feedback_pays:
        kept.append("residual")
    if isinstance(codec, PartsCodec):
        kept.append("thresholds, regions" if codec.ahead else "right factors")
    if isinstance(codec, StatefulCodec):
        kept += codec.kept()
    return ", ".join(kept) or "nothing"


def _fits(name: str, codec: Codec) -> bool:
    try:
        collectives.check_pair(name, codec, _RANKS)
    except ConfigError:
        return False
    return True


def _paper(name: str, codec: Codec) -> str:
    """Return the first source in docs/papers.md whose row names the codec's module."""
    module = f"`{type(codec).__module__.partition('.')[2].replace('.', '/')}.py`"
    for line in (ROOT / "docs/papers.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and module in cells[3]:
            sources = re.split(r"; ", cells[1])
            letters = re.sub(r"\W", "", type(codec).name).lower()
            named = [source for source in sources if re.sub(r"\W", "", source).lower().startswith(letters)]
            return re.split(r", (?:sections?|algorithms?|appendix) |: ", (named or sources)[0])[0]
    return ""


# ---- kernels --------------------------------------------------------------------------------------------------------

_SENTENCE_END = re.compile(r"(?<=[\w)\]`.])(?:[.:] +(?=[A-Z`])(?!Then)|; )")  # not the stop in "et al., ICLR 2018"
_DECLARATION = re.compile(r"/\*((?:(?!\*/).)*)\*/\n(?:(?!/\*|FL_API)[^\n]*\n)*?FL_API ([^;]+);", re.DOTALL)


def kernels() -> str:
    """Return docs/kernels.md, from the comments of the core's header."""
    header = (ROOT / "fusionlayer/csrc/include/fusionlayer_codec.h").read_text()
    contract = header.partition("Contract of every verb:")[2].partition("*/")[0]
    promises = [_plain(text) for text in contract.split("\n *   - ") if text.strip()]
    rows = []
    for comment, declaration in _DECLARATION.findall(header):
        name = re.search(r"\b(fl_\w+)\(", declaration)
        if name:
            rows.append(f"- `{name[1]}`: " + _SENTENCE_END.split(_plain(comment))[0].rstrip("."))
    return as_page(
        "# Kernels",
        "Which functions does the compiled core have, and which guarantees do they give? Codecs compute in C++17\n"
        "behind a C ABI. The CPU library has drivers for AVX-512, AVX2 and plain x86-64, chosen at loading; the CUDA\n"
        "library has kernels of the same arithmetic. See also [how their bytes stay\n"
        "equal](architecture.md#the-codec-core), [the bytes](wire_format.md) and\n"
        "[speeds on a GPU](../benchmarks/results/README.md#on-a-gpu).",
        "## What every function promises",
        [f"- {promise}" for promise in promises],
        "## The functions",
        "This is the beginning of each comment in `fusionlayer/csrc/include/fusionlayer_codec.h`. The comments also\n"
        "define residuals, statuses and limits. `encode` and `decode` are those of the codec in `spec`.",
        rows,
        "## What the CUDA kernels are made of",
        "A kernel is limited by the longer of two times: issuing its instructions, or moving its bytes at the rate of\n"
        "a copy. [Instructions](../benchmarks/results/instructions_intel-r-xeon-r-processor_2026-11-26.md) of a\n"
        "thread for each element were counted in nvcc's code for sm_80, sm_90 and sm_100. No kernel spills a\n"
        "register to memory. `delta` takes some 45 instructions of sm_90 for an unchanged element of bf16.",
    )


def _plain(comment: str) -> str:
    """Return a comment of C as one line that Markdown leaves as it is."""
    text = re.sub(r"\s*\n \*\s*|\s+", " ", comment).strip()
    return re.sub(r"([*<\[\]])", r"\\\1", text)


def gpus() -> str:
    """Return docs/gpu.md, whose section on kernels that changed since they ran is made from hashes of their sources."""
    heading, page = "## Kernels that have run", (ROOT / "docs/gpu.md").read_text()
    before, _, after = page.partition(f"{heading}\n")
    return f"{before}{heading}\n\n" + "\n".join(kernel_runs.not_run()) + "\n\n" + after[after.index("## ") :]


PAGES: dict[str, Callable[[], str]] = {
    "docs/config.md": configuration,
    "docs/commands.md": commands,
    "docs/codecs.md": codec_table,
    "docs/kernels.md": kernels,
    "docs/gpu.md": gpus,
}


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())


if __name__ == "__main__":
    main()
