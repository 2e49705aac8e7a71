"""Resumed training equals uninterrupted training, bit for bit: every way to train by every way to save and load."""

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import fusionlayer as fl
from fusionlayer import codecs
from fusionlayer.base.errors import WireError
from fusionlayer.scheduler.memory import merged_residuals
from fusionlayer.transport import Transport, local
from tests.codecs.toy_sparse import toy_sparse
from tests.codecs.variants import is_kind
from tests.harness import run_ranks
from tests.integrations.training import make_model, train
from tests.loops import looped
from tests.ranks import over_threads
from tests.tiers import exhaustive, tiered

STEPS, AT = range(7), 5
"""Five steps, then a checkpoint: in the middle of a round of four local steps."""


class Job:
    """A model and all that trains it."""

    def __init__(self, kind: str, codec: str = "int4", first: dict[str, Any] | None = None) -> None:
        self.model: nn.Module = make_model()
        if first is not None:
            self.model.load_state_dict(first)
        self.optimizer: Any
        self.objects: dict[str, Any] = {}
        self.close: Callable[[], None] = lambda: None
        if kind == "fsdp.compress":
            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        if kind == "ShardedOptimizer":
            both = {"weights": "qwd", "gradients": "int8"}
            self.optimizer = fl.ShardedOptimizer(self.model.parameters(), AdamW, lr=0.01, **both)
        else:
            self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        if kind == "fsdp.compress":
            self.objects["compression"] = fl.fsdp.compress(self.model, "qwd", "int8")
        elif kind == "hook":
            self.model = DistributedDataParallel(self.model)
            self.objects["hook"] = fl.ddp.register(self.model, codec, error_feedback=True)
            self.close = self.objects["hook"].close
        elif kind in ("optimizer", "local steps"):
            sync = fl.Local.diloco(every=4) if kind == "local steps" else None
            self.optimizer = fl.DistributedOptimizer(
                self.optimizer, self.model, codec=codec, error_feedback=True, sync=sync
            )
            self.close = self.optimizer.close
        self.objects["optimizer"] = self.optimizer

    def train(self, steps: Iterable[int]) -> None:
        train(self.model, self.optimizer, dist.get_rank(), steps)

    def weights(self) -> Tensor:
        parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()]
        return torch.cat([part.detach().flatten() for part in parts])

    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()} | {name: each.state_dict() for name, each in self.objects.items()}

    def load(self, states: dict[str, Any]) -> None:
        self.model.load_state_dict(states["model"])
        for name, each in self.objects.items():
            each.load_state_dict(states[name])


def by_torch_save(kind: str, job: Job, folder: Path) -> Job:
    path = folder / f"of rank {dist.get_rank()}.pt"
    torch.save(job.states(), path)
    again = Job(kind)
    again.load(torch.load(path, weights_only=False))
    return again


def by_torch_save_before_wrapping(kind: str, job: Job, folder: Path) -> Job:
    path = folder / f"of rank {dist.get_rank()}.pt"
    torch.save(job.states(), path)
    states = torch.load(path, weights_only=False)
    plain = {name.removeprefix("module."): x for name, x in states["model"].items()}
    again = Job(kind, first=plain)
    for name, each in again.objects.items():
        each.load_state_dict(states[name])
    return again


def by_save_ranks(kind: str, job: Job, folder: Path) -> Job:
    """The model is rank 0's, except what the optimizer's own state holds."""
    if dist.get_rank() == 0:
        torch.save(job.model.state_dict(), folder / "model.pt")
    fl.checkpoint.save_ranks(folder, **job.objects, **_optimizer_of(job))
    again = Job(kind)
    again.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    fl.checkpoint.load_ranks(folder, **again.objects, **_optimizer_of(again))
    return again


def by_dcp(kind: str, job: Job, folder: Path) -> Job:
    again = Job(kind)
    if kind != "fsdp.compress":
        state = {"model": job.model.state_dict(), "own": fl.checkpoint.rank_state(**job.objects)}
        dcp.save(state, checkpoint_id=folder)
        found = {"model": again.model.state_dict()}
        dcp.load(found, checkpoint_id=folder)
        again.model.load_state_dict(found["model"])
        fl.checkpoint.load_ranks(folder, **again.objects)
        return again
    of_model, of_optimizer = get_state_dict(job.model, job.optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer, "compression": job.objects["compression"]}
    dcp.save(saved, checkpoint_id=folder)
    of_model, of_optimizer = get_state_dict(again.model, again.optimizer)
    loaded = {"model": of_model, "optimizer": of_optimizer, "compression": again.objects["compression"]}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(again.model, again.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return again


def _optimizer_of(job: Job) -> dict[str, Any]:
    return {} if "optimizer" in job.objects else {"optimizer": job.optimizer}


WAYS: dict[str, Callable[[str, Job, Path], Job]] = {
    "torch.save": by_torch_save,
    "torch.save, loaded before wrapping": by_torch_save_before_wrapping,
    "save_ranks": by_save_ranks,
    "dcp": by_dcp,
}


FAST = {
    "optimizer": ("save_ranks",),
    "local steps": ("torch.save, loaded before wrapping",),
    "hook": ("torch.save",),
    "ShardedOptimizer": ("dcp",),
    "fsdp.compress": ("torch.save",),
}
"""A way for each kind, and each way at least once."""

# Its state and its weights are sharded over ranks; the other ways save whole ones.
ALL = {kind: ("torch.save", "dcp") if kind == "fsdp.compress" else tuple(WAYS) for kind in FAST}


def check_matrix(rank: int, world: int, folder: str, matrix: dict[str, tuple[str, ...]]) -> list[str]:
    fl.init()
    wrong = []
    for kind, ways in matrix.items():
        through = Job(kind)
        through.train(STEPS[:AT])
        torch.save(through.states(), f"{folder}/{kind} {rank}")
        through.train(STEPS[AT:])
        expected = through.weights()
        through.close()
        for way in ways:
            job = Job(kind)
            job.load(torch.load(f"{folder}/{kind} {rank}", weights_only=False))
            place = Path(folder, kind, way)
            place.mkdir(parents=True, exist_ok=True)
            again = WAYS[way](kind, job, place)
            job.close()
            again.train(STEPS[AT:])
            if not torch.equal(again.weights(), expected):
                wrong.append(f"{kind} by {way}")
            again.close()
        refused(kind, folder)
    dist.barrier()
    return wrong


def refused(kind: str, folder: str) -> None:
    """Rank 0's state on every rank, as frameworks load it, is an error on the others, and changes nothing."""
    dist.barrier()
    job = Job(kind)
    state = torch.load(f"{folder}/{kind} 0", weights_only=False)
    name = {"hook": "hook", "fsdp.compress": "compression"}.get(kind, "optimizer")
    before = job.weights()
    if dist.get_rank():
        with pytest.raises(fl.ConfigError, match="rank 0 of 2|of another rank: it has rows 0 to "):
            job.objects[name].load_state_dict(state[name])
    assert torch.equal(job.weights(), before)
    dist.barrier()
    job.close()


@pytest.mark.medium
@pytest.mark.timeout(300)
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    assert run_ranks(check_matrix, 2, str(tmp_path), FAST, timeout=280) == [[], []]


@pytest.mark.medium
@exhaustive(guarded_by="tests/integrations/test_resume.py::test_resumed_training_equals_uninterrupted_training")
@pytest.mark.timeout(300)
def test_resumed_training_by_all_ways_equals_uninterrupted_training(tmp_path: Path) -> None:
    assert run_ranks(check_matrix, 2, str(tmp_path), ALL, timeout=280) == [[], []]


# ---- ranks that are threads: every codec and kind of step, from before and within each phase -------------------------


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.01)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def onebit_over(warmup_codec: str) -> Callable[[Any], Optimizer]:
    return lambda p: fl.OneBitAdam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, freeze_step=3, warmup_codec=warmup_codec)


STOCHASTIC = {"codec": "int", "bits": 4, "rounding": "stochastic"}
TOY: dict[str, Any] = {"codec": "toysparse", "density": 0.1, "warmup": 3}
AHEAD: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"ahead": False},
    {"algorithm": "oktopk"},
    {"algorithm": "gather_v"},
    {"planner": "wfbp"},
]
SPARSIFIERS = [codecs.get(name) for name in codecs.names() if codecs.get(name).ahead]
LOCAL: dict[str, Any] = {"error_feedback": True, "sync": fl.Local.diloco(every=3)}
PLAIN: list[dict[str, Any]] = [
    {"codec": "raw"},
    {"codec": "int4"},
    STOCHASTIC,
    STOCHASTIC | {"error_feedback": True},
    {"codec": "int4", "feedback_bits": 8},
    {"codec": "topk", "density": 0.1, "feedback_bits": 8},
    {"codec": "mxfp4", "scale": "auto"},  # whose headroom has moved after two steps
    {"codec": "int4", **LOCAL},
    {"codec": "topk", **LOCAL},
]
POWERSGD: list[dict[str, Any]] = [
    {},
    {"warmup_steps": 2},
    {"warm_start": False},
    {"overlap": True, "planner": "wfbp"},
    {"factors": "bf16"},
]
CASES: list[tuple[Any, dict[str, Any]]] = [
    *((adam, options) for options in PLAIN),
    *((adam, TOY | way) for way in AHEAD),
    *((adam, {"codec": codec.name, "density": 0.1} | way) for codec in SPARSIFIERS for way in AHEAD),
    *((momentum, {"codec": "powersgd", "rank": 2} | way) for way in POWERSGD),
    (onebit_over("raw"), {"codec": "onebit"}),
    (onebit_over("int4"), {"codec": "topk"}),
]


def is_fast(make: Any, options: dict[str, Any]) -> bool:
    """Of the sparsifiers that share all but their choice of elements one of each kind is fast."""
    codec = options["codec"]
    return (
        codec == "toysparse" or options in PLAIN or make is not adam or len(options) == 2 and is_kind(codecs.get(codec))
    )


@looped("make, options", tiered(CASES, is_fast))
def test_each_codec_resumes_from_each_step(make: Any, options: dict[str, Any]) -> None:
    """In new objects, and back in the ones that have trained on; saving changes nothing."""

    def rank_main(rank: int) -> Tensor:
        def pair() -> tuple[nn.Module, Any]:
            model = make_model()
            how = {key: value for key, value in options.items() if key != "overlap"}
            ahead = model if "overlap" in options else None
            return model, fl.DistributedOptimizer(make(model.parameters()), model, overlap_forward=ahead, **how)

        def end(first: int) -> Tensor:
            train(model, optimizer, rank, range(first, 6))
            optimizer.synchronize()
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        model, optimizer = pair()
        states: dict[int, io.BytesIO] = {}
        for step in (1, 3, 4):
            train(model, optimizer, rank, range(max(states, default=0), step))
            states[step] = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), states[step])
        expected = end(4)
        for step, file in states.items():
            if step > 1:
                optimizer.close()
                model, optimizer = pair()
            file.seek(0)
            of_model, of_optimizer = torch.load(file, weights_only=True)
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            assert torch.equal(end(step), expected), step
        optimizer.close()
        return expected

    with toy_sparse():
        first, *others = local.run(rank_main, 3 if options.get("algorithm") == "oktopk" else 2)
    assert all(torch.equal(first, other) for other in others)


def owed(optimizer: Any) -> dict[str, Tensor]:
    """Return the error feedback of this rank in the unit of what is applied, by name."""
    state = optimizer.state_dict()["fusionlayer"]
    return {name: x * state["factor"] for name, x in merged_residuals([state]).items()}


@looped(
    "options, before, after",
    [({}, 3, 2), ({"gradient_predivide_factor": 2.0}, 2, 3), ({"op": fl.Sum}, 4, 2), ({"feedback_bits": 8}, 3, 2)],
)
def test_error_feedback_goes_to_another_number_of_ranks_and_its_sum_stays(
    options: dict[str, Any], before: int, after: int, tmp_path: Path
) -> None:
    folder = tmp_path / f"{before} {after} {sorted(options)}"

    def make() -> tuple[nn.Module, Any]:
        model = make_model()
        return model, fl.DistributedOptimizer(SGD(model.parameters(), lr=0.01), model, codec="int4", **options)

    def save(transport: Transport) -> dict[str, Tensor]:
        model, optimizer = make()
        train(model, optimizer, transport.rank, range(3))
        fl.checkpoint.save_ranks(folder, optimizer=optimizer)
        return owed(optimizer)

    def load(transport: Transport) -> dict[str, Tensor]:
        model, optimizer = make()
        fl.checkpoint.load_ranks(folder, optimizer=optimizer)
        found = owed(optimizer)
        # A framework loads the state of rank 0 of before on all ranks; each rank keeps its own.
        optimizer.load_state_dict(torch.load(folder / "state of rank 0", weights_only=True))
        assert all(torch.equal(x, found[name]) for name, x in owed(optimizer).items())
        train(model, optimizer, transport.rank, [3])
        return found

    def save_rank_0s(transport: Transport) -> None:
        model, optimizer = make()
        fl.checkpoint.load_ranks(folder, optimizer=optimizer)
        if transport.rank == 0:
            torch.save(optimizer.state_dict(), folder / "state of rank 0")

    saved = over_threads(before, save)
    over_threads(before, save_rank_0s)
    loaded = over_threads(after, load)
    for name in saved[0]:
        expected = sum(each[name] for each in saved)
        got = sum(each[name] for each in loaded if name in each)
        assert isinstance(expected, Tensor) and expected.any()
        rounding = float(expected.abs().max()) * (0.05 if "feedback_bits" in options else 1e-6)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=rounding)


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_of_torch_runs_no_code(tmp_path: Path) -> None:
    folder, mark, key = tmp_path / "saved", tmp_path / "was run", "rank 0 of 1"
    description = folder / ".metadata"

    def body(transport: Transport) -> None:
        model = make_model()
        optimizer = fl.DistributedOptimizer(SGD(model.parameters(), lr=0.01), model)
        dcp.save({"own": fl.checkpoint.rank_state(optimizer=optimizer)}, checkpoint_id=folder, no_dist=True)
        right = pickle.loads(description.read_bytes())
        fl.checkpoint.load_ranks(folder, optimizer=optimizer)
        # Whole; in a field; and as a value, which torch would unpickle without asking.
        entry = next(name for name, path in right.planner_data.items() if path[1:] == (key, "form"))
        as_value, in_a_field = copy.deepcopy(right), copy.deepcopy(right)
        as_value.state_dict_metadata[entry] = BytesStorageMetadata()
        in_a_field.planner_data["x"] = Attack(mark)
        for wrong in (Attack(mark), in_a_field, as_value, {"a": "dictionary"}, os.path.join):
            description.write_bytes(pickle.dumps(wrong))
            with pytest.raises(WireError, match="cannot be read|does not describe a checkpoint|has no states"):
                fl.checkpoint.load_ranks(folder, optimizer=optimizer)

    over_threads(1, body)
    assert not mark.exists()


def test_states_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    sync = fl.Local.averaging(every=4)

    def make() -> tuple[nn.Module, Any]:
        model = make_model()
        return model, fl.DistributedOptimizer(SGD(model.parameters(), lr=0.01), model, sync=sync)

    def save(transport: Transport) -> None:
        model, optimizer = make()
        train(model, optimizer, transport.rank, range(2))
        fl.checkpoint.save_ranks(tmp_path / "middle", optimizer=optimizer)
        optimizer.synchronize()
        fl.checkpoint.save_ranks(tmp_path / "end", optimizer=optimizer)
        fl.checkpoint.save_ranks(tmp_path / "plain", optimizer=SGD(model.parameters(), lr=0.01))

    def load(transport: Transport) -> None:
        model, optimizer = make()
        with pytest.raises(fl.ConfigError, match=r"middle of a round .* of 3 ranks, this job has 2; .*synchronize\(\)"):
            fl.checkpoint.load_ranks(tmp_path / "middle", optimizer=optimizer)
        fl.checkpoint.load_ranks(tmp_path / "end", optimizer=optimizer)
        with pytest.raises(fl.ConfigError, match="for 3 ranks, this job has 2, and a SGD is for as many"):
            fl.checkpoint.load_ranks(tmp_path / "plain", optimizer=SGD(model.parameters(), lr=0.01))
        with pytest.raises(fl.ConfigError, match="has states of optimizer, not of 'hook'"):
            fl.checkpoint.load_ranks(tmp_path / "end", hook=optimizer)
        with pytest.raises(fl.ConfigError, match=r"rank 2 of 3; expected the states of all ranks"):
            fl.checkpoint.load_ranks(tmp_path / "cut", optimizer=optimizer)
        with pytest.raises(fl.ConfigError, match="has no states of ranks"):
            fl.checkpoint.load_ranks(tmp_path, optimizer=optimizer)
        with pytest.raises(fl.ConfigError, match=r"x=3; expected an object with state_dict\(\)"):
            fl.checkpoint.save_ranks(tmp_path, x=3)

    over_threads(3, save)
    (tmp_path / "cut").mkdir()
    for rank in (0, 2):
        name = f"rank {rank} of 3.pt"
        (tmp_path / "cut" / name).write_bytes((tmp_path / "end" / name).read_bytes())
    over_threads(2, load)
