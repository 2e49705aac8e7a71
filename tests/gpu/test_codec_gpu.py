"""Every codec of the core gives the same bits on a GPU as on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import fusionlayer as fl
from fusionlayer.base.errors import WireError
from fusionlayer.codecs import Codec
from fusionlayer.codecs.lossless.delta import Delta
from fusionlayer.codecs.research.thc import THC
from tests.codecs.test_delta import moved
from tests.gpu.place import GPU, needs_device
from tests.synthetic import awkward, bit_patterns, gradient
from tests.tiers import tiered

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4097, 70_001)
LARGE = (1 << 24) + 4097  # more than one pass of any grid
SEED, ROWS = 0xFEED_5EED, 3


def core_codecs() -> Iterator[Codec]:
    """Yield every option of every codec that has kernels, without headers."""
    for name in ("raw", "bf16", "fp16"):
        yield fl.codecs.get(name, header=False)
    for bits in (2, 3, 4, 8):
        for group in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            for hadamard in (False, True):
                for rounding in ("nearest", "stochastic"):
                    yield fl.codecs.get(
                        "int", bits=bits, group_size=group, hadamard=hadamard, rounding=rounding, header=False
                    )
    for number, block in product(("e4m3", "e5m2", "int8"), (32, 64, 128, 256, 512)):
        for hadamard, scales in product((False, True), ("folded", "dual")):
            yield fl.codecs.get("taco", format=number, block_size=block, hadamard=hadamard, scales=scales, header=False)
    for number in ("e4m3", "e5m2"):
        yield fl.codecs.get("fp8", format=number, header=False)
    for scale in ("e8m0", "bf16"):
        yield from (fl.codecs.get("mxfp8", format=number, scale=scale, header=False) for number in ("e4m3", "e5m2"))
        yield from (fl.codecs.get("mxfp6", format=number, scale=scale, header=False) for number in ("e2m3", "e3m2"))
        yield fl.codecs.get("mxfp4", scale=scale, header=False)
    yield from (fl.codecs.get("zip", exponents=choice, header=False) for choice in ("auto", "window", "table"))
    yield fl.codecs.get("zip", sigma=0.25, header=False)
    yield fl.codecs.get("rans", header=False)
    for block, levels in product((32, 64, 128, 256, 512, 1024), ("normal", "uniform")):
        for rounding in ("nearest", "stochastic"):
            yield fl.codecs.get("thc", block_size=block, levels=levels, rounding=rounding, header=False)
    yield from (fl.codecs.get(name, header=False) for name in ("tlq", "tlq_hs", "ulq"))
    for tile, channels in ((32, 128), (64, 384), (128, 1024)):
        yield fl.codecs.get("tahquant", tile=tile, channels=channels, header=False)
        yield fl.codecs.get("tahquant6", tile=tile, channels=channels, header=False)
    yield from (fl.codecs.get("onebit", group_size=group, header=False) for group in (32, 128, 2048, 4096))
    for bits, chunk in product((2, 3, 4, 8, 32), (64, 4096)):
        yield fl.codecs.get("chunked_topk", bits=bits, chunk=chunk, header=False)


def is_typical(codec: Codec) -> bool:
    """Tell whether a codec has the usual widths of groups and blocks; others differ from it in a number alone."""
    typical = {"group_size": (128, 2048), "block_size": (256,), "chunk": (4096,)}
    return all(codec.options.get(key, widths[0]) in widths for key, widths in typical.items())


def first_of_each_kernel() -> Iterator[Codec]:
    """Yield a codec for each combination of options that chooses other code on the device, with one width each."""
    seen = set()
    for codec in filter(is_typical, core_codecs()):
        widths = ("group_size", "block_size", "chunk")
        options = {key: value for key, value in codec.options.items() if key not in widths}
        if (key := (codec.name, *map(str, options.items()))) not in seen:
            seen.add(key)
            yield codec


CODECS = list(core_codecs())
TYPICAL = list(filter(is_typical, CODECS))
KERNELS = list(first_of_each_kernel())
PLAIN = [
    *(
        fl.codecs.get(name).bare
        for name in ("raw", "int8", "int4", "int3", "int2", "taco", "fp8", "mxfp8", "mxfp6", "mxfp4", "zip", "rans")
    ),
    fl.codecs.get("onebit", group_size=128).bare,
    *(fl.codecs.get("thc", block_size=256).bare, fl.codecs.get("tahquant", channels=384).bare),
    *(fl.codecs.get(name).bare for name in ("chunked_topk", "tlq_hs")),
]
"""A codec of each kind that has kernels, as it is used."""
FEW = [fl.codecs.get("int4").bare, fl.codecs.get("taco").bare, fl.codecs.get("zip").bare, *PLAIN[-4:-1:2]]
"""One for each way in which kernels go over a tensor; the CPU takes long to check many elements."""

every_codec_and_dtype = pytest.mark.parametrize(
    "codec, dtype",
    tiered(product(CODECS, DTYPES), lambda codec, dtype: is_typical(codec) or dtype is torch.float32),
    ids=str,
)
typical_codec_and_dtype = pytest.mark.parametrize(
    "codec, dtype", tiered(product(TYPICAL, DTYPES), lambda codec, dtype: codec in KERNELS), ids=str
)
typical_codec = pytest.mark.parametrize("codec", tiered(TYPICAL, lambda codec: codec in PLAIN), ids=str)


def sample(codec: Codec, numel: int, dtype: torch.dtype, stream: int = 0) -> Tensor:
    """Return (numel,) values on the CPU, some of them zero, tiny, huge or not finite."""
    return awkward(numel, codec.block, dtype) if stream % 2 == 0 else gradient(numel, stream, dtype)


def same(cpu: Tensor, gpu: Tensor) -> bool:
    """Tell whether two tensors have the same bytes."""
    return torch.equal(cpu.view(torch.uint8), gpu.cpu().view(torch.uint8))


def verbs(codec: Codec, device: torch.device, numel: int, dtype: torch.dtype, shift: int = 0) -> dict[str, Tensor]:
    """Return what every verb makes on ``device``; tensors of elements begin ``shift`` elements into their memory."""

    def on_device(values: Tensor) -> Tensor:
        memory = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)
        memory[shift:].copy_(values)
        return memory[shift:]

    capacity = codec.wire(numel, dtype).capacity
    rows = torch.zeros(ROWS, capacity, dtype=torch.uint8, device=device)
    many = torch.cat([sample(codec, numel, dtype, stream) for stream in range(ROWS)])
    results = {"encode_chunks": rows}
    codec.encode_chunks(on_device(many), rows, numel, seed=SEED, offset=4096)

    x = on_device(sample(codec, numel, dtype, 1))
    residual = on_device(gradient(numel, 9))
    results["encode"] = torch.zeros(capacity, dtype=torch.uint8, device=device)
    codec.encode(x, results["encode"], seed=SEED, residual=residual)
    results["residual"] = residual

    results["decode_chunks"] = on_device(torch.zeros(ROWS * numel, dtype=dtype))
    codec.decode_chunks(rows, results["decode_chunks"], numel)
    for add in (False, True):
        results[f"decode_sum, add={add}"] = total = on_device(sample(codec, numel, dtype, 3))
        codec.decode_sum(rows, total, add=add)

    results["recode"] = torch.zeros(capacity, dtype=torch.uint8, device=device)
    codec.recode(rows, results["recode"], numel, dtype=dtype, seed=SEED)
    results["recoded with x"] = torch.zeros(capacity, dtype=torch.uint8, device=device)
    kept = on_device(gradient(numel, 11))
    codec.recode(rows, results["recoded with x"], numel, dtype=dtype, x=x, seed=SEED, residual=kept)
    results["recode's residual"] = kept
    return results


def check(codec: Codec, numel: int, dtype: torch.dtype, shift: int = 0) -> None:
    expected = verbs(codec, torch.device("cpu"), numel, dtype, shift)
    actual = verbs(codec, GPU, numel, dtype, shift)
    differing = [name for name, want in expected.items() if not same(want, actual[name])]
    assert differing == [], f"{codec}, {numel} elements of {dtype}, shifted by {shift}"


@pytest.mark.parametrize("codec", KERNELS, ids=str)
def test_every_kernel_once(codec: Codec) -> None:
    """What compute-sanitizer looks at, which makes kernels many times slower: each once, with a tail."""
    for dtype in DTYPES:
        check(codec, 4097, dtype)


@every_codec_and_dtype
def test_ragged_lengths(codec: Codec, dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        check(codec, numel, dtype)


@typical_codec_and_dtype
def test_tensors_that_are_not_aligned(codec: Codec, dtype: torch.dtype) -> None:
    for numel in (33, 1024, 5000):
        check(codec, numel, dtype, shift=1)


@pytest.mark.parametrize("codec", tiered(TYPICAL, lambda codec: codec in FEW), ids=str)
def test_large_tensors(codec: Codec) -> None:
    check(codec, LARGE, torch.float32)
    check(codec, LARGE, torch.bfloat16)


@typical_codec_and_dtype
def test_every_bit_pattern(codec: Codec, dtype: torch.dtype) -> None:
    x = bit_patterns(dtype)
    on_gpu = codec.compress(x.to(GPU), SEED)
    assert same(codec.compress(x, SEED), on_gpu)
    decoded = codec.decompress(on_gpu, x.shape, dtype)
    assert same(codec.decompress(on_gpu.cpu(), x.shape, dtype), decoded)


@pytest.mark.parametrize("levels", ["normal", "uniform"])
@pytest.mark.parametrize("count", [1, 8, 9, 137])
def test_sums_of_codes(count: int, levels: str) -> None:
    numel = 70_001
    codec = fl.codecs.get("thc", levels=levels, header=False)
    assert isinstance(codec, THC)
    rms = 1 + torch.arange(-(-numel // codec.block)) % 7 / 4  # of each section
    agreed = replace(codec, rms=rms, signs=5)
    payloads = torch.zeros(count, codec.wire(numel).capacity, dtype=torch.uint8)
    for rank, payload in enumerate(payloads):
        agreed.encode(gradient(numel, rank), payload, seed=rank)
    made = []
    for device in (torch.device("cpu"), GPU):
        each = replace(agreed, rms=rms.to(device))
        total = torch.zeros(codec.sum_bytes(numel, count), dtype=torch.uint8, device=device)
        each.add_codes(payloads.to(device), total, numel, torch.float32)
        out = torch.zeros(numel, device=device)
        each.decode_sums(total.unsqueeze(0), out, numel, count)
        made.append((total, out))
    (total, out), (total_gpu, out_gpu) = made
    assert same(total, total_gpu) and same(out, out_gpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", tiered([0, 1, 33, 4097, 70_001, LARGE], lambda numel: numel != LARGE))
def test_changes_since_a_base(numel: int, dtype: torch.dtype) -> None:
    """Of one element in fifty, of one in two, and of all; bytes, results, and errors in place of wrong values."""
    codec = Delta(header=False)
    base = gradient(numel, 3, dtype)
    for share, reach in ((0.02, 1), (0.5, 3), (1, 5000)):
        x, made = moved(base, share, reach), []
        for device in (torch.device("cpu"), GPU):
            payload = torch.zeros(codec.wire(numel, dtype).capacity, dtype=torch.uint8, device=device)
            codec.encode_change(x.to(device), base.to(device), payload)
            out, in_place = torch.zeros_like(base, device=device), base.to(device, copy=True)
            codec.apply_change(payload, base.to(device), out)
            codec.apply_change(payload, in_place, in_place)
            assert same(x, out) and same(x, in_place)
            made.append(payload)
        assert same(*made)
        if numel:
            other = base.to(GPU, copy=True)
            other[numel // 2] = 7.0
            with pytest.raises(WireError, match="another base"):
                codec.apply_change(made[1], other, other)
    check(codec, min(numel, 70_001), dtype)


@needs_device
@typical_codec
def test_work_runs_on_the_current_stream(codec: Codec) -> None:
    x = gradient(1 << 20)
    expected = codec.decompress(codec.compress(x * 2, SEED), x.shape)
    late = torch.zeros_like(x, device=GPU)
    source = x.to(GPU)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # in any other stream the codec would see zeros
        late.copy_(source * 2)
        decoded = codec.decompress(codec.compress(late, SEED), x.shape)
    stream.synchronize()
    assert same(expected, decoded)


@needs_device
@typical_codec
def test_calls_only_enqueue_so_that_a_graph_can_hold_them(codec: Codec) -> None:
    numel = 10_000
    x, out = torch.zeros(numel, device=GPU), torch.zeros(numel, device=GPU)
    payload = torch.zeros(codec.wire(numel).capacity, dtype=torch.uint8, device=GPU)
    codec.encode(x, payload, seed=SEED)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, payload, seed=SEED)
        codec.decode(payload, out)
    values = gradient(numel, 2)
    x.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    assert same(codec.decompress(codec.compress(values, SEED), values.shape), out)


@typical_codec
def test_messages_with_headers_travel_between_devices(codec: Codec) -> None:
    x = gradient(3000, 4)
    from_gpu = codec.checked.compress(x.to(GPU), SEED)
    assert same(codec.checked.compress(x, SEED), from_gpu)
    on_cpu = codec.checked.decompress(from_gpu.cpu(), x.shape)
    assert same(on_cpu, codec.checked.decompress(from_gpu, x.shape))
