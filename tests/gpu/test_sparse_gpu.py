"""The sparse verbs give the same bits on a GPU as on the CPU."""

import itertools
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from fusionlayer import codecs, native
from fusionlayer.codecs import TensorState
from fusionlayer.native import selection
from tests.gpu.place import GPU, SMALL
from tests.synthetic import awkward, gradient

LENGTHS = (1, 33, 255, 257, 4097, 65_537, 1_000_003)
LARGE = (1 << 24) + 4097
FORMS = {"bitmap": selection.SPARSE_BITMAP, "byte": selection.SPARSE_BYTE, "short": selection.SPARSE_SHORT}

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def same(cpu: Tensor, gpu: Tensor) -> bool:
    """Tell whether two tensors have the same bytes."""
    return torch.equal(cpu.view(torch.uint8), gpu.cpu().view(torch.uint8))


def offsets_of(form: int, numel: int, capacity: int, values: torch.dtype) -> list[int]:
    counts = -(-numel // 256) if form == selection.SPARSE_BYTE else 0
    positions = (-(-numel // 8), capacity, 2 * capacity)[form]
    planes = (-(-numel // 65536) * 4, counts, positions, capacity * values.itemsize)
    return [0, *accumulate(-(-nbytes // 16) * 16 for nbytes in planes)]


@pytest.mark.parametrize("numel", [*LENGTHS, LARGE])
def test_looks_agree(numel: int) -> None:
    for acc in (gradient(numel, 1), awkward(numel, 32, torch.float32)):
        on_gpu = acc.to(GPU)
        for k in {1, max(1, numel // 100), numel}:
            assert selection.kth_magnitude(on_gpu, k) == selection.kth_magnitude(acc, k)
            assert same(selection.choose_largest(acc, k), selection.choose_largest(on_gpu, k))
        for above in (0, 0x38000000):
            assert selection.magnitude_stats(on_gpu, above) == selection.magnitude_stats(acc, above)
        ladder = [0, 1, 0x38000000, 0x3F800000, 0x7F800000]
        assert selection.count_above(on_gpu, ladder) == selection.count_above(acc, ladder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_form
def test_messages_agree(form: int, dtype: torch.dtype) -> None:
    for numel in LENGTHS if SMALL else (*LENGTHS, LARGE):
        values = torch.bfloat16 if numel % 2 else torch.float32
        x, start = awkward(numel, 32, dtype), gradient(numel, 2)
        probe = start.clone()
        selection.accumulate(x, 0.5, probe)
        magnitude, above = selection.kth_magnitude(probe, max(1, numel // 50))
        capacity = max(1, numel // 60)
        for flags, threshold, ties in ((0, magnitude, 1), (0, magnitude, -1), (selection.SPARSE_RANDOM, 1 << 25, 0)):
            offsets = offsets_of(form, numel, capacity, values)
            params = native.CodecParams(native.SPARSE, (form, native.DTYPES[values], capacity, flags))
            results = []
            for device in (torch.device("cpu"), GPU):
                spec = params.spec(numel, dtype, seed=7, offset=2**32 - 1000)
                acc, clear = start.to(device, copy=True), gradient(numel, 3).to(device)
                body = torch.zeros(offsets[-1], dtype=torch.uint8, device=device)
                given = x.to(device)
                choice = None if ties < 0 else torch.tensor([threshold, ties], device=device)
                how = {"x": given, "scale": 0.5, "clear": clear, "choice": choice}
                selection.sparse_encode(spec, offsets[:4], acc, threshold, ties, body, **how)
                out = given.clone()
                native.decode_sum(spec, offsets[:4], torch.stack([body] * 3), out, add=True)
                results.append((acc, clear, body, out))
            assert all(same(cpu, gpu) for cpu, gpu in zip(*results, strict=True)), (numel, flags, ties, above)


@pytest.mark.parametrize("name", ["topk", "dgc", "gaussiank", "redsync", "redsync_trim", "sidco"])
def test_thresholds_agree(name: str) -> None:
    """Messages, residuals and what is kept, step after step, of thresholds that are found anew or kept."""
    for numel, reuse in itertools.product((257, 65_537, 1_000_003), (1, 3)):
        codec = codecs.get(name, header=False, slack=1.5, reuse=reuse, density=0.02)
        states = [TensorState(torch.zeros(numel, device=device)) for device in (torch.device("cpu"), GPU)]
        for step in range(7):
            x = awkward(numel, 32, torch.float32) if step == 5 else gradient(numel, step) * 2.0**step
            sent = []
            for state in states:
                assert state.residual is not None
                body = torch.zeros(codec.wire(numel).capacity, dtype=torch.uint8, device=state.residual.device)
                codec.encode_tensor(x.to(body.device), body, state, scale=0.5, seed=step)
                sent.append([body, state.residual, *state.tensors.values()])
            assert all(same(cpu, gpu) for cpu, gpu in zip(*sent, strict=True)), (numel, reuse, step)


def test_draws_agree() -> None:
    for numel, k in ((50, 1), (4097, 400), (1_000_003, 10_000)):
        acc = gradient(numel, 6)
        spec = native.CodecParams(native.SPARSE, (selection.SPARSE_SHORT, 0, numel, selection.SPARSE_RANDOM)).spec(
            numel, torch.float32, seed=9
        )
        assert same(selection.choose_drawn(spec, acc, k), selection.choose_drawn(spec, acc.to(GPU), k))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_agrees(nesterov: bool) -> None:
    results = []
    for device in (torch.device("cpu"), GPU):
        velocity, acc = gradient(70_001, 4).to(device), gradient(70_001, 5).to(device)
        selection.accumulate_momentum(awkward(70_001, 32, torch.bfloat16).to(device), 0.3, 0.9, nesterov, velocity, acc)
        results.append((velocity, acc))
    assert all(same(cpu, gpu) for cpu, gpu in zip(*results, strict=True))
