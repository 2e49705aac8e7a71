"""A GPU that is only a model: tensors that say they are on it, and streams that know what is ordered after what.

The elements are on the CPU, and every operation is done at once, in the order of the program. What the model keeps is
what a GPU would be free to do in another order. Each stream has a vector clock: how much of every stream's work comes
before its next work. Events carry clocks from stream to stream, and to the host. Two accesses to the same bytes, one of
them a write, must be ordered by these clocks; else they are a race, whatever the values were this time.

There may be several devices. As in CUDA each thread has a current one, which is the first until the thread sets
another. An event belongs to the device on which it was recorded first.

Memory is watched, too. When a tensor's memory is freed, its allocator may give it to the next work of the stream on
which it was allocated. So whatever has used it must be ordered before that, or be announced by ``record_stream``.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusionlayer import native
from fusionlayer.codecs.native import NativeCodec
from fusionlayer.native import selection

__all__ = ["DEVICE", "Gpu", "OnGpu", "planted", "refuse_others"]

DEVICE = torch.device("cuda", 0)
_HOST = -1

Clock = dict[int, int]


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    gpu: Gpu

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = self.gpu.device_of(device)
        self.priority = priority
        self.number = self.cuda_stream = self.gpu.streams
        self.gpu.streams += 1
        self.clock: Clock = {self.number: 0}

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        _join(self.gpu.host_clock, self.clock)


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.device: torch.device | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.gpu.current()
        if self.device not in (None, stream.device):
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.device, self.clock = stream.device, dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.gpu.current()).wait_event(self)

    def synchronize(self) -> None:
        _join(Stream.gpu.host_clock, self.clock)

    def query(self) -> bool:
        return all(Stream.gpu.host_clock.get(stream, 0) >= tick for stream, tick in self.clock.items())


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        clock[stream] = max(tick, clock.get(stream, 0))


class _Access(NamedTuple):
    start: int
    stop: int
    stream: int
    tick: int
    writes: bool
    what: str

    def before(self, clock: Mapping[int, int]) -> bool:
        return clock.get(self.stream, 0) >= self.tick


class _Freed(NamedTuple):
    start: int
    stop: int
    allocated_on: int
    clock: Clock


class OnGpu(Tensor):
    """A tensor that says it is on the GPU; operations on it are those of the current stream."""

    elements: Tensor
    where: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elements: Tensor, where: torch.device = DEVICE) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elements.shape,
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=elements.dtype,
            device="cpu",
        )
        made.elements, made.where = elements, where
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.elements.data_ptr()

    def tolist(self) -> Any:
        with Stream.gpu.at(self.where):
            Stream.gpu.touch(self.elements, False, "tolist")
            Stream.gpu.current().synchronize()
        return self.elements.tolist()

    def record_stream(self, stream: Any) -> None:
        Stream.gpu.keep(self.elements, stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Stream.gpu.run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Makes tensors of the model where a program asks for ones on a GPU; pinned memory is plain memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if _is_gpu(kwargs.get("device")) and not any(isinstance(x, OnGpu) for x in args):
            where = Stream.gpu.device_of(kwargs["device"])
            return Stream.gpu.made(func(*args, **{**kwargs, "device": "cpu"}), func.__name__, where)
        if func is _TO and any(map(_is_gpu, args[1:])):
            where = Stream.gpu.device_of(next(filter(_is_gpu, args[1:])))
            if not isinstance(args[0], OnGpu):
                return Stream.gpu.made(args[0].clone(), "to", where)
            if args[0].where == where:
                return args[0].clone() if kwargs.get("copy") else args[0]
        return func(*args, **kwargs)


def _in_backward(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``factory`` for hooks that run within backward, where modes of Python are off."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return _Factories().__torch_function__(factory, (), args, kwargs)

    return functools.wraps(factory)(make)


_TO = Tensor.to


def _is_gpu(device: object) -> bool:
    return device is not None and str(device).startswith("cuda")


class Gpu:
    """The model.

    Attributes:
        races: what it has found so far, one line each.
        streams: number of streams that were made.
        capturing: whether the program captures a CUDA graph.

    Args:
        visible: the GPUs of the host that this process sees; number i of them is its cuda:i.
    """

    def __init__(self, visible: Sequence[int] = (0,)) -> None:
        Stream.gpu = self
        self.visible = visible
        self.races: list[str] = []
        self.streams = 0
        self.capturing = False
        self.host_clock: Clock = {}
        # Guards what follows, as lanes may be threads. Reentrant, as the garbage collector may free a tensor anywhere.
        self._lock = threading.RLock()
        self._accesses: list[_Access] = []
        self._kept: defaultdict[int, set[int]] = defaultdict(set)
        self._freed: deque[_Freed] = deque()
        self._here = threading.local()
        self._defaults = [Stream(torch.device("cuda", index)) for index in range(len(visible))]
        self.default = self._defaults[0]

    # ---- what stands in for torch.cuda ------------------------------------------------------------------------------

    def current(self, device: object = None) -> Stream:
        where = self.device_of(device)
        stream: Stream = self._streams_here().get(where.index, self._defaults[where.index])
        return stream

    def _streams_here(self) -> dict[int, Stream]:
        """The streams that this thread has set, by device."""
        return self._here.__dict__.setdefault("streams", {})  # type: ignore[no-any-return]

    def device_of(self, device: object = None) -> torch.device:
        """Return a device with its number: that of the calling thread's current one, if none is given."""
        if device is not None:
            device = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
            if device.index is not None:
                assert device.type == "cuda" and device.index < len(self.visible), f"{device} of {len(self.visible)}"
                return device
        return torch.device("cuda", getattr(self._here, "device", 0))

    def _properties(self, device: object = None) -> Any:
        number = self.visible[self.device_of(device).index]
        return SimpleNamespace(uuid=f"GPU-{number}", pci_domain_id=0, pci_bus_id=number, pci_device_id=0)

    def set_device(self, device: object) -> None:
        self._here.device = self.device_of(device).index

    @contextmanager
    def at(self, device: object) -> Iterator[None]:
        before = self.device_of()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def set_stream(self, stream: Stream) -> None:
        if "streams" not in self._here.__dict__ and threading.current_thread() is not threading.main_thread():
            _Factories().__enter__()  # for good: no thread but the main one goes on without the model
        self._streams_here()[stream.device.index] = stream
        self.set_device(stream.device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current(stream.device)
        with self.at(stream.device):
            self.set_stream(stream)
            try:
                yield
            finally:
                self._streams_here()[stream.device.index] = before

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
        """Let torch and the codec core use the model."""
        for name, stand_in in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": self.current,
            "set_stream": self.set_stream,
            "stream": self.on,
            "device": self.at,
            "set_device": self.set_device,
            "current_device": lambda: self.device_of().index,
            "device_count": lambda: len(self.visible),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": self._properties,
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            refuse_others(stand_in, getattr(torch.cuda, name))
            monkeypatch.setattr(torch.cuda, name, stand_in)
        # Calls by address tell the model nothing. The verbs, which codecs use else, work on the same tensors.
        monkeypatch.setattr(NativeCodec, "_is_direct", property(lambda codec: False))
        for verb, arguments in _VERBS.items():
            owner = native if hasattr(native, verb) else selection
            monkeypatch.setattr(owner, verb, self._recorded(getattr(owner, verb), arguments))
        for factory in (torch.empty, torch.full, torch.tensor, torch.zeros):
            monkeypatch.setattr(torch, factory.__name__, _in_backward(factory))
        monkeypatch.setattr(Tensor, "to", _in_backward(_TO))
        with _Factories():
            yield self

    # ---- tensors and what is done with them -------------------------------------------------------------------------

    def made(self, elements: Tensor, what: str, where: torch.device | None = None) -> OnGpu:
        """Return new memory as a tensor of the model, allocated and perhaps written by the current stream."""
        storage, where = elements.untyped_storage(), self.device_of(where)
        start, stream = storage.data_ptr(), self.current(where)
        if storage.nbytes():
            weakref.finalize(storage, self._free, start, start + storage.nbytes(), stream).atexit = False
        if not what.startswith(("empty", "new_empty")):
            with self.at(where):
                self.touch(elements, True, what)
        return OnGpu(elements, where)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation and record what it reads and writes."""
        what = func._schema.name.removeprefix("aten::")
        wrappers = {id(x.elements): x for x in tree_leaves((args, kwargs)) if isinstance(x, OnGpu)}
        wheres = {x.where for x in wrappers.values()}
        where = next(iter(wheres), self.device_of())
        if len(wheres) > 1 and what not in ("copy_", "_to_copy"):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {what} got {wheres}")
        with self.at(where):
            return self._run_at(where, wrappers, func, args, kwargs, what)

    def _run_at(
        self, where: torch.device, wrappers: Mapping[int, OnGpu], func: Any, args: Any, kwargs: Any, what: str
    ) -> Any:
        plain_args, plain = tree_map_only(OnGpu, lambda x: x.elements, (args, kwargs))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((plain_args, plain)) if isinstance(x, Tensor)}
        out = func(*plain_args, **plain)
        aliases = [each.alias_info for each in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):  # not a view
            for place, argument in enumerate(func._schema.arguments):
                given = plain_args[place] if place < len(plain_args) else plain.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if not (what.startswith("new_") and not writes):
                    for x in tree_leaves(given):
                        if isinstance(x, Tensor):
                            self.touch(x, writes, what)
        if what == "_local_scalar_dense":
            self.current().synchronize()

        def wrap(x: Tensor) -> Tensor:
            if id(x) in wrappers or id(x) in map(id, tree_leaves((plain_args, plain))):
                return wrappers.get(id(x), x)
            return OnGpu(x, where) if x.untyped_storage().data_ptr() in known else self.made(x, what, where)

        return tree_map_only(Tensor, wrap, out)

    def touch(self, x: Tensor, writes: bool, what: str) -> None:
        """Record that the current stream reads or writes the memory of ``x``."""
        stream = self.current()
        with self._lock:
            _join(stream.clock, self.host_clock)  # what the host has waited for comes before what it asks for now
            stream.clock[stream.number] += 1
            self._record(x, stream.number, stream.clock, writes, what)

    def host(self, x: Tensor, *, writes: bool) -> None:
        """Record that the host reads or writes the memory of ``x`` now."""
        with self._lock:
            self.host_clock[_HOST] = self.host_clock.get(_HOST, 0) + 1
            self._record(x, _HOST, self.host_clock, writes, "the host")

    def keep(self, x: Tensor, stream: Stream) -> None:
        with self._lock:
            self._kept[x.untyped_storage().data_ptr()].add(stream.number)

    def settle(self) -> list[str]:
        """Return the races that were found, those of memory that was freed lately included."""
        with self._lock:
            self._reuse_freed()
        return self.races

    def _record(self, x: Tensor, stream: int, clock: Clock, writes: bool, what: str) -> None:
        self._reuse_freed()
        if not x.numel():
            return
        start = x.data_ptr()
        last = sum((length - 1) * step for length, step in zip(x.shape, x.stride(), strict=True))
        new = _Access(start, start + (last + 1) * x.element_size(), stream, clock[stream], writes, what)
        kept = []
        for old in self._accesses:
            if old.start < new.stop and new.start < old.stop and (writes or old.writes):
                if not old.before(clock):
                    self._tell(old, f"{_verb(new)} by {what} on stream {stream}")
                elif writes and new.start <= old.start and old.stop <= new.stop:
                    continue  # what comes after the new access comes after the old one
            kept.append(old)
        self._accesses = [*kept, new]

    def _free(self, start: int, stop: int, stream: Stream) -> None:
        self._freed.append(_Freed(start, stop, stream.number, dict(stream.clock)))

    def _reuse_freed(self) -> None:
        """Let the allocator give freed memory away: the stream that had allocated it may write there at once."""
        while self._freed:
            freed = self._freed.popleft()
            _join(freed.clock, self.host_clock)
            kept = self._kept.pop(freed.start, set())
            mine = [a for a in self._accesses if freed.start <= a.start < freed.stop]
            self._accesses = [a for a in self._accesses if a not in mine]
            for access in mine:
                if not access.before(freed.clock) and access.stream not in kept:
                    self._tell(access, f"its memory was freed to stream {freed.allocated_on}")

    def _tell(self, access: _Access, then: str) -> None:
        self.races.append(f"{_verb(access)} by {access.what} on stream {access.stream}, not waited for when {then}")

    def _recorded(self, original: Callable[..., Any], arguments: Mapping[str, str]) -> Callable[..., Tensor | None]:
        verb = original.__name__
        signature = inspect.signature(original)

        def recorded(*args: Any, **kwargs: Any) -> Tensor | None:
            given = signature.bind(*args, **kwargs).arguments
            for name, access in arguments.items():
                if isinstance(x := given.get(name), OnGpu):
                    self.touch(x.elements, "w" in access, f"{verb}({name})")
            found = original(**{k: x.elements if isinstance(x, OnGpu) else x for k, x in given.items()})
            return self.made(found, verb) if isinstance(found, Tensor) else None

        return recorded


# What the functions of the codec core read and write.
_VERBS: dict[str, dict[str, str]] = {
    "encode": {"x": "r", "residual": "rw", "bodies": "w"},
    "decode": {"bodies": "r", "out": "w"},
    "decode_sum": {"bodies": "r", "out": "w"},
    "recode": {"bodies": "r", "x": "r", "residual": "rw", "body": "w"},
    "accumulate": {"x": "r", "acc": "rw"},
    "choose_threshold": {"acc": "r", "memory": "rw", "sample": "r"},
    "sparse_encode": {"x": "r", "acc": "rw", "body": "w", "choice": "r"},
}


def refuse_others(stand_in: Any, original: Any) -> None:
    """Assert that a function or a class, with its public methods, takes no arguments but those of torch's original."""
    ours, theirs = ([*inspect.signature(each).parameters] for each in (stand_in, original))
    assert ours == theirs[: len(ours)], f"{original} has the arguments {theirs}, and its stand-in {ours}"
    for name, method in vars(stand_in).items() if inspect.isclass(stand_in) else ():
        if inspect.isfunction(method) and not name.startswith("_"):
            refuse_others(method, getattr(original, name))


def _verb(access: _Access) -> str:
    return "written" if access.writes else "read"


def planted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Let the function ``name`` of a class or module be what its source says with ``new`` in place of ``old``."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}; mend the list of planted races"
    mutated = "from __future__ import annotations\ndef make(__class__):\n"
    mutated += textwrap.indent(source.replace(old, new), "    ") + f"    return {name}\n"
    scope: dict[str, Any] = {}
    exec(compile(mutated, f"<{name}, planted>", "exec"), function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope["make"](owner))
