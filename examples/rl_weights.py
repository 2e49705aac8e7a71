"""Reinforcement learning: one trainer, two inference workers, and weights that stream from one to the others.

    python examples/rl_weights.py

A worker lets the policy write sequences with the newest weights, rewards each token that counts on by one, and sends
both to the trainer. The trainer makes a step of REINFORCE of each batch, and publishes its weights by ``fl.publish``.
A worker polls by ``fl.subscribe`` between two batches, so no batch mixes two versions. Nobody waits for a worker: the
trainer takes what comes, and prints how many versions ago it was written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import sys
from multiprocessing.synchronize import Event
from typing import Any

import torch
from torch import Tensor, nn

import fusionlayer as fl

TOKENS, WRITTEN, ROWS = 16, 12, 64


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="of training (120)")
    parser.add_argument("--workers", type=int, default=2, help="inference processes (2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = make_policy()
    context = multiprocessing.get_context("spawn")
    batches: Any = context.Queue(maxsize=options.workers)
    ended = context.Event()
    with fl.publish(policy, "tcp://127.0.0.1:0") as publisher:
        publisher.step()
        arguments = (publisher.address, batches, ended)
        workers = [context.Process(target=infer, args=(each, *arguments)) for each in range(options.workers)]
        for worker in workers:
            worker.start()
        try:
            rewards = train(policy, publisher, batches, options.steps)
        finally:
            ended.set()
            for worker in workers:
                worker.join()
    first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
    print(f"reward {first:.2f} -> {last:.2f} in {options.steps} steps; {publisher.version} versions")
    return 0 if last > first else 1


def make_policy() -> nn.Module:
    """Return a network that gives the logits of the next token after a token."""
    return nn.Sequential(nn.Embedding(TOKENS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, TOKENS))


def train(policy: nn.Module, publisher: fl.Publisher, batches: Any, steps: int) -> list[float]:
    """Learn from what workers send, and publish after each step; return the mean reward of each batch."""
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    rewards = []
    for step in range(steps):
        worker, version, written = batches.get(timeout=120)
        text = torch.from_numpy(written)
        reward = reward_of(text)
        chances = policy(text[:, :-1]).log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
        loss = -((reward - reward.mean()) * chances).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(float(reward.mean()))
        if step % 20 == 0:
            age = (publisher.version or 0) - version
            print(f"step {step:3d}  reward {rewards[-1]:.2f}  of worker {worker}, {age} versions ago", flush=True)
        publisher.step()
    return rewards


def reward_of(text: Tensor) -> Tensor:
    """Return 1 for each token that is by one larger than the token before it, 0 for others."""
    return (text[:, 1:] == (text[:, :-1] + 1) % TOKENS).float()


@torch.no_grad()
def infer(worker: int, address: str, batches: Any, ended: Event) -> None:
    """Write batch after batch, each with the newest weights, until the trainer has ended."""
    torch.set_num_threads(1)
    torch.manual_seed(worker + 1)
    policy = make_policy()
    with fl.subscribe(address, policy, name=f"worker {worker}") as follower:
        follower.wait(120)
        while not ended.is_set():
            follower.poll()
            text = [torch.randint(TOKENS, (ROWS,))]
            for _ in range(WRITTEN):
                text.append(policy(text[-1]).softmax(-1).multinomial(1)[:, 0])
            batch = worker, follower.version, torch.stack(text, 1).numpy()
            while not ended.is_set():
                try:
                    batches.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    pass
    batches.cancel_join_thread()


if __name__ == "__main__":
    sys.exit(main())
