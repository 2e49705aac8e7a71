"""Versions in the files of a folder, or in the objects of a store."""

from __future__ import annotations

import hmac
import json
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..base.errors import ConfigError, FusionLayerError, UsageError, WireError
from .address import Endpoint
from .outlet import Outlet
from .signing import SIGNED_BYTES, checks, seal, sign
from .snapshot import Snapshot
from .source import Ended, Source
from .stores import Store, open_store
from .update import Update, make, read

__all__ = ["FolderOutlet", "FolderSource", "files_of", "way"]

_FORM = 1
_NEWEST = "newest.json"
_MOST_BYTES = 1 << 12
_MOST_VERSION = 10**12 - 1
_PARTIAL = re.compile(r"\.(?:[0-9a-f]{16}\.\d{12}\.\w+|newest\.json)\.[0-9a-f]+\.partial", re.ASCII)
_FILE = re.compile(r"([0-9a-f]{16})\.(\d{12})\.(?:whole|from(\d{12}))", re.ASCII)
_PAUSE = 0.2
"""Seconds between two looks at a folder."""


class _Newest(NamedTuple):
    """The content of the file ``newest.json``.

    Attributes:
        run: of its publisher.
        version: number of the newest version.
        ended: there will be no more.
        began: when the publisher has, in ns since 1970, if it signs.
    """

    run: str
    version: int
    ended: bool
    began: int = 0


class UpdateFile(NamedTuple):
    """A file of one update.

    Attributes:
        run: of its publisher.
        version: the version that it makes.
        since: the version that a reader must have; None: none.
        nbytes: its length.
        name: of the file.
    """

    run: str
    version: int
    since: int | None
    nbytes: int
    name: str


def files_of(store: Store) -> list[UpdateFile]:
    """Return the files of updates in a store."""
    found = []
    for name, nbytes in store.sizes().items():
        if match := _FILE.fullmatch(name):
            since = None if match[3] is None else int(match[3])
            found.append(UpdateFile(match[1], int(match[2]), since, nbytes, name))
    return found


def way(there: Sequence[UpdateFile], have: int | None, to: int) -> list[UpdateFile] | None:
    """Return the updates of one run that lead from version ``have``, or from nothing, to ``to`` in the fewest bytes.

    None: no files lead there.
    """
    best: dict[int | None, tuple[int, UpdateFile | None]] = {None: (0, None), have: (0, None)}
    for file in sorted(there, key=lambda file: file.version):  # an update leads to a later version than it needs
        if file.since in best and file.version <= to:
            nbytes = best[file.since][0] + file.nbytes
            if file.version not in best or nbytes < best[file.version][0]:
                best[file.version] = nbytes, file
    if to not in best:
        return None
    steps: list[UpdateFile] = []
    while (last := best[steps[-1].since if steps else to][1]) is not None:
        steps.append(last)
    return steps[::-1]


class FolderOutlet(Outlet):
    """Writes each version as the difference to the one before, and every ``keep``-th one whole as well.

    The files of the last ``keep`` versions stay, one of which is whole. So a follower that is at most this many
    versions behind needs no whole version, and any other one finds one. With a secret each file is signed.
    """

    def __init__(self, place: Endpoint, keep: int, secret: bytes | None = None) -> None:
        super().__init__(place)
        self._store = open_store(place)
        self._keep = keep
        self._secret = secret
        self._began = time.time_ns()
        self._written: Snapshot | None = None
        self._versions: deque[int] = deque(maxlen=keep)
        self._count = 0
        try:
            self._store.prepare()
            for name in self._store.sizes():
                if _PARTIAL.fullmatch(name):  # of a publisher that was killed
                    self._store.remove(name)
        except Exception as error:  # clients of object stores raise errors of their own
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"publish: folder {self._store.place} cannot be used: {why}") from error
        self._start(publisher=self._work)

    @property
    def followers(self) -> list[str]:
        """None: the readers of the files are unknown."""
        return []

    @property
    def refused(self) -> int:
        return 0

    def _is_out(self) -> bool:
        return self._written is self._newest

    def _wake(self) -> None:
        """The condition has been notified."""

    def _end(self) -> None:
        if self._written is not None and self._failure is None:
            with suppress(OSError, FusionLayerError):
                self._point(self._written, ended=True)

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads[0].join()

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._written is self._newest and not self._closed:
                        self._changed.wait()
                    new = self._newest
                    if self._closed or new is None:
                        return
                self._write(new)
                with self._changed:
                    self._written = new
                    self._changed.notify_all()
        except OSError as error:
            self._fail(FusionLayerError(f"publish: {self._store.place} cannot be written: {error.strerror or error}"))
        except Exception as error:
            self._fail(error)

    def _write(self, new: Snapshot) -> None:
        stem = f"{new.run}.{new.version:012d}"
        before = self._written
        if before is not None:
            self._store.write(f"{stem}.from{before.version:012d}", self._signed(make(new, before)))
        if self._count % self._keep == 0:
            self._store.write(f"{stem}.whole", self._signed(make(new)))
        self._count += 1
        self._point(new, ended=False)
        self._versions.append(new.version)
        for file in files_of(self._store):
            if file.run != new.run or file.version < self._versions[0]:
                self._store.remove(file.name)

    def _point(self, snapshot: Snapshot, ended: bool) -> None:
        if self._written is not None and self._is_of_another(snapshot.run):
            where = self._store.place
            raise UsageError(f"publish: another publisher writes into {where}; give each a folder of its own")
        facts: dict[str, object] = {"form": _FORM, "run": snapshot.run, "version": snapshot.version, "ended": ended}
        if self._secret is not None:
            facts |= {"began": self._began}
            facts |= {"signature": sign(self._secret, [*facts.values()])}
        self._store.write(_NEWEST, [memoryview(json.dumps(facts).encode())])

    def _is_of_another(self, run: str) -> bool:
        """Return whether another publisher has begun here. What a stranger or an earlier one can have put here is not.

        It is replaced.
        """
        try:
            facts = _facts(self._store)
        except (OSError, WireError):
            return False
        if facts is None or facts["run"] == run:
            return False
        return self._secret is None or (_is_signed(facts, self._secret) and _told(facts).began > self._began)

    def _signed(self, update: Update) -> Sequence[memoryview]:
        if self._secret is None:
            return update.parts
        return [memoryview(seal(self._secret, update.parts[0])), *update.parts]


def _facts(store: Store) -> dict[str, Any] | None:
    """Return the content of ``newest.json``, whose fields have their types; None if it is missing.

    Raises:
        WireError: it was damaged.
    """
    try:
        text = store.read(_NEWEST, _MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        facts: dict[str, Any] = json.loads(text)
        found = _told(facts)
        types = tuple(map(type, found))
        fits = 0 <= found.version <= _MOST_VERSION and re.fullmatch(r"[0-9a-f]{1,16}", found.run, re.ASCII)
        fits = fits and re.fullmatch(r"[0-9a-f]{64}", facts.get("signature", "0" * 64), re.ASCII)
        if facts["form"] == _FORM and types == (str, int, bool, int) and fits:
            return facts
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        pass
    raise WireError(
        f"{store.place}/{_NEWEST} says {text[:80]!r}: it was damaged, or another fusionlayer has written it"
    )


def _is_signed(facts: dict[str, Any], secret: bytes) -> bool:
    """Return whether the content of ``newest.json`` has the signature that a publisher with the secret gives it."""
    signature = sign(secret, [facts["form"], *_told(facts)])
    return hmac.compare_digest(str(facts.get("signature")).encode(), signature.encode())


def _told(facts: dict[str, Any]) -> _Newest:
    return _Newest(facts["run"], facts["version"], facts["ended"], facts.get("began", 0))


class FolderSource(Source):
    """Reads the updates of a folder. It checks for a newer version five times a second.

    Args:
        place: of the folder.
        secret: only versions signed with it are accepted; None: only unsigned versions.
    """

    def __init__(self, place: Endpoint, secret: bytes | None = None) -> None:
        self._store = open_store(place)
        self._secret = secret
        self._latest = 0, -1  # when the publisher began, and its newest version, of all that were signed
        self._damaged: set[str] = set()
        self._closing = threading.Event()

    def next(self, have: Snapshot | None, least: int = 0) -> Snapshot | None:
        newest = self._newest()
        if newest is None:
            raise FileNotFoundError(f"{self._store.place} has no versions yet")
        if have is not None and (have.run, have.version) == newest[:2]:
            if newest.ended:
                raise Ended
            self._closing.wait(_PAUSE)
            return None
        there = [file for file in files_of(self._store) if file.run == newest.run and file.name not in self._damaged]
        mine = have.version if have is not None and have.run == newest.run else None
        steps = way(there, mine, newest.version)
        if steps is None:  # they were replaced meanwhile, or are damaged: a later version will do
            self._closing.wait(_PAUSE)
            raise FileNotFoundError(f"no files of {self._store.place} lead to version {newest.version}")
        made = have
        for step in steps:
            made = self._read(step, made)
        return made

    def _newest(self) -> _Newest | None:
        """Return the newest version that is announced, and signed if there is a secret.

        Raises:
            WireError: it was damaged, is not signed by the secret, or is older than one that was.
            ConfigError: it is signed, and there is no secret.
        """
        facts = _facts(self._store)
        if facts is None:
            return None
        found, where = _told(facts), f"{self._store.place}/{_NEWEST}"
        if self._secret is None:
            if "signature" in facts:
                raise ConfigError("the publisher signs its versions: give subscribe(secret=...) that of publish")
            return found
        if "signature" not in facts:
            raise WireError(f"{where} is not signed, and this follower has a secret: give publish the same secret")
        if not _is_signed(facts, self._secret):
            raise WireError(f"{where} is signed with another secret: give publisher and followers the same one")
        if (found.began, found.version) < self._latest:
            raise WireError(f"{where} announces version {found.version}, which is older than one that was there before")
        self._latest = found.began, found.version
        return found

    def _read(self, step: UpdateFile, base: Snapshot | None) -> Snapshot:
        path = f"{self._store.place}/{step.name}"
        with self._store.opened(step.name) as file:

            def source(nbytes: int) -> bytearray:
                data = bytearray(nbytes)
                if file.readinto(data) != nbytes:  # type: ignore[attr-defined]
                    raise WireError(f"{path} ends too early: it was cut short")
                return data

            try:
                if self._secret is None:
                    made = read(source, step.nbytes, base)
                else:
                    mark = bytes(source(min(SIGNED_BYTES, step.nbytes)))
                    made = read(source, step.nbytes - len(mark), base, checks(self._secret, mark))
                if (made.run, made.version) != (step.run, step.version):
                    raise WireError(f"{path} holds version {made.version} of {made.run}: it is another file")
                return made
            except WireError as error:
                self._damaged.add(step.name)
                raise WireError(f"{path}: {error}") from error

    def close(self) -> None:
        self._closing.set()
