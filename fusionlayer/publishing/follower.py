"""A follower: it holds one whole version at a time, and goes over to newer ones when it is asked to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

from torch import Tensor, nn

from ..base.errors import ConfigError, FusionLayerError, TransportError, UsageError, WireError, again
from ..process import forks
from .address import Endpoint, parse, seconds_of
from .assembly import ShardsSource
from .client import TcpSource
from .folder import FolderSource
from .keyring import Keyring, check_name, common_of, keyring_of
from .models import check_model, load
from .server import TcpOutlet
from .snapshot import Box, Snapshot
from .source import Ended, Source
from .tls import TLS, check_tls

__all__ = ["Follower", "subscribe"]

_logger = logging.getLogger("fusionlayer")

_RELAY_KEEPS = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
"""Seconds between attempts to reach a publisher: each pause is twice the one before."""


def subscribe(
    address: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    secret: str | bytes | os.PathLike[str] | None = None,
    name: str | None = None,
    tls: TLS | None = None,
    timeout: float = 30.0,
    relay: str | None = None,
) -> Follower:
    """Follow the versions that ``fl.publish`` publishes at ``address``; returns at once, whether or not it is there.

        follower = fl.subscribe("tcp://trainer:29600", model)
        follower.wait()
        while serving:
            generate(model)
            follower.poll()

    Args:
        address: "tcp://HOST:PORT", "file:///FOLDER" or a Path, as the publisher has it.
        model: each version that is shown is loaded into it, by the thread that calls ``poll`` or ``wait``. None: take
            ``tensors()``, or call ``load_into``.
        secret: the publisher's secret, or a Path of its file. None: the content of the file in
            FUSIONLAYER_PUBLISH_SECRET_FILE, if that is set. Versions in a folder are taken only if they are signed with
            it.
        name: this follower's name in the publisher's log, and the key of its secret if each follower has one.
            None: that in the file with the secret, or the host's.
        tls: how the connection is encrypted, ``fl.TLS(authorities=...)``; over TCP alone. None: it is not.
        timeout: seconds after which a publisher that does not say a word counts as lost, at least 2. The follower then
            connects again, without end.
        relay: "tcp://HOST:PORT" at which this follower serves others what it has received, with the same secret; port
            0 is one of the system's choice. The publisher sends each version to one follower then, and the others to
            relays. None: it serves no others.

    Raises:
        ConfigError: an argument is invalid.
    """
    place, seconds = parse(address), seconds_of(timeout)
    check_tls(tls, place)
    keyring = keyring_of(secret)
    if name is not None:
        check_name(name)
    if model is not None:
        check_model("subscribe", model)
    if not place.is_tcp:
        if relay is not None:
            raise ConfigError("subscribe: a follower of a folder is no relay: others read the folder as well")
        return Follower(place, FolderSource(place, common_of(keyring)), model)
    if not place.port:
        raise ConfigError("subscribe: port 0; expected the port of publisher.address")
    connect = partial(TcpSource, name=name, keyring=keyring, tls=tls, timeout=seconds)
    outlet = _open_relay(relay, keyring, tls, seconds)
    source = ShardsSource(str(place), lambda other: connect(parse(other)), str(outlet.place) if outlet else "")
    return Follower(place, source, model, outlet)


def _open_relay(relay: str | None, keyring: Keyring | None, tls: TLS | None, timeout: float) -> TcpOutlet | None:
    if relay is None:
        return None
    place = parse(relay)
    if not place.is_tcp or tls is not None:
        raise ConfigError("subscribe: a relay serves over TCP and without tls=...; give relay='tcp://HOST:PORT'")
    common_of(keyring)  # one that is for this follower alone lets no other in
    return TcpOutlet(place, _RELAY_KEEPS, keyring, None, timeout, _RELAY_KEEPS)


class Follower:
    """Follows a publisher. ``fl.subscribe`` makes it.

    A thread of its own receives versions, checks and decodes them. The shown version changes only within
    ``poll``, ``wait`` and iteration, and then as a whole: no reader sees tensors of two versions. Each version is one
        that
    the publisher has published, to the bit: every tensor has the digest that the publisher gave it.

    It holds the shown version, and during a transfer also the newer one; unchanged tensors are held once. One thread at
    a time may call its methods.

    Attributes:
        trouble: why no newer version came lately, such as a broken connection; None without trouble.
        ended: the publisher has ended in order, and ``latest`` is its last version. A publisher that begins again there
            is followed, and this is False again.
    """

    def __init__(
        self, place: Endpoint, source: Source, model: nn.Module | None, outlet: TcpOutlet | None = None
    ) -> None:
        self.trouble: FusionLayerError | OSError | None = None
        self.ended = False
        self._place = place
        self._source = source
        self._outlet = outlet
        self._model = model
        self._shown: Snapshot | None = None
        self._latest: Snapshot | None = None
        self._fatal: FusionLayerError | None = None
        self._closed = False
        # Guards the state that the thread sets: _latest, trouble, ended, _fatal.
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._generation = forks.generation
        self._thread = threading.Thread(target=self._work, name="fusionlayer follower", daemon=True)
        self._thread.start()
        forks.at_exit(self.close)

    # ---- versions ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The number of the version that is shown; None before the first."""
        return self._shown.version if self._shown else None

    @property
    def latest(self) -> int | None:
        """The number of the newest version that is here; ``poll`` would show it."""
        with self._changed:
            return self._latest.version if self._latest else None

    @property
    def relay(self) -> str:
        """The address at which this follower serves others; empty if it does not."""
        return str(self._outlet.place) if self._outlet else ""

    @property
    def digest(self) -> str | None:
        """The digest of the version that is shown, over all names and tensors: ``publisher.digest`` of that version."""
        return self._shown.digest if self._shown else None

    def poll(self) -> bool:
        """Show the newest version that is here, and return whether it is another one than before. It never waits.

        Raises:
            ConfigError: publisher and follower have different secrets, or the version does not fit the model; the
                follower then keeps the shown version.
            UsageError: the follower was closed.
        """
        with self._changed:
            self._check()
            new = self._latest
        if new is None or new is self._shown:
            return False
        if self._model is not None:
            load(self._model, new.tensors, f"version {new.version} of {self._place}")
        self._shown = new
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Wait until there is a newer version than the one that is shown; show it, and return its number.

        Args:
            timeout: seconds; None: without limit.

        Raises:
            ConfigError: as for ``poll``.
            TransportError: no version came in time, or the publisher has ended; the message has the reason.
            UsageError: the follower was closed.
        """
        if not self._await(timeout):
            raise TransportError(self._why(timeout or 0.0))
        self.poll()
        assert self.version is not None
        return self.version

    def __iter__(self) -> Iterator[int]:
        """Show version after version, and yield their numbers, until the publisher ends.

        Versions that are replaced before this one is done with are left out.
        """
        while self._await(None):
            self.poll()
            assert self.version is not None
            yield self.version

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over name and tensor of the version that is shown, in the publisher's order.

        It stays with this version, regardless of later ones. Tensors are the follower's own, on the CPU: copy them, and
        do not change them.

        Raises:
            UsageError: there is no version yet.
        """
        return iter(self._now().tensors.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the version that is shown by name, as ``tensors`` does."""
        return dict(self._now().tensors)

    def load_into(self, model: nn.Module) -> None:
        """Copy the version that is shown into ``model``, whose parameters and buffers have the same names and shapes.

        All is checked before anything is written. Values are converted where the model has another type. Floats are
        never converted into integers, and integers only into a type that holds them.

        Raises:
            ConfigError: names or shapes differ, or a type in the model cannot hold the values.
            UsageError: there is no version yet.
        """
        check_model("load_into", model)
        load(model, self._now().tensors, f"version {self.version} of {self._place}")

    def select(self, boxes: Mapping[str, Box]) -> None:
        """Receive only parts of tensors from now on, as a tensor-parallel rank of an inference engine needs them.

        Args:
            boxes: for each such tensor start and length in each dimension. A tensor that comes has the shape of its
                box. Tensors without a box, or whose box does not fit, come whole, and so do all from a folder.

        Raises:
            ConfigError: there are too many.
        """
        self._source.select(tuple(sorted(boxes.items())))

    def _now(self) -> Snapshot:
        if self._shown is None:
            raise UsageError("the follower shows no version yet: call wait() or poll() first")
        return self._shown

    # ---- its end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End. The shown version stays; a second call does nothing."""
        if self._closed or self._generation != forks.generation:
            return
        self._closed = True
        self._closing.set()
        self._source.close()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_LONGEST_PAUSE)  # no longer: it may wait for a host that does not answer
        if self._outlet is not None:
            self._outlet.close(0.0)
        forks.not_at_exit(self.close)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _await(self, timeout: float | None) -> bool:
        """Wait for another version than the one that is shown; return whether there is one."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                if self._latest is not None and self._latest is not self._shown:
                    return True
                left = None if end is None else end - time.monotonic()
                if self.ended or (left is not None and left <= 0):
                    return False
                self._changed.wait(left)

    def _check(self) -> None:
        """Raise the error that ends the use of this follower. The lock is held."""
        if self._generation != forks.generation:
            raise forks.refuse("its follower belongs to its parent")
        if self._closed:
            raise UsageError("the follower was closed; subscribe again")
        if self._fatal:
            raise again(self._fatal)

    def _why(self, timeout: float) -> str:
        shown = None if self._shown is None else f"version {self._shown.version}"
        if self.ended:
            return f"{self._place}: the publisher has ended, and {shown} is its last; it is followed if it begins again"
        what = f"nothing newer than {shown}" if shown else "no version"
        why = f": {self.trouble}" if self.trouble else "; the publisher has published none"
        return f"{self._place}: {what} came within {timeout:g} s{why}"

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._follow()
        finally:
            self._source.drop()

    def _follow(self) -> None:
        pause = _FIRST_PAUSE
        base: Snapshot | None = None
        while not self._closing.is_set():
            try:
                new = self._source.next(base)
            except Ended:
                self._tell(ended=True)
                self._closing.wait(_LONGEST_PAUSE)
                continue
            except ConfigError as error:
                self._tell(fatal=error)
                return
            except Exception as error:
                if isinstance(error, WireError):
                    base = None
                self._tell(trouble=_told(error))
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            base = new or base
            self._tell(new)
            if new is not None and self._outlet is not None:
                with suppress(FusionLayerError):  # the outlet has logged it; this follower goes on
                    self._outlet.offer(new)

    def _tell(
        self,
        new: Snapshot | None = None,
        *,
        ended: bool = False,
        trouble: FusionLayerError | OSError | None = None,
        fatal: FusionLayerError | None = None,
    ) -> None:
        """Hand new versions to the thread that uses the follower."""
        with self._changed:
            if trouble is not None and str(trouble) != str(self.trouble) and not (self._closed or self.ended):
                level = logging.WARNING if isinstance(trouble, WireError) or self._latest else logging.INFO
                _logger.log(level, "%s: %s; the follower goes on with what it has", self._place, trouble)
            self.trouble = trouble
            self.ended = ended or (self.ended and trouble is not None)  # an ended publisher cannot be reached
            self._fatal = fatal
            # A reconnecting follower gets its own version again if there is no newer one; it is not shown twice.
            if new is not None and (new.run, new.version) != (
                self._latest and (self._latest.run, self._latest.version)
            ):
                self._latest = new
            self._changed.notify_all()


def _told(error: Exception) -> FusionLayerError | OSError:
    """Return an error as ``trouble`` has it; one of another kind becomes the cause of a ``FusionLayerError``."""
    if isinstance(error, (FusionLayerError, OSError)):
        return error
    told = FusionLayerError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told
