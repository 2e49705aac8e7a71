"""Train the same model with plain DDP and with fusionlayer, and show what each costs on this machine.

    python examples/demo.py [--steps 40] [--rate 100mbit] [--quick]

Two workers, first on loopback, then, where Linux allows network namespaces, on two emulated hosts with a slow link
between them. Weights, data and number of steps are the same every time. Takes about one minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lab import Network, launch, why_not  # noqa: E402

WORKERS = 2
METHODS = {
    "DDP, f32": ("--method", "ddp"),
    "fusionlayer, int8": ("--codec", "int8"),
    "fusionlayer, int4": ("--codec", "int4"),
}
HEADINGS = ("validation\nloss", "against\nDDP", "median\nstep", "\nspeed-up", "sent per\nstep", "less than\nf32 ring")
STEP = re.compile(r"step \d+/\d+ +loss (\S+)")


class RunFailed(Exception):
    """A training run ended without a result; the message has its last lines."""


@dataclass(frozen=True)
class Scene:
    """Where the methods are compared: its name in the table, more words for the progress bars, and its network."""

    name: str
    words: str
    network: Network


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of every run (default 40)")
    parser.add_argument("--rate", default="100mbit", help="of the emulated link (default 100mbit)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one run may take (default 240)")
    parser.add_argument("--quick", action="store_true", help="5 steps and no int4, to see that all of it works")
    options = parser.parse_args()
    steps = 5 if options.quick else options.steps
    methods = [method for method in METHODS if not options.quick or "int4" not in METHODS[method]]
    try:
        link = Network(hosts=WORKERS, rate=options.rate)
    except ValueError as error:
        parser.error(str(error))
    if steps < 1:
        parser.error(f"--steps {steps}; expected a whole number above 0")

    console = Console(highlight=False)
    start = time.monotonic()
    try:
        compare(console, link, methods, steps, options.timeout)
    except RunFailed as failure:
        console.print("\n[bold red]The demo failed:[/]", end=" ")
        console.print(str(failure), markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing is left running.")
        return 130
    console.print(f"[dim]{time.monotonic() - start:.0f} s in all.[/]")
    return 0


def compare(console: Console, link: Network, methods: Sequence[str], steps: int, timeout: float) -> None:
    """Run the methods in every scene and print the table."""
    obstacle = why_not(link)
    scenes = [Scene("loopback", "both workers on one host", Network(hosts=1, isolated=obstacle is None))]
    if obstacle is None:
        scenes.append(Scene(f"{in_words(link)} link", "one worker on each of two emulated hosts", link))
    describe(console, steps, link, obstacle)

    results: dict[Scene, dict[str, dict[str, Any]]] = {}
    for scene in scenes:
        console.print(f"\n[bold]{scene.name}[/], {scene.words}")
        # On loopback one codec shows the cost of compression; without a link, loopback has all runs.
        shown = [method for method in methods if scene is scenes[-1] or "int4" not in METHODS[method]]
        results[scene] = run_scene(console, scene, shown, steps, timeout)
    console.print()
    console.print(tabulate(results))
    console.print()
    conclude(console, results)


def describe(console: Console, steps: int, link: Network, obstacle: str | None) -> None:
    """Print what is about to be run, and on what."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    console.print(f"[bold]fusionlayer and DDP[/]: {WORKERS} workers, {steps} steps, the same weights and data\n")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("machine", f"{escape(cpu_name())}, {cores} cores, {platform.system()} {platform.release()}")
    if load > cores / 2:
        facts.add_row("", f"[yellow]load {load:.1f} in the last minute: other work makes steps longer[/]")
    facts.add_row("software", f"PyTorch {version('torch')}, fusionlayer {version('fusionlayer')}")
    facts.add_row("training", "GPT on the sources of Python's standard library")
    facts.add_row("loopback", "no network to save: shows what compression costs")
    if obstacle is None:
        facts.add_row("link", f"{in_words(link)}, emulated: two network namespaces shaped by tc")
    else:
        facts.add_row("link", f"[yellow]not emulated, so no time can be saved here: {escape(obstacle)}[/]")
    console.print(facts)


def run_scene(
    console: Console, scene: Scene, methods: Sequence[str], steps: int, timeout: float
) -> dict[str, dict[str, Any]]:
    """Return the result of each method, in their order."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    results = {}
    with Progress(*columns, console=console) as bars:
        tasks = {method: bars.add_task(method, total=steps, start=False, loss="") for method in methods}
        for method, task in tasks.items():
            bars.start_task(task)
            arguments = (*METHODS[method], "--steps", str(steps))
            results[method] = train(method, arguments, scene.network, timeout, shower(bars, task))
            bars.stop_task(task)
    return results


def shower(bars: Progress, task: TaskID) -> Callable[[float], None]:
    """Return what moves a bar by one step and shows its loss."""
    return lambda loss: bars.update(task, advance=1, loss=f"loss {loss:.3f}")


def train(
    method: str, arguments: tuple[str, ...], network: Network, timeout: float, advance: Callable[[float], None]
) -> dict[str, Any]:
    """Return what ``train_gpt.py`` has measured.

    Raises:
        RunFailed: it ended with an error, or not within ``timeout`` seconds.
    """
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *arguments, "--json", "-"]
    others: deque[str] = deque(maxlen=30)
    result: dict[str, Any] | None = None
    with launch(
        command,
        network,
        workers=WORKERS // network.hosts,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if step := STEP.match(line):
                advance(float(step[1]))
            elif line.startswith("{"):
                result = json.loads(line)
            else:
                others.append(line)
        status = process.wait()
    if status or result is None:
        raise RunFailed(f"{method} ended with status {status}; its last lines:\n{''.join(others).rstrip() or '(none)'}")
    return result


def tabulate(results: dict[Scene, dict[str, dict[str, Any]]]) -> Table:
    """Return the table of all results, a section for each scene."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for scene, runs in results.items():
        table.add_section()
        table.add_row(f"[bold]{scene.name}[/]")
        baseline = runs["DDP, f32"]
        for method, run in runs.items():
            sent, ratio = run["bytes_per_step"], run["compression_ratio"]
            table.add_row(
                f"  {method}",
                f"{run['validation_loss']:.4f}",
                "" if run is baseline else f"{100 * (run['validation_loss'] / baseline['validation_loss'] - 1):+.2f} %",
                f"{run['step_seconds'] * 1e3:.0f} ms",
                "" if run is baseline else f"{baseline['step_seconds'] / run['step_seconds']:.2f}x",
                "?" if sent is None else f"{sent / 1e6:.2f} MB",
                "?" if ratio is None else f"{ratio:.2f}x",
            )
    return table


def conclude(console: Console, results: dict[Scene, dict[str, dict[str, Any]]]) -> None:
    """Print what a reader must know to trust the table."""
    runs = [run for scene in results.values() for run in scene.values()]
    if all(run["replicas_identical"] for run in runs):
        console.print(f"After every run both workers had the same bits in all {runs[0]['parameters']:,} parameters.")
    else:
        console.print("[bold red]In some runs the workers ended with different parameters.[/]")
    if not all(scene.network.isolated for scene in results):
        console.print("Bytes on loopback include what other programs sent there meanwhile.")
    console.print("Sent: all bytes the network device carried for one worker, protocol included.")
    console.print("One run each, in turn: times and speed-ups vary with what else the machine does.")


def in_words(network: Network) -> str:
    """Return the rate of the network's links as people write it."""
    rate = network.rate or ""
    number = rate.rstrip("kmgbit")
    return f"{number} {dict(k='k', m='M', g='G')[rate[len(number)]]}bit/s"


def cpu_name() -> str:
    """Return what the CPU calls itself."""
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
