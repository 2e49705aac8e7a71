"""docs/config.md: all settings and variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import yaml

from docs.site.markdown import as_code, as_page, table
from fusionlayer import launch
from fusionlayer.base import config
from fusionlayer.cli import environment
from fusionlayer.launch import allocations

__all__ = ["configuration"]

BUILD = {
    "CXX": "the C++ compiler (default: `g++`, else `c++`)",
    "CUDA_HOME": "folder of the CUDA toolkit; see `FUSIONLAYER_NVCC`",
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
        "argument in code; an environment variable; the file that `FUSIONLAYER_CONFIG` names; the default. So\n"
        "another codec needs no edit of the script:",
        "```\nFUSIONLAYER_CODEC=int4 torchrun --nproc-per-node 2 examples/train_gpt.py\n```",
        "`fusionlayer doctor` explains the variables that are set. `fl.init()` warns of unknown names that begin with\n"
        "`FUSIONLAYER_`.",
        "## Keys of the file",
        "The file is YAML. An unknown key is an error. The variable of a key is `FUSIONLAYER_` and the key in\n"
        "capitals, and its value is YAML too: `FUSIONLAYER_CODEC_OPTIONS='{bits: 4}'`. Brackets hold type and default.",
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
        "A plan takes precedence over a codec, even over one named in code. If the settings name `auto`, calls on\n"
        "single tensors use `raw`.",
        "## Other variables of fusionlayer",
        _variables({name: meaning for name, meaning in more.items() if name not in builds}),
        f"When building: {as_code([*builds, *BUILD])} ([installing](install.md#what-is-built)).",
        "## Variables of other programs",
        _variables(environment.OTHERS),
        "## Variables of launchers",
        "Rank and number of ranks come from the first launcher whose variables are set, else from Ray Train, if the\n"
        "program has imported it.",
        launchers,
        "`PET_NNODES` and `PET_NPROC_PER_NODE`, which Kubeflow sets for torchrun, only show that torchrun was\n"
        "forgotten. `PMI_RANK` and `PMI_SIZE` do not count under srun.",
        "A process without a rank is refused if one of these variables reports several hosts or tasks. `RANK=0` and\n"
        "`WORLD_SIZE=1` let it train alone.",
        as_code(allocations.VARIABLES),
        "## Horovod's variables",
        "`fusionlayer.torch` reads these:",
        _variables({n: m for n, m in environment.HOROVOD.items() if n not in launch.VARIABLES["horovodrun"]}),
        f"These have no effect; `fusionlayer doctor` prints why: {as_code(environment.HOROVOD_UNUSED)}.",
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
