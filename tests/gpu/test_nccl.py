"""Two ranks on one device over NCCL: the bits of gloo in every trainer, and failures that end in time and are named."""

import signal
from typing import Any

import pytest
import torch.distributed as dist

from tests.gpu import trainers, two_ranks
from tests.gpu.place import ON, PATIENCE, needs_device
from tests.gpu.trainers import OWN_PARTS, TRAINERS
from tests.harness import outcomes_of, run_ranks

# Ranks are processes, which need more than the one core that a test of one process is kept on.
pytestmark = pytest.mark.medium

BACKEND = "cpu:gloo,cuda:nccl" if ON == "cuda" else "gloo"
LARGE = (1 << 31) + 5000 if ON == "cuda" else (1 << 16) + 5000


def by_gloo(body: Any, *args: Any) -> list[Any]:
    return run_ranks(body, 2, ON, *args, timeout=PATIENCE)


def over_nccl(body: Any, *args: Any, timeout: float = PATIENCE) -> list[Any]:
    return run_ranks(body, 2, ON, *args, backend=BACKEND, timeout=timeout)


@pytest.fixture(scope="module", autouse=True)
def meeting() -> None:
    """Let torch alone sum over NCCL once. Where that fails, every test here fails at once, and says why."""
    if ON == "cuda" and not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    assert over_nccl(two_ranks.meet, timeout=PATIENCE / 2) == [[3.0] * 3] * 2


def test_torch_alone() -> None:
    """Nothing beyond the meeting: a run of this test shows whether the others can be run on this machine."""


@pytest.mark.parametrize("peers", [False, True], ids=["nccl", "peers"])
def test_what_every_transport_does(peers: bool) -> None:
    over_nccl(two_ranks.conform, peers)


@pytest.mark.parametrize("peers", [False, True], ids=["nccl", "peers"])
def test_subsets_duplicates_and_messages(peers: bool) -> None:
    assert over_nccl(two_ranks.in_parts, peers) == by_gloo(two_ranks.in_parts, False)


def test_sums_in_one_launch() -> None:
    assert over_nccl(two_ranks.in_one_launch) == by_gloo(two_ranks.in_one_launch)


@pytest.mark.parametrize("body, options", TRAINERS, ids=lambda value: getattr(value, "__name__", None) or str(value))
def test_trainers_have_the_bits_of_gloo(body: Any, options: dict[str, Any]) -> None:
    by_nccl = over_nccl(body, options)
    assert body in OWN_PARTS or by_nccl[0] == by_nccl[1]
    if ON == "cuda":
        assert by_nccl == by_gloo(body, options)


def test_what_horovods_scripts_lean_on() -> None:
    over_nccl(trainers.horovods_behaviours)


@pytest.mark.parametrize("codec", ["raw", "int8", "topk"])
def test_communicators_of_others_beside_ours(codec: str) -> None:
    """With NCCL_LAUNCH_RACE_FATAL a launch by two threads at once would be an error."""
    by_nccl = over_nccl(trainers.beside_others, codec)
    assert by_nccl[0] == by_nccl[1]


@pytest.mark.parametrize(
    "how, words", [(signal.SIGKILL, "rank 1 is gone (process "), (signal.SIGSTOP, "rank 1 is stopped (process ")]
)
@pytest.mark.parametrize("peers", [False, True], ids=["nccl", "peers"])
def test_a_rank_that_is_lost_is_named(how: signal.Signals, words: str, peers: bool) -> None:
    outcomes = outcomes_of(
        two_ranks.lose_the_other, 2, ON, peers, signals={(1, "summed"): how}, backend=BACKEND, store="tcp"
    )
    assert (outcomes[0].kind, outcomes[0].error[0]) == ("raised", "TransportError"), outcomes[0]
    assert words in outcomes[0].error[1] and outcomes[0].attributes["ranks"] == (1,), outcomes[0]


def test_closing_waits_for_the_device() -> None:
    over_nccl(two_ranks.close_at_once, 1 << 24 if ON == "cuda" else 1 << 18)


@needs_device
def test_an_error_of_the_device_is_reported_as_itself() -> None:
    healthy, broken = outcomes_of(two_ranks.break_the_device, 2, ON, backend=BACKEND, store="tcp")
    for outcome in (healthy, broken):
        assert (outcome.kind, outcome.attributes.get("ranks")) == ("raised", (1,)), f"{outcome}\n{outcome.trace}"
    assert "device-side assert" in broken.error[1], broken


def test_elements_beyond_32_bits() -> None:
    errors = over_nccl(two_ranks.beyond_32_bits, LARGE)
    assert errors[0] == errors[1] and max(errors[0]) < 0.02, errors
