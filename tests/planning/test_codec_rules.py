import re
from pathlib import Path

import pytest

from fusionlayer import codecs
from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import TensorInfo
from fusionlayer.planning import online
from fusionlayer.planning.codec_rules import FIDELITIES, CodecRule, CodecRules, Sending
from tests.loops import looped

CANDIDATES = {name: Sending(codecs.get(name)) for name in ("raw", "bf16", "int8", "int4")}
SECONDS = {"raw": 4.0, "bf16": 2.0, "int": 1.0}


def tensor(name: str, numel: int = 1000, dtype: str = "float32") -> TensorInfo:
    return TensorInfo(name, numel, dtype, 4)


def seconds(sending: Sending, tensor: TensorInfo) -> float:
    """int4 is the fastest, then int8, bf16, raw; but below 100 elements raw costs nothing."""
    if tensor.numel < 100 and sending.codec.name == "raw":
        return 0.0
    return SECONDS[sending.codec.name] - (0.5 if sending == CANDIDATES["int4"] else 0)


def chosen(policy: CodecRules, which: TensorInfo) -> tuple[str, str]:
    choice = policy.choose(which, CANDIDATES, seconds)
    return str(choice.codec).partition("(")[0], choice.reason


def test_the_first_rule_that_fits_counts() -> None:
    policy = CodecRules(
        (
            CodecRule("raw", match="*.norm.*"),
            CodecRule("bf16", dtype="bfloat16"),
            CodecRule("int4", {"group_size": 32}, min_numel=1000),
            CodecRule("raw"),
        )
    )
    assert chosen(policy, tensor("a.norm.weight")) == ("raw", "rules[0]: match '*.norm.*'")
    assert chosen(policy, tensor("a.weight", dtype="bfloat16")) == ("bf16", "rules[1]: bfloat16")
    assert chosen(policy, tensor("a.weight")) == ("int", "rules[2]: at least 1000 elements")
    assert policy.choose(tensor("a.weight"), {}, seconds).codec == codecs.get("int4", group_size=32)
    assert chosen(policy, tensor("a.bias", 999)) == ("raw", "rules[3]: every tensor")


@looped(
    "fidelity, best, second",
    [("lossless", "raw", None), ("near_lossless", "int8", "bf16"), ("aggressive", "int4", "int8")],
)
def test_auto_takes_the_fastest_that_is_allowed(fidelity: str, best: str, second: str | None) -> None:
    choice = CodecRules((CodecRule("auto"),), fidelity).choose(tensor("t"), CANDIDATES, seconds)
    assert choice.codec == CANDIDATES[best].codec
    assert choice.reason.startswith(f"rules[0]: auto, {fidelity}: {best} takes")
    beaten = "" if second is None else f", {second} {1e3 * SECONDS[CANDIDATES[second].codec.name]:.2f} ms"
    assert choice.reason.endswith(f"ms alone{beaten}")


def test_auto_does_not_compress_what_is_too_small() -> None:
    assert chosen(CodecRules((CodecRule("auto"),), "aggressive"), tensor("bias", 10))[0] == "raw"


def test_a_tensor_without_a_rule_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no rule fits 'bias' .10 elements.; end with a rule for all"):
        chosen(CodecRules((CodecRule("int4", min_numel=100),)), tensor("bias", 10))


def test_the_example_of_the_page_is_a_policy(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    (example,) = re.findall(r"^```yaml\n(fidelity.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "policy.yaml").write_text(example)
    assert len(CodecRules.from_yaml(tmp_path / "policy.yaml").rules) == 3


@looped(
    "content, message",
    [
        ("[]", "[]; expected keys and values"),
        ("rules: 7", "rules=7; expected a list"),
        ("rule: []", "unknown key 'rule'; did you mean 'rules'"),
        ("rules: [{codec: raw, numel: 3}]", "rules[0]: unknown key 'numel'; did you mean 'min_numel'"),
        ("rules: [{match: x}]", "rules[0]: lacks 'codec'"),
        ("rules: [{codec: int5}]", "rules[0]: unknown codec 'int5'"),
        ("rules: [{codec: auto, options: {bits: 4}}]", "'auto' takes no options"),
        ("rules: [{codec: raw, min_numel: many}]", "rules[0].min_numel='many'; expected a whole number"),
        ("{rules: [], fidelity: lossles}", "fidelity='lossles'; did you mean 'lossless'"),
        ("rules: [", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="policy .*policy.yaml") as caught:
        CodecRules.from_yaml(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_auto_may_choose_in_training() -> None:
    """Four bits and fewer change too much of a tensor to be near-lossless."""
    candidates = {name: codecs.get(name) for name in online.CANDIDATES}
    allowed = {fidelity: [*CodecRules((CodecRule("auto"),), fidelity).allowed(candidates)] for fidelity in FIDELITIES}
    every = ["raw", "bf16", "int8", "int4", "int3", "int2", "topk", "chunked_topk", "dgc"]
    near = ["raw", "bf16", "int8"]
    assert allowed == {"lossless": ["raw"], "near_lossless": near, "aggressive": every, "local": every}
