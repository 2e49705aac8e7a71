"""A step can be taken back: error feedback, and what else codecs keep, is then as it was before, to the bit."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fusionlayer import codecs
from fusionlayer.scheduler import Engine, Memory
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads
from tests.tiers import tiered

from .engines import MODEL, gradients, make_engine, run_step

WORLD, STEPS = 3, 3
SHAPES = ((30, 10), (5,), (16, 8), (25, 40), (1,), (21, 37))
MATRICES = [replace(tensor, shape=shape) for tensor, shape in zip(MODEL, SHAPES, strict=True)]


def flattened(state: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings, tensors as bytes."""
    if isinstance(state, dict):
        return {key: leaf for name, each in state.items() for key, leaf in flattened(each, f"{path}/{name}").items()}
    return {path: state.detach().numpy().tobytes() if isinstance(state, Tensor) else state}


@looped(
    "codec, options, bits",
    tiered(
        [
            ("int4", {}, 32),
            ("int4", {}, 8),
            ("topk", {"density": 0.1}, 32),
            ("topk", {"density": 0.1}, 8),
            ("dgc", {}, 32),
            ("powersgd", {}, 32),
            ("mxfp8", {"scale": "auto"}, 32),
            ("raw", {}, 32),
        ],
        lambda codec, options, bits: codec != "dgc" and not (codec == "topk" and bits == 8),
    ),
)
@on_threads(WORLD)
def test_a_step_is_taken_back_and_made_once_more(
    transport: Transport, codec: str, options: dict[str, Any], bits: int
) -> None:
    def engine_with(memory: Memory, step: int, plan: Any = None) -> Engine:
        made = make_engine(
            transport.duplicate(),
            MATRICES,
            codec=codecs.get(codec, **options),
            plan=plan,
            memory=memory,
            error_feedback=None if codec in ("raw", "mxfp8") else True,
            hold_results=True,
            undoable=True,
            lanes=2,
        )
        made.step = step
        return made

    def make_step(engine: Engine, step: int) -> dict[str, Any]:
        given = gradients(transport.rank, step)
        before = flattened(given)
        for name, values in given.items():
            engine.submit(name, values)
        engine.end_step()
        results = {name: x.clone() for index in sorted(engine.untaken) for name, x in engine.take(index).items()}
        assert flattened(given) == before, "gradients stay as they were"
        return flattened(results)

    memory = Memory(bits)
    engine = engine_with(memory, 0)
    for step in range(STEPS):
        make_step(engine, step)
        memory.forget()
    saved = flattened(memory.state_dict())
    assert flattened(memory.state_before()) == saved
    results = make_step(engine, STEPS)
    after = flattened(memory.state_dict())
    assert flattened(memory.state_before()) == saved
    assert (after == saved) == (codec == "raw"), "the step has changed what is kept"

    again = Memory(bits)
    again.load_state_dict(memory.state_before())
    engine.close()
    second = engine_with(again, STEPS, engine.plan)
    assert make_step(second, STEPS) == results
    assert flattened(again.state_dict()) == after

    # In the middle of a step, too: a half of its gradients has arrived.
    again.forget()
    for name, values in list(gradients(transport.rank, STEPS + 1).items())[-3:]:
        second.submit(name, values)
    transport.barrier()
    second.abandon()
    assert flattened(again.state_before()) == after


@on_threads(2)
def test_an_engine_that_need_not_take_back_keeps_no_copies(transport: Transport) -> None:
    engine = make_engine(transport.duplicate(), codec=codecs.get("int4"), error_feedback=True)
    run_step(engine, gradients(transport.rank, 0))
    assert not engine.memory._before and not engine.memory._spare
    engine.close()
