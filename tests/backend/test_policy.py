"""Rules: what they fit, and the error for each way to get them wrong."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import UsageError, backend
from fusionlayer.backend import OPS, CallPolicy, CallRule, hints
from fusionlayer.backend.choices import CallChoices
from fusionlayer.base.errors import ConfigError
from tests.loops import looped


def chosen(
    policy: CallPolicy, op: str, x: Tensor, *, names: tuple[str, ...] = ("default_pg", "0"), size: int = 2
) -> str:
    choices = CallChoices(policy, names, size, devices=frozenset({"cpu"}))
    choice = choices.of(op, [x])
    assert choices.of(op, [x]) is choice
    return "passes" if choice is None else f"{choice.codec.name} {choice.algorithm}"


def of(*rules: dict[str, Any], **rest: Any) -> CallPolicy:
    return CallPolicy.of({"rules": list(rules), **rest})


BIG = torch.zeros(10_000)


def test_without_rules_all_passes() -> None:
    for policy in (CallPolicy(), CallPolicy.of(None), CallPolicy.of({}), of({"codec": "raw"})):
        assert {chosen(policy, op, BIG) for op in OPS} == {"passes"}


def test_the_first_rule_that_fits_decides() -> None:
    policy = of(
        {"codec": "raw", "group": "exper*"},
        {"codec": "bf16", "op": "all_reduce", "max_bytes": 1000, "min_bytes": 0},
        {"codec": "int8", "op": ["all_reduce", "send"], "dtype": "float32", "group": "mesh_dp"},
        {"codec": "int4", "op": "all_reduce", "algorithm": "ring"},
        {"codec": "taco", "min_bytes": 50_000},
    )
    assert chosen(policy, "all_reduce", BIG, names=("mesh_dp", "3")) == "int None"
    assert chosen(policy, "all_reduce", BIG) == "int ring"
    assert chosen(policy, "all_reduce", BIG, names=("experts", "4")) == "passes"
    assert chosen(policy, "all_reduce", BIG[:250]) == "bf16 None"
    assert chosen(policy, "all_reduce", BIG[:251]) == "passes", "below the policy's threshold"
    assert chosen(policy, "all_reduce", BIG.bfloat16(), names=("mesh_dp", "3")) == "int ring"
    assert chosen(policy, "send", BIG) == "passes"
    assert chosen(policy, "send", torch.zeros(12_500)) == "taco None"
    assert chosen(policy, "all_gather", torch.zeros(12_500)) == "passes", "nobody asked"
    assert chosen(of({"codec": "int8", "op": "all_gather"}), "all_gather", BIG) == "int None"
    assert chosen(of({"codec": "int8", "group": "0"}), "send", BIG) == "int None", "groups have names, too"


def test_an_all_to_all_is_as_large_as_all_of_its_pairs() -> None:
    choices = CallChoices(of({"codec": "int8", "op": "all_to_all"}), ("0",), 4, devices=frozenset({"cpu"}))
    for numel, codecs in ((1023, []), (1024, ["int"])):
        found = choices.of_pairs([BIG[:numel]] * 4, [BIG[:numel].clone()] * 4)
        assert found is not None and [codec.name for codec in found[0].values()] == codecs


def test_what_is_never_touched() -> None:
    policy = of({"codec": "int8", "op": list(OPS), "min_bytes": 0})
    for op in OPS:
        assert chosen(policy, op, BIG) == "int None"
        assert chosen(policy, op, BIG, size=1) == "passes"
        assert chosen(policy, op, BIG[:0]) == "passes"
        for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64):
            assert chosen(policy, op, BIG.to(dtype)) == "passes"
        assert chosen(policy, op, BIG.to_sparse()) == "passes"
        assert chosen(policy, op, BIG.to("meta")) == "passes"
    assert chosen(of({"codec": "int8"}), "all_reduce", BIG[:4095]) == "passes"
    assert chosen(of({"codec": "int8"}), "all_reduce", BIG[:4096]) == "int None"
    assert chosen(of({"codec": "int8"}, min_bytes=4 * 4097), "all_reduce", BIG[:4096]) == "passes"


@looped(
    "source, told",
    [
        ({"rule": []}, r"policy: unknown key 'rule'; did you mean 'rules'\? known: rules, min_bytes"),
        ({"rules": {}}, "policy: rules={}; expected a list"),
        ({"rules": [3]}, r"policy: rules\[0\]=3; expected keys and values"),
        ({"min_bytes": "many"}, "policy: min_bytes='many'; expected a whole number"),
        ({"min_bytes": -1}, "policy: min_bytes=-1; expected a number of bytes"),
        ({"rules": [{"codec": "int8"}, {"op": "send"}]}, r"policy: rules\[1\]: lacks 'codec'"),
        ({"rules": [{"codec": "int9"}]}, r"policy: rules\[0\]: unknown codec 'int9'; did you mean 'int'\?"),
        ({"rules": [{"codec": 8}]}, r"policy: rules\[0\].codec=8; expected a text"),
        ({"rules": [{"codec": "int8", "options": {"bit": 4}}]}, r"rules\[0\]: .*cannot take the options .*'bit'"),
        ({"rules": [{"codec": "int8", "options": 4}]}, r"policy: rules\[0\].options=4; expected keys and values"),
        ({"rules": [{"codec": "int8", "opp": "send"}]}, r"policy: rules\[0\]: unknown key 'opp'; did you mean 'op'\?"),
        ({"rules": [{"codec": "int8", "op": "allreduce"}]}, r"unknown op 'allreduce'; did you mean 'all_reduce'\?"),
        ({"rules": [{"codec": "int8", "op": 1}]}, "op=1; expected a text or a list or null"),
        ({"rules": [{"codec": "int8", "dtype": "float64"}]}, "unknown dtype 'float64'; did you mean .* known: float32"),
        ({"rules": [{"codec": "int8", "min_bytes": True}]}, "min_bytes=True; expected a whole number or null"),
        ({"rules": [{"codec": "int8", "min_bytes": 9, "max_bytes": 8}]}, "min_bytes=9, max_bytes=8; expected 0 <="),
        ({"rules": [{"codec": "topk"}]}, "codec 'topk' leaves most elements out and needs error feedback"),
        ({"rules": [{"codec": "onebit"}]}, "codec 'onebit' loses most of a tensor and needs error feedback"),
        ({"rules": [{"codec": "powersgd", "op": "send", "error_feedback": True}]}, "codec 'powersgd' loses most of"),
        ({"rules": [{"codec": "raw", "algorithm": "ring"}]}, "algorithm='ring' with codec 'raw'"),
        ({"rules": [{"codec": "int8", "algorithm": "ring"}]}, "give it in a rule with op: all_reduce or op: reduce_sc"),
        ({"rules": [{"codec": "int8", "op": "all_reduce", "algorithm": "rang"}]}, r"did you mean 'ring'\?"),
        ({"rules": [{"codec": "int8", "op": "reduce_scatter", "algorithm": "two_shot"}]}, "expected 'ring' or none"),
        (["int8"], r"policy: got a list; expected a fusionlayer.backend.Policy, a mapping, or the path"),
    ],
)
def test_errors_name_what_is_wrong(source: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CallPolicy.of(source)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("min_bytes: 100\nrules:\n- {codec: int8, op: all_reduce}\n- {codec: taco, group: mesh_tp}\n")
    read = CallPolicy.of(path)
    assert (
        read
        == CallPolicy((CallRule("int8", op="all_reduce"), CallRule("taco", group="mesh_tp")), 100)
        == CallPolicy.of(str(path))
    )
    assert CallPolicy.of(read) is read
    path.write_text("rules: [{codec: int8, gruop: x}]")
    with pytest.raises(ConfigError, match=r"policy .*policy.yaml: rules.*unknown key 'gruop'; did you mean 'group'\?"):
        CallPolicy.of(path)
    path.write_text("rules: [")
    with pytest.raises(ConfigError, match="policy.yaml cannot be read: "):
        CallPolicy.of(path)
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read: .*No such file"):
        CallPolicy.of(tmp_path / "nowhere.yaml")


def test_facts_tell_all_policies_apart() -> None:
    rules = [{"codec": "int8"}, {"codec": "int4"}, {"codec": "int8", "options": {"group_size": 64}}]
    rules += [{"codec": "int8", **more} for more in ({"op": "send"}, {"group": "a"}, {"dtype": "float32"})]
    rules += [{"codec": "int8", **more} for more in ({"min_bytes": 5}, {"max_bytes": 5})]
    rules += [{"codec": "int8", "op": "all_reduce", "algorithm": name} for name in ("ring", "butterfly")]
    facts = [of(rule).facts for rule in rules] + [of(min_bytes=5).facts, of().facts, of(*rules).facts]
    assert len(set(facts)) == len(facts)
    assert of(*rules).facts == of(*rules).facts


def test_the_innermost_hint_of_the_calling_thread_counts() -> None:
    seen: list[bool] = []
    with backend.hint(plain=True):
        thread = threading.Thread(target=lambda: seen.append(hints.current().plain))
        thread.start()
        thread.join()
        with backend.hint():
            seen.append(hints.current().plain)
        seen.append(hints.current().plain)
        with pytest.raises(ZeroDivisionError), backend.hint():
            raise ZeroDivisionError
        seen.append(hints.current().plain)
    assert seen == [False, False, True, True] and hints.current() == hints.NONE


def test_a_residual_is_of_all_that_is_summed() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    assert hints.residual_of(tensors) is None
    with backend.hint(residual=torch.zeros(10)):
        assert hints.residual_of(tensors) is hints.current().residual
        with pytest.raises(UsageError, match="residual of 10 elements for an all-reduce of 4"):
            hints.residual_of(tensors[1:])


def test_padding_is_cleared() -> None:
    x = torch.full((2, 5), float("nan"))
    with backend.hint(padding=(slice(1, 3), slice(9, 10))):
        hints.clear_padding([x])
    assert x.view(-1).isnan().tolist() == [True, False, False, *[True] * 6, False]


def test_a_policy_for_groups_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="needs a default group"):
        backend.adopt({"rules": []})
