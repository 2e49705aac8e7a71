"""Options that no codec has a meaning for are refused: the error names codec, option and value, and then what to do."""

import math
import re
from typing import Any

import pytest

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from tests.loops import looped

WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "chunked_topk": {
        "density": (0, -0.1, 1.5, "all", math.nan, True),
        "bits": (1, 5, 16, 2.0, "2"),
        "chunk": (32, 8192, 100, 4096.0),
    },
    "dgc": {
        "momentum": (-0.1, 1.0),
        "sampling": (0.0,),
        "nesterov": (True,),
        "clip_norm": (0.0,),
        "warmup_steps": (-1,),
        "warmup_stages": (0,),
    },
    "dynamiq": {"bits": (2, 9, 4.5), "variable": (1,), "epsilon4": (0.5,), "epsilon8": (0.1,)},
    "fp8": {"format": ("int8",)},
    "fp8_block": {"format": ("e2m3",), "block_size": (16,)},
    "gaussiank": {"reuse": (0, 2.5, True)},
    "int": {"bits": (5, 1, "8", 8.0), "group_size": (48, 16, 128.0), "hadamard": (1,), "rounding": ("up",)},
    "mxfp4": {"scale": (8,)},
    "mxfp6": {"format": ("e4m3",)},
    "mxfp8": {"format": ("e2m3",), "scale": ("f32",)},
    "omnireduce": {"bits": (0, 17), "block_size": (100,)},
    "onebit": {"group_size": (100, 8192), "warmup_steps": (-1,)},
    "powersgd": {
        "rank": (0, 2.0),
        "min_compression_rate": (0, "2"),
        "warm_start": (1,),
        "factors": ("fp16",),
        "warmup_steps": (-1,),
    },
    "qsdp": {"bits": (5,), "group_size": (1000,), "rounding": ("nearest",)},
    "randomk": {"values": ("f16", None)},
    "redsync": {"slack": (0.9, math.inf, math.nan, "some")},
    "sidco": {"stages": (0, 17), "distribution": ("normal",)},
    "taco": {
        "format": ("e3m4", "e2m1"),
        "block_size": (48, 1024, 256.0),
        "hadamard": (1,),
        "scales": ("both",),
        "tau": (0.5,),
        "epsilon": (0.0,),
        "limited": (1,),
    },
    "tahquant": {"bits": (5,), "tile": (16,), "channels": (96, 0), "coarse": (1.0,)},
    "thc": {"levels": ("log",), "rounding": ("up",), "block_size": (48, 8192), "clip": (1.0, "2")},
    "topk": {"density": (0, -0.1, 1.5, "all", math.nan, True), "reuse": (4,)},
    "zip": {"exponents": ("all",), "sigma": (0.0, -1.0, math.nan, math.inf, "1")},
}
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("int_full", {"hadamard": True}, "full range is for 4 or 8 bits"),
    ("int_full", {"rounding": "stochastic"}, "full range is for 4 or 8 bits"),
    ("int_full", {"bits": 2}, "full range is for 4 or 8 bits"),
    ("qgz", {"bits": 2}, "full range"),
    ("tahquant", {"coarse": 0.1, "bits": 6}, "tahquant codec: coarse="),
    ("zip", {"exponents": "table", "sigma": 1.0}, "one of the two"),
    ("powersgd", {"ranks": 2}, "rank"),
]


@looped("name", WRONG)
def test_values_out_of_range_are_refused(name: str) -> None:
    for option, values in WRONG[name].items():
        for value in values:
            told = rf"{name} codec: .*{option}={re.escape(repr(value))}.*; "
            with pytest.raises(ConfigError, match=told):
                codecs.get(name, **{option: value})
                raise AssertionError(f"accepted: {name} with {option}={value!r}")


@looped("name, options, told", TOGETHER)
def test_options_that_do_not_go_together_are_refused(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        codecs.get(name, **options)
