"""Ranks that publish the parts of tensors that they hold, and followers that take parts."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fusionlayer as fl
from fusionlayer.base.errors import ConfigError, TransportError, WireError
from fusionlayer.publishing import assembly, boxes, snapshot
from fusionlayer.publishing.address import parse
from fusionlayer.publishing.boxes import Reads, boxes_of, cut, join, spread, text_of, within
from fusionlayer.publishing.client import TcpSource
from fusionlayer.publishing.server import TcpOutlet
from fusionlayer.publishing.shards import shard_of
from fusionlayer.publishing.snapshot import Box, Snapshot
from tests.harness import run_ranks
from tests.publishing.gateway import Gateway
from tests.publishing.states import RUN, bits, until
from tests.ranks import on_processes
from tests.synthetic import gradient

LONG = 180.0
ROWS = ((0, 3), (3, 0), (3, 5))


def parts(version: int = 0, places: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], list[Snapshot]]:
    """Return a state, and what three ranks publish of it: rows, one of them none."""
    x, y = gradient(8 * 6, version).view(8, 6), gradient(5, 90 + version)
    found = []
    for start, n in ROWS:
        shard = snapshot.Shard(((start, n), (0, 6)) if n else ((0, 0), (0, 0)), (8, 6))
        tensors = {"x": x[start : start + n].clone() if n else x.new_empty(0, 0)}
        found.append(Snapshot(RUN, version, tensors, {"x": shard}))
    first = Snapshot(RUN, version, {**found[0].tensors, "y": y}, found[0].shards, places)
    return {"x": x, "y": y}, [first, *found[1:]]


def test_parts_make_the_whole_and_so_do_cuts_of_them() -> None:
    state, published = parts()
    whole, views = join(published)
    assert bits(whole.tensors) == bits(state)
    assert all(bits(view.tensors) == bits(part.tensors) for view, part in zip(views, published, strict=True))
    assert views[2].tensors["x"].data_ptr() == whole.tensors["x"][3:].data_ptr(), "parts take no memory of their own"
    every: list[Box] = [((a, m), (b, n)) for a in (0, 2, 7) for m in (0, 1, 5) for b in (0, 5) for n in (1, 6)]
    for box in every:
        asked = (("x", box), ("unknown", box))
        expected = {**state, "x": within(state["x"], box)} if boxes.fits(box, (8, 6)) else state
        assert bits(join([cut(part, asked) for part in published])[0].tensors) == bits(expected), box
        assert bits(cut(whole, asked).tensors) == bits(expected)
    with pytest.raises(WireError, match="too few or too many"):
        join(published[:2])
    with pytest.raises(WireError, match="too few or too many"):
        join([*published, published[2]])


def test_what_loaders_read_is_recorded() -> None:
    tensors = {
        name: torch.zeros(shape) for name, shape in {"a": (12, 8), "b": (10, 6), "c": (5,), "d": (4, 3, 2)}.items()
    }
    with Reads({**tensors, "unread": torch.zeros(3, 3)}) as reads:
        torch.empty(4, 8).copy_(tensors["a"].narrow(0, 4, 4))
        torch.empty(10, 3).copy_(tensors["b"].chunk(2, 1)[1])
        torch.empty(5, dtype=torch.bfloat16).copy_(tensors["c"])
        torch.empty(2, 2).copy_(tensors["d"].narrow(0, 1, 2)[:, :2, 1])
    found = reads.boxes()
    assert found == {
        "a": ((4, 4), (0, 8)),
        "b": ((0, 10), (3, 3)),
        "d": ((1, 2), (0, 2), (1, 1)),
        "unread": ((0, 0),) * 2,
    }
    spreads = spread(within(tensors["b"] + 1, found["b"]), found["b"], (10, 6))
    assert spreads.shape == (10, 6) and bool((within(spreads, found["b"]) == 1).all())
    assert boxes_of(text_of(tuple(found.items()))) == tuple(found.items())
    for text in (
        b"",
        b"1",
        b'[["a", [[0, -1]]]]',
        b'[["a", [[0, true]]]]',
        b"[[1, [[0, 1]]]]",
        b"[" * 9000,
        b'[["a", [[0]]]]',
    ):
        with pytest.raises(WireError):
            boxes_of(text)


def test_followers_take_parts_and_others_all() -> None:
    state = {"x": gradient(8 * 6, 1).view(8, 6), "y": gradient(5, 2)}
    box: Box = ((2, 4), (1, 3))
    with (
        fl.publish(state, "tcp://127.0.0.1:0", secret="0123456789abcdef") as publisher,
        fl.subscribe(publisher.address, secret="0123456789abcdef") as part,
        fl.subscribe(publisher.address, secret="0123456789abcdef") as whole,
    ):
        publisher.step()
        assert part.wait(LONG) == whole.wait(LONG) == 0 and part.digest == whole.digest
        part.select({"x": box})
        for version in range(1, 4):
            state["x"] += 1
            assert publisher.step() == part.wait(LONG) == whole.wait(LONG) == version
            assert bits(whole.state_dict()) == bits(state)
            # It may have asked for the first one before.
            expected = within(state["x"], box) if version > 1 or part.digest != whole.digest else state["x"]
            assert bits(part.state_dict()) == bits({**state, "x": expected})


def test_a_follower_joins_what_ranks_publish_whatever_happens_to_one_of_them() -> None:
    """Each rank at a port of its own. All parts are of one version, also when ranks step faster than it follows."""
    outlets = [TcpOutlet(parse("tcp://127.0.0.1:0"), 8, None, None, 2.0, 8) for _ in range(3)]
    with Gateway(outlets[2].place.port) as gateway:
        places = (str(outlets[1].place), gateway.address)

        def step(version: int) -> dict[str, Tensor]:
            state, published = parts(version, places)
            for outlet, part in zip(outlets, published, strict=True):
                outlet.offer(part)
            return state

        with fl.subscribe(str(outlets[0].place), timeout=2) as follower, fl.subscribe(str(outlets[0].place)) as cutter:
            cutter.select({"x": ((2, 4), (1, 3))})
            for version in range(6):
                state = step(version)
                if version == 3:
                    gateway.cut()
                if version == 4:
                    gateway.flips = 1
                assert follower.wait(LONG) == cutter.wait(LONG) == version
                assert bits(follower.state_dict()) == bits(state)
                # It may have asked for the first one before it took parts.
                is_cut = version > 0 or cutter.state_dict()["x"].shape != (8, 6)
                assert bits(cutter.state_dict()) == bits({**state, "x": state["x"][2:6, 1:4]} if is_cut else state)
            for version in range(6, 200):
                state = step(version)
            while follower.wait(LONG) != 199:
                assert bits(follower.state_dict()) == bits(parts(follower.version or 0)[0])
            assert bits(follower.state_dict()) == bits(state)
            outlets[1].close(0)
            step(200)
            with pytest.raises(TransportError, match="nothing newer than version 199"):
                follower.wait(1)
            assert follower.version == 199
    for outlet in outlets:
        outlet.close(0)


@pytest.mark.parametrize("run", [RUN, "another"])
def test_a_follower_of_ranks_goes_on_where_one_of_them_has_begun_again(run: str) -> None:
    """Rank 1 dies with a version that rank 0 has sent; both go on, or begin again with a lower number."""
    first, second = (TcpOutlet(parse("tcp://127.0.0.1:0"), 4, None, None, 2.0, 4) for _ in "ab")

    def step(version: int, run: str) -> None:
        made = parts(version, (str(second.place),))[1]
        whole = cut(Snapshot(run, version, parts(version)[0]), ())
        halves = [snapshot.Shard(((start, 4), (0, 6)), (8, 6)) for start in (0, 4)]
        x = whole.tensors["x"]
        first.offer(Snapshot(run, version, {"x": x[:4].clone()}, {"x": halves[0]}, made[0].places))
        if not second._closed:
            second.offer(Snapshot(run, version, {"x": x[4:].clone()}, {"x": halves[1]}))

    with fl.subscribe(str(first.place), timeout=2) as follower:
        step(5, RUN)
        assert follower.wait(LONG) == 5
        second.close(0)
        step(6, RUN)
        until(lambda: follower.trouble is not None)
        second = TcpOutlet(parse("tcp://127.0.0.1:0"), 4, None, None, 2.0, 4)
        if run == RUN:
            step(6, run)
        else:
            first.close(0)
            first = TcpOutlet(first.place, 4, None, None, 2.0, 4)
            step(1, run)
        assert follower.wait(LONG) == (6 if run == RUN else 1)
        assert bits(follower.state_dict()) == bits({"x": parts(follower.version or 0)[0]["x"]})
    first.close(0)
    second.close(0)


def test_a_version_that_one_rank_lacks_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_MOST_SECONDS", 0.1)
    outlets = [TcpOutlet(parse("tcp://127.0.0.1:0"), 4, None, None, 2.0, 4) for _ in range(3)]
    with fl.subscribe(str(outlets[0].place), timeout=20) as follower:
        published = parts(3, (str(outlets[1].place), str(outlets[2].place)))[1]
        outlets[0].offer(published[0])
        outlets[2].offer(published[2])
        until(lambda: f"{outlets[1].place} has not published version 3 in" in str(follower.trouble))
        outlets[1].offer(published[1])
        assert follower.wait(LONG) == 3 and bits(follower.state_dict()) == bits(parts(3)[0])
        with pytest.raises(ConfigError, match="to describe"):
            follower.select({f"{i:0100}": ((0, 1),) for i in range(10_000)})
    for outlet in outlets:
        outlet.close(0)


def test_cuts_of_many_followers_count_as_one_version() -> None:
    state = {"x": gradient(8 * 6, 1).view(8, 6)}
    with fl.publish(state, "tcp://127.0.0.1:0", keep=1) as publisher:
        outlet = publisher._outlet
        assert isinstance(outlet, TcpOutlet)
        followers = [fl.subscribe(publisher.address, name=str(i)) for i in range(3)]
        for i, follower in enumerate(followers):
            follower.select({"x": ((0, 1 + i), (0, 6))})
        for version in range(3):
            state["x"] += 1
            publisher.step()
            assert {follower.wait(LONG) for follower in followers} == {version}
            assert publisher.flush(LONG)
        until(lambda: len(outlet._kept) == 3 and {each.version for each in outlet._kept.values()} == {2})
        followers.pop(0).close()
        until(lambda: len(outlet._peers) == 2 and len(outlet._updates) == 2)
        for follower in followers:
            follower.close()


def test_a_follower_that_rests_stays_connected() -> None:
    """It asks rank 0 for the next version, and other ranks only when there is one."""
    outlet = TcpOutlet(parse("tcp://127.0.0.1:0"), 2, None, None, 0.2, 2)
    source = TcpSource(outlet.place, None, None, None, 60)
    outlet.offer(parts(1)[1][1])
    while (have := source.next(None, 1)) is None:
        pass
    source.rest(have)
    until(lambda: all(peer.rests for peer in outlet._peers.values()))
    (peer,) = outlet._peers.values()
    assert not peer.is_late(time.monotonic() + 1e4) and outlet.flush(LONG)
    peer.rests = False
    assert peer.is_late(time.monotonic() + 1e4)
    peer.rests = True
    outlet.offer(parts(2)[1][1])
    outlet.offer(parts(3)[1][1])
    while (new := source.next(have, 2)) is None:
        pass
    assert new.version == 2 and [*outlet._peers.values()] == [peer]
    source.close()
    outlet.close(0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 9)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Buffer(torch.ones(2))


def publish_fsdp(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Layers().bfloat16()
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    fully_shard(model.body)
    fully_shard(model)
    publisher = fl.publish(model, "tcp://127.0.0.1:0", timeout=20)
    assert publisher.address.startswith("tcp://127.0.0.1:")
    follower = fl.subscribe(publisher.address, timeout=20) if rank == 0 else None
    for version in range(3):
        with torch.no_grad():
            for x in model.parameters():
                x.add_(0.5)
        for name in expected.keys() - {"scale"}:
            expected[name] = expected[name] + 0.5 if name != "head.weight" else expected["embed.weight"]
        expected["head.weight"] = expected["embed.weight"]
        before = dict(model.state_dict())
        assert publisher.step() == version  # no collective: ranks need not come together
        held = sum(x.to_local().nbytes for x in before.values() if isinstance(x, DTensor))
        newest = publisher._newest
        assert newest is not None and sum({id(x): x.nbytes for x in newest.tensors.values()}.values()) <= held + 8
        if follower is not None:
            assert follower.wait(LONG) == version
            assert bits(follower.state_dict()) == bits(expected)
            named = follower.state_dict()
            assert named["embed.weight"] is named["head.weight"]
        dist.barrier()
    if follower is not None:
        follower.close()
    publisher.close(1)


@pytest.mark.medium
def test_each_fsdp_rank_publishes_its_rows_and_ties_stay() -> None:
    run_ranks(publish_fsdp, 3)


@pytest.mark.medium
@on_processes(4)
def test_boxes_of_dtensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7 * 5.0).view(7, 5)
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate())):
        x = distribute_tensor(whole, mesh, placements)
        shard = shard_of(x)
        assert shard is not None and shard.shape == (7, 5)
        owns = all(mesh.get_coordinate()[i] == 0 for i, each in enumerate(placements) if isinstance(each, Replicate))
        assert torch.equal(within(whole, shard.box), x.to_local() if owns else torch.empty(0, 0))
