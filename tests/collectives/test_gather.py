"""Sizes of messages come from the wire, and memory is taken only for sizes that make sense."""

import pytest
import torch

from fusionlayer import codecs
from fusionlayer.base.errors import WireError
from fusionlayer.collectives._base import MessageSpan
from fusionlayer.collectives.gather import gather_v
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import on_threads


@looped("announced", [-1, 101, 1 << 62])
@on_threads(2)
def test_a_size_that_no_message_has_is_refused_by_name(transport: Transport, announced: int) -> None:
    all_gather = transport.all_gather

    def damaged(x: torch.Tensor, out: torch.Tensor) -> None:
        all_gather(x, out)
        out.view(torch.int64)[1, 0] = announced

    transport.all_gather = damaged  # type: ignore[method-assign]
    payload, every = torch.zeros(100, dtype=torch.uint8), torch.zeros(2, 100, dtype=torch.uint8)
    with pytest.raises(WireError, match=f"rank 1 announces {announced} bytes for a message of 100"):
        gather_v(payload, every, [MessageSpan(25, torch.float32, 0, 100)], codecs.get("raw"), transport)
