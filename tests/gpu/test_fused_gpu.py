"""The fused verbs, and those of dynamiq, give the same bits on a GPU as on the CPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from fusionlayer import codecs, native
from fusionlayer.codecs.quantized.integer import Int
from fusionlayer.codecs.research.dynamiq import DynamiQ
from fusionlayer.training.weights import Weights
from tests.gpu.place import GPU, SMALL
from tests.gpu.test_codec_gpu import DTYPES, LARGE, LENGTHS, same
from tests.synthetic import awkward, gradient

CPU = torch.device("cpu")
SOURCES = [
    Int(bits, group, hadamard, header=False)
    for bits, group, hadamard in product((8, 4, 3, 2), (32, 128, 512, 4096), (False, True))
]
TARGETS = [
    Int(4, 128, False, "stochastic", header=False),
    Int(4, 32, True, header=False),
    Int(8, 4096, True, header=False),
    Int(3, 64, True, header=False),
    codecs.get("tlq_hs").bare,
]
DYNAMIQ = [
    codecs.get("dynamiq", **options).bare
    for options in (
        {},
        *({"bits": bits} for bits in (3, 4, 6, 8)),
        *({name: False} for name in ("variable", "nonuniform", "hierarchical")),
        {"epsilon4": 0.1, "epsilon8": 0.03},
    )
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_messages_of_one_codec_become_one_of_another(source: Int, target: Int) -> None:
    for numel, count, fed in product((1, 33, 4097, 70_001), (1, 4), (False, True)):
        x = torch.cat([awkward(numel, 128) if m else gradient(numel, m) for m in range(count)])
        results = []
        for device in (CPU, GPU):
            messages = torch.zeros(count, source.wire(numel).capacity, dtype=torch.uint8, device=device)
            source.encode_chunks(x.to(device), messages, numel)
            payload = torch.zeros(target.wire(numel).capacity, dtype=torch.uint8, device=device)
            residual = gradient(numel, 9).to(device) if fed else None
            target.recode(messages, payload, numel, source=source, seed=3, offset=target.block, residual=residual)
            results.append((messages, payload, *([residual] if residual is not None else [])))
        assert all(same(cpu, gpu) for cpu, gpu in zip(*results, strict=True)), (numel, count, fed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [*TARGETS, Weights.of("qwd").codec.bare], ids=str)
def test_differences(codec: Int, dtype: torch.dtype) -> None:
    for numel in (*LENGTHS, LARGE):
        x, base = awkward(numel, codec.block, torch.float32), gradient(numel, 2, dtype)
        results = []
        for device in (CPU, GPU):
            payload = torch.zeros(codec.wire(numel).capacity, dtype=torch.uint8, device=device)
            weights = base.to(device, copy=True)
            codec.encode_difference(x.to(device), weights, payload, seed=5, offset=codec.block)
            codec.decode_add(payload, weights, dtype=torch.float32)
            results.append((payload, weights))
        assert all(same(cpu, gpu) for cpu, gpu in zip(*results, strict=True)), numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", DYNAMIQ, ids=str)
def test_dynamiq(codec: DynamiQ, dtype: torch.dtype) -> None:
    """Widths are those that ranks agreed on; what only one rank makes, of its own sums in torch, may differ."""
    for numel in (1, 255, 256, 257, 4097, 70_001, *([] if SMALL else [1 << 22])):
        x, other = gradient(numel, 1, dtype), awkward(numel, 256, dtype)
        energies = native.dynamiq_stats(gradient(numel, 1))[1]
        given = codec._allocated(energies, [energies.numel()])
        results = []
        for device in (CPU, GPU):
            agreed = replace(codec, given=given.to(device), shared=7, place=(1, 4))
            on_device = x.to(device)
            residual, kept = gradient(numel, 3).to(device), gradient(numel, 4).to(device)
            stats = native.dynamiq_stats(other.to(device), residual)
            first, second, third = torch.zeros(3, agreed.wire(numel, dtype).capacity, dtype=torch.uint8, device=device)
            agreed.encode(other.to(device), first, seed=5, residual=residual)
            agreed.recode(first.unsqueeze(0), second, numel, dtype=dtype, x=on_device, seed=6)
            agreed.recode(torch.stack([first, second]), third, numel, dtype=dtype, seed=8, residual=kept)
            decoded, added = torch.zeros_like(on_device), on_device.clone()
            agreed.decode(third, decoded)
            agreed.decode_add(second, added)
            results.append((*stats, first, residual, second, third, kept, decoded, added))
        differing = [i for i, (cpu, gpu) in enumerate(zip(*results, strict=True)) if not same(cpu, gpu)]
        assert differing == [], numel


def test_widths_follow_from_energies_alike() -> None:
    codec = DYNAMIQ[0]
    for numel in (256, 70_001, 1 << 22):
        energies = native.dynamiq_stats(gradient(numel, 1))[1]
        lengths = [energies.numel() // 2, energies.numel() - energies.numel() // 2]
        assert same(codec._allocated(energies, lengths), codec._allocated(energies.to(GPU), lengths))
