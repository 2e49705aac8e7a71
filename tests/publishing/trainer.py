"""A publisher in tests, and what it has published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import fusionlayer as fl
from fusionlayer.publishing.server import TcpOutlet

LONG = 180.0


class Trainer:
    """A publisher at one port, which may begin anew, and what it has published."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1", **options: Any) -> None:
        self.options, self.host = options, host
        self.digests: dict[tuple[str, int], str] = {}
        self.begin(port)

    def begin(self, port: int | None = None) -> None:
        self.publisher = fl.publish({}, f"tcp://{self.host}:{self.port if port is None else port}", **self.options)

    @property
    def port(self) -> int:
        return int(self.publisher.address.rpartition(":")[2])

    @property
    def outlet(self) -> TcpOutlet:
        outlet = self.publisher._outlet
        assert isinstance(outlet, TcpOutlet)
        return outlet

    def publish(self, state: Mapping[str, Tensor], version: int | None = None) -> int:
        number = self.publisher.update(state, version)
        assert self.publisher.digest is not None
        self.digests[self.publisher.run, number] = self.publisher.digest
        return number

    def is_its(self, follower: fl.Follower) -> bool:
        """Return whether a follower shows tensors of one published version: of its digest, which they really have."""
        shown = follower._shown
        assert shown is not None
        fresh = type(shown)(shown.run, shown.version, follower.state_dict())
        return self.digests[shown.run, shown.version] == fresh.digest == follower.digest

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close(0)
