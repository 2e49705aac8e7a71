import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from fusionlayer import codecs, collectives
from fusionlayer.base.errors import ConfigError
from fusionlayer.codecs import Codec
from fusionlayer.collectives import MessageSpan
from fusionlayer.transport import Transport
from tests import samples
from tests.codecs.variants import defaults, every, is_kind, is_variant_of_few_bits, repeats
from tests.loops import looped
from tests.ranks import on_threads, over_threads
from tests.synthetic import gradient
from tests.tiers import exhaustive

from .conformance import DTYPES, FEW_LENGTHS, LENGTHS, WORLDS, conform, given, pairs, takes

DEFAULTS = defaults()
MULTI_HOP = ("butterfly", "grid", "ring")  # they add in another order


Worlds = tuple[int, ...]
Types = tuple[torch.dtype, ...]


def fast(codec: Codec) -> list[tuple[Worlds, Types]]:
    """Return in which worlds the fast tier tries which types. Worlds 6 and 7: test_multi_hop.py."""
    return [((1, 2, 3, 8), DTYPES[:1]), ((4,), DTYPES[1:])] if is_kind(codec) else [((3,), DTYPES[:1])]


def rest(codec: Codec) -> list[tuple[Worlds, Types]]:
    """Return what the exhaustive tier adds."""
    if is_kind(codec):
        return [((4, 5), DTYPES[:1]), ((1, 2, 3, 5, 8), DTYPES[1:])]
    return [((2, 4, 8), DTYPES[:1]), ((3,), DTYPES[1:])]


@pytest.mark.parametrize("name", collectives.names())
def test_every_collective_with_every_codec(name: str, device: torch.device) -> None:
    for codec in codecs_of(name):
        conforms(name, codec, fast(codec), device)


@exhaustive(guarded_by="tests/collectives/test_conformance.py::test_every_collective_with_every_codec")
@pytest.mark.parametrize("name", collectives.names())
def test_in_other_worlds_and_types(name: str, device: torch.device) -> None:
    for codec in codecs_of(name):
        conforms(name, codec, rest(codec), device)


def codecs_of(name: str) -> list[Codec]:
    return [codec for each, codec in pairs(DEFAULTS) if each == name]


def conforms(name: str, codec: Codec, cases: list[tuple[Worlds, Types]], device: torch.device) -> None:
    for world, dtypes in ((world, dtypes) for worlds, dtypes in cases for world in worlds):
        print(f"{codec}: {world} ranks, {dtypes}")
        # Where collectives cut tensors depends on the codec by its block alone: one of each kind has all lengths.
        every = is_kind(codec) and world == 3 and dtypes == DTYPES[:1]
        lengths = LENGTHS if every else FEW_LENGTHS[2:] if world in (1, 8) else FEW_LENGTHS
        over_threads(world, partial(conform, name=name, codec=codec, device=device, lengths=lengths, dtypes=dtypes))


def variants_by_name() -> dict[str, list[Codec]]:
    """Return the variants that change the bytes, by the name of their codec."""
    found: dict[str, list[Codec]] = {}
    for codec in every():
        if not (codec in DEFAULTS or codec in repeats() or is_variant_of_few_bits(codec)):
            found.setdefault(codec.name, []).append(codec)
    return found


@pytest.mark.parametrize("variants", variants_by_name())
def test_options_are_carried(variants: str, device: torch.device) -> None:
    """What an option changes is in the codec's own tests; each variant takes another collective."""
    for number, variant in enumerate(variants_by_name()[variants]):
        choices = pairs([variant])
        name, codec = choices[number % len(choices)]
        print(name, codec)
        lengths = (codec.block, 3 * codec.block + 5)
        held = partial(conform, name=name, codec=codec, device=device, lengths=lengths, dtypes=[torch.float32])
        over_threads(3, held)


def test_many_ranks(device: torch.device) -> None:
    codec = codecs.get("int4").bare
    over_threads(64, lambda transport: conform(transport, "two_shot", codec, device, [1000], [torch.float32]))


@looped("dtype", DTYPES)
def test_without_loss_the_sum_is_the_one_in_rank_order(dtype: torch.dtype) -> None:
    inputs = [given(rank, 0, 1000, dtype) for rank in range(5)]
    total = torch.zeros(1000)
    for x in inputs:
        total += x

    def body(transport: Transport) -> None:
        for name, codec in pairs([codecs.get("raw")]):
            if name not in MULTI_HOP:
                x = inputs[transport.rank].clone()
                collectives.get(name)(x, codec, transport)
                assert torch.equal(x, total.to(dtype)), name

    over_threads(5, body)


@looped("world", (1, 2, 3, 4))
def test_a_pair_is_refused_before_training_if_and_only_if_its_first_sum_would_fail(world: int) -> None:
    def fails(name: str, codec: Codec, transport: Transport) -> bool:
        x = torch.ones(300)
        try:
            if name in collectives.names():
                collectives.get(name)(x, codec, transport, residual=torch.zeros(300))
            else:
                mine = codec.compress(x)
                every = torch.empty(transport.size, mine.numel(), dtype=torch.uint8)
                span = MessageSpan(300, x.dtype, 0, mine.numel())
                collectives.get_gather(name)(mine, every, [span], codec, transport)
                codec.decode_sum(every, x)
        except Exception:
            return True
        return False

    def refused(name: str, codec: Codec) -> bool:
        try:
            return collectives.choose(codec, (world,), name, ahead=name in collectives.gather_names()) != name
        except ConfigError as error:
            others = str(error).partition("choose another algorithm, such as ")[2].split(", ")[:-1]
            assert str(codec) in str(error) and others and not any(refused(other, codec) for other in others)
            return True

    pairs = [(n, codec.bare) for codec in DEFAULTS for n in (*collectives.names(), *collectives.gather_names())]
    late = over_threads(world, lambda transport: [fails(*pair, transport) for pair in pairs])
    early = [refused(*pair) for pair in pairs]
    assert late == [early] * world, [pair for pair, a, b in zip(pairs, early, late[0], strict=True) if a != b]
    assert any(early) and not all(early)


@looped("size", WORLDS)
def test_refused_pairs_are_never_chosen(size: int) -> None:
    for codec in defaults():
        assert takes(collectives.choose(codec, (size,)), codec)


def test_codecs_take_the_collective_of_their_paper() -> None:
    """Where the number of ranks suits it, and the user names no other."""
    expected = {
        "dynamiq": {2: "one_shot", 3: "ring", 4: "butterfly", 6: "ring", 8: "butterfly"},
        "thc": {2: "one_shot", 3: "integer_sum", 8: "integer_sum", 2184: "integer_sum", 2185: "two_shot"},
        "omnireduce": {2: "omnireduce", 3: "omnireduce", 8: "omnireduce"},
        "int8": {2: "one_shot", 8: "two_shot"},
    }
    for name, sizes in expected.items():
        codec = codecs.get(name)
        assert {size: collectives.choose(codec, (size,)) for size in sizes} == sizes, name
        assert collectives.choose(codec, (8,), "two_shot") == "two_shot"


def test_the_usual_collective_follows_the_nodes() -> None:
    """Nodes of several ranks, equal or not, take ``two_level``, unless a codec cannot be encoded anew."""
    expected = {"two_shot": [(3,), (1, 1, 1)], "two_level": [(2, 1), (2, 2), (8,) * 8, (8, 7, 8), (8,) * 64]}
    expected["one_shot"] = [(1,), (2,), (1, 1)]
    expected["two_shot"].append((1,) * 32)
    expected["grid"] = [(1,) * 33, (1,) * 1024]
    for name, cases in expected.items():
        for nodes in cases:
            assert collectives.usual(codecs.get("int8"), nodes) == collectives.choose(codecs.get("int4"), nodes) == name
            assert collectives.choose(codecs.get("raw"), nodes) == "dense"
            assert collectives.choose(codecs.get("topk"), nodes) == re.sub("two_level|grid", "two_shot", name)


def test_the_first_choice_of_a_process_is_no_other() -> None:
    """Collectives are loaded when they are first asked for: what was asked before must not change the choice."""
    tell = "from fusionlayer import codecs, collectives; print(collectives.choose(codecs.get('dynamiq'), (3,)))"
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ring"


def test_the_collective_of_the_paper_loses_less() -> None:
    inputs = samples.skewed(8, 1 << 14)
    for name, times in (("dynamiq", 3), ("thc", 1.05), ("omnireduce", 3)):
        found = [
            samples.sum_error(how, samples.adapt(name, inputs), inputs)
            for how in ("two_shot", collectives.choose(codecs.get(name), (8,)))
        ]
        assert found[0] > times * found[1], (name, found)


def test_a_refusal_comes_before_anything_is_sent() -> None:
    refused = [(name, codec) for codec in defaults() for name in collectives.names() if not takes(name, codec)]
    assert ("dense", codecs.get("int8")) in refused
    particular = ("oktopk", "omnireduce", "integer_sum", "zipped", "switched", "low_rank")
    assert not any(codec.lossless for name, codec in refused if name not in particular)

    def body(transport: Transport) -> int:
        for name, codec in refused:
            with pytest.raises(ConfigError, match=f"algorithm '{name}'.*choose another"):
                collectives.get(name)(torch.ones(10), codec, transport)
        return transport.bytes_sent

    assert over_threads(3, body) == [0, 0, 0]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown collective 'two_shoot'; did you mean 'two_shot'.*one_shot"):
        collectives.get("two_shoot")


@looped("world", WORLDS)
@on_threads()
def test_bytes_sent_are_as_documented(transport: Transport, world: int) -> None:
    codec, n = codecs.get("int4").bare, 5000
    chunk = -(-n // (world * codec.block)) * codec.block
    documented = {
        "one_shot": (codec, (world - 1) * codec.wire(n).capacity),
        "two_shot": (codec, 2 * (world - 1) * codec.wire(chunk).capacity),
        "dense": (codecs.get("raw").bare, 2 * (world - 1) * 4 * n // world),
    }
    for name, (used, expected) in documented.items():
        before = transport.bytes_sent
        collectives.get(name)(gradient(n, transport.rank), used, transport)
        assert transport.bytes_sent - before == expected, name


@on_threads(3)
def test_the_result_depends_on_nothing_that_was_left_behind(transport: Transport) -> None:
    """Scratch memory of a longer call before does not show in the bytes of a shorter one."""
    for name, codec in pairs(DEFAULTS):
        results = []
        for _ in range(2):
            x = given(transport.rank, 0, 129, torch.float32).clone()
            collectives.get(name)(x, codec, transport, seed=1)
            results.append(x)
            collectives.get(name)(torch.full((5000,), 3.0), codec, transport, seed=2)
        assert torch.equal(*results)
