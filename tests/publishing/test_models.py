"""What is published of models, and what becomes of it in others: ties, wrappers, other shapes, vLLM's interface."""

import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError
from fusionlayer.training import publication
from tests.harness import run_ranks
from tests.loops import looped
from tests.publishing.states import bits, until
from tests.transport.test_connecting import free_port

LONG = 180.0


class Tied(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight


def changed(model: nn.Module, amount: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += amount


def test_a_model_follows_and_ties_travel_once(tmp_path: Path) -> None:
    source, other = Tied(), Tied().double()
    with fl.publish(source, tmp_path) as publisher, fl.subscribe(tmp_path, other) as follower:
        for _ in range(2):
            changed(source)
            source.norm.num_batches_tracked += 1
            publisher.step()
            follower.wait(LONG)
            assert other.head.weight is other.embed.weight
            assert all(
                torch.equal(a.double(), b.double())
                for a, b in zip(source.state_dict().values(), other.state_dict().values(), strict=True)
            )
        again = dict(follower.tensors())
        assert again["head.weight"] is again["embed.weight"]
        assert list(again) == list(source.state_dict())


def compiled(model: Tied, how: str) -> nn.Module:
    """Return ``model`` compiled as a whole, block by block, or both; nothing is traced before it is called."""
    if how in ("blocks", "both"):
        model.norm = torch.compile(model.norm)  # type: ignore[assignment]
        model.more = nn.Sequential(torch.compile(nn.Sequential(torch.compile(nn.Linear(2, 2)))))  # type: ignore[call-overload]
    else:
        model.more = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    return torch.compile(model) if how in ("whole", "both") else model  # type: ignore[return-value]


@looped("how, follows", [("plain", "both"), ("whole", "blocks"), ("blocks", "plain"), ("both", "whole")])
@looped("mapping", [False, True])
def test_names_do_not_depend_on_what_is_compiled(
    how: str, follows: str, mapping: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("versions")
    source, other = compiled(Tied(), how), compiled(Tied(), follows)
    published = source.state_dict() if mapping else source
    with fl.publish(published, folder) as publisher, fl.subscribe(folder, other) as follower:
        publisher.step()
        follower.wait(LONG)
        assert list(follower.state_dict()) == list(compiled(Tied(), "plain").state_dict())
    assert bits(source.state_dict()) == bits(dict(zip(source.state_dict(), other.state_dict().values(), strict=True)))


def test_two_names_that_differ_by_the_prefix_alone_are_refused(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(1), "a._orig_mod.weight": torch.zeros(1)}
    with fl.publish(state, tmp_path) as publisher, pytest.raises(ConfigError, match="another name are both 'a.weight'"):
        publisher.step()


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int64)


@looped("given", [*FLOATS, *INTEGERS, torch.complex64])
def test_a_value_is_never_truncated(given: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Into each type of a follower: floats may be rounded, other values stay what they are."""
    for value in (1, 200) if given in (torch.uint8, torch.int64) else (1,):
        x = torch.full((3,), value, dtype=torch.float32).to(given)
        folder = tmp_path_factory.mktemp("versions")
        with fl.publish({"x": x}, folder) as publisher, fl.subscribe(folder) as follower:
            publisher.step()
            follower.wait(LONG)
            for kind in (*FLOATS, *INTEGERS, torch.complex64):
                model = nn.Module()
                model.x = nn.Parameter(torch.zeros(3, dtype=kind), requires_grad=False)
                fits = kind == given or kind.is_complex or (kind in FLOATS and not given.is_complex)
                if given in INTEGERS and kind in INTEGERS:
                    fits = torch.equal(x.to(kind).long(), x.long())
                if fits:
                    follower.load_into(model)
                    assert torch.equal(model.x, x.to(kind))
                else:
                    with pytest.raises(ConfigError, match=f"'x' has values of {given} that {kind} in the model cannot"):
                        follower.load_into(model)
                    assert not model.x.to(torch.int64).any()


def test_what_does_not_fit_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with fl.publish(model, tmp_path) as publisher, fl.subscribe(tmp_path) as follower:
        publisher.step()
        follower.wait(LONG)
        untied = Tied()
        publisher.update(
            {name: x.clone() for name, x in Tied().state_dict().items()} | {"head.weight": torch.zeros(16, 8)}
        )
        with fl.subscribe(tmp_path, model) as bound:
            until(lambda: bound.latest == 1)
            before = bits(model.state_dict())
            for _ in range(2):
                with pytest.raises(ConfigError, match="does not fit the model: '0.bias' is missing"):
                    bound.poll()
            assert bits(model.state_dict()) == before and bound.version is None
        others = (
            (nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 3)), r"'1.weight' has the shape \[3, 3\], and \[3, 4\]"),
            (nn.Sequential(nn.Linear(3, 3)), "'1.weight' is not in the model"),
        )
        for other, told in others:
            before = bits(other.state_dict())
            with pytest.raises(ConfigError, match=told):
                follower.load_into(other)
            assert bits(other.state_dict()) == before
        follower.wait(LONG)
        with pytest.raises(ConfigError, match="'embed.weight' and 'head.weight' differ, and are one tensor"):
            follower.load_into(untied)
        with pytest.raises(ConfigError, match="got an int for a model"):
            follower.load_into(3)  # type: ignore[arg-type]


def test_what_cannot_be_published_is_told(tmp_path: Path) -> None:
    with fl.publish({}, tmp_path) as publisher:
        for state, told in (
            ({"extra": {"a": 1}}, "'extra' is a dict; expected tensors alone"),
            ({3: torch.ones(1)}, "a tensor's name is 3"),
            ({"s": torch.eye(3).to_sparse()}, "'s' is a tensor of torch.sparse_coo"),
            ({"m": torch.ones(2, device="meta")}, "'m' is on no device"),
        ):
            with pytest.raises(ConfigError, match=told):
                publisher.update(state)  # type: ignore[arg-type]
        assert publisher.version is None
        publisher.update({"w": torch.ones(1)}, version=7)
        for version in (7, 3, True, 8.0):
            with pytest.raises(ConfigError, match="expected a number above 7"):
                publisher.update({"w": torch.ones(1)}, version=version)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected tensors by name"):
            publisher.update([1])  # type: ignore[arg-type]


class Receiver:
    """Takes weights as engines of inference do, vLLM's models among them: any order, names of their own, fused."""

    def __init__(self) -> None:
        self.qkv = torch.zeros(12, 4)
        self.loaded: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, x in weights:
            place = "qkv".index(name.removesuffix("_proj.weight"))
            self.qkv[4 * place : 4 * (place + 1)].copy_(x)
            self.loaded.add(name)
        return self.loaded


def test_receivers_that_take_an_iterator_of_named_tensors(tmp_path: Path) -> None:
    rows = {f"{name}_proj.weight": torch.full((4, 4), float(i)) for i, name in enumerate("qkv")}
    engine = Receiver()
    with fl.publish(rows, tmp_path) as publisher, fl.subscribe(tmp_path) as follower:
        for _ in range(2):
            publisher.step()
            follower.wait(LONG)
            assert engine.load_weights(follower.tensors()) == rows.keys()
            assert torch.equal(engine.qkv, torch.cat([*rows.values()]))
            rows["k_proj.weight"] += 1


def publish_sharded(rank: int, world: int, folder: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    model.register_buffer("scale", torch.ones(3))
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    trained: nn.Module = model
    if kind == "ddp":
        trained = torch.compile(DistributedDataParallel(model), backend="eager")  # type: ignore[assignment]
    else:
        fully_shard(model[0])
        fully_shard(model)
    with fl.publish(trained, Path(folder)) as publisher:
        assert publisher.step() == 0
        assert bool(publisher.address) == bool(publisher.digest) == (rank == 0)
        assert publisher.flush(LONG) and publisher.followers == 0
        changed(model)
        assert publisher.update(version=5) == 5
    dist.barrier()
    with fl.subscribe(Path(folder)) as follower:
        assert [*follower] == [5]
        assert bits(follower.state_dict()) == bits({name: x + 1 if name != "scale" else x for name, x in whole.items()})
        if kind == "fsdp":
            with pytest.raises(ConfigError, match="is a DTensor, of which this rank has a part"):
                follower.load_into(model)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_publish_together(kind: str, tmp_path: Path) -> None:
    run_ranks(publish_sharded, 2, str(tmp_path), kind)


@looped("where", ["port", "folder"])
def test_another_process_publishes_when_it_has_become_rank_0(
    where: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in an elastic job, where the processes after the one that was lost move up."""
    place = tmp_path_factory.mktemp("versions") if where == "folder" else f"tcp://127.0.0.1:{free_port()}"
    x, ranks = torch.zeros(3), {"first": 0, "second": 1}
    with pytest.MonkeyPatch.context() as patch:

        def publisher_of(name: str) -> fl.Publisher:
            patch.setattr(publication, "_rank", lambda: ranks[name])
            return fl.publish({"x": x}, place)

        def step_of(name: str) -> int:
            patch.setattr(publication, "_rank", lambda: ranks[name])
            return publishers[name].step()

        publishers = {name: publisher_of(name) for name in ranks}
        with fl.subscribe(place) as follower:
            assert step_of("first") == step_of("second") == 0
            follower.wait(LONG)
            ranks = {"first": 1, "second": 0}
            for version in (1, 2):
                x += 1
                assert step_of("first") == step_of("second") == version, "the one that lost the rank steps first"
                until(lambda version=version: follower.latest == version)
                follower.poll()
                assert follower.state_dict()["x"].tolist() == [version] * 3
            assert publishers["second"].address and not publishers["first"].address
            assert publishers["second"].digest and publishers["first"].digest is None
        for publisher in publishers.values():
            publisher.close()


def test_a_new_rank_0_raises_where_followers_cannot_find_it() -> None:
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as taken:
        for port, told in ((0, "followers know the port"), (taken.getsockname()[1], "cannot listen")):
            patch.setattr(publication, "_rank", lambda: 1)
            with fl.publish({"x": torch.zeros(1)}, f"tcp://127.0.0.1:{port}") as publisher:
                publisher.step()
                patch.setattr(publication, "_rank", lambda: 0)
                with pytest.raises((fl.UsageError, ConfigError), match=told):
                    publisher.step()
