"""DeepSpeed with its traffic compressed: every kind of parallelism, in two starts of two processes."""

import inspect
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusionlayer as fl
from fusionlayer.backend import hint
from tests.harness import run_ranks
from tests.ports import free_port
from tests.tiers import engine, exhaustive, needs

from . import deepspeed_oracles as oracles
from . import deepspeed_training as training

pytestmark = [pytest.mark.medium, engine, needs("deepspeed")]

STEPS = 3
INT8 = {"codec": "int8", "min_bytes": 0}
INT4 = {"codec": "int4", "min_bytes": 0}
BF16 = {"bf16": {"enabled": True}}
BITS = {"zero0": 32, "zero1": 8, "zero2": 8}
"""Of the error feedback's elements, by kind of training."""

Found = list[dict[str, Any]]
"""What each rank has found, by names."""


@pytest.fixture(scope="module")
def plain() -> Found:
    return run_ranks(on_gloo, 2, free_port(), backend=None, timeout=200)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(compressed, 2, free_port(), tmp_path_factory.mktemp("config"), backend=None, timeout=250)


def on_gloo(rank: int, world: int, port: int) -> dict[str, Any]:
    """DeepSpeed alone, and what fusionlayer says to a backend that runs already."""
    training.join(rank, world, port)
    import deepspeed

    trained: dict[str, Any] = {kind: training.train(deepspeed.initialize, kind, STEPS) for kind in training.KINDS}
    return {**trained, "foreign": refusal(lambda: fl.deepspeed.init_distributed(training.settings("zero2", {})))}


def compressed(rank: int, world: int, port: int, folder: Path) -> dict[str, Any]:
    """All that needs the backend."""
    training.join(rank, world, port)
    initialize = fl.deepspeed.initialize
    fl.deepspeed.init_distributed(training.settings("zero0", {"gradients": "raw"}))
    results: dict[str, Any] = {"mismatch": refusal(lambda: training.engine_of(initialize, "zero0", _odd(rank)))}
    for kind in training.KINDS:
        if kind == "zero0":
            results["ways"] = _ways_to_configure(rank, folder)
        if kind in ("zero0", "zero1", "zero2"):
            for feedback in (True, False):
                section = {"gradients": INT4, "error_feedback": feedback, "feedback_bits": BITS[kind]}
                results["feedback", kind, feedback] = _error_of_mean_gradient(kind, section)
        if kind == "zero3":
            results["exempt"] = [_with_exempt(scatters) for scatters in (True, False)]
            with poisoned():
                results["poisoned"] = _train(kind, {"gradients": INT8, "weights": INT8})
            results["zero++"] = _train(kind, {"zero_plus_plus": True})
        if kind == "moe":
            results["router"] = _averages(kind, {"gradients": "raw"}), _averages(kind, {"gradients": INT4})
        sections = {
            "raw": {"gradients": "raw"},
            "warm-up": {"gradients": {**INT8, "min_bytes": 64}, "warmup_steps": STEPS},  # norms travel as they are
            "gradients": {"gradients": INT8},
        }
        if kind in ("zero1", "zero2", "zero3"):
            sections["all"] = {"gradients": INT8, "weights": INT8}
        if kind in ("moe", "pipeline"):
            sections["all"] = {"gradients": INT8, "activations": INT8}
        for name, section in sections.items():
            results[name, kind] = _train(kind, section)
        if kind == "zero0":
            results["1-bit Adam"] = oracles.one_bit()
            results["frozen Adam"] = oracles.one_bit({"gradients": "raw"})
            results["experts"] = refusal(lambda: oracles.engine_of("moe", optimizer=oracles.ONE_BIT))
        if kind == "zero2":
            results["differences"] = oracles.differences(kind)
            lossless = {"gradients": "raw", "weights": {"codec": "delta", "min_bytes": 0}}
            results["delta"] = [oracles.trained(kind, section, **BF16) for section in ({"gradients": "raw"}, lossless)]
            results["resumed"] = oracles.resumed(kind, folder, oracles.SDP4BIT)
    return results


def _odd(rank: int) -> dict[str, Any]:
    return {"gradients": "int8", "warmup_steps": rank}


def _train(kind: str, section: dict[str, Any]) -> dict[str, Any]:
    before = _calls()
    losses, digest = training.train(fl.deepspeed.initialize, kind, STEPS, section)
    calls = {op: number - before.get(op, 0) for op, number in _calls().items() if number > before.get(op, 0)}
    return {"losses": losses, "digest": digest, "calls": calls}


def _calls() -> dict[str, int]:
    """Return how many calls have travelled compressed so far, in all groups."""
    total: dict[str, int] = {}
    for group in dist.distributed_c10d._world.pg_map:
        for op, number in fl.backend.traffic(group).calls.items():
            total[op] = total.get(op, 0) + number
    return total


def refusal(call: Any) -> tuple[str, str]:
    try:
        call()
    except fl.FusionLayerError as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def poisoned() -> Iterator[None]:
    """Have memory that nobody has written to hold values that spoil what they are near to."""
    empty = torch.empty

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    torch.empty = spoilt  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty


def _ways_to_configure(rank: int, folder: Path) -> list[Any]:
    """Return what became of a section that came from a file, by ``args``, and by a framework's own call."""
    import deepspeed

    path = folder / f"config{rank}.json"
    path.write_text("// for rank\n" + json.dumps(training.settings("zero0", {"gradients": "int4"})))
    model = training.build("zero0")
    common = {"model": model, "model_parameters": list(model.parameters())}
    args = SimpleNamespace(deepspeed_config=str(path), local_rank=rank)
    fronts = (fl.deepspeed.initialize, deepspeed.initialize)
    ours, theirs = (list(inspect.signature(front).parameters) for front in fronts)
    assert ours == theirs
    engines = [
        fl.deepspeed.initialize(config=str(path), **common)[0],
        fl.deepspeed.initialize(args, **common)[0],
        deepspeed.initialize(config=training.settings("zero0"), **common)[0],
    ]
    before = deepspeed.initialize
    fl.deepspeed.install(str(path))
    fl.deepspeed.install()
    engines.append(deepspeed.initialize(config=str(path), **common)[0])
    deepspeed.initialize = before
    engines.append(fl.deepspeed.initialize(config=training.settings("zero0", {"enabled": False}), **common)[0])
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    first, checkpoint, _ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"model": model, "torch": torch, "folder": str(folder)}
    exec(first, names)
    exec(checkpoint, names)
    engines.append(names["engine"])
    return [getattr(engine, "fusionlayer", None) and engine.fusionlayer.section.gradients.codec for engine in engines]


def _error_of_mean_gradient(kind: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return how far the mean of many averages of the same gradients is from what they should be, relatively."""
    from deepspeed.utils import safe_get_full_grad

    engine = training.engine_of(fl.deepspeed.initialize, kind, section, lr=0.0)
    batch = next(training.batches(1))
    parameters = dict(engine.module.named_parameters())

    def average() -> dict[str, torch.Tensor]:
        engine.backward(engine(*batch))
        with hint(plain=True):
            grads = {name: safe_get_full_grad(each).clone() for name, each in parameters.items()}
        engine.step()
        return grads

    rounds = [average() for _ in range(8)]
    fl.backend.adopt(None)
    exact = average()
    error = sum(float((sum(r[name] for r in rounds) / 8 - exact[name]).square().sum()) for name in exact)
    norm = sum(float(each.square().sum()) for each in exact.values())
    held = engine.fusionlayer
    state = held.state_dict()
    residuals = {**state["residuals"], **{name: kept["codes"] for name, kept in state["packed"].items()}}
    bits = {name: 8 * each.itemsize for name, each in residuals.items()}
    held.load_state_dict(held.state_dict())
    engine.destroy()
    return {
        "error": math.sqrt(error / norm),
        "residuals": sum(each.numel() for each in residuals.values()),
        "parameters": sum(each.numel() for each in parameters.values()),
        "bits": {*bits.values()},
        "kept": any(bool(each.any()) for each in residuals.values()),
    }


def _averages(kind: str, section: dict[str, Any], **zero: Any) -> dict[str, Any]:
    """Return the bits of averaged gradients by name; ``zero`` are keys of the configuration of ZeRO."""
    from deepspeed.utils import safe_get_full_grad

    model = training.build(kind)
    config = training.settings(kind, section)
    config["zero_optimization"] |= zero
    engine = fl.deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.backward(engine(*next(training.batches(1))))
    with hint(plain=True):
        found = {
            name: safe_get_full_grad(each) if kind == "zero3" else each.grad
            for name, each in engine.module.named_parameters()
        }
    bits = {name: each.numpy().tobytes() for name, each in found.items()}
    exempt = engine.fusionlayer.exempt
    engine.destroy()
    return {"bits": bits, "exempt": exempt}


def _with_exempt(scatters: bool) -> list[dict[str, Any]]:
    """Average in buffers in which one parameter is exempt and its neighbours are not, uncompressed and compressed."""
    sections = ({"gradients": "raw"}, {"gradients": INT4, "exempt": ["blocks.0.*.bias"]})
    return [_averages("zero3", section, reduce_scatter=scatters) for section in sections]


@pytest.mark.parametrize("kind", training.KINDS)
def test_raw_is_deepspeed_on_gloo_bit_for_bit(plain: Found, found: Found, kind: str) -> None:
    for expected, mine in zip(plain, found, strict=True):
        assert (mine["raw", kind]["losses"], mine["raw", kind]["digest"]) == expected[kind]


@pytest.mark.parametrize("kind", [kind for kind in training.KINDS if kind != "pipeline"])
def test_gradients_travel_compressed_after_the_warm_up(found: Found, kind: str) -> None:
    for mine in found:
        raw, warm, coded = (mine[name, kind] for name in ("raw", "warm-up", "gradients"))
        assert (warm["losses"], warm["digest"]) == (raw["losses"], raw["digest"])
        assert coded["digest"] != raw["digest"] and coded["losses"] == pytest.approx(raw["losses"], rel=5e-3)
    if kind in ("zero0", "zero1", "zero2"):
        assert found[0]["gradients", kind]["digest"] == found[1]["gradients", kind]["digest"], "replicas differ"


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        *((f"zero{stage}", {"all_gather"}) for stage in (1, 2, 3)),
        ("moe", {"all_to_all"}),
        ("pipeline", {"send", "recv"}),
    ],
)
def test_weights_and_activations_travel_compressed_where_asked(found: Found, kind: str, ops: set[str]) -> None:
    for mine in found:
        raw, gradients, every = (mine[name, kind] for name in ("raw", "gradients", "all"))
        assert not raw["calls"] and not ops & set(gradients["calls"]) and ops <= set(every["calls"])
        assert every["digest"] != raw["digest"] and every["losses"] == pytest.approx(raw["losses"], rel=5e-3)


def test_what_zero3_leaves_undefined_spoils_nothing(found: Found) -> None:
    for mine in found:
        spoilt, clean = mine["poisoned"], mine["all", "zero3"]
        assert (spoilt["losses"], spoilt["digest"]) == (clean["losses"], clean["digest"])


def test_zero_plus_plus_on_one_node(found: Found) -> None:
    for mine in found:
        losses = mine["zero++"]["losses"]
        assert losses == pytest.approx(mine["raw", "zero3"]["losses"], rel=2e-2)
        assert losses != mine["raw", "zero3"]["losses"]


def test_weights_travel_as_differences_from_the_copies_of_all_ranks(found: Found) -> None:
    """SDP4Bit, section 3.1: the steps of an oracle, equal copies, near the optimizer's weights, at 4 bits."""
    first, second = (mine["differences"] for mine in found)
    assert first["digest"] == second["digest"], "copies differ"
    for mine in (first, second):
        assert mine["wrong"] <= 3, "not the oracle's steps"
        assert 0 < mine["apart"] < 1 / 13, "what a message lost goes with the next one"
        assert mine["sent"] == mine["counted"]


def test_sdp4bit_goes_on_from_deepspeeds_checkpoint_to_the_same_bits(found: Found) -> None:
    for mine in found:
        expected, went_on = mine["resumed"]
        assert expected == went_on
    assert found[0]["resumed"] == found[1]["resumed"], "copies differ"


def test_one_bit_adam_by_the_configuration_that_deepspeed_dropped(found: Found) -> None:
    """Its variance is frozen, and momenta travel as signs: the steps of an oracle in plain torch."""
    first, second = (mine["1-bit Adam"] for mine in found)
    assert first["digest"] == second["digest"], "replicas differ"
    for mine in (first, second):
        assert mine["calls"] == [0] * oracles.FREEZE + [1] * (oracles.STEPS - oracles.FREEZE)
        assert mine["wrong"] < 0.2, "signs flip where momenta are rounding noise"
    for mine in found:
        assert mine["frozen Adam"]["wrong"] < 1e-4, "not the oracle's steps"


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2"])
def test_error_feedback_sends_what_was_lost(found: Found, kind: str) -> None:
    for mine in found:
        fed, lost = mine["feedback", kind, True], mine["feedback", kind, False]
        assert fed["residuals"] == fed["parameters"] and fed["kept"] and fed["bits"] == {BITS[kind]}
        assert not lost["residuals"]
        assert 0.02 < lost["error"] < 0.3 and fed["error"] < 0.5 * lost["error"]


def test_gradients_of_routers_are_exempt(found: Found) -> None:
    for mine in found:
        raw, coded = mine["router"]
        (router,) = coded["exempt"]
        assert router == "experts.deepspeed_moe.gate.wg.weight"
        assert raw["bits"][router] == coded["bits"][router]
        assert raw["bits"]["head.weight"] != coded["bits"]["head.weight"]


def test_exempt_gradients_in_mixed_buffers_travel_as_they_are(found: Found) -> None:
    for mine in found:
        for raw, coded in mine["exempt"]:
            equal = {name for name, bits in raw["bits"].items() if bits == coded["bits"][name]}
            assert len(coded["exempt"]) > 1 and set(coded["exempt"]) <= equal < set(raw["bits"])
        raw, scattered = mine["exempt"][0]
        others = {name for name in raw["bits"] if name not in scattered["exempt"] and name.endswith("weight")}
        assert all(raw["bits"][name] != scattered["bits"][name] for name in others)


def test_changed_weights_of_a_16_bit_model_lose_no_bit(found: Found) -> None:
    for mine in found:
        plain, delta = mine["delta"]
        assert plain == delta


def test_where_a_section_may_come_from(found: Found) -> None:
    assert [mine["ways"] for mine in found] == [["int4", "int4", None, "int4", None, "int8"]] * 2


def test_mistakes_that_show_when_processes_meet(plain: Found, found: Found) -> None:
    for mine in plain:
        kind, message = mine["foreign"]
        assert kind == "ConfigError" and "runs already with the backend" in message and "gloo" in message
        assert "init_distributed(config)" in message
    for mine in found:
        kind, message = mine["experts"]
        assert kind == "ConfigError" and '"OneBitAdam" with experts' in message
        kind, message = mine["mismatch"]
        assert kind == "PlanMismatch" and 'the section "fusionlayer"' in message


def pipelines_on_gloo(rank: int, world: int, port: int) -> tuple[list[float], str]:
    training.join(rank, world, port)
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return training.train(deepspeed.initialize, "pipeline", STEPS)


def pipelines_compressed(rank: int, world: int, port: int) -> list[dict[str, Any]]:
    training.join(rank, world, port)
    fl.deepspeed.init_distributed(training.settings("pipeline", {"gradients": "raw"}))
    return [_train("pipeline", section) for section in ({"gradients": "raw"}, {"gradients": INT8, "activations": INT8})]


@exhaustive(guarded_by="tests/integrations/test_deepspeed.py::test_gradients_travel_compressed_after_the_warm_up")
def test_two_pipelines_of_two_stages_average_their_gradients() -> None:
    expected = run_ranks(pipelines_on_gloo, 4, free_port(), backend=None)
    found = run_ranks(pipelines_compressed, 4, free_port(), backend=None)
    for (losses, digest), (raw, coded) in zip(expected, found, strict=True):
        assert (raw["losses"], raw["digest"]) == (losses, digest) and not raw["calls"]
        assert coded["losses"] == pytest.approx(losses, rel=5e-3) and coded["digest"] != digest
        assert "all_reduce" in coded["calls"] and {"send", "recv"} & set(coded["calls"])
    parts = [coded["digest"] for _, coded in found]
    assert len(set(parts)) == 2 and all(parts.count(part) == 2 for part in parts), "replicas of a stage differ"
