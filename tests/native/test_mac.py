"""The authentication codes of ``csrc/sockets``: known answers, and Python's integers where carries run through."""

import random
import subprocess
from pathlib import Path

import pytest

from tests.native.conftest import find_compiler
from tests.transport.tags import chacha20, poly1305, tag

pytestmark = pytest.mark.medium

FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all")


def test_known_answers_hold_for_the_reference_of_these_tests() -> None:
    """RFC 8439, 2.5.2 and 2.6.2; and OpenSSL 3.0 for associated data of 0, 16 and 100 bytes without plaintext."""
    key = bytes.fromhex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")
    assert poly1305(key, b"Cryptographic Forum Research Group").hex() == "a8061dc1305136c6c22b8baf0c0127a9"
    block = chacha20(bytes(range(0x80, 0xA0)), bytes.fromhex("000000000001020304050607"))
    assert block[:32].hex() == "8ad5a08b905f81cc815040274ab29471a833b637e3fd0da508dbb8e2fdd1a646"
    for nbytes, expected in (
        (0, "ef58bab027bb99f61d05cf1b073b52a9"),
        (16, "d22fad34a8037a919bb18102bb5a4a49"),
        (100, "8ff923c997f9d99526ba39f1629c1701"),
    ):
        assert tag(bytes(range(7, 39)), 1, 2**40 + 3, bytes(i * 37 % 256 for i in range(nbytes))).hex() == expected


def test_tags_are_those_of_the_reference(tmp_path: Path) -> None:
    """Among them sums around the modulus, and keys and blocks of ones alone, in which every carry runs through."""
    draw = random.Random(5)
    ones, two = b"\xff" * 16, b"\x02" + bytes(15)
    # RFC 8439, A.3, vectors 7 to 11: what remains at the end is the modulus, nearly so, or a little more.
    polys = [
        (two + bytes(16), ones),
        (two + ones, two),
        (b"\1" + bytes(31), ones + b"\xf0" + ones[1:] + b"\x11" + bytes(15)),
        (b"\1" + bytes(31), ones + b"\xfb" + b"\xfe" * 15 + b"\1" * 16),
        (two + bytes(16), b"\xfd" + ones[1:]),
    ]
    pieces = [ones, bytes(16), two, b"\xfb" + ones[1:], b"\xfa" + ones[1:], b"\xfc" + ones[1:]]
    for count in range(2000):
        r = draw.choice([*pieces, draw.randbytes(16)])
        pad = draw.choice([ones, bytes(16), draw.randbytes(16)])
        blocks = [draw.choice([*pieces, draw.randbytes(16)]) for _ in range(count % 13)]
        polys.append((r + pad, b"".join(blocks)))
    tags = [
        (draw.randbytes(32), draw.randrange(2), draw.randrange(2000), draw.randbytes(nbytes))
        for nbytes in (*range(140), 4096, 131072, 100_003)
    ]
    asked = [f"poly {key.hex()} {data.hex() or '-'}" for key, data in polys]
    asked += [f"tag {key.hex()} {part} {number} {data.hex() or '-'}" for key, part, number, data in tags]
    program = tmp_path / "mac_of"
    source = Path(__file__).with_name("mac_of.cpp")
    subprocess.run([find_compiler(), *FLAGS, str(source), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], input="\n".join(asked), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = [poly1305(key, data).hex() for key, data in polys] + [tag(*each).hex() for each in tags]
    assert run.stdout.split() == expected
