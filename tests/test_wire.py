import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusionlayer import native
from fusionlayer.base.errors import WireError
from fusionlayer.codecs import Codec
from fusionlayer.native import wire
from fusionlayer.native.wire import ALIGN, WIRE_VERSION, Header, Plane, aligned, digest, lay_out
from tests.codecs.variants import every
from tests.loops import looped
from tests.synthetic import gradient

HEADER = Header("int", 0xCAFE, torch.bfloat16, numel=1000, used=640, sequence=7, body_crc=0xBEEF)
CODECS = [codec.checked for codec in every()]


def message(codec: Codec, numel: int = 300) -> Tensor:
    return codec.compress(gradient(numel, 80), seed=1)


# ---- facts that ranks compare ---------------------------------------------------------------------------------------


def test_equal_facts_have_equal_digests() -> None:
    assert digest({"a": 1, "b": {2, 1}}, [3, 4]) == digest({"b": {1, 2}, "a": 1}, (3, 4))
    assert len({digest(codec) for codec in CODECS} | {digest(codec.bare) for codec in CODECS}) == 2 * len(set(CODECS))
    with pytest.raises(TypeError, match="cannot be compared over ranks"):
        digest(object())


def test_every_difference_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [
        (),
        (1,),
        ("1",),
        (1, 2),
        ([1, 2],),
        ("1, 2",),
        (1.0,),
        (True,),
        (None,),
        (b"1",),
        ({"a": 1},),
        ({"a": "1"},),
    ]
    facts += [(torch.float16,), (HEADER,), (replace(HEADER, numel=1001),)]
    digests = {digest(*fact) for fact in facts}
    assert len(digests) == len(facts)
    monkeypatch.setattr(wire, "WIRE_VERSION", WIRE_VERSION + 1)
    assert digest() not in digests


# ---- layout ---------------------------------------------------------------------------------------------------------


def test_alignment() -> None:
    assert [aligned(nbytes) for nbytes in (0, 1, 127, 128, 129)] == [0, 128, 128, 128, 256]


TYPES = st.sampled_from([torch.uint8, torch.float32, torch.int64])
PLANES = st.lists(st.builds(Plane, st.just("plane"), st.integers(0, 10**12), TYPES))


@given(PLANES, st.booleans())
def test_planes_lie_one_behind_the_other(planes: list[Plane], header: bool) -> None:
    form = lay_out(planes, 0, torch.float32, header=header)
    end = form.body
    assert form.body == ALIGN * header
    for plane, section in zip(planes, form.sections, strict=True):
        assert section.plane == plane
        assert section.offset == aligned(end)
        end = section.offset + plane.count * plane.dtype.itemsize
    assert form.capacity == aligned(end)


# ---- header ---------------------------------------------------------------------------------------------------------


def test_the_header_is_where_the_format_says() -> None:
    data = HEADER.pack()
    assert len(data) == ALIGN and not any(data[64:])
    assert data[:8] == b"FLW1" + bytes([WIRE_VERSION, 1, 0, 0])
    assert data[8:24] == b"int".ljust(16, b"\0")
    assert struct.unpack("<QQQIII", data[24:60]) == (1000, 640, 7, 0xCAFE, 0xBEEF, 0)
    assert struct.unpack("<I", data[60:64])[0] == native.crc32c(data[:60])


@given(st.integers(0, ALIGN - 1), st.integers(1, 255))
def test_every_damaged_byte_is_noticed(position: int, mask: int) -> None:
    data = bytearray(HEADER.pack())
    data[position] ^= mask
    with pytest.raises(WireError):
        Header.unpack(bytes(data))


@given(st.binary(max_size=2 * ALIGN))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        Header.unpack(data)
    with pytest.raises(WireError):
        Header.unpack((b"FLW1" + data).ljust(ALIGN, b"\0"))


@looped(
    "position, value, message",
    [
        (4, WIRE_VERSION + 1, f"wire version {WIRE_VERSION + 1}, this is"),
        (4, WIRE_VERSION - 1, f"wire version {WIRE_VERSION - 1}, this is"),
        (5, 9, "element type 9, known"),
    ],
)
def test_a_whole_header_of_another_kind_is_refused(position: int, value: int, message: str) -> None:
    fields = bytearray(HEADER.pack()[:60])
    fields[position] = value
    data = bytes(fields) + struct.pack("<I", native.crc32c(bytes(fields)))
    with pytest.raises(WireError, match=message):
        Header.unpack(data.ljust(ALIGN, b"\0"))


def test_the_longest_name_fits() -> None:
    header = replace(HEADER, codec="sixteen_letters_")
    assert Header.unpack(header.pack()) == header


# ---- checked messages -----------------------------------------------------------------------------------------------


@given(st.sampled_from(CODECS), st.integers(0), st.integers(1, 255))
def test_every_damaged_byte_of_a_message_is_noticed(codec: Codec, position: int, mask: int) -> None:
    payload = message(codec)
    payload[position % payload.numel()] ^= mask
    with pytest.raises(WireError):
        codec.decompress(payload, 300)


@given(st.sampled_from(CODECS), st.integers(0))
def test_every_cut_is_noticed(codec: Codec, length: int) -> None:
    payload = message(codec)
    with pytest.raises(WireError):
        codec.decompress(payload[: length % payload.numel()], 300)


def test_messages_of_other_codecs_and_options_are_refused() -> None:
    for sender in CODECS:
        payload = message(sender)
        for receiver in CODECS:
            if receiver != sender:
                with pytest.raises(WireError):
                    receiver.decompress(payload, 300)


def test_the_error_says_what_differs() -> None:
    codec = next(codec for codec in CODECS if codec.name == "int")
    with pytest.raises(WireError, match="numel 300, expected 301"):
        codec.decompress(message(codec), 301)
    with pytest.raises(WireError, match="dtype torch.float32, expected torch.bfloat16"):
        codec.decompress(message(codec), 300, torch.bfloat16)
    with pytest.raises(WireError, match="cut short"):
        codec.decode_add(message(codec)[:-ALIGN], torch.zeros(300))


# ---- checksum -------------------------------------------------------------------------------------------------------


def test_crc32c_known_answers() -> None:
    assert native.crc32c(b"123456789") == 0xE3069283
    assert native.crc32c(bytes(32)) == 0x8A9136AA
    assert native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert native.crc32c(b"") == 0
