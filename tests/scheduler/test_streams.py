"""Streams of a GPU: everything that is read is ordered after its write, and no memory is used again too early."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import TransportError, UsageError
from fusionlayer.base.plan import FusionPlan
from fusionlayer.collectives import _pieces
from fusionlayer.scheduler import Engine, memory, plan_state
from fusionlayer.scheduler.ahead import AheadBuffer
from fusionlayer.scheduler.buffers import Buffer, FlatBuffer
from fusionlayer.transport import Transport, _staging
from fusionlayer.transport._staging import bring, bring_back, space
from tests.loops import looped
from tests.streams import DEVICE, Gpu, OnGpu, Stream, planted
from tests.synthetic import gradient

from .engines import MODEL, make_engine

CPU = torch.device("cpu")
STEPS = 3


class Echo(Transport):
    """Rank 0 of two; what the other rank sends is what rank 0 sends to itself."""

    rank, size, timeout = 0, 2, 60.0

    def __init__(self, gpu: Gpu, at_once: bool) -> None:
        self._gpu = gpu
        self._at_once = at_once

    def only_queues(self, device: torch.device) -> bool:
        return self._at_once and device.type == "cuda"

    def exchange(self, messages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        sends, recvs = map(list, zip(*messages.values(), strict=True))
        if not sends[0].is_cuda or self._at_once:
            for x in recvs:
                if x.data_ptr() != sends[0].data_ptr():
                    x.copy_(sends[0])
            return
        near, targets = bring(sends, CPU), space(recvs, CPU)
        self._gpu.host(near[0], writes=False)
        for target in targets:
            self._gpu.host(target, writes=True)
            target.copy_(near[0])
        bring_back(targets, recvs)

    def all_reduce(self, x: Tensor) -> None:
        x.mul_(2)

    def broadcast(self, x: Tensor, root: int) -> None:
        pass

    def duplicate(self) -> Transport:
        return Echo(self._gpu, self._at_once)

    def close(self) -> None:
        pass

    def subset(self, ranks: Sequence[int]) -> Transport:
        raise NotImplementedError

    def send(self, x: Tensor, to: int, tag: int = 0) -> None:
        raise NotImplementedError

    def recv(self, x: Tensor, source: int, tag: int = 0) -> None:
        raise NotImplementedError


class Program:
    """A training program: backward on two streams, as of a model with branches, and updates on a third one."""

    def __init__(self, gpu: Gpu, engine: Engine) -> None:
        self.gpu, self.engine = gpu, engine
        self.branches = [Stream(), Stream()]
        self.weights = {tensor.name: torch.zeros(tensor.numel, device=DEVICE) for tensor in MODEL}

    def backward(self, step: int) -> dict[str, Tensor]:
        """Make gradients and submit them; one of them is not contiguous."""
        values = {}
        for branch in self.branches:
            branch.wait_stream(self.gpu.default)
        numbered = list(enumerate(MODEL))
        first = max(0, step - 1)  # so the first gradient after the change of plan is not one of the first bucket
        for place, (number, tensor) in enumerate(numbered[first:] + numbered[:first]):
            with self.gpu.on(self.branches[place % 2]):
                fresh = gradient(tensor.numel, 10 * step + number)
                x: Tensor = self.gpu.made(fresh.clone(), "backward")
                if tensor.numel == 128:
                    x = self.gpu.made(fresh.view(8, 16).t().contiguous(), "backward").t()
                self.engine.submit(tensor.name, x)
                values[tensor.name] = x
        for branch in self.branches:
            self.gpu.default.wait_stream(branch)
        return values

    def step(self, step: int) -> None:
        """Take a step; the gradients are freed at its end, as by ``zero_grad``. One step's are not used at all."""
        values = self.backward(step)
        self.engine.synchronize()
        if step == 1:
            values.clear()
        for name in values:
            self.weights[name].add_(values[name].reshape(-1))
        for branch in self.branches:
            branch.wait_stream(self.gpu.default)

    def overlapped_step(self, step: int) -> None:
        """Take a step whose results are used in place of the gradients, which are freed as backward goes on."""
        self.backward(step).clear()
        self.engine.end_step()
        for index in sorted(self.engine.untaken):
            for name, result in self.engine.take(index).items():
                self.weights[name].add_(result.reshape(-1))


def races(gpu: Gpu, at_once: bool, overlapped: bool = False, **options: Any) -> list[str]:
    """Return the races of some steps, between which the plan changes once."""
    engine = make_engine(Echo(gpu, at_once), device=DEVICE, overlap_forward=overlapped, **options)
    program = Program(gpu, engine)
    for step in range(STEPS):
        if step == STEPS - 1 and engine.plan is not None:
            whole = engine.plan.buckets[0]
            runs = [[tensor] for tensor in MODEL]
            plan = FusionPlan.build(runs, 2, whole.codec, whole.options, whole.algorithm, 128, whole.ahead)
            engine.switch(plan)
        (program.overlapped_step if overlapped else program.step)(step)
    engine.close()
    del program, engine
    return gpu.settle()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with Gpu().installed(monkeypatch) as model:
        yield model


WAYS: dict[str, dict[str, Any]] = {
    "raw": {"codec": codecs.get("raw")},
    "error feedback": {"codec": codecs.get("int4"), "error_feedback": True, "algorithm": "two_shot"},
    "ahead of fusion": {"codec": codecs.get("int4"), "error_feedback": True, "ahead": True},
    "thresholds": {"codec": codecs.get("dgc", density=0.1, slack=2.0, reuse=2)},
}


@looped("way", WAYS)
@looped("at_once", [True, False], ids=["NCCL", "gloo"])
@looped("overlapped", [False, True], ids=["in place", "overlapped"])
def test_every_read_is_ordered_after_its_write(gpu: Gpu, at_once: bool, overlapped: bool, way: str) -> None:
    assert races(gpu, at_once, overlapped, lanes=2, **WAYS[way]) == []  # over NCCL it is one


def test_results_are_those_of_the_operations(gpu: Gpu) -> None:
    program = Program(gpu, make_engine(Echo(gpu, True), device=DEVICE, codec=codecs.get("raw")))
    program.step(0)
    for number, tensor in enumerate(MODEL):
        expected = 2 * gradient(tensor.numel, number)
        if tensor.numel == 128:
            expected = expected.view(8, 16).reshape(-1)
        found = program.weights[tensor.name]
        assert isinstance(found, OnGpu) and torch.equal(found.elements, expected)


def pieces(gpu: Gpu) -> list[str]:
    """Return the races of a collective whose pieces are pipelined."""
    x = gpu.made(gradient(4096, 0), "backward")
    codec = codecs.get("int8").bare
    collectives.get("two_shot")(x, codec, Echo(gpu, True), piece=1024)
    x.add_(1)
    return gpu.settle()


def test_pieces_travel_after_they_are_encoded(gpu: Gpu) -> None:
    assert pieces(gpu) == []
    streams = gpu.streams
    assert pieces(gpu) == [] and gpu.streams == streams, "streams are kept, not made for each call"


# ---- where calls only queue work ------------------------------------------------------------------------------------


class Told(Echo):
    """Tells which bucket was sent on which thread, and when it was drained; a bucket of ``bad`` elements fails."""

    def __init__(self, gpu: Gpu, at_once: bool, bad: int = 0) -> None:
        super().__init__(gpu, at_once)
        self.told: list[Any] = []
        self.bad = bad
        self.drain_fails = False

    def duplicate(self) -> Transport:
        raise AssertionError("one lane is enough")

    def all_reduce(self, x: Tensor) -> None:
        if x.numel() == self.bad:
            raise ValueError("boom")
        super().all_reduce(x)
        self.told.append((x.numel(), threading.current_thread(), self._gpu.current().priority))

    def drain(self) -> None:
        self.told.append("drained")
        if self.drain_fails:
            raise TransportError("rank 1 is gone", [1])

    def close(self) -> None:
        self.told.append("closed")


def engine_of(transport: Transport, **options: Any) -> Engine:
    """Return an engine with a bucket for each tensor."""
    plan = FusionPlan.build([[tensor] for tensor in MODEL], 2, "raw", {}, "dense", 1)
    return make_engine(transport, plan=plan, device=DEVICE, **options)


def gradients(gpu: Gpu, names: str) -> Iterator[tuple[str, Tensor]]:
    for digit in names:
        yield f"w{digit}", gpu.made(gradient(MODEL[int(digit)].numel, int(digit)), "backward")


def test_buckets_leave_on_the_thread_of_the_hook_in_the_order_of_the_plan(gpu: Gpu) -> None:
    """Several communicators of a device must get their work in one order on all ranks; and nothing waits for it."""
    transport = Told(gpu, at_once=True)
    engine = engine_of(transport, lanes=2)
    me, numels = threading.current_thread(), [tensor.numel for tensor in MODEL]
    for name, x in gradients(gpu, "310254"):
        engine.submit(name, x)
        if name == "w2":
            assert [numel for numel, *_ in transport.told] == numels[:4], "at once, and not at the end of the step"
    engine.synchronize()
    assert transport.told == [(numel, me, -1) for numel in numels]
    assert gpu.current() is gpu.default and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "codec, options, algorithm, told",
    [
        ("zip", {}, "zipped", "zip"),
        ("mxfp8", {"scale": "auto"}, "two_shot", "mxfp8"),
        ("topk", {}, "gather_v", "the collective gather_v"),
        ("topk", {}, "gather", None),
    ],
)
def test_what_holds_up_backward_is_told_once(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, codec: str, options: dict[str, Any], algorithm: str, told: str | None
) -> None:
    plan_state._warn_of_waiting.cache_clear()
    for at_once in (False, True, True):
        plan = FusionPlan.build(
            [[tensor] for tensor in MODEL], 2, codec, options, algorithm, 128, "gather" in algorithm
        )
        engine = make_engine(Told(gpu, at_once), plan=plan, device=DEVICE)
        assert [engine._plans._maker.codec_of(bucket).name for bucket in plan.buckets] == [codec] * len(MODEL)
        assert at_once or not caplog.messages, "a thread of its own waits"
    assert len(caplog.messages) == bool(told) and all(text.startswith(told or "") for text in caplog.messages)


def test_what_fails_at_once_is_raised_by_what_comes_next(gpu: Gpu) -> None:
    transport = Told(gpu, at_once=True, bad=MODEL[1].numel)
    engine = engine_of(transport)
    given = dict(gradients(gpu, "0123"))
    for name in ("w0", "w1"):
        engine.submit(name, given[name])
    for again in (lambda: engine.submit("w2", given["w2"]), lambda: engine.submit("w3", given["w3"]), engine.drain):
        with pytest.raises(ValueError, match="boom"):
            again()
    engine.close()
    assert [what for what in transport.told if isinstance(what, str)] == ["closed", "closed"], "nothing is waited for"
    assert not {numel for numel, *_ in transport.told} & {MODEL[2].numel, MODEL[3].numel}


@pytest.mark.parametrize("fails", [False, True])
def test_an_orderly_end_waits_for_the_device_before_it_closes(gpu: Gpu, fails: bool) -> None:
    transport = Told(gpu, at_once=True)
    engine = engine_of(transport)
    for name, x in gradients(gpu, "012345"):
        engine.submit(name, x)
    engine.synchronize()
    transport.told.clear()
    transport.drain_fails = fails
    if fails:
        with pytest.raises(TransportError, match="rank 1 is gone"):
            engine.close()
        with pytest.raises(TransportError, match="rank 1 is gone"):
            engine.drain()
        assert transport.told[:2] == ["drained", "closed"]
    else:
        engine.close()
        assert transport.told == ["drained", "closed"]


def test_gradients_are_refused_while_a_graph_is_captured(gpu: Gpu) -> None:
    transport = Told(gpu, at_once=True)
    engine = engine_of(transport)
    gpu.capturing = True
    with pytest.raises(UsageError, match="gradient 'w0' arrives while a CUDA graph is captured.*make_graphed"):
        engine.submit(*next(gradients(gpu, "0")))
    gpu.capturing = False
    for name, x in gradients(gpu, "012345"):
        engine.submit(name, x)
    engine.synchronize()
    assert len(transport.told) == len(MODEL)
    gpu.capturing = True
    with pytest.raises(UsageError, match="while a CUDA graph is captured"):
        engine.close()
    assert transport.told[-1] == "closed", "threads and connections stay"


# ---- planted races --------------------------------------------------------------------------------------------------


AHEAD, IN_FLAT = WAYS["ahead of fusion"], WAYS["error feedback"]
PLANTED: dict[str, tuple[Any, str, str, str, Any]] = {
    "pieces leave before they are encoded": (
        _pieces._StreamWorker,
        "send",
        "self._network.wait_stream(self._computing)",
        "pass",
        pieces,
    ),
    "a message is written anew while it travels": (
        _pieces._StreamWorker,
        "send",
        "return lambda: self._computing.wait_event(event)",
        "return lambda: None",
        pieces,
    ),
    "buckets are packed before backward is done": (
        Buffer,
        "follow",
        "torch.cuda.current_stream(self._device).wait_event(arrival)",
        "pass",
        lambda gpu: races(gpu, True, **IN_FLAT),
    ),
    "results are used before they are there": (
        Buffer,
        "take",
        "self.join()",
        "pass",
        lambda gpu: races(gpu, True, True, **IN_FLAT),
    ),
    "gradients are freed before they are packed": (
        Buffer,
        "_note_used",
        "gradient.record_stream(torch.cuda.current_stream(self._device))",
        "pass",
        lambda gpu: races(gpu, True, True, **IN_FLAT),
    ),
    "a stream gets its gradients' memory back too early": (
        Buffer,
        "take",
        "owner.wait_event(self._done)",
        "pass",
        lambda gpu: races(gpu, True, **IN_FLAT),
    ),
    "a stream gets its results' memory back too early": (
        Buffer,
        "take",
        "result.record_stream(stream)",
        "pass",
        lambda gpu: races(gpu, True, True, **IN_FLAT),
    ),
    "error feedback is freed before it is copied": (
        memory,
        "_handed_over",
        "old.record_stream(torch.cuda.current_stream(old.device))",
        "pass",
        lambda gpu: races(gpu, True, **IN_FLAT),
    ),
    "memory of another stream is used before it is filled": (
        FlatBuffer,
        "__init__",
        "self._note_work()",
        "pass",
        lambda gpu: races(gpu, True, **IN_FLAT),
    ),
    "a payload is encoded before its memory is filled": (
        AheadBuffer,
        "put",
        "self.join()",
        "pass",
        lambda gpu: races(gpu, True, **AHEAD),
    ),
    "the host sends what the device has not copied yet": (
        _staging,
        "bring",
        "torch.cuda.current_stream(source).synchronize()",
        "pass",
        lambda gpu: races(gpu, False, **IN_FLAT),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_model_finds_a_planted_race(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, function, old, new, program = PLANTED[name]
    planted(monkeypatch, owner, function, old, new)
    if owner is _staging:
        monkeypatch.setitem(globals(), "bring", _staging.bring)
    assert program(gpu), name
