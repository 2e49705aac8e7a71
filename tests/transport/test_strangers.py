"""Strangers while a job begins: programs that reach its ports, or write into its store."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusionlayer import context, launch
from fusionlayer.base.errors import TransportError
from fusionlayer.elastic import forming
from fusionlayer.elastic.forming import KNOCKS, NEWEST, PATIENCE, TICKETS, Former
from fusionlayer.elastic.generation import Generation, Member, MemberReport, decode_member, encode_member
from fusionlayer.elastic.member_store import open_store, reach, sealed
from fusionlayer.launch import RankInfo, meeting, stores
from fusionlayer.process.processes import Identity
from fusionlayer.transport import Transport, c10d, star
from fusionlayer.transport.links import proof, reconnecting
from tests.harness import outcomes_of, run_ranks, stay_last
from tests.ports import free_port
from tests.ranks import over_threads
from tests.tiers import exhaustive, tiered

KEY = "a key of this job alone"

JUNK = [
    *(b"", b"\xff\xfe\0", b"junk", b"-1", b"7", b"9" * 5000, b"null", b"1e999", b'"x"', b"[" * 100_000),
    *(b"{}", b"[]", b'[1, {"a": []}]', b'["text", [-1, "x"]]', b"0 -5", b"0 99999999999", b'{"nonce": "xy"}'),
]


@pytest.fixture(params=[None, KEY], ids=["no key", "key"])
def key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Set the job's key, or none."""
    if request.param is not None:
        monkeypatch.setenv("FUSIONLAYER_JOB_KEY", request.param)
    return request.param  # type: ignore[no-any-return]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returns or raises."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(timeout=180) for each in [pool.submit(run, call) for call in calls]]


# ---- what stands in the store ---------------------------------------------------------------------------------------


class Poisoned(dist.Store):
    """A store in which a stranger has written a value over that of a rank."""

    def __init__(self, store: dist.Store, key: str, value: bytes) -> None:
        super().__init__()
        self._store, self._key, self._value = store, key, value

    def get(self, key: str) -> bytes:
        return self._value if self._key in key else self._store.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._store.compare_set(key, expected, desired)
        return self._value if self._key in key else found

    def check(self, keys: list[str]) -> bool:
        return self._store.check([key for key in keys if self._key not in key] or ["always"])

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=5)) -> None:
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


def test_ranks_that_meet_survive_any_value(key: str | None) -> None:
    for poisoned in ("size", "at/0", "here/1", "here/2", "cause"):
        for value in JUNK:
            store = dist.HashStore()
            store.set("always", "")
            bad, ends = Poisoned(store, poisoned, value), time.monotonic() + 1
            met = at_once(*(partial(launch._await_all, bad, RankInfo(rank, 2), 1.0, ends) for rank in range(2)))
            assert all(each is None or isinstance(each, TransportError) for each in met), (poisoned, value, met)
            if key is not None:  # ranks that are quick need not read who the others are
                told = ["has no seal of this job's key" in str(each) for each in met]
                assert any(told) or (met == [None, None] and poisoned != "size"), (poisoned, value, met)


def test_ranks_that_greet_each_other_survive_any_value(key: str | None) -> None:
    for value in JUNK:
        store = dist.HashStore()
        store.set("always", "")
        store.add("fusionlayer/hello", 1)  # a process that is gone
        bad = Poisoned(store, "hello/", value)
        met = at_once(*(partial(launch._greet, bad, RankInfo(rank, 2), 0.05) for rank in range(2)))
        assert all(isinstance(each, TransportError) for each in met), (value, met)
        assert key is None or "has no seal of this job's key" in str(met[0])


def test_a_count_of_a_stranger_takes_neither_memory_nor_time_of_rank_0() -> None:
    looks: list[int] = []

    class Counting(Poisoned):
        def check(self, keys: list[str]) -> bool:
            looks.append(len(keys))
            return super().check(keys)

    store = dist.HashStore()
    store.set("always", "")
    store.add("fusionlayer/hello", 1 << 20)
    with pytest.raises(TransportError, match="did not come within"):
        launch._greet(Counting(store, "nowhere", b""), RankInfo(0, 2), 0.5)
    assert max(looks) < 2000


class Board(meeting.Board):
    text = ""

    def write(self, text: str) -> None:
        self.text = text

    def look(self) -> str:
        return self.text


def test_no_rank_follows_an_address_that_another_program_has_published(key: str | None) -> None:
    board = Board(1.0)
    board.publish(1234)
    assert board.read() == ("127.0.0.1", 1234)
    right = board.text
    for value in ("x", "127.0.0.1:99", b"127.0.0.1:99".hex() + "ff", right[:-1], *("é", "70" * 2000)):
        board.text = value
        with pytest.raises(TransportError, match="another program has written it|in the store"):
            board.read()
    board.text = b"evil.example.org:99".hex()
    if key is None:
        assert board.read() == ("evil.example.org", 99)
    else:
        with pytest.raises(TransportError, match="has no seal of this job's key"):
            board.read()


def test_a_file_of_junk_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    board = meeting.FileBoard({"PMIX_NAMESPACE": "job"}, 1.0, None)
    (tmp_path / f"fusionlayer-{os.getuid()}-job").write_bytes(b"\xff\xfe" * 9999)
    with pytest.raises(TransportError, match="another program has written it"):
        board.read()


# ---- rank 0 announces nonsense --------------------------------------------------------------------------------------

NAME = f"fusionlayer-{16 * '0'}"
LETTERS: list[object] = [
    *({}, [], "x", 7, None, {"hosts": []}, {"hosts": 1, "port": 1, "near": "x", "nonce": ""}),
    *({"hosts": ["a\0b"], "port": port, "near": NAME, "nonce": "00"} for port in (0, -1, 1 << 20, "x")),
    *({"hosts": [], "port": 9, "near": near, "nonce": "00"} for near in (7, "", "../x", "x" * 300)),
    *({"hosts": [], "port": 9, "near": NAME, "nonce": nonce} for nonce in (1, "x", None)),
]


def test_nonsense_of_rank_0_about_its_address_is_an_error() -> None:
    cases: list[tuple[int, bytes]] = [(length, b"") for length in (0, -1, -(1 << 62), 1 << 62, 1 << 30)]
    cases += [(len(each), each) for each in JUNK if each]
    cases += [(len(text), text) for text in (json.dumps(letter).encode() for letter in LETTERS)]
    for length, letter in cases:

        def body(transport: Transport, length: int = length, letter: bytes = letter) -> str:
            if transport.rank:
                with pytest.raises(TransportError) as error:
                    star.connect(transport)
                return str(error.value)
            name = torch.zeros(32, dtype=torch.uint8)
            transport.all_gather(name, torch.empty(2, 32, dtype=torch.uint8))
            transport.broadcast(torch.tensor([length]), 0)
            if 0 < length <= 1 << 20:
                transport.broadcast(torch.frombuffer(bytearray(letter), dtype=torch.uint8), 0)
            return ""

        assert "makes no sense" in over_threads(2, body)[1], (length, letter[:80])


def test_hosts_that_lead_nowhere_end_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    now = [0.0]

    def nowhere(host: str, port: int) -> socket.socket:
        tried.append(host)
        now[0] += 5
        raise OSError("timed out")

    monkeypatch.setattr(star, "_reach", nowhere)
    monkeypatch.setattr(star.time, "monotonic", lambda: now[0])
    address = star._Address(["\0", *(f"10.0.0.{n}" for n in range(10_000))], 9, NAME, b"x")
    with pytest.raises(TransportError, match="cannot reach rank 0 at port 9"):
        star._call(address, 1, near=False, deadline=12.0)
    assert len(tried) < 5


# ---- an elastic job -------------------------------------------------------------------------------------------------


def begun() -> tuple[list[Former], list[Any], Generation, list[Any]]:
    """Return two members, as threads have them: formers, stores, their generation, and stores as strangers see them."""
    formers, stores, strangers, members = [], [], [], []
    for number in range(2):
        kept, where = open_store(True, PATIENCE)
        members.append(Member(f"m{number}", where, Identity(0, "elsewhere", "", "").encode()))
        stores.append(sealed(kept))
        strangers.append(reach(where, PATIENCE))
        formers.append(Former(members[-1], stores[-1], 180.0, lambda: members[0].address))
    first = Generation(0, tuple(members), (), 0, members[0].address)
    for store in stores:
        store.set(NEWEST, first.encode())
    return formers, stores, first, strangers


def form(formers: list[Former], first: Generation, between: bool = True) -> Generation:
    found = at_once(*(partial(each.form, MemberReport(first, 3, between)) for each in formers))
    assert len({each.encode() for each in found}) == 1, found
    return found[0]  # type: ignore[no-any-return]


def test_strangers_at_a_member_neither_join_nor_stop_the_members(key: str | None) -> None:
    formers, _, first, strangers = begun()
    guest, where = open_store(True, PATIENCE)
    wild = Member("stranger", where, Identity(0, "elsewhere", "", "").encode())
    knocks = [*JUNK, encode_member(wild).encode()]
    for value in JUNK[:4]:
        knocks.append(json.dumps({"id": "x", "identity": "", "address": {"node": value.hex()}}).encode())
    for port in (0, -1, 1 << 20, "x", 1.5, None):
        address = {"node": "", "names": ["a"], "port": port, "token": ""}
        knocks.append(json.dumps({"id": "x", "identity": "", "address": address}).encode())
    for names in ([], ["a\0" + "b" * 99], ["x"] * 1000):
        address = {"node": "", "names": names, "port": 7, "token": ""}
        knocks.append(json.dumps({"id": "x", "identity": "", "address": address}).encode())
    nowhere = {"node": "", "names": ["127.0.0.1"], "port": free_port(), "token": ""}
    for name, identity in (("\ud800", ""), ("x", "\ud800"), ("../x", ""), (7, ""), ("x" * 99, "")):
        knocks.append(json.dumps({"id": name, "identity": identity, "address": nowhere}).encode())
        if not identity:
            with pytest.raises(TransportError, match="makes no sense"):
                decode_member(knocks[-1])
    for value in knocks:
        strangers[0].set(f"knock/{strangers[0].add(TICKETS, 1)}", value)
        strangers[0].add(KNOCKS, 1)
    strangers[0].set("report/m1", JUNK[1])
    now = form(formers, first)
    joined = [each.id for each in now.members if each.id not in ("m0", "m1")]
    assert joined == ([] if key else ["stranger"]), "with a key nobody joins who has none"
    assert now.number == 1 and not formers[0].has_visitors()
    del guest


def test_counts_of_a_stranger_keep_no_member_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could count up to a number of visitors that never come: members would look for them for ever, every step."""
    monkeypatch.setattr(forming, "_MOST_VISITORS", 8)
    formers, _, first, strangers = begun()
    strangers[0].add(TICKETS, 1 << 50)
    strangers[0].add(KNOCKS, 1 << 50)
    assert formers[0].has_visitors()
    form(formers, first)
    assert not formers[0].has_visitors()
    strangers[0].add(KNOCKS, 1)
    assert formers[0].has_visitors()


def test_a_member_list_of_junk_leads_no_member_astray(key: str | None) -> None:
    for value in [*JUNK, json.dumps({"number": 1 << 70, "members": [], "fresh": [], "behind": [], "done": 0}).encode()]:
        with pytest.raises(TransportError, match="makes no sense"):
            Generation.decode(value)
    formers, stores, first, strangers = begun()
    # With a number of its own, and without the members: they would believe that the job goes on without them.
    false = Generation(5, (Member("x", first.members[0].address, ""),), (), 3, first.members[0].address)
    for stranger in strangers:
        stranger.set(NEWEST, false.encode())
    if key is not None:
        assert form(formers, first).number == 1
        strangers[0].set(NEWEST, false.encode())
        with pytest.raises(TransportError, match="has no seal of this job's key"):
            stores[0].get(NEWEST)


# ---- connections ----------------------------------------------------------------------------------------------------

OPENINGS = [b"", b"x", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n" * 99]
# Two processes have one connection of gloo. Who calls says its number, that of its rank, and is asked nothing else.
IN_ITS_PLACE = [rank.to_bytes(8, "little") for rank in range(2)]


@contextmanager
def strangers_at(
    places: list[tuple[str, int]], count: int = 200, openings: Sequence[bytes] = OPENINGS
) -> Iterator[None]:
    """Hold connections to these ports: silent ones, and ones that have sent garbage or half of something."""
    held = []
    for number in range(count):
        for place in places:
            with suppress(OSError):
                end = socket.create_connection(place, 5)
                held.append(end)
                end.sendall(openings[number % len(openings)])
    try:
        yield
    finally:
        for end in held:
            end.close()


def test_strangers_at_stores_delay_nobody(key: str | None) -> None:
    port = free_port()
    server = stores.open_store("127.0.0.1", port, 0, 2, 60.0, serve_it=True)
    kept, where = open_store(True, PATIENCE)
    with strangers_at([("127.0.0.1", port), ("127.0.0.1", where.port)]):
        client = stores.open_store("127.0.0.1", port, 1, 2, 60.0, serve_it=False)
        ends = time.monotonic() + 60
        ends_of = enumerate((server, client))
        met = at_once(*(partial(launch._await_all, end, RankInfo(rank, 2), 60.0, ends) for rank, end in ends_of))
        assert met == [None, None]
        sealed(reach(where, PATIENCE)).set("a", "b")
        assert sealed(kept).get("a") == b"b"


def listening() -> list[tuple[str, int]]:
    """Return the ports of this host's loopback on which this process listens."""
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            address, port = words[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def launched(rank: int, world: int, port: int, key: str | None) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if key is not None:
        os.environ["FUSIONLAYER_JOB_KEY"] = key


def train(timeout: float, sockets: bool = False) -> float:
    context.init(timeout, transport="sockets" if sockets else None)
    transport = context.transport()
    end = star.connect(transport)
    x = torch.full((1000,), float(transport.rank + 1))
    transport.all_reduce(x)
    transport.barrier()
    end.close()
    return float(x.mean())


TRANSPORTS = [(None, False), (KEY, False), (KEY, True), (None, True)]


def train_among_strangers(
    rank: int, world: int, port: int, key: str | None, sockets: bool, openings: Sequence[bytes], timeout: float
) -> float:
    launched(rank, world, port, key)
    with pytest.MonkeyPatch.context() as patch:
        original = stores.EndingStore.set
        ended = threading.Event()
        threads: list[threading.Thread] = []

        def intrude(self: stores.EndingStore, name: str, value: str) -> None:
            """Come as soon as an address is known, and before the other rank does."""
            if ("gloo/" in name or "/at" in name) and not threads:
                come = threading.Event()

                def hold() -> None:
                    with strangers_at(listening(), 100, openings):
                        come.set()
                        ended.wait(180)

                threads.append(threading.Thread(target=hold))
                threads[0].start()
                assert come.wait(180)
            original(self, name, value)

        patch.setattr(stores.EndingStore, "set", intrude)
        try:
            result = train(timeout, sockets)
        except TransportError:
            stay_last()  # or the other one may see first that this one is gone
            raise
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert threads, "no stranger came"
        return result


@pytest.mark.medium
@pytest.mark.parametrize("key, sockets", tiered(TRANSPORTS, lambda *case: case == (KEY, False)))
def test_a_job_begins_among_strangers_at_all_of_its_ports(key: str | None, sockets: bool) -> None:
    given = free_port(), key, sockets, OPENINGS, 60.0
    assert run_ranks(train_among_strangers, 2, *given, backend=None) == [3.0, 3.0]


def train_in_vain(*given: Any) -> float:
    """As ``train_among_strangers``; a rank waits for a second only until the other has proved who it is."""
    with pytest.MonkeyPatch.context() as patch:
        prove = c10d.prove_link
        patch.setattr(c10d, "prove_link", lambda *place: prove(*place[:-1], 1.0))
        return train_among_strangers(*given)


@pytest.mark.medium
@exhaustive(guarded_by="tests/transport/test_strangers.py::test_what_is_connected_without_the_job_key_is_no_rank")
@pytest.mark.parametrize("key", [KEY, None])
def test_a_stranger_in_a_rank_s_place_at_gloo_is_an_error_within_the_timeout(key: str | None) -> None:
    timeout = 4.0 if key is None else 60.0  # with a key nobody waits that long
    given = free_port(), key, False, IN_ITS_PLACE, timeout
    for outcome in outcomes_of(train_in_vain, 2, *given, backend=None):
        assert outcome.error[0] == "TransportError", outcome
        assert key is None or "does not prove that it is a process of this job" in outcome.error[1], outcome


def train_with(rank: int, world: int, port: int, key: str | None, name: str, value: bytes) -> float:
    """A rank's value of a key is replaced, as a stranger does who writes after it and before the others read."""
    launched(rank, world, port, key)
    with pytest.MonkeyPatch.context() as patch:
        if rank == (name != "sockets/at"):  # rank 0 calls no other, and reads no address
            original = dist.Store.set

            def replace(self: dist.Store, where: str, given: Any) -> None:
                original(self, where, value if name in where else given)  # type: ignore[arg-type]

            patch.setattr(dist.Store, "set", replace)
        try:
            return train(3.0, sockets="sockets" in name)
        except TransportError:
            if rank == 0:
                stay_last()  # its process keeps the store by which the other learns why it fails
            raise


KEYS = ("settings/", "gloo/", "who/", "at/", "node/", "sockets/is", "sockets/at")
POISON = [(key, name, value) for key in (None, KEY) for name in KEYS for value in JUNK[2::5]]
FAST = [(None, "settings/", b"junk"), (None, "gloo/", b"junk"), (KEY, "settings/", b"junk"), (KEY, "gloo/", b"junk")]
FAST += [(None, "sockets/is", b"junk"), (None, "sockets/at", b"junk")]


@pytest.mark.medium
@pytest.mark.parametrize(
    "key, name, value", tiered(POISON, lambda *case: case in FAST), ids=lambda value: str(value)[:24].encode().hex()
)
def test_a_poisoned_key_is_an_error_that_says_so_or_nothing(key: str | None, name: str, value: bytes) -> None:
    outcomes = outcomes_of(train_with, 2, free_port(), key, name, value, backend=None)
    for outcome in outcomes:
        assert outcome.kind == "returned" and outcome.value == 3.0 or outcome.error[0] == "TransportError", outcome
    if key is not None and name in ("settings/", "gloo/"):
        assert any("has no seal of this job's key" in outcome.error[1] for outcome in outcomes), outcomes


def train_without_the_key(rank: int, world: int, port: int, folder: str) -> float:
    """Rank 1 stands for a stranger that gloo has connected: it has all but the key."""
    seen = dist.FileStore(f"{folder}/seen", world)
    launched(rank, world, port, KEY)
    if rank == 1:
        proof.job_key = type("none", (), {"find": staticmethod(lambda: b"another key that it has guessed")})  # type: ignore[assignment]
    try:
        return train(5.0)
    except TransportError:
        if rank == 0:
            seen.set("by rank 0", "")
            stay_last()
        seen.wait(["by rank 0"])  # or rank 0 may see first that this one is gone
        raise


@pytest.mark.medium
def test_what_is_connected_without_the_job_key_is_no_rank(tmp_path: Path) -> None:
    for outcome in outcomes_of(train_without_the_key, 2, free_port(), str(tmp_path), backend=None):
        assert outcome.error[0] == "TransportError" and "it has no job key" in outcome.error[1], outcome


def write_down(rank: int, world: int, port: int, key: str | None) -> tuple[list[str], set[str]]:
    """Return the secrets of this rank's transport, and all that it has written into stores."""
    launched(rank, world, port, key)
    secrets, written = [], set()
    keeper, write = reconnecting.Keeper.__init__, dist.Store.set

    def take(self: Any, *given: Any) -> None:
        secrets.extend(each.hex() for each in given if isinstance(each, bytes))
        keeper(self, *given)

    def note(self: dist.Store, where: str, value: Any) -> None:
        written.add(value.decode("latin-1") if isinstance(value, bytes) else value)
        write(self, where, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconnecting.Keeper, "__init__", take)
        patch.setattr(dist.Store, "set", note)
        train(60.0, sockets=True)
    return secrets, written


@pytest.mark.medium
def test_no_secret_stands_in_the_store() -> None:
    told = run_ranks(write_down, 2, free_port(), KEY, backend=None)
    secrets = {each for rank in told for each in rank[0]}
    assert len(secrets) == 1, "the ranks share one"
    values = "\n".join(value for rank in told for value in rank[1])
    assert "nonce" in values and not any(secret in values for secret in (*secrets, KEY))


def meet_with_and_without(rank: int, world: int, port: int) -> float:
    launched(rank, world, port, KEY if rank == 0 else None)
    if rank == 0:
        try:
            return train(3.0)
        finally:
            stay_last()
    return train(3.0)


@pytest.mark.medium
def test_a_rank_without_the_job_key_is_told_so() -> None:
    outcomes = outcomes_of(meet_with_and_without, 2, free_port(), backend=None)
    for outcome in outcomes:
        assert outcome.error[0] == "TransportError", outcome
        assert "give all processes of a job the same FUSIONLAYER_JOB_KEY" in outcome.error[1], outcome
