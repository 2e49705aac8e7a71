"""Updates: one version made of another to the bit, and nothing made of what was damaged."""

import json
import struct

import pytest
import torch

from fusionlayer import native
from fusionlayer.base.errors import WireError
from fusionlayer.publishing import update
from fusionlayer.publishing.snapshot import Snapshot, digest_of
from fusionlayer.publishing.update import make, read
from tests.fuzz import source_of
from tests.loops import looped
from tests.publishing.states import bits, odd_state, plain_state, snapshot
from tests.synthetic import mixed
from tests.tiers import tiered


def joined(target: Snapshot, base: Snapshot | None = None) -> bytes:
    return b"".join(make(target, base).parts)


def received(data: bytes, base: Snapshot | None = None) -> Snapshot:
    return read(source_of(data), len(data), base)


def test_versions_come_over_to_the_bit_whole_and_as_differences() -> None:
    versions = [snapshot(i, odd_state(i)) for i in range(4)]
    for have, to in ((None, 0), (None, 3), (0, 1), (0, 3), (3, 0)):
        base = None if have is None else received(joined(versions[have]))
        made = received(joined(versions[to], base), base)
        assert bits(made.tensors) == bits(odd_state(to)) and list(made.tensors) == list(odd_state(to))
        assert (made.run, made.version, made.digest) == (versions[to].run, to, versions[to].digest)
        assert made.tensors["tied.a"] is made.tensors["tied.b"]
        # What the receiver says of its tensors is true, not only what it was told.
        assert Snapshot(made.run, to, made.tensors).digests == versions[to].digests
        if base is not None:
            assert made.tensors["bytes"] is base.tensors["bytes"], "what has not changed is held once"


def test_differences_are_short_and_a_combined_one_is_no_longer_than_the_chain() -> None:
    versions = [snapshot(i, plain_state(i)) for i in range(6)]
    whole = len(joined(versions[0]))
    steps = [len(joined(b, a)) for a, b in zip(versions, versions[1:], strict=False)]
    assert max(steps) < whole / 5
    assert len(joined(versions[5], versions[0])) < sum(steps)


def test_another_base_is_refused() -> None:
    first, second, third = (snapshot(i, odd_state(i)) for i in range(3))
    data = joined(third, second)
    for base in (None, first):
        with pytest.raises(WireError, match="came to a follower that has"):
            received(data, base)


@pytest.mark.parametrize("seed", tiered(range(20), lambda seed: seed < 2, lambda seed: seed < 5))
def test_damage_is_told_and_never_accepted(seed: int) -> None:
    first, second = (snapshot(i, odd_state(i)) for i in range(2))
    right = bits(second.tensors)
    refused = 0
    for base in (None, first):
        data = joined(second, base)
        # Half of the flips hit the header and the small tensors.
        places = mixed(torch.arange(40).numpy().astype("uint64") + seed * 40)
        for i, random in enumerate(int(place) for place in places):
            place = random % (len(data) if i % 2 else 2500)
            harmed = bytearray(data)
            harmed[place] ^= 1 << (random >> 40) % 8
            try:  # a bit without a meaning, which pads what is before it, does no harm
                assert bits(received(bytes(harmed), base).tensors) == right, "wrong weights were accepted"
            except WireError:
                refused += 1
        for end in (0, 11, 12, 500, len(data) - 1):
            with pytest.raises(WireError):
                received(data[:end], base)
        with pytest.raises(WireError):
            received(data + b"!", base)
    assert refused > 70


def forged(**changes: object) -> bytes:
    """Return an update with another header, whose checksum is right."""
    data = joined(snapshot(0, {"w": torch.ones(4)}))
    (length,) = struct.unpack_from("<I", data, 4)
    header = {**json.loads(data[12 : 12 + length]), **changes}
    text = json.dumps(header).encode()
    return struct.pack("<4sII", b"FLV1", len(text), native.crc32c(text)) + text + data[12 + length :]


@looped(
    "changes",
    [
        *(
            {"form": 2},
            {"run": 3},
            {"version": "1"},
            {"version": 10**4000},
            {"base": 5},
            {"digest": "0" * 32},
            {"tensors": 3},
        ),
        *({"tied": {"w": "w"}}, {"tied": {"x": "y"}}, {"tied": []}, {"tensors": [["w"]]}, {"tensors": [3]}),
        *({"tied": {"x": "w"}, "order": ["x"]}, {"order": ["x"]}, {"digest": None}, {"tensors": None}),
        *(
            {"tensors": [["w", *row]]}
            for row in (
                ("float32", [1 << 62], "zip", 16, "0" * 32),  # memory that the bytes cannot fill
                ("float32", [1 << 40], "zip", 16, "0" * 32),
                ("float32", [10**4000] * 2000 + [0], "raw", 0, "0" * 32),  # minutes of multiplying
                ("float32", [1 << 40, 1 << 40, 0], "raw", 0, "0" * 32),  # strides that overflow
                ("float32", [1] * 10000, "raw", 4, "0" * 32),
                ("float32", [4], "raw", 10**4000, "0" * 32),
                ("float32", [4], ["raw"], 16, "0" * 32),
                ("float32", [-4], "raw", 16, "0" * 32),
                ("float32", [True] * 4, "raw", 16, "0" * 32),
                ("float32", [4], "raw", -16, "0" * 32),
                ("float32", [4], "same", 0, "0" * 32),
                ("float32", [4], "delta", 16, "0" * 32),
                ("float32", [4], "int8", 16, "0" * 32),
                ("float99", [4], "raw", 16, "0" * 32),
                ("int32", [4], "zip", 16, "0" * 32),
                ("float32", [5], "raw", 16, "0" * 32),
                ("float32", [4], "raw", 16, 7),
            )
        ),
    ],
)
def test_a_header_that_makes_no_sense_is_a_wire_error(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        received(forged(**changes))
    assert received(forged()).version == 0


def test_a_header_of_lists_in_lists_is_a_wire_error() -> None:
    text = b"[" * 50_000
    with pytest.raises(WireError, match="makes no sense"):
        received(update._FRONT.pack(update._MAGIC, len(text), native.crc32c(text)) + text)


def test_no_memory_is_taken_for_more_than_the_bytes_can_hold() -> None:
    data = forged()
    left = len(data) - 12 - struct.unpack_from("<I", data, 4)[0]
    for codec in ("zip", "raw"):
        with pytest.raises(WireError, match=f"in {left} bytes of '{codec}'"):
            received(forged(tensors=[["w", "float32", [1 << 40], codec, left, "0" * 32]]))
    with pytest.raises(WireError, match="a size of a tensor is no whole number up to"):  # and is not multiplied
        received(forged(tensors=[["w", "float32", [10**4000], "raw", 0, "0" * 32]]))


def test_a_digest_tells_types_and_shapes_apart() -> None:
    alike = [torch.zeros(6), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32), torch.zeros(12, dtype=torch.half)]
    assert len({digest_of(x) for x in alike}) == len(alike)
