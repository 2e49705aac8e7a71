"""What a newcomer of an elastic job gets has the bits that members have, and no more bytes than need be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusionlayer.base.errors import WireError
from fusionlayer.training.policies import handover
from fusionlayer.transport import Transport
from tests.loops import looped
from tests.ranks import over_threads
from tests.synthetic import gradient

N = 70_001
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def state_of(shift: int = 0) -> dict[str, Any]:
    """Return a state with tensors of many types, large and small, some of them odd."""
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]).repeat(N)
    strided = gradient(2 * N, 7 + shift, torch.float32).view(N, 2).t()
    state = {name: gradient(N, 1 + shift, dtype) for name, dtype in FLOATS.items()}
    rest = {"special": special, "strided": strided, "counts": torch.arange(N) + shift, "flags": special[:N] == 0}
    small = {
        "scalar": torch.tensor(3.0 + shift),
        "none": torch.empty(0),
        "complex": torch.ones(N, dtype=torch.complex64),
    }
    return {
        "tensors": [*state.values(), state["f32"][:5]],
        "optimizer": {"state": {0: rest, 1: small}},
        "step": 7 + shift,
    }


def bits(state: Any) -> Any:
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: bits(each) for key, each in state.items()}
    return [bits(each) for each in state] if isinstance(state, list) else state


def handed_over(
    members: dict[str, Any],
    newcomers: dict[str, Any],
    ranks_per_node: int,
    change: Callable[[Tensor], None] | None = None,
) -> tuple[Any, int]:
    """Return what rank 1 gets of rank 0, and the bytes that rank 0 sends; ``change`` alters what arrives."""

    def body(transport: Transport) -> Any:
        own = handover.parted(newcomers)[1]
        if transport.rank == 0:
            handover.send(members, handover.fingerprints(own), transport, 1)
            return transport.bytes_sent
        received = transport.recv

        def recv(x: Tensor, source: int, tag: int = 0) -> None:
            received(x, source, tag)
            if change is not None:
                change(x)

        transport.recv = recv  # type: ignore[method-assign]
        return handover.receive(own, transport, 0)

    sent, got = over_threads(2, body, ranks_per_node=ranks_per_node)
    return got, sent


@looped("ranks_per_node", [2, 1])
def test_a_state_arrives_with_all_its_bits(ranks_per_node: int) -> None:
    got, _ = handed_over(state_of(), {}, ranks_per_node)
    assert bits(got) == bits(state_of())
    got, _ = handed_over(state_of(), state_of(1), ranks_per_node)
    assert bits(got) == bits(state_of()), "what the newcomer had is replaced"


def test_between_hosts_it_is_compressed_and_what_is_there_does_not_travel() -> None:
    members: dict[str, Any] = {name: gradient(N, 1, dtype) for name, dtype in FLOATS.items()}
    plain = sum(x.nbytes for x in members.values())
    _, within = handed_over(members, {}, 2)
    _, between = handed_over(members, {}, 1)
    assert plain < within < plain + 10_000 and between < 0.85 * plain
    frozen = {"f32": members["f32"].clone(), "bf16": members["bf16"] + 1, "f16": members["f16"].view(torch.bfloat16)}
    got, sent = handed_over(members, frozen, 1)
    assert bits(got) == bits(members)
    assert sent < between - 0.8 * members["f32"].nbytes
    # The newcomer's own tensors are written to, and one that it has is not replaced.
    assert got["f32"].data_ptr() == frozen["f32"].data_ptr() and got["bf16"].data_ptr() == frozen["bf16"].data_ptr()


def test_another_tensor_with_the_same_checksum_is_sent() -> None:
    """A checksum of 32 bits is only a first look: the digest decides."""
    members, known = {"x": gradient(N, 1, torch.float32)}, {"x": gradient(N, 2, torch.float32)}
    crc = handover.fingerprints(handover.parted(members)[1])['["x"]'].crc

    def body(transport: Transport) -> Any:
        own = handover.parted(known)[1]
        if transport.rank == 1:
            return handover.receive(own, transport, 0)
        theirs = {name: each._replace(crc=crc) for name, each in handover.fingerprints(own).items()}
        return handover.send(members, theirs, transport, 1)

    assert bits(over_threads(2, body)[1]) == bits(members)


@looped("ranks_per_node", [2, 1])
def test_what_was_damaged_on_its_way_is_refused(ranks_per_node: int) -> None:
    """A bit of any message, large or small, flips."""
    refused = 0
    for damaged in range(100):
        seen = [0]

        def flip(x: Tensor, seen: list[int] = seen, damaged: int = damaged) -> None:
            if seen[0] == damaged:
                x.view(-1).view(torch.uint8)[x.nbytes // 3] ^= 4
            seen[0] += 1

        try:
            handed_over(
                {"x": gradient(N, 1, torch.float32), "y": gradient(N, 2, torch.bfloat16)}, {}, ranks_per_node, flip
            )
        except WireError as error:
            refused += 1
            assert "damaged" in str(error) or "checksum" in str(error), error
        if seen[0] <= damaged:
            break
    assert damaged == refused == 6, "two messages of what is no tensor, and two of each tensor"
