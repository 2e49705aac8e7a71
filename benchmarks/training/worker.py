"""One worker of one cell: ``python -m benchmarks.training.worker CELL RESULT``, the cell as JSON.

Rank 0 says on stdout how far it is, and writes the file RESULT in the end: what was measured of each method, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import fusionlayer as fl
from examples.wire import carrier, sent_bytes

from .cell import Cell, Measured, Round
from .replicas import Replica, Turn, make_replica, slowest
from .workloads import make_workload

__all__ = ["main", "measure"]

TURN_SECONDS = 1.0
MOST_STEPS = 8


def main() -> None:
    """Run the worker that the command line describes."""
    cell = Cell(**json.loads(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    fl.init()
    results = measure(cell)
    if fl.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({name: asdict(measured) for name, measured in results.items()}))
    dist.barrier()
    fl.shutdown()


def measure(cell: Cell) -> dict[str, Measured]:
    """Return what each method of the cell did, the same on all ranks."""
    workload = make_workload(cell.model, cell.seed, fl.rank())
    players: dict[str, Player] = {}
    for method in cell.methods:
        players[method] = Player(make_replica(method, workload))
        seconds = players[method].warm_up()
        _say(f"{method}: warmed up, {seconds * 1e3:.0f} ms a step, {players[method].steps} steps a turn")
    for number in range(cell.rounds):
        start = time.perf_counter()
        order = list(cell.methods)
        random.Random(cell.seed * cell.rounds + number).shuffle(order)
        for method in order:
            players[method].play()
        seconds = time.perf_counter() - start
        _say(f"round {number + 1} of {cell.rounds}: {seconds:.0f} s")
    measured = {method: player.result() for method, player in players.items()}
    for player in players.values():
        player.replica.close()
    return measured


class Player:
    """A replica with all of its turns."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.steps = 1
        self._done = 0
        self._losses: list[float] = []
        self._turns: list[tuple[Turn, float]] = []
        self._device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))

    def warm_up(self) -> float:
        """Take the first steps and decide how many a turn has; return the mean seconds of the last period's."""
        period, seconds = self.replica.period, 0.0
        for _ in range(-(-self.replica.warm_up // period)):
            turn, _ = self._turn(period)
            seconds = slowest(turn.seconds) / period
        self.steps = steps_of_turn(seconds, period)
        return seconds

    def play(self) -> None:
        """Take one turn that counts."""
        self._turns.append(self._turn(self.steps))

    def _turn(self, steps: int) -> tuple[Turn, float]:
        self.replica.prepare(self._done, self.replica.lead + steps)
        dist.barrier()
        before = self._count()
        turn = self.replica.run()
        dist.barrier()
        self.replica.rest()
        dist.barrier()
        sent = self._count() - before
        self._done += len(turn.losses)
        self._losses += turn.losses
        return turn, sent / len(turn.losses)

    def _count(self) -> int:
        return sent_bytes(self._device) if self._device else 0

    def result(self) -> Measured:
        """Return all turns, over all ranks; all ranks together."""
        everyone: list[tuple[str, list[tuple[Turn, float]], list[float]]] = [("", [], [])] * fl.size()
        dist.all_gather_object(everyone, (self.replica.digest(), self._turns, self._losses))
        turns = zip(*(turns for _, turns, _ in everyone), strict=True)
        return Measured(
            self.steps,
            tuple(_round(turn, self.steps) for turn in turns),
            tuple(statistics.fmean(losses) for losses in zip(*(losses for *_, losses in everyone), strict=True)),
            len({digest for digest, *_ in everyone}) == 1,
            self.replica.note,
        )


def steps_of_turn(seconds: float, period: int = 1) -> int:
    """Return how many steps of ``seconds`` a turn has: whole periods that take about a second, one if it is longer."""
    return period * max(1, min(MOST_STEPS // period, round(TURN_SECONDS / (seconds * period))))


def _round(everyone: Sequence[tuple[Turn, float]], steps: int) -> Round:
    turns = [turn for turn, _ in everyone]
    waiting = [turn.waiting for turn in turns if turn.waiting is not None]
    codec = [turn.codec for turn in turns if turn.codec is not None]
    codec_cpu = [turn.codec_cpu for turn in turns if turn.codec_cpu is not None]
    return Round(
        max(turn.seconds for turn in turns) / steps,
        max(sent for _, sent in everyone),
        statistics.fmean(turn.cpu for turn in turns) / steps,
        max(waiting) / steps if waiting else None,
        statistics.fmean(codec) / steps if codec else None,
        statistics.fmean(codec_cpu) / steps if codec_cpu else None,
    )


def _say(text: str) -> None:
    if fl.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
