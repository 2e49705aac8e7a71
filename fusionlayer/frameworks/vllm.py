"""vLLM's weight-transfer backend ``fusionlayer``: each worker follows a publisher of ``fl.publish``.

vLLM finds ``register`` by its entry point in every process that it starts. A worker's follower receives and checks
versions on a thread of its own while requests run; an update only loads the version that is there already. vLLM's own
loaders map names, fuse layers and cut what a tensor-parallel rank holds. What they read of the first version is
recorded, and later versions are fetched in these parts alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import ConfigError, FusionLayerError, TransportError, UsageError
from ..publishing import TLS, Follower, subscribe
from ..publishing.boxes import Reads, spread
from ..publishing.snapshot import Box

__all__ = ["FollowingEngine", "InitInfo", "UpdateInfo", "WorkerExtension", "poll", "poll_async", "register"]

_PAUSE = 0.005


def register() -> None:
    """Add the backend to vLLM's registry; vLLM calls it in each of its processes, once or more often."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory

    engine = type("FusionlayerEngine", (FollowingEngine, WeightTransferEngine), {})
    with suppress(ValueError):  # it is registered
        WeightTransferEngineFactory.register_engine("fusionlayer", engine)


@dataclass
class InitInfo:
    """``init_info`` of vLLM's ``init_weight_transfer_engine``: the arguments of ``fl.subscribe``, as JSON has them.

    Attributes:
        address: that of the publisher.
        secret_file: path of the file with the secret; None: as for ``subscribe``.
        tls: arguments of ``fl.TLS``; None: no encryption.
        name: of the followers; None: as for ``subscribe``.
        timeout: as for ``subscribe``.
        parts: fetch only the rows and columns that this worker's loaders read.
    """

    address: str
    secret_file: str | None = None
    tls: dict[str, Any] | None = None
    name: str | None = None
    timeout: float = 30.0
    parts: bool = True


@dataclass
class UpdateInfo:
    """``update_info`` of vLLM's ``update_weights``.

    Attributes:
        version: load this version, or a later one; None: the newest that all workers have.
        timeout: seconds to wait for it; requests wait meanwhile.
    """

    version: int | None = None
    timeout: float = 30.0


class WorkerExtension:
    """Adds to vLLM's workers the method that ``poll`` calls: ``LLM(worker_extension_cls=...)`` names this class."""

    def received_version(self) -> int | None:
        """Return the version that this worker has received and not loaded yet, or None."""
        engine: FollowingEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return engine.received()


def poll(llm: Any) -> int | None:
    """Load the newest version, if all workers of a vLLM ``LLM`` have it; return its number, or None without a new one.

    Call it between two calls of ``generate``. It never waits for a version. ``outputs`` name the version by which they
    were made: ``llm.get_weight_version()``.

    Raises:
        ConfigError: publisher and workers have different secrets, or versions do not fit the model.
    """
    version = _common(llm.collective_rpc("received_version"))
    if version is not None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update(str(version))
        llm.reset_prefix_cache()
    return version


async def poll_async(engine: Any, mode: str = "wait") -> int | None:
    """Do what ``poll`` does, for vLLM's ``AsyncLLM``: pause it, load the version, and resume.

    Args:
        engine: an ``AsyncLLM``.
        mode: of ``pause_generation``. "wait": running requests end with the version that they began with. "keep": they
            continue with the new one. "abort": they end at once.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    version = _common(await engine.collective_rpc("received_version"))
    if version is not None:
        await engine.pause_generation(mode=mode)
        try:
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest({"version": version}))
            await engine.finish_weight_update(str(version))
        finally:
            await engine.resume_generation()
    return version


def _common(received: list[int | None]) -> int | None:
    """Return the version that all workers have received, or None."""
    return received[0] if len({*received}) == 1 else None


class FollowingEngine:
    """Loads published versions into the model of one worker. ``register`` joins it with vLLM's base class.

    Attributes:
        model: the worker's model, and ``model_config`` its configuration; vLLM sets both.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    model: Any
    model_config: Any
    _follower: Follower | None = None
    _takes_parts: bool
    # Of the first version: shapes and types, and what the loaders have read.
    _shapes: dict[str, tuple[torch.Size, torch.dtype]]
    _boxes: dict[str, Box]
    _loaded: tuple[int | None, str | None] | None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin to follow a publisher, and no longer another one; returns at once."""
        self.shutdown()
        self._follower = subscribe(
            init_info.address,
            secret=Path(init_info.secret_file) if init_info.secret_file else None,
            tls=TLS(**init_info.tls) if init_info.tls else None,
            name=init_info.name,
            timeout=init_info.timeout,
        )
        self._takes_parts = init_info.parts
        self._shapes, self._boxes = {}, {}
        self._loaded = None

    def start_weight_update(self) -> None:
        """Do nothing: the model changes within ``receive_weights`` alone, when all bytes are there."""

    def finish_weight_update(self) -> None:
        """Do nothing, as ``start_weight_update``."""

    def received(self) -> int | None:
        """Return the version that is here and not loaded yet, or None; an update loads this one."""
        follower = self._following()
        follower.poll()
        return None if self._loaded == (follower.version, follower.digest) else follower.version

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that all workers of this vLLM have.

        Raises:
            ConfigError: its tensors have other names, shapes or types than those of the first one.
            TransportError: it did not come in time.
        """
        follower = self._following()
        self._agree(follower, update_info)
        if self._loaded == (follower.version, follower.digest):
            return
        tensors = follower.state_dict()
        self._check(tensors, follower.version)
        whole = {name: spread(x, self._boxes.get(name, ()), self._shapes[name][0]) for name, x in tensors.items()}
        reads = Reads(whole) if self._loaded is None and self._takes_parts else None
        with reads or nullcontext():
            _load(self.model, self.model_config, whole)
        self._loaded = follower.version, follower.digest
        if reads is not None:
            self._boxes = reads.boxes()
            follower.select(self._boxes)

    def shutdown(self) -> None:
        """Follow no longer; a second call does nothing."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def _following(self) -> Follower:
        if self._follower is None:
            raise UsageError("vLLM follows no publisher yet: call init_weight_transfer_engine with its address first")
        return self._follower

    def _check(self, tensors: Mapping[str, Tensor], version: int | None) -> None:
        """Compare a version with the first one, before the model changes."""
        if not self._shapes:
            self._shapes = {name: (x.shape, x.dtype) for name, x in tensors.items()}
        problems = [name for name in self._shapes.keys() ^ tensors.keys()]
        for name, x in tensors.items():
            shape, dtype = self._shapes.get(name, (x.shape, x.dtype))
            mine = torch.Size(n for _, n in self._boxes.get(name, ()))
            if x.dtype != dtype or x.shape not in (shape, mine):
                problems.append(name)
        if problems:
            raise ConfigError(
                f"version {version} has other names, shapes or types than the first one that vLLM loaded: "
                f"{sorted(problems)[:3]}; start vLLM again for another model"
            )

    def _agree(self, follower: Follower, wanted: UpdateInfo) -> None:
        """Wait until all workers show one version, and the wanted one or a later one.

        vLLM calls all workers alike, so they exchange in rounds what each of them shows.
        """
        end = time.monotonic() + wanted.timeout
        polls = wanted.version is None  # else what `received` has returned counts first
        while True:
            trouble = None
            try:
                if polls:
                    follower.poll()
            except FusionLayerError as error:
                trouble = str(error)
            shown = _exchange((follower.version, trouble, time.monotonic() > end))
            versions = {version for version, _, _ in shown}
            version = follower.version
            for _, problem, _ in shown:
                if problem:
                    raise ConfigError(f"a worker of vLLM: {problem}")
            if len(versions) == 1 and version is not None and version >= (wanted.version or 0):
                return
            if any(late for _, _, late in shown):
                why = follower.trouble or "the publisher has published none"
                expected = "any" if wanted.version is None else wanted.version
                raise TransportError(f"vLLM's workers have the versions {versions}, expected {expected}: {why}")
            time.sleep(_PAUSE)
            polls = True


def _load(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors as vLLM loads a checkpoint: its layers pack weights for their kernels anew."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with disable_mtp_completeness_check():
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, config)


def _exchange(mine: tuple[int | None, str | None, bool]) -> list[tuple[int | None, str | None, bool]]:
    """Return what all workers of this vLLM have given."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    found = [mine] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(found, mine, group=world.cpu_group)
    return found
