"""``fl.publish``: the weights of a training job as versions, which other jobs follow by ``fl.subscribe``."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .. import context
from ..base.errors import ConfigError, UsageError, kind_of
from ..process.interfaces import is_loopback, own_address, reachable_names
from ..publishing import Outlet, Snapshot, open_outlet, parse
from ..publishing.address import Endpoint, seconds_of
from ..publishing.keyring import keyring_of
from ..publishing.models import named_tensors
from ..publishing.shards import is_sharded, shard_of
from ..publishing.snapshot import Shard, check_tensor, copied, identity
from ..publishing.tls import TLS, check_tls

_logger = logging.getLogger("fusionlayer")


def publish(
    source: nn.Module | Mapping[str, Tensor],
    address: str | os.PathLike[str],
    *,
    keep: int = 8,
    secret: str | bytes | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    timeout: float = 30.0,
) -> Publisher:
    """Publish versions of weights at ``address``, where ``fl.subscribe`` of other jobs follows them.

        with fl.publish(model, "tcp://:29600") as publisher:
            for batch in batches:
                train(model, batch)
                publisher.step()

    All ranks of a job call it, and ``step``. Rank 0 publishes. If an elastic job loses rank 0, the process that is
    rank 0 next continues at the same address, or ``step`` raises. Of ``DTensor`` (FSDP2, tensor parallelism) each rank
    publishes its own part over TCP, at a port of its own, which followers find by rank 0; into a folder rank 0 writes
    what it gathers, one tensor at a time. Of other tensors rank 0's count. Names are those of ``state_dict()``
    without the prefixes of DistributedDataParallel and ``torch.compile``.

    Args:
        source: a model, or tensors by name that training changes in place, such as a ``state_dict()``.
        address: "tcp://HOST:PORT" to listen at, where no host means 127.0.0.1 and port 0 a free port; or
            "file:///FOLDER" or a Path of a folder for this publisher alone.
        keep: how many versions a follower may be behind, and still get differences. Over TCP at most this many versions
            are kept in memory, those that followers have. In a folder the files of as many versions are kept.
        secret: proves followers over TCP, and signs the files of a folder: a text of at least 16 bytes, or a Path of a
            file with secrets, which is read again when it changes. None: those in the file
            FUSIONLAYER_PUBLISH_SECRET_FILE. Without it, any caller gets the weights, and any process that can write to
            the folder can change them.
        tls: how connections are encrypted, over TCP, such as ``fl.TLS("cert.pem", "key.pem")``. None: they are not.
        timeout: seconds in which a follower must take some of the data sent to it, at least 2.

    Raises:
        ConfigError: an argument is invalid, or no rank can listen or write there.
    """
    if not isinstance(source, (nn.Module, Mapping)):
        raise ConfigError(f"publish: got {kind_of(source)}; expected a model, or tensors by name")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"keep={keep!r}; expected a number of versions, at least 1")
    place, seconds = parse(address), seconds_of(timeout)
    check_tls(tls, place)
    make = partial(open_outlet, keep=keep, keyring=keyring_of(secret), tls=tls, timeout=seconds)
    if place.is_tcp and _rank() is not None and any(map(is_sharded, named_tensors(source).values())):
        return Publisher(source, place, partial(make, offers=keep), shards=True)
    return Publisher(source, place, make)


class Publisher:
    """Publishes versions. ``fl.publish`` makes it; use it as a context manager, or ``close`` it.

    Attributes:
        run: identifies this publisher, from now until its end.
        version: number of the version published last; None before the first.
    """

    def __init__(
        self,
        source: nn.Module | Mapping[str, Tensor],
        place: Endpoint,
        make: Callable[[Endpoint], Outlet],
        shards: bool = False,
    ) -> None:
        self.run = secrets.token_hex(8)
        self.version: int | None = None
        self._source = source
        self._place, self._make, self._shards = place, make, shards
        self._is_first = (_rank() or 0) == 0
        self._outlet: Outlet | None = None
        self._others: tuple[str, ...] = ()
        self._closed = False
        self._newest: Snapshot | None = None
        if shards:
            self._open_all()
        elif self._is_first:
            self._outlet = make(place)

    @property
    def address(self) -> str:
        """The publishing address, with the port that the system has chosen; followers need that of rank 0."""
        return str(self._outlet.place) if self._outlet else ""

    @property
    def followers(self) -> int:
        """How many followers are connected. 0 for a folder, and on ranks other than 0."""
        return len(self._outlet.followers) if self._outlet else 0

    @property
    def follower_names(self) -> list[str]:
        """The names of the connected followers: from their certificates, or the names that they gave."""
        return self._outlet.followers if self._outlet else []

    @property
    def refused(self) -> int:
        """How many callers were sent away, as they did not prove to be followers, or there was no room for more."""
        return self._outlet.refused if self._outlet else 0

    @property
    def digest(self) -> str | None:
        """The digest of the newest version, over all names and tensors; a pass over its bytes.

        None before the first version, and on a rank that publishes nothing. Where each rank publishes its part, that
        of the part.
        """
        return self._newest.digest if self._newest else None

    def step(self) -> int:
        """Publish the present tensors as the next version, and return its number.

        It waits for one copy of all tensors into the host's memory. All else continues in threads: encoding, sending
        and writing. If these are slower than the steps, followers skip versions.

        Raises:
            ConfigError: a value is no dense tensor, or this process has become rank 0 of an elastic job and cannot
                publish at the address.
            FusionLayerError: versions could not be published, such as on a full disk.
            UsageError: it was closed, or this process has become rank 0 and publishes at no port that followers know.
        """
        return self.update()

    def update(self, source: Mapping[str, Tensor] | None = None, version: int | None = None) -> int:
        """Publish as ``step`` does, other tensors or under another number.

        Args:
            source: tensors by name; None: the tensors of ``publish``. Names and shapes may be others than before.
            version: a number larger than the one before, such as the step of the training; None: the next one, from 0.

        Raises:
            ConfigError: as for ``step``, or the number is not larger.
            FusionLayerError, UsageError: as for ``step``.
        """
        if self._closed:
            raise UsageError("the publisher was closed; publish anew")
        if source is not None and not isinstance(source, Mapping):
            raise ConfigError(f"update: got {kind_of(source)}; expected tensors by name")
        last = -1 if self.version is None else self.version
        number = last + 1 if version is None else version
        if not isinstance(number, int) or isinstance(number, bool) or not last < number < 10**12:
            raise ConfigError(f"version={version!r}; expected a number above {last}, the last version")
        self._follow_rank()
        tensors, shards = self._gather(self._source if source is None else source)
        if self._outlet:
            self._newest = Snapshot(self.run, number, tensors, shards, self._others)
            self._outlet.offer(self._newest)
        self.version = number
        return number

    def flush(self, timeout: float) -> bool:
        """Wait until all connected followers have the newest version, or until it is written into the folder.

        Returns:
            whether that is so, after ``timeout`` seconds at most.
        """
        return self._outlet.flush(timeout) if self._outlet else True

    def close(self, timeout: float = 30.0) -> None:
        """Wait as ``flush`` does, notify followers that this was the last version, and end.

        A second call does nothing.
        """
        self._closed = True
        if self._outlet:
            self._outlet.close(timeout)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(30.0 if error is None else 0.0)

    def _follow_rank(self) -> None:
        """Publish on the process that is rank 0 now: an elastic job may have lost the one that was."""
        rank = _rank()
        if self._shards or rank is None or (rank == 0) == (self._outlet is not None):
            return
        if self._outlet:
            self._outlet.close(0.0)
            self._outlet = self._newest = None
            return
        if self._place.is_tcp and not self._place.port:
            raise UsageError(
                "publish: this process has become rank 0, and followers know the port of another process; give "
                'publish a port, such as "tcp://HOST:29600", or a folder'
            )
        self._outlet, self._is_first = self._make(self._place), True
        _logger.warning("this process has become rank 0, and publishes at %s from now on", self._outlet.place)

    def _open_all(self) -> None:
        """Publish on each rank, and let rank 0 know where the others do; all ranks take part."""
        place, why = self._place, None
        if not self._is_first:
            host = place.host if is_loopback(place.host) else own_address() or reachable_names()[0]
            place = Endpoint(None, host, 0)
        try:
            self._outlet = self._make(place)
        except ConfigError as error:
            why = error
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.run, self.address, why and str(why)))
        for rank, (_, _, problem) in enumerate(found):
            if problem:
                if self._outlet:
                    self._outlet.close(0.0)
                raise ConfigError(f"rank {rank}: {problem}") from why
        self.run = found[0][0]
        self._others = tuple(address for _, address, _ in found[1:]) if self._is_first else ()

    def _gather(self, source: nn.Module | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """Return copies of the tensors that this rank publishes, and where they lie in whole ones.

        All ranks take part, in the order of names, where a tensor must be gathered.
        """
        named = named_tensors(source)
        for name, x in named.items():
            check_tensor(name, x)
        copies: dict[object, Tensor] = {}
        found: dict[str, Tensor] = {}
        shards: dict[str, Shard] = {}
        for name, x in named.items():
            sharded = type(x).__name__ == "DTensor"
            local = x.to_local() if sharded else x
            # Tied tensors are copied once. An empty one has no memory that would reveal it.
            key: object = (identity(local), x.shape) if local.numel() else name
            publishes = self._is_first
            if self._shards and is_sharded(x) and (shard := shard_of(x)):
                lengths = [n for _, n in shard.box]
                x = local if math.prod(lengths) else local.new_empty(lengths)
                publishes = publishes or x.numel() > 0
                shards |= {name: shard} if publishes else {}
            elif sharded:  # on all ranks, whatever each of them thinks is tied
                x = x.full_tensor()
            if publishes and self._outlet:
                found[name] = copies[key] = copies[key] if key in copies else copied(x)
        return found, shards


def _rank() -> int | None:
    """Return this process's rank in its job; None without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return context.rank() if context.is_initialized() else None
