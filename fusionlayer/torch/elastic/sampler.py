"""A sampler that distributes the rest of the epoch again when ranks have been added or removed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from ... import context
from ...base.errors import require
from .. import basics


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The indices of a data set, dealt out to ranks in turn, without those that were processed in this epoch.

    Give it to ``TorchState``, which restarts it with the present ranks. Call ``record_batch`` after each batch, before
    ``commit``, and ``set_epoch`` at the end of each epoch, not at its beginning.

    Every rank gets equally many indices. If they do not divide evenly, the first remaining indices come twice.

    Args:
        dataset: of constant size.
        shuffle: another order in each epoch, the same on all ranks.
        seed: the seed of that order; equal on all ranks.

    Attributes:
        epoch: as set.
        processed_num: samples that all ranks together have processed in this epoch.
        remaining_indices: the indices left when the sampler last restarted.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        require(dataset, Sized, "ElasticSampler", "a data set that has a length")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, without processed indices."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of ``batch_size`` samples on every rank as processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from where ``state_dict`` was taken, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the rest of the epoch out to the ranks that there are now."""
        by_name = basics.is_initialized()
        self.num_replicas = basics.size() if by_name else context.size()
        self.rank = basics.rank() if by_name else context.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return iter([left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples
