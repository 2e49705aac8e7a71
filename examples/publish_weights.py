"""A trainer feeds a second process, which generates text and goes over to newer weights while it runs.

    python examples/publish_weights.py

starts both on this host. On two hosts:

    (umask 077; python -c "import secrets; print(secrets.token_hex(16))" > weights.secret)
    python examples/publish_weights.py trainer --address tcp://0.0.0.0:29600 --secret-file weights.secret
    python examples/publish_weights.py generator --address tcp://TRAINER:29600 --secret-file weights.secret

The trainer publishes its weights in bf16 after every step, by ``fl.publish``. The generator follows them by
``fl.subscribe`` and polls between two pieces of text, so no piece mixes two versions. ``--address`` may be a folder
that both can reach, such as file:///shared/weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, Config, Corpus
from torch import Tensor

import fusionlayer as fl

CONFIG = Config(width=64, layers=2)


def main() -> int:
    """Run the command line; return the exit status."""
    options = parse_options()
    torch.set_num_threads(1)
    if options.role == "trainer":
        train(options, options.address or "tcp://:29600")
    elif options.role == "generator":
        generate(options, options.address or "tcp://:29600")
    else:
        return both(options)
    return 0


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=("trainer", "generator"), help="without it both run on this host")
    parser.add_argument("--address", help="where versions are published; tcp://:29600 is on this host alone")
    parser.add_argument(
        "--secret-file", type=Path, help="file with the secret; without it any process that connects gets the weights"
    )
    parser.add_argument("--steps", type=int, default=60, help="of training (60)")
    parser.add_argument("--bytes", type=int, default=48, help="of a piece of text (48)")
    return parser.parse_args()


def both(options: argparse.Namespace) -> int:
    """Train here, at a port of the system's choice, and generate in a second process; return its exit status."""
    trainer = start_publishing(options, options.address or "tcp://:0")
    words = [sys.executable, __file__, "generator", "--address", trainer[1].address, "--bytes", str(options.bytes)]
    words += ["--secret-file", str(options.secret_file)] if options.secret_file else []
    with subprocess.Popen(words) as generator:
        # Its start takes longer than a short training. Who reads a folder is not known to the publisher.
        while trainer[1].address.startswith("tcp") and not trainer[1].followers and generator.poll() is None:
            time.sleep(0.05)
        train_and_publish(options, *trainer)
        return generator.wait(60)


def train(options: argparse.Namespace, address: str) -> None:
    """Train, and publish every step."""
    train_and_publish(options, *start_publishing(options, address))


def start_publishing(options: argparse.Namespace, address: str) -> tuple[GPT, fl.Publisher, dict[str, Tensor]]:
    """Return a model that learns in f32, its publisher, and the tensors in bf16 that it publishes."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    served = {name: x.bfloat16() for name, x in model.state_dict().items()}
    served["head.weight"] = served["tokens.weight"]  # tied, so it is sent once
    return model, fl.publish(served, address, secret=options.secret_file), served


def train_and_publish(
    options: argparse.Namespace, model: GPT, publisher: fl.Publisher, served: dict[str, Tensor]
) -> None:
    """Train, and publish what each step has made."""
    corpus, generator = Corpus(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with publisher:
        for step in range(options.steps):
            loss = model(*corpus.sample(8, CONFIG.context, generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name, x in model.state_dict().items():
                served[name].copy_(x)
            publisher.update(version=step)
        say(f"trainer    loss {loss.item():.3f}, version {publisher.version} {publisher.digest}")


def generate(options: argparse.Namespace, address: str) -> None:
    """Generate one piece of text after the other, with the newest weights, until the trainer has ended."""
    model = GPT(CONFIG).bfloat16().eval()
    with fl.subscribe(address, model, secret=options.secret_file) as follower:
        follower.wait(60)
        while True:
            text = piece(model, options.bytes)
            say(f"generator  version {follower.version:3d} {follower.digest}  {text!r}")
            if not follower.poll() and follower.ended:
                return


def say(line: str) -> None:
    """Print a line in one piece: two processes write to the same place."""
    print(f"{line}\n", end="", flush=True)


@torch.no_grad()
def piece(model: GPT, count: int) -> str:
    """Return ``count`` bytes that the model takes for the likeliest after "def "."""
    text = list(b"def ")
    for _ in range(count):
        tokens = torch.tensor([text[-CONFIG.context :]])
        places = model.places(torch.arange(tokens.shape[1]))
        logits = model.head(model.norm(model.blocks(model.tokens(tokens) + places)))
        text.append(int(logits[0, -1].argmax()))
    return bytes(text).decode("ascii", "replace")


if __name__ == "__main__":
    sys.exit(main())
