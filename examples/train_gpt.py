"""Train a small GPT on the sources of Python's standard library, with plain DDP or with fusionlayer.

    torchrun --nproc-per-node 2 examples/train_gpt.py --codec int8
    mpirun -n 2 python examples/train_gpt.py --codec int4 --codec-option group_size=64
    torchrun --nproc-per-node 2 examples/train_gpt.py --codec auto --save-plan plan.yaml
    torchrun --nproc-per-node 2 examples/train_gpt.py --plan plan.yaml
    torchrun --nproc-per-node 2 examples/train_gpt.py --codec int4 --sync averaging --every 4
    torchrun --nproc-per-node 2 examples/train_gpt.py --method ddp

Environment variables give the other options, such as FUSIONLAYER_CODEC or FUSIONLAYER_PLAN (docs/config.md). There is
one process for each GPU if there are enough, else processes share the CPU's cores. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import yaml
from gpt import GPT, Config, Corpus
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wire import carrier, sent_bytes

import fusionlayer as fl

VALIDATION_PIECES = 256
SYNCS = ("averaging", "overlapped", "diloco")


def main() -> None:
    """Run the command line."""
    options = parse_options()
    with mistakes("train_gpt"):
        result = train(options, join_job())
        if fl.rank() == 0:
            report(result, options.json)
    fl.shutdown()


@contextmanager
def mistakes(program: str) -> Iterator[None]:
    """End the process with one line where something fails that its user can mend."""
    try:
        yield
    except fl.FusionLayerError as error:
        sys.exit(f"{program}: {error}")
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except OSError as error:
        sys.exit(f"{program}: {error.filename or 'output'}: {error.strerror or error}")
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        sys.exit(f"{program}: the model does not fit into memory; choose a smaller one, such as by --width")


class Parser(argparse.ArgumentParser):
    """A parser of docstrings and options whose errors are one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2; name the nearest choice or option."""
        wrong = re.search(r"(invalid choice|unrecognized arguments): '?([^' ]+)", message)
        if wrong:
            of = re.findall(r"[\w+-]+", message.partition("choose from")[2]) or [*self._option_string_actions]
            message = message.partition(" (choose from")[0]
            message += "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(wrong[2], of, 1))
        self.exit(2, f"{self.prog}: {message}; see --help\n".replace("?;", "?"))

    def parse_model(self) -> argparse.Namespace:
        """Return the options, if the heads of attention fit the model's width."""
        options = self.parse_args()
        if options.width % options.heads:
            self.error(f"--heads {options.heads} does not divide --width {options.width}; choose another")
        return options


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--method", choices=("fusionlayer", "ddp"), default="fusionlayer", help="what averages gradients"
    )
    parser.add_argument(
        "--codec",
        choices=["auto", *fl.codecs.names()],
        default=None if {"FUSIONLAYER_CODEC", "FUSIONLAYER_CONFIG"} & os.environ.keys() else "int8",
        help="codec; auto: chosen by costs measured in the first steps (default: as configured, else int8)",
    )
    parser.add_argument(
        "--codec-option", metavar="KEY=VALUE", type=option, action="append", default=[], help="may be repeated"
    )
    algorithms = [*fl.collectives.names(), *fl.collectives.gather_names()]
    parser.add_argument("--algorithm", choices=algorithms, help="collective (default: chosen by codec)")
    parser.add_argument(
        "--ahead",
        action=argparse.BooleanOptionalAction,
        help="encode each gradient as it arrives, ahead of fusion (default: chosen by codec)",
    )
    parser.add_argument("--fidelity", choices=("lossless", "near_lossless", "aggressive"), help="of --codec auto")
    parser.add_argument("--planner", choices=fl.planners.names(), help="how gradients are fused (default: configured)")
    parser.add_argument("--plan", metavar="FILE", help="fusion plan, which names its codecs, instead of a planner")
    parser.add_argument("--save-plan", metavar="FILE", type=writable, help="write the plan of the last step there")
    parser.add_argument(
        "--overlap-forward", action="store_true", help="let the next forward begin before all gradients have arrived"
    )
    parser.add_argument("--sync", choices=SYNCS, help="local steps: send how far workers have come, not each gradient")
    parser.add_argument("--every", metavar="STEPS", type=positive, help="local steps between two syncs, for --sync")
    parser.add_argument("--steps", type=positive, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch-size", type=positive, default=8, help="pieces of text per worker and step (default 8)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--width", type=positive, default=Config.width, help=f"of the model (default {Config.width})")
    parser.add_argument("--layers", type=positive, default=Config.layers, help=f"blocks (default {Config.layers})")
    parser.add_argument("--heads", type=positive, default=Config.heads, help=f"per block (default {Config.heads})")
    parser.add_argument("--context", type=positive, default=Config.context, help=f"tokens (default {Config.context})")
    parser.add_argument("--untied", action="store_true", help="give the output layer weights of its own")
    parser.add_argument("--json", metavar="FILE", type=writable, help="write the results there, - for standard output")
    options = parser.parse_model()
    if options.every and not options.sync:
        parser.error("--every is for --sync; give both")
    return options


def positive(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected a whole number above 0")
    return number


def option(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``KEY=VALUE``, the value read as YAML."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}; expected KEY=VALUE, such as group_size=64")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a value in YAML, such as 64, true or text") from None


def writable(text: str) -> str:
    """Return the name of a file that can be written, so that nothing is lost after training; - is standard output."""
    if text != "-":
        known = os.path.exists(text)
        try:
            with open(text, "ab"):
                pass
            if not known:
                with suppress(FileNotFoundError):  # all ranks try it at the same time
                    os.unlink(text)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return text


def join_job() -> torch.device:
    """Join the job that a launcher has started this process in; return the device to train on."""
    gpus = torch.cuda.device_count()
    if gpus and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        dist.init_process_group("gloo")  # NCCL wants a GPU for each process
    fl.init()
    if gpus:
        device = torch.device("cuda", fl.local_rank() % gpus)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // fl.local_size()))
    return torch.device("cpu")


def join_launched_job() -> torch.device:
    """Join as ``join_job`` does, but only a job that a launcher has started: meshes need a process group."""
    device = join_job()
    if not dist.is_initialized():
        raise fl.ConfigError("nothing has started this process as one of several; use torchrun --nproc-per-node N")
    return device


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train as ``options`` say; return what was measured, losses averaged over workers."""
    torch.manual_seed(options.seed)
    config = Config(options.width, options.layers, options.heads, options.context, tied=not options.untied)
    corpus = Corpus()
    data = torch.Generator().manual_seed(options.seed * fl.size() + fl.rank() + 1)
    network: nn.Module = GPT(config).to(device)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate)

    # The one difference between the methods. With fusionlayer it takes two statements, and the model stays as it is.
    # Arguments that are None take what is configured, by variables or by a file.
    if options.method == "ddp":
        model = DistributedDataParallel(network) if fl.size() > 1 else network
    else:
        model = network
        fl.broadcast_parameters(network.state_dict(), root_rank=0)
        optimizer = fl.DistributedOptimizer(
            optimizer,
            named_parameters=network.named_parameters(),
            codec=options.codec,
            algorithm=options.algorithm,
            ahead=options.ahead,
            planner=options.planner,
            plan=options.plan,
            fidelity=options.fidelity,
            overlap_forward=network if options.overlap_forward else None,
            sync=local_steps(options),
            **dict(options.codec_option),
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_cosine(step, options.steps))
    traffic = Traffic(device)
    losses: list[float] = []
    seconds: list[float] = []
    traffic.start()
    with progress(label(options), options.steps) as advance:
        for _ in range(options.steps):
            start = time.perf_counter()
            tokens, targets = corpus.sample(options.batch_size, config.context, data)
            loss = model(tokens.to(device), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            advance(losses[-1], seconds[-1])
        if options.sync:
            optimizer.synchronize()  # type: ignore[attr-defined]  # between two syncs each worker has its own model
    sent = traffic.stop(options.steps)

    plan = getattr(optimizer, "fusion_plan", None)  # of the last step; None for one worker, and with DDP
    if options.save_plan and plan is not None and fl.rank() == 0:
        plan.to_yaml(options.save_plan)

    dense = 2 * (fl.size() - 1) / fl.size() * 4 * parameters
    return {
        "method": options.method,
        "codec": options.codec if options.method == "fusionlayer" else None,
        "codec_options": dict(options.codec_option),
        "sync": options.sync,
        "fusion_plan": plan and in_words(plan),
        "workers": fl.size(),
        "device": str(device.type),
        "parameters": parameters,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "train_loss": average(statistics.fmean(losses[-10:]), device),
        "validation_loss": average(validate(network, corpus, config.context, device), device),
        "step_seconds": statistics.median(seconds),
        "network_device": traffic.device,
        "bytes_per_step": sent,
        "bytes_per_step_dense": dense,
        "compression_ratio": dense / sent if sent else None,
        "replicas_identical": replicas_identical(network, device),
        "torch": torch.__version__,
        "fusionlayer": fl.__version__,
    }


def local_steps(options: argparse.Namespace) -> fl.Local | None:
    """Return how often workers sync, or None for gradients that are sent in each step."""
    if options.sync is None:
        return None
    every = {} if options.every is None else {"every": options.every}
    sync: fl.Local = getattr(fl.Local, options.sync)(**every)
    return sync


def warmup_and_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: up during the first tenth of all steps, then down along a cosine."""
    return min(1.0, (step + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, length: int, device: torch.device) -> float:
    """Return the loss on this worker's share of the validation text."""
    tokens, targets = corpus.validate(VALIDATION_PIECES, length)
    mine = slice(fl.rank(), None, fl.size())
    return float(model(tokens[mine].to(device), targets[mine].to(device)))


def average(value: float, device: torch.device) -> float:
    """Return the mean of ``value`` over workers."""
    return float(fl.all_reduce(torch.tensor(value, dtype=torch.float64, device=device)))


def replicas_identical(model: nn.Module, device: torch.device) -> bool:
    """Return whether all workers have the same bits in all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    mine = digest.digest()
    return average(float(mine == fl.broadcast_object(mine)), device) == 1.0


class Traffic:
    """Counts the bytes that this host's network device sends, per worker: the same yardstick for every method."""

    def __init__(self, device: torch.device) -> None:
        nccl = device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend()
        self.device = None
        if fl.size() > 1 and not (nccl and fl.local_size() == fl.size()):  # NCCL's bytes stay off the network there
            self.device = carrier(fl.local_size(), fl.size(), os.environ.get("GLOO_SOCKET_IFNAME"))
        self._before = 0

    def start(self) -> None:
        """Begin to count, on all workers at once."""
        self._before = self._count()

    def stop(self, steps: int) -> float | None:
        """Return the bytes per step and worker since ``start``; None if no device carries them."""
        after = self._count()
        return (after - self._before) / steps / fl.local_size() if self.device else None

    def _count(self) -> int:
        if dist.is_initialized():
            dist.barrier()
        return sent_bytes(self.device) if self.device else 0


def label(options: argparse.Namespace) -> str:
    """Return the method in words."""
    if options.method == "ddp":
        return "DDP, f32"
    sync = f", local steps ({options.sync})" if options.sync else ""
    return f"fusionlayer, {options.plan or options.codec or 'as configured'}{sync}"


def in_words(plan: fl.FusionPlan) -> str:
    """Return how many buckets a plan has, and how they are sent."""
    ways = Counter(f"{bucket.codec} by {bucket.algorithm}" for bucket in plan.buckets)
    return ", ".join(f"{count} of {way}" for way, count in ways.most_common())


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[float, float], None]]:
    """Yield what shows a step's loss and seconds to rank 0's user: a bar on a terminal, lines elsewhere."""
    if fl.rank():
        yield lambda loss, seconds: None
        return
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        done = 0

        def line(loss: float, seconds: float) -> None:
            nonlocal done
            done += 1
            print(f"step {done}/{steps}  loss {loss:.4f}  {seconds * 1e3:.0f} ms", flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=steps, loss="")
        yield lambda loss, seconds: bar.update(task, advance=1, loss=f"loss {loss:.3f}")


def report(result: dict[str, Any], path: str | None) -> None:
    """Print the results, and write them as JSON where the user wants them."""
    if path == "-":
        print(json.dumps(result), flush=True)
        return
    sent, dense, device = result["bytes_per_step"], result["bytes_per_step_dense"], result["network_device"]
    print(f"parameters        {result['parameters']:,}")
    print(f"workers           {result['workers']} on {result['device']}")
    print(f"training loss     {result['train_loss']:.4f}, mean of the last {min(10, result['steps'])} steps")
    print(f"validation loss   {result['validation_loss']:.4f}")
    print(f"median step       {result['step_seconds'] * 1e3:.1f} ms")
    if result["sync"]:
        print(f"local steps       {result['sync']}")
    if result["fusion_plan"]:
        print(f"buckets           {result['fusion_plan']}")
    if sent:
        print(f"sent per step     {sent / 1e6:.3f} MB by each worker over {device}, protocol included")
        print(f"compression       {dense / sent:.2f}x; a dense f32 ring all-reduce sends {dense / 1e6:.3f} MB")
    elif result["workers"] > 1:
        print("sent per step     not measured: no network device of this host carries it")
    print(f"replicas          {'identical' if result['replicas_identical'] else 'DIFFERENT'}")
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
