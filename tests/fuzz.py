"""Random bytes for every parser of what comes from a network or a file of others: it refuses them by its own error.

``python -m tests.fuzz 1000000 [SEED]`` tries so many inputs, shared out over all parsers, and prints what went wrong.
"""

import argparse
import hashlib
import json
import random
import resource
import selectors
import socket
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks import driver
from fusionlayer import codecs, native
from fusionlayer.base import config, records
from fusionlayer.base.errors import ConfigError, TransportError, WireError
from fusionlayer.base.plan import FusionPlan, TensorInfo
from fusionlayer.base.secrets import Seal, prove
from fusionlayer.cli import main
from fusionlayer.cli.hosts import read_hostfile
from fusionlayer.coordination import requests
from fusionlayer.elastic import generation
from fusionlayer.health import report
from fusionlayer.health.calls import Call
from fusionlayer.health.judge import judge
from fusionlayer.health.state import ChannelState, Finding, RankState, decode_finding
from fusionlayer.health.state import decode as decode_state
from fusionlayer.health.state import encode as encode_state
from fusionlayer.launch import meeting
from fusionlayer.native.wire import Header
from fusionlayer.planning.profile import Profile
from fusionlayer.process.processes import Identity
from fusionlayer.publishing import boxes, folder, frames, greeting, keyring, referral, signing, update
from fusionlayer.publishing.address import Endpoint
from fusionlayer.publishing.snapshot import Shard, Snapshot
from fusionlayer.training import checkpoint
from fusionlayer.transport import star
from fusionlayer.transport.links import device_memory, introduction, sockets
from fusionlayer.transport.links.base import LinkError
from fusionlayer.transport.links.introduction import ConnectionKeys
from fusionlayer.transport.links.socket_options import listeners
from fusionlayer.transport.settings import gather_settings
from tests.cli.test_trace import step_spans
from tests.codecs.conformance import encoded
from tests.synthetic import gradient

ODD: Sequence[Any] = (
    *(None, True, False, -1, 0, 1, 3, 255, 1 << 31, 1 << 48, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**300),
    *(
        10**4000,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "\x1b[2J",
        "\ud800",
        "9" * 50,
        "a" * 9000,
    ),
    *([], {}, [[]], [1] * 100, [10**4000] * 50, {"a": 1}, "runs", "zip", "raw", "same", "float32"),
)
_WORDS = [struct.pack("<q", n) for n in (-1, 0, 1, 6, -6, -3, 1 << 31, 1 << 62, -(1 << 62))]

Parse = Callable[[bytes], object]


class Parser(NamedTuple):
    """A reader of bytes that others have written.

    Attributes:
        seeds: right inputs.
        parse: reads one.
        refuses: errors by which it refuses one; any other one is a defect.
        sealed: changes an input so that its checksums are right again.
    """

    seeds: Sequence[bytes]
    parse: Parse
    refuses: tuple[type[Exception], ...] = ()
    sealed: Callable[[bytes], bytes] = bytes


# ---- inputs ---------------------------------------------------------------------------------------------------------


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds with changes, or noise."""
    data = bytearray(chance.choice(seeds))
    if chance.random() < 0.4 and (changed := _mutated_json(chance, bytes(data))) is not None:
        return changed
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(data) + 1)
        what = chance.randrange(8)
        if what == 0:
            del data[place:]
        elif what == 1:
            data[place:place] = chance.randbytes(chance.randrange(20))
        elif what == 2:
            data[place : place + 8] = chance.choice(_WORDS)
        elif what == 3:
            del data[place : place + chance.randrange(20)]
        elif what == 4:
            other = chance.choice(seeds)
            data[place:] = other[chance.randrange(len(other) + 1) :]
        elif what == 5:
            data[:] = chance.randbytes(chance.randrange(200))
        elif place < len(data):
            data[place] ^= 1 << chance.randrange(8)
    return bytes(data)


def _mutated_json(chance: random.Random, data: bytes) -> bytes | None:
    """Return the JSON in ``data`` with other values, and what is around it as it was; None: there is none."""
    found = _json_in(data)
    if found is None:
        return None
    value, begin, end = found
    if chance.random() < 0.02:
        return data[:begin] + b"[" * 5000 + data[end:]
    for _ in range(chance.choice((1, 1, 2, 4))):
        value = _replaced(chance, value)
    return data[:begin] + json.dumps(value).encode() + data[end:]


def _json_in(data: bytes) -> tuple[Any, int, int] | None:
    """Return the first JSON in ``data``, where it begins, and where it ends; None: there is none."""
    begin = min((place for place in (data.find(b"{"), data.find(b"[")) if place >= 0), default=-1)
    try:
        value, end = json.JSONDecoder().raw_decode(data.decode("latin-1"), begin)
    except (ValueError, IndexError, RecursionError):
        return None
    return value, begin, end


def _replaced(chance: random.Random, value: Any) -> Any:
    if isinstance(value, (dict, list)) and value and chance.random() < 0.9:
        copy = value.copy()
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(keys)
        if chance.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _replaced(chance, value[key])
        return copy
    return chance.choice(ODD)


# ---- parsers --------------------------------------------------------------------------------------------------------


def source_of(data: bytes) -> Callable[[int], bytearray]:
    place = 0

    def take(nbytes: int) -> bytearray:
        nonlocal place
        if place + nbytes > len(data):
            raise WireError("cut short")
        place += nbytes
        return bytearray(data[place - nbytes : place])

    return take


def _updates() -> Iterator[tuple[str, Parser]]:
    first, second = (
        Snapshot("0" * 16, i, {"w": gradient(300, i, torch.bfloat16), "b": torch.full((3, 2), i)}) for i in range(2)
    )
    shards = {"w": Shard(((3, 300),), (400,)), "b": Shard(((0, 3), (1, 2)), (3, 4))}
    part = Snapshot("0" * 16, 2, second.tensors, shards, ("tcp://127.0.0.1:5",))
    made = [update.make(*pair) for pair in ((first, None), (second, first), (part, first))]
    seeds = [b"".join(each.parts) for each in made]

    def sealed(data: bytes) -> bytes:
        found = _json_in(data[12:])
        end = 12 + found[2] if found else max(12, len(data))
        return update._FRONT.pack(b"FLV1", end - 12, native.crc32c(data[12:end])) + data[12:]

    def parse(data: bytes) -> object:
        return update.read(source_of(data), len(data), first)

    yield "update", Parser(seeds, parse, (WireError,), sealed)
    signed = [signing.seal(b"secret", each.parts[0]) + seed for each, seed in zip(made, seeds, strict=True)]

    def parse_signed(data: bytes) -> object:
        rest = data[signing.SIGNED_BYTES :]
        check = signing.checks(b"secret", data[: signing.SIGNED_BYTES])
        return update.read(source_of(rest), len(rest), first, check)

    yield "signed update", Parser(signed, parse_signed, (WireError,))
    yield "parts", Parser([boxes.text_of((("w", ((3, 300), (0, 2))), ("b", ())))], boxes.boxes_of, (WireError,))
    found = referral.Referral("0" * 16, 3, "ab", "tcp://127.0.0.1:5").text()
    yield "referral", Parser([found], referral.Referral.of, (WireError,))
    yield "miss", Parser([b'["tcp://127.0.0.1:5", true]'], referral.miss_of, (WireError,))
    places = [b"tcp://0.0.0.0:7", b"tcp://[::]:7", b"tcp://host:7"]
    yield "relay", Parser(places, lambda data: referral.address_of(data, "10.0.0.1:5"), (WireError,))


def _folders(place: Path) -> Iterator[tuple[str, Parser]]:
    facts: dict[str, object] = {"form": 1, "run": "0" * 16, "version": 3, "ended": False}
    signed = {**facts, "began": 5}
    signed["signature"] = signing.sign(b"secret", [*signed.values()])

    def newest(secret: bytes | None) -> Parse:
        def parse(data: bytes) -> object:
            (place / "newest.json").write_bytes(data)
            return folder.FolderSource(Endpoint(place), secret)._newest()

        return parse

    seeds = [json.dumps(each).encode() for each in (facts, signed)]
    yield "newest.json", Parser(seeds, newest(None), (WireError, ConfigError, OSError))
    yield "signed newest.json", Parser(seeds, newest(b"secret"), (WireError, OSError))

    def saved(data: bytes) -> object:
        (place / "00000000.pt").write_bytes(data)
        return checkpoint.load(place, 0)

    checkpoint.save_delta({"w": gradient(100, 1, torch.bfloat16), "n": 3}, place)
    yield "checkpoint", Parser([(place / "00000000.pt").read_bytes()], saved, (WireError,))

    def status(data: bytes) -> object:
        (place / "status.json").write_bytes(data)
        from fusionlayer.cli.status import page

        found = report.read(place / "status.json")
        with _silence():
            return page(found)

    report.write(
        report.Report(2, "train.py", 2, Identity.own(), 5.0, 6.0, states=_rank_states(), past=((5.5, "a line"),)),
        place / "status.json",
    )

    def trace(data: bytes) -> object:
        (place / "trace.json").write_bytes(data)
        with _silence():
            return main(["trace", str(place / "trace.json")])

    whole = json.dumps(step_spans(0, 0.0) + step_spans(1, 1000.0)).encode()
    yield "timeline", Parser([whole, whole.replace(b"}, {", b"},\n{").replace(b"[{", b"[\n{")], trace)
    yield "status", Parser([(place / "status.json").read_bytes()], status, (ConfigError,))


class _Nowhere:
    def write(self, text: str) -> int:
        text.encode()  # as a terminal gets it
        return len(text)

    def flush(self) -> None:
        """Nothing to do."""

    def isatty(self) -> bool:
        return False


@contextmanager
def _silence() -> Iterator[None]:
    with redirect_stdout(_Nowhere()), redirect_stderr(_Nowhere()):  # type: ignore[type-var]
        yield


def _rank_states() -> tuple[RankState, ...]:
    recent = ((7, Call("all_reduce of (10) float32", where="train.py:3")), (8, Call("barrier")))
    channels = {"group 0": ChannelState((0, 1), 8, 7, Call("barrier"), recent, {"0": 17})}
    return tuple(
        RankState(
            rank, Identity.own(), 3, waits=bool(rank), channels=channels, counts={"steps": 5.0, "bytes_sent": 1e9}
        )
        for rank in range(2)
    )


def _stores() -> Iterator[tuple[str, Parser]]:
    mine, other = _rank_states()

    def compare(data: bytes) -> object:
        state = decode_state(data, 1, 2)
        return None if state is None else judge({0: mine, 1: state}, {})

    yield "state of a watcher", Parser([encode_state(other).encode()], compare)
    call = Call("all_gather", (3, 4), (3, 4), None, "a step", "")
    lost, channel = Finding("gone", (1,), "lost"), ChannelState((), 4, 3, call, ((3, call),))
    state = RankState(1, Identity.own(), 3, "failed", channels={"": channel}, finding=lost, leaving=lost, heard=True)
    yield "state of a transport", Parser([encode_state(state).encode()], lambda data: decode_state(data, 1, 2))
    yield "cause", Parser([encode_state(lost).encode()], lambda data: decode_finding(data, 2))
    identity = Identity.own().encode().encode()
    yield "identity", Parser([identity], lambda data: Identity.decode(data).trouble(Identity.own()))


def _member_stores() -> Iterator[tuple[str, Parser]]:
    where = generation.MemberAddress("node", ("host", "10.0.0.1"), 29500, "token")
    member = generation.Member("a", where, Identity.own().encode())
    now = generation.Generation(3, (member, member), ("a",), 7, where, ())
    told = [
        generation.MemberReport(now, 7, True).encode().encode(),
        generation.MemberReport(now, -1, True).encode().encode(),
    ]
    refuses = (TransportError,)
    yield "generation", Parser([now.encode().encode()], generation.Generation.decode, refuses)
    yield "report of a member", Parser(told, generation.MemberReport.decode, refuses)
    member_text = generation.encode_member(member).encode()
    yield "member", Parser([member_text], lambda data: str(generation.decode_member(data).process), refuses)
    yield (
        "address of rank 0",
        Parser([b"10.0.0.1:29500".hex().encode()], lambda data: meeting._address(data.decode("latin-1")), refuses),
    )
    letter = json.dumps({"hosts": ["h"], "port": 9, "near": f"fusionlayer-{16 * '0'}", "nonce": "00"}).encode()
    yield (
        "address of a star",
        Parser([letter], lambda data: star._Address.read(torch.tensor([*data], dtype=torch.uint8)), refuses),
    )
    facts = json.dumps(["node", {"checksum": True}]).encode()

    def settings_of(data: bytes) -> object:
        store: Any = SimpleNamespace(
            set=lambda *_: None, add=lambda *_: 1, wait=lambda _: None, multi_get=lambda _: [data]
        )
        return gather_settings(store, 0, 1, "node", {"checksum": True})

    yield "settings of a rank", Parser([facts], settings_of, refuses)
    nonce, places = json.dumps({"node": "n", "nonce": "00" * 16}), json.dumps([[["10.0.0.1", 5], ["fe80::1", 9]]])
    of_sockets: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "nonce": (nonce, sockets._node_and_nonce),
        "listeners": (places, listeners),
    }
    for name, (seed, parse) in of_sockets.items():
        each = partial(lambda parse, data: sockets._parsed([data], parse), parse)
        yield f"{name} of sockets", Parser([seed.encode()], each, (LinkError,))


def _messages() -> Iterator[tuple[str, Parser]]:
    signature = requests.Signature("allreduce", dtypes=("float32",), shapes=((3, 4),), op="Sum")
    asked = [requests.Request(3, "a", signature, (4,), b"data"), requests.Request(4, 7, signature)]
    given = requests.Response("execute", (requests.Item(3, (1, 2), None), requests.Item(None, (), signature)))
    yield (
        "requests",
        Parser([requests.Writer(9).write(asked)], lambda data: requests.Reader().read(data), (WireError,)),
    )
    yield "response", Parser([requests.write_response(given)], requests.read_response, (WireError,))
    farewell = requests.write_farewell(requests.Reason("it ends", (1,)))
    yield "farewell", Parser([farewell], requests.read_farewell, (WireError,))

    def star_frames(data: bytes) -> object:
        here, there = socket.socketpair()
        with there:
            connection = star.StarConnection(here, ConnectionKeys(bytes(32), bytes(32)))
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            while connection.received() is not None:
                pass
            connection.close()

    def star_messages(*messages: bytes) -> bytes:
        seal, sent = Seal(bytes(32)), b""
        for message in messages:
            facts = star._FACTS.pack(len(message), seal.tag(hashlib.sha256(message).digest()))
            sent += facts + struct.pack("<I", zlib.crc32(facts)) + message
        return sent

    seeds = [star_messages(*several) for several in ((b"message",), (b"message",) * 3, (b"message", b"x" * 5000))]
    yield "star", Parser(seeds, star_frames, (), lambda data: star_messages(data[star._PREFIX.size :]))

    secret, zeros = b"s" * 16, bytes(16)
    reception = introduction.Reception([], secret, [1])

    def hello_of(number: int, nonce: bytes) -> bytes:
        said = introduction._NUMBERS.pack(number, 0) + zeros + nonce
        return introduction._HELLO.pack(number, nonce, prove(secret, b"caller", said))

    def receive_caller(data: bytes) -> object:
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            caller = reception._callers[here] = introduction._Caller(here, "here")
            caller.nonce = zeros
            reception._selector.register(here, selectors.EVENT_READ)
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            while reception._callers:
                admitted = reception.admit(1.0)
                assert all(number == 1 and data.startswith(hello_of(1, data[4:20])) for number, *_ in admitted)

    seeds = [hello_of(number, bytes([number]) * 16) for number in (1, 2)]
    yield (
        "hello of a rank",
        Parser(seeds, receive_caller, (), lambda data: hello_of(*introduction._HELLO.unpack(data.ljust(52)[:52])[:2])),
    )

    def introduce(data: bytes) -> object:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            assert introduction.introduce(here, secret, 1, time.monotonic() + 180) is None

    yield "answer of a host", Parser([bytes(48)], introduce, (OSError,))

    def greet(data: bytes) -> object:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            return greeting.greet(here, "follower", None)

    opening = greeting.Greeting(None).opening
    refused = (WireError, ConfigError, TransportError, OSError)
    yield "opening", Parser([opening, opening + bytes(33), opening + b"\1" + bytes(32)], greet, refused)

    def hello(data: bytes) -> object:
        return greeting.Greeting(None).answer(data.ljust(greeting.HELLO_BYTES, b"\0")[: greeting.HELLO_BYTES], None)

    yield "hello", Parser([bytes(16) + b"me" + bytes(greeting.HELLO_BYTES - 18)], hello, ())
    yield (
        "frame of a publisher",
        Parser(
            [frames.frame(frames.DATA, 70, None), frames.frame(frames.BEAT, 0, None)],
            lambda data: frames.read_frame(data.ljust(frames.PREFIX_BYTES)[: frames.PREFIX_BYTES]),
            (WireError,),
        ),
    )
    facts = (None, None, None, 0, None, None, 1, b"h" * 66, 512, 1024, False, b"/torch_1_2", 3, b"e" * 64, True)
    yield "device memory", Parser([device_memory.pack(5, facts)], device_memory.unpack, (OSError,))
    message = encoded(codecs.get("int8"), torch.ones(40))
    yield "header", Parser([message.numpy().tobytes()], Header.unpack, (WireError,))


def _texts() -> Iterator[tuple[str, Parser]]:
    plan = FusionPlan.build([[TensorInfo("a", 9, "float32", 4)]], 2, "int8", {"group": 64}, "two_shot", 16)

    def parse_plan(data: bytes) -> object:
        try:
            data_or_error: object = records.parse(data.decode("utf-8", "replace"))
        except yaml.YAMLError as error:
            raise ConfigError(str(error)) from None
        from fusionlayer.base.plan import _PlanFile

        made = records.build(_PlanFile, data_or_error, "plan").plan
        return made.check([TensorInfo("a", 9, "float32", 4)], 2)

    yaml_texts = [
        plan.to_bytes(),
        b"version: 1\nworld_size: 1:30\nbuckets: [{a: 2001-01-01, b: !!int '3'}, 0x1f, .inf]\n",
    ]
    yield "plan", Parser(yaml_texts, parse_plan, (ConfigError,))


def _lists(place: Path) -> Iterator[tuple[str, Parser]]:
    """Files that users write, or copy from elsewhere."""

    def of_file(read: Callable[[Path], object]) -> Parse:
        def parse(data: bytes) -> object:
            (place / "list").write_bytes(data)
            return read(place / "list")

        return parse

    hosts = b"node1 slots=4\nme@node2:3 # big\n[fd00::2]:5\nfd00::3\n"
    yield "hostfile", Parser([hosts], of_file(read_hostfile), (ConfigError,))
    secrets = b"# all\nme:0123456789abcdef\n0123456789abcdef\n"
    yield "secrets", Parser([secrets], lambda data: [*keyring._parsed(data, place)], (ConfigError,))
    settings = b"codec: int8\ncodec_options: {group: 64}\nrates: [1gbit]\ntimeout: &a 3\nlanes: *a\n"
    yield (
        "settings",
        Parser([settings], of_file(lambda path: config.load({"FUSIONLAYER_CONFIG": str(path)})), (ConfigError,)),
    )
    profile = b"""{version: 1, title: t, machine: {cores: 2, workers: 2}, codecs: {}, links: {},
copy: [[1, 1.0], [9, 2.0]],
model: {name: m, forward: 1.0, backward: 1.0, optimizer: 0.5, tensors: [{name: a, numel: 3, ready: 0.1}]}}"""
    yield "profile", Parser([profile], of_file(lambda path: str(Profile.from_yaml(path))), (ConfigError,))


def _codec_messages() -> Iterator[tuple[str, Parser]]:
    x = gradient(300, 5)
    for name in codecs.names():
        codec = codecs.get(name).bare
        try:
            right = encoded(codec, x)
            codec.decode(right, torch.empty(300))
        except Exception:  # noqa: S112 - it needs a base, or ranks to agree with
            continue

        def parse(data: bytes, codec: Any = codec, nbytes: int = right.numel()) -> object:
            payload = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")[:nbytes]), dtype=torch.uint8)
            return codec.decode(payload, torch.empty(300))

        yield f"messages of {name}", Parser([right.numpy().tobytes()], parse, (WireError,))


def parsers(place: Path) -> dict[str, Parser]:
    """Return all parsers; those of files keep them in the folder ``place``."""
    makers = (
        _updates(),
        _folders(place),
        _stores(),
        _member_stores(),
        _messages(),
        _texts(),
        _lists(place),
        _codec_messages(),
    )
    return {name: parser for maker in makers for name, parser in maker}


# ---- trying ---------------------------------------------------------------------------------------------------------


def attempt(parser: Parser, count: int, seed: int) -> list[tuple[bytes, str]]:
    """Try ``count`` inputs; return those at which the parser raised what it should not, each with the traceback."""
    chance = random.Random(seed)
    wrong = []
    for number in range(count):
        data = mutated(chance, parser.seeds)
        if number % 2:
            data = parser.sealed(data)
        try:
            parser.parse(data)
        except parser.refuses:
            pass
        except Exception:
            wrong.append((data, traceback.format_exc()))
    return wrong


def run(arguments: Sequence[str]) -> int:
    """Try as many inputs as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parsers to try; the results go into fuzz-some")
    driver.add_options(parser)
    options = parser.parse_args(arguments)
    # What takes memory by a number of the input fails.
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, resource.RLIM_INFINITY))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        every = {n: each for n, each in parsers(Path(place)).items() if not options.only or n in options.only}
        count = -(-options.count // len(every))
        for name, each in every.items():
            wrong = attempt(each, count, options.seed)
            rows.append({"parser": name, "inputs": count, "wrong": len(wrong)})
            print(f"{name}: {count} inputs, {len(wrong)} wrong", flush=True)
            for data, trace in wrong[:3]:
                print(f"  {data[:300]!r}\n{trace}", flush=True)
    title = f"{count * len(every)} random inputs to {len(every)} parsers, seed {options.seed}"
    total = {"parsers": len(every), "inputs": count * len(every), "wrong": sum(row["wrong"] for row in rows)}
    driver.finish(options, "fuzz-some" if options.only else "fuzz", title, driver.begin(options), rows, [total])
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
