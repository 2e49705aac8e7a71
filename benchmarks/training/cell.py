"""What one set of worker processes is asked to measure, and what it answers; both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cell", "Measured", "Round"]


@dataclass(frozen=True)
class Cell:
    """One set of worker processes.

    Attributes:
        model: a name of ``workloads.MODELS``.
        hosts: number of hosts.
        workers: number of workers on each host.
        rate: of each host's link, such as "100mbit"; None: not limited.
        methods: names of methods; "alone" and "ddp" are among them.
        rounds: turns that each method gets.
        seed: of weights, data and the order of methods in each round.
        delay: of every frame between two hosts, half of a round trip, such as "25ms"; None: not delayed.
        loss: chance of a frame between two hosts to be lost.
        congestion: control of TCP.
        baseline: the method that others are compared with.
    """

    model: str
    hosts: int
    workers: int
    rate: str | None
    methods: tuple[str, ...]
    rounds: int
    seed: int = 0
    delay: str | None = None
    loss: float = 0.0
    congestion: str = "reno"
    baseline: str = "ddp"

    def __str__(self) -> str:
        delay = f", {self.delay} each way" if self.delay else ""
        lossy = f", {self.loss:.3g} lost" if self.loss else ""
        control = f", {self.congestion}" if self.loss else ""
        return f"{self.model}, {self.hosts} x {self.workers} workers, {self.rate or 'no limit'}{delay}{lossy}{control}"


@dataclass(frozen=True)
class Round:
    """One turn of one method, for each of its steps.

    Attributes:
        seconds: of the slowest worker.
        sent: bytes that left the busiest host.
        cpu: CPU seconds of a worker, all threads, mean over workers.
        waiting: seconds from backward's last gradient until all averages were there, of the slowest worker; None where
            that is not known.
        codec: seconds in fusionlayer's codecs, all threads, mean over workers; None for methods of others.
        codec_cpu: CPU seconds of the threads that made those calls, likewise.
    """

    seconds: float
    sent: float
    cpu: float
    waiting: float | None
    codec: float | None
    codec_cpu: float | None


@dataclass(frozen=True)
class Measured:
    """What one method did.

    Attributes:
        steps: consecutive steps of a turn.
        rounds: its turns.
        losses: training loss of every step since the first, warm-up included, mean over workers.
        identical: all workers ended with the same bits in all parameters.
        note: what was chosen for it, in words.
    """

    steps: int
    rounds: tuple[Round, ...]
    losses: tuple[float, ...]
    identical: bool
    note: str = ""
