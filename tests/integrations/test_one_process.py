"""A job of one rank refuses what a larger one would: mistakes show on the first machine, not on the cluster."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.parallel.moe import Dispatcher
from fusionlayer.parallel.tensor_parallel.channel import Channel
from tests.loops import looped
from tests.ranks import over_threads


def optimizer(**options: Any) -> Any:
    model = nn.Linear(3, 3)
    return fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def all_reduce(**options: Any) -> Any:
    return fl.all_reduce(torch.ones(8), **options)


def all_reduce_of_doubles(**options: Any) -> Any:
    return fl.all_reduce(torch.ones(8, dtype=torch.float64), **options)


def all_gather(**options: Any) -> Any:
    return fl.all_gather(torch.ones(8), **options)


def rule(**options: Any) -> Any:
    return fl.backend.CallPolicy.of({"rules": [{"op": "all_reduce", **options}]})


def deepspeed(**options: Any) -> Any:
    return fl.deepspeed.DeepSpeedSection.of({"fusionlayer": {"gradients": options}})


def sharded(**options: Any) -> Any:
    return fl.ShardedOptimizer(nn.Linear(3, 3).parameters(), torch.optim.SGD, lr=0.1, **options)


CASES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (optimizer, {"codec": "int44"}, "unknown codec 'int44'; did you mean 'int4'"),
    (optimizer, {"codec": "int8", "bits": 9}, "bits=9; expected 2, 3, 4 or 8"),
    (optimizer, {"codce": "int8"}, "DistributedOptimizer.. has no argument 'codce'.* did you mean 'codec'"),
    (optimizer, {"planer": "wfbp"}, "DistributedOptimizer.. has no argument 'planer'.* did you mean 'planner'"),
    (optimizer, {"planning": 3}, "planning: got an? int; expected a fusionlayer.Planning, or a planner"),
    (
        optimizer,
        {"planning": fl.Planning(planner="wfbp"), "planner": "single"},
        "planner=... is given, and planning has",
    ),
    (optimizer, {"codec": "int8", "bit": 4}, "no argument 'bit', and codec 'int8' no such option; did you mean 'bits'"),
    (optimizer, {"codec": "int8", "algorithm": "rong"}, "unknown collective 'rong'; did you mean 'ring'"),
    (optimizer, {"codec": "topk", "algorithm": "ring"}, "'ring' encodes partial sums anew.* cannot use topk"),
    (optimizer, {"plan": "no.yaml"}, "plan file no.yaml cannot be read"),
    (optimizer, {"policy": "no.yaml"}, "policy no.yaml cannot be read"),
    (optimizer, {"codec": "auto", "profile": "no.yaml"}, "profile no.yaml cannot be read"),
    (optimizer, {"autotune": True}, r"DistributedOptimizer\(autotune=...\): it was removed: .* codec='auto'"),
    (optimizer, {"planner": "taperd"}, "unknown planner 'taperd'; did you mean 'tapered'"),
    (optimizer, {"error_feedback": "yes"}, "error_feedback='yes'; expected True, False or None"),
    (optimizer, {"ahead": "no"}, "ahead='no'; expected True, False or None"),
    (all_reduce, {"codec": "int44"}, "unknown codec 'int44'"),
    (all_reduce, {"codec": "int8", "algorithm": "rong"}, "unknown collective 'rong'"),
    (all_reduce, {"codec": "int8", "algorithm": "dense"}, "'dense' sends values as they are and cannot use int"),
    (all_reduce, {"codce": "int8"}, "all_reduce.. has no argument 'codce'.* did you mean 'codec'"),
    (all_reduce_of_doubles, {"codec": "int44"}, "unknown codec 'int44'"),
    (all_gather, {"codec": "int8", "grup": None}, "all_gather.. has no argument 'grup'.* did you mean 'group'"),
    (rule, {"codec": "int8", "algorithm": "low_rank"}, "'low_rank' sums the factors of matrices and cannot use int"),
    (deepspeed, {"codec": "int8", "algorithm": "omnireduce"}, "gradients: algorithm 'omnireduce' .* cannot use int"),
    (sharded, {"weights": "qq"}, "unknown codec 'qq'"),
    (sharded, {"gradients": "int44"}, "unknown codec 'int44'"),
    (Channel, {"codec": "int44"}, "unknown codec 'int44'"),
    (Channel, {"codec": "int8", "peice_bytes": 4}, "Channel.. has no argument 'peice_bytes'.* mean 'piece_bytes'"),
    (Dispatcher, {"gradient_codecs": "int8"}, "no argument 'gradient_codecs'.* did you mean 'gradient_codec'"),
]


@looped("front, options, told", CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_one_rank_refuses_what_two_would(front: Callable[..., Any], options: dict[str, Any], told: str) -> None:
    def body(_: object) -> None:
        with pytest.raises(ConfigError, match=told):
            front(**options)

    for world in (1, 2):
        over_threads(world, body)


@looped("options", [{}, {"codec": "int4"}, {"codec": "auto"}], ids=str)
def test_what_was_made_to_check_options_leaves_no_thread(options: dict[str, Any]) -> None:
    def body(_: object) -> None:
        before = set(threading.enumerate())
        assert optimizer(**options).fusion_plan is None
        for thread in set(threading.enumerate()) - before:
            thread.join(180)  # a lane ends by itself once it is told to
            assert not thread.is_alive(), thread.name

    over_threads(1, body)
