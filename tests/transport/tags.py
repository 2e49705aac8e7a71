"""Frames of ``sockets`` and their tags, written down a second time: by Python's integers, as RFC 8439 puts it."""

import struct

import torch

from fusionlayer import native

FRAME_BYTES = 64
TAG_BYTES = 16
HEAD, PAYLOAD = 0, 1


def frame(**changes: int) -> bytes:
    """Return the frame of the only chunk of the first message, of 4096 bytes."""
    given = dict(magic=0x4C46, kind=1, checked=0, nbytes=4096, serial=1, key=5, length=4096, delivered=0, index=0)
    given |= dict(chunk=4096, back=0, received=0, checksum=0) | changes
    bare = struct.pack("<HBBIQQQQIIIII", *given.values())
    return bare + struct.pack("<I", native.crc32c(torch.frombuffer(bytearray(bare), dtype=torch.uint8)))


def sealed(bare: bytes, payload: bytes, key: bytes, number: int) -> bytes:
    """Return frame ``number`` of a direction, the first being 1, with its tags and its payload."""
    head = bare + tag(key, PAYLOAD, number, payload)
    return head + tag(key, HEAD, number, head) + payload


def tag(key: bytes, part: int, number: int, data: bytes) -> bytes:
    """Return the tag of ChaCha20-Poly1305 without plaintext, ``data`` being the associated data."""
    padded = data + bytes(-len(data) % 16) + struct.pack("<QQ", len(data), 0)
    return poly1305(chacha20(key, struct.pack("<IQ", part, number))[:32], padded)


def poly1305(key: bytes, data: bytes) -> bytes:
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for start in range(0, len(data), 16):
        total = (total + int.from_bytes(data[start : start + 16] + b"\1", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def chacha20(key: bytes, nonce: bytes, counter: int = 0) -> bytes:
    """Return one block."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter]
    start += struct.unpack("<3I", nonce)
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for into, by, other, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[into] = (x[into] + x[by]) % 2**32
            x[other] ^= x[into]
            x[other] = (x[other] << bits | x[other] >> (32 - bits)) % 2**32

    for _ in range(10):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            quarter(column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(x, start, strict=True)))
