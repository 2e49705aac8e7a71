"""The section of a DeepSpeed configuration: what it means, and what each mistake in it is answered with."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionlayer import ConfigError, codecs
from fusionlayer.frameworks.deepspeed.gradients import padding_of
from fusionlayer.frameworks.deepspeed.one_bit import options_of
from fusionlayer.frameworks.deepspeed.section import ROUTERS, DeepSpeedSection, RoleCodec
from fusionlayer.frameworks.deepspeed.spans import GradientSpan, Spans
from fusionlayer.training.weights import PRESETS, Weights
from tests.loops import looped


def section(given: Any, stage: int = 2, **zero: Any) -> DeepSpeedSection:
    found = DeepSpeedSection.of({"zero_optimization": {"stage": stage, **zero}, "fusionlayer": given})
    assert found is not None
    return found


def test_what_is_left_out_or_auto() -> None:
    assert DeepSpeedSection.of({"zero_optimization": {"stage": 3}}) is None
    plain = section({})
    assert plain == section({"gradients": "auto", "weights": {"codec": "auto"}, "error_feedback": "auto"})
    assert plain.gradients == RoleCodec("int8") and not plain.weights.compresses and not plain.activations.compresses
    assert plain.error_feedback and plain.exempt == ROUTERS and plain.warmup_steps == 0
    assert not section({}, stage=3).error_feedback, "each rank would keep all of a sharded model's gradients"
    assert not section({"gradients": "raw"}).error_feedback
    # Hugging Face fills in values that are "auto", and leaves those that it does not know.
    assert DeepSpeedSection.of({"zero_optimization": "auto", "fusionlayer": {}}) is not None


def test_roles_become_rules_of_operations() -> None:
    found = section(
        {
            "gradients": {"codec": "int4", "options": {"group_size": 64}, "algorithm": "ring", "min_bytes": 10},
            "weights": "int8",
            "activations": "bf16",
        }
    )
    rules = {rule.op: rule for rule in found.policy.rules}
    assert {op: rule.codec for op, rule in rules.items()} == {
        **{"all_reduce": "int4", "reduce_scatter": "int4", "all_gather": "int8"},
        **{"all_to_all": "bf16", "send": "bf16"},
    }
    assert rules["all_reduce"].algorithm == "ring" and rules["reduce_scatter"].algorithm is None
    assert rules["all_reduce"].options == {"group_size": 64} and rules["all_reduce"].min_bytes == 10
    assert found != section({"gradients": "int4"})


def test_presets_are_defaults() -> None:
    plus = section({"zero_plus_plus": True}, stage=3)
    assert (plus.gradients.codec, plus.weights.codec, plus.error_feedback) == ("qgz", "qwz", False)
    assert {rule.op: rule.make_codec() for rule in plus.policy.rules} == {
        **{op: codecs.get("qgz") for op in ("all_reduce", "reduce_scatter")},
        "all_gather": codecs.get("int8", group_size=2048),
    }
    assert section({"zero_plus_plus": True, "weights": "mxfp8"}, stage=3).weights.codec == "mxfp8"


def test_papers_names_are_those_of_the_other_integrations() -> None:
    both = section({"weights": {"codec": "sdp4bit", "min_bytes": 7}})
    assert (both.weights, both.gradients.codec) == (RoleCodec("qwd", min_bytes=7), "tlq_hs")
    assert both.differences == Weights.of("qwd").codec and not both.error_feedback
    assert {rule.op for rule in both.policy.rules} == {"all_reduce", "reduce_scatter"}, "no rule rounds whole weights"
    assert section({"weights": "zero++"}, stage=3) == section({"zero_plus_plus": True}, stage=3)
    assert section({"weights": "qwd"}).gradients.codec == "int8" and section({"weights": "delta"}).differences
    assert (
        section({"weights": "qw"}).differences is None
        and section({"weights": "qw"}).policy.rules[-1].op == "all_gather"
    )


def test_the_optimizer_that_deepspeed_dropped() -> None:
    """An old configuration has a section without saying so; parameters keep DeepSpeed's defaults."""
    old = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "betas": [0.8, 0.9], "comm_backend_name": "mpi"}}}
    found = DeepSpeedSection.of(old)
    assert found is not None and found.gradients.codec == "onebit" and found.error_feedback and not found.warmup_steps
    assert options_of(old) == {
        **{"lr": 4e-4, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0, "freeze_step": 100000}
    }
    assert options_of({"optimizer": {"type": "Adam"}}) is None and options_of({}) is None


@looped(
    "optimizer, more, message",
    [
        (
            {"type": "ZeroOneAdam"},
            {},
            '"ZeroOneAdam", which DeepSpeed has dropped in 0.19.7: its steps without messages',
        ),
        ({"type": "OneBitLamb"}, {}, 'use "OneBitAdam", or "Lamb"'),
        ({"type": "OneBitAdam", "params": {"amsgrad": True}}, {}, "amsgrad=True; 1-bit Adam has no such variant"),
        ({"type": "OneBitAdam", "params": {"max_grad_norm": 1.0}}, {}, 'clips by "gradient_clipping"'),
        ({"type": "OneBitAdam", "params": {"freeze_steps": 9}}, {}, "unknown parameter 'freeze_steps'; did you mean"),
        ({"type": "OneBitAdam", "params": {"lr": "1e-3"}}, {}, "lr='1e-3'; expected a number"),
        ({"type": "OneBitAdam", "params": {"betas": [0.9]}}, {}, "betas=[0.9]; expected two numbers"),
        ({"type": "OneBitAdam", "params": {"freeze_step": 0}}, {}, "freeze_step=0; expected a whole number"),
        ({"type": "OneBitAdam", "params": [1]}, {}, "params=[1]; expected keys and values"),
        ({"type": "OneBitAdam"}, {"zero_optimization": {"stage": 1}}, "each rank needs whole gradients and momenta"),
        ({"type": "OneBitAdam"}, {"fusionlayer": {"enabled": False}}, "which DeepSpeed has dropped in 0.19.7"),
        ({"type": "OneBitAdam"}, {"fusionlayer": {"warmup_steps": 5}}, "whose freeze_step ends the warm-up"),
    ],
)
def test_mistakes_in_the_optimizer(optimizer: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        DeepSpeedSection.of({"optimizer": optimizer, **more})
    assert "\n" not in str(raised.value)


def test_one_bit_takes_its_codec_by_name() -> None:
    signs = section({"one_bit": True})
    assert signs.gradients.codec == "onebit" and signs.error_feedback and signs.warmup_steps == 100
    assert [(rule.codec, rule.ops, rule.error_feedback) for rule in signs.policy.rules] == [
        ("onebit", ("all_reduce",), True)
    ]


def test_the_sections_of_the_page_are_sections() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    role, old = (json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert section(role).gradients.options == {"group_size": 64}
    assert DeepSpeedSection.of(old) is not None
    _, keys, weights, *_ = re.split(r"^## (?:The section|Weights|1-bit Adam)$", page, flags=re.MULTILINE)
    names = re.findall(r"`([a-z]\w*\+*)`", weights)
    assert {*PRESETS} < {*names}
    for name in names:
        assert section({"weights": name}, stage=1).weights.codec == PRESETS.get(name, (name,))[0]
    rows = re.findall(r"^\| `(\w+)` \|", keys, re.MULTILINE)
    assert set(rows) == {*(f.name for f in fields(DeepSpeedSection)), "zero_plus_plus", "one_bit"}


@looped(
    "given, stage, zero, message",
    [
        ("int8", 2, {}, "'int8'; expected keys and values"),
        ({"gradient": "int8"}, 2, {}, "unknown key 'gradient'; did you mean 'gradients'?"),
        ({"gradients": {"codek": "int8"}}, 2, {}, "gradients: unknown key 'codek'; did you mean 'codec'?"),
        ({"gradients": "int5"}, 2, {}, "gradients: unknown codec 'int5'; did you mean"),
        ({"gradients": 8}, 2, {}, "gradients=8; expected keys and values"),
        ({"gradients": {"codec": "int8", "options": {"grup_size": 8}}}, 2, {}, "cannot take the options"),
        ({"gradients": {"algorithm": "rung"}}, 2, {}, "gradients.algorithm='rung'; did you mean 'ring'?"),
        ({"weights": {"codec": "int8", "algorithm": "ring"}}, 2, {}, "weights.algorithm='ring'; only all-reduces"),
        ({"gradients": {"min_bytes": -1}}, 2, {}, "min_bytes=-1; expected 0 or more"),
        ({"gradients": {"min_bytes": "big"}}, 2, {}, "gradients.min_bytes='big'; expected a whole number"),
        ({"enabled": 1}, 2, {}, "enabled=1; expected true or false"),
        ({"error_feedback": "yes"}, 2, {}, "error_feedback='yes'; expected true or false"),
        ({"feedback_bits": 16}, 2, {}, "feedback_bits=16; expected 32 or 8"),
        ({"warmup_steps": -1}, 2, {}, "warmup_steps=-1; expected 0 or more"),
        ({"exempt": "*router*"}, 2, {}, "exempt='*router*'; expected a list"),
        ({"error_feedback": True}, 3, {}, "error_feedback=true with ZeRO stage 3"),
        ({"weights": "int8"}, 0, {}, "only ZeRO 1 to 3 send weights"),
        ({"zero_plus_plus": True, "one_bit": True}, 2, {}, "choose one"),
        ({"one_bit": True}, 3, {}, "signs need error feedback"),
        ({"gradients": "topk"}, 2, {}, "leaves most elements out"),
        ({"gradients": "onebit", "error_feedback": False}, 2, {}, "'onebit', which loses most of them, without error"),
        ({"gradients": "powersgd"}, 3, {}, "'powersgd', which loses most of them, without error_feedback"),
        ({"weights": "qwd"}, 3, {}, "would each keep a copy of all weights; set stage 1 or 2"),
        ({"weights": "sdp4bit"}, 3, {}, "would each keep a copy of all weights"),
        ({"weights": "sdp4bit", "gradients": "int8"}, 2, {}, "weights=sdp4bit names gradients too, as tlq_hs"),
        ({"gradients": "sdp4bit"}, 2, {}, "gradients=sdp4bit names weights too"),
        ({"gradients": "qwd"}, 2, {}, "gradients: 'qwd' is a way to send weights"),
        (
            {"weights": {"codec": "qwd", "options": {"bits": 8}}},
            2,
            {},
            "weights: 'qwd' has no options: it is 'int4' with",
        ),
        ({"weights": "qwdd"}, 2, {}, "weights: unknown codec 'qwdd'"),
        ({"weights": "topk"}, 2, {}, "leaves most elements out"),
        ({"activations": "onebit"}, 0, {}, "activations: codec 'onebit' loses most of a tensor"),
        ({}, 2, {"use_multi_rank_bucket_allreduce": False}, "use_multi_rank_bucket_allreduce=false"),
        ({}, 3, {"zero_quantized_gradients": True}, "zero_quantized_gradients is true; one of the two"),
        ({}, 3, {"stage3_use_all_reduce_for_fetch_params": True}, "which look like gradients"),
    ],
)
def test_mistakes(given: Any, stage: int, zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        section(given, stage, **zero)
    assert str(raised.value).startswith('section "fusionlayer"')
    assert "\n" not in str(raised.value)


def test_what_is_disabled_forbids_nothing() -> None:
    assert not section({"enabled": False}, 3, zero_quantized_gradients=True).enabled


def test_spans_of_gradients_in_a_buffer_and_alone() -> None:
    spans = Spans()
    buffer, alone = torch.zeros(100), torch.zeros(4, 5)
    spans.add_run(buffer[10:60], [("a", 20), ("b", 30)])
    spans.add("c", alone)
    assert list(spans.parts(buffer[5:40])) == [GradientSpan("a", 0, 20, 5), GradientSpan("b", 0, 10, 25)]
    assert list(spans.parts(buffer[35:])) == [GradientSpan("b", 5, 30, 0)]
    assert list(spans.parts(alone)) == [GradientSpan("c", 0, 20, 0)]
    assert list(spans.parts(torch.zeros(3))) == [] and list(spans.parts(buffer[60:])) == []
    assert GradientSpan("b", 5, 30, 0).key == "b[5:30]"


@pytest.mark.parametrize(("numels", "size"), [([7], 2), ([8], 2), ([1, 2, 3], 4), ([10, 4, 1], 3), ([5, 5], 5)])
def test_padding_is_where_deepspeed_puts_it(numels: list[int], size: int) -> None:
    """The rows that DeepSpeed makes are made here one element at a time: 0 where it fills up."""
    expected = []
    for rank in range(size):
        for numel in numels:
            chunk = -(-numel // size)
            expected += [float(rank * chunk + i < numel) for i in range(chunk)]
    row = torch.ones(len(expected))
    for piece in padding_of(numels, size):
        assert piece.stop > piece.start
        row[piece] = 0
    assert row.tolist() == expected
