"""torch's own tests of torch.distributed end as on gloo when every call that can be is compressed without loss."""

from collections import Counter
from importlib.util import find_spec

import pytest

from tests.tiers import exhaustive

from .torch_suite import OURS, PEER, verdicts

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(find_spec("torch.testing._internal.distributed") is None, reason="torch has none of its tests"),
]

PARTS = (
    "test_all_reduce_coalesced",
    "test_all_gather",
    "test_all_to_all_single",
    "test_isend",
    "test_send_recv_with_tag",
    "test_batch_isend_irecv",
    "test_monitored_barrier_gloo",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_logging_data_cpu",
)
"""Parts of the names of some tests of each kind; ``("",)`` runs all."""
DIFFER = {
    "test_isend_autograd_profiler",
    "test_isend_torch_profiler",
    "test_send_recv_with_tag_autograd_profiler",
    "test_send_recv_with_tag_torch_profiler",
}
"""A profiler shows a compressed message with bytes, not shapes: only works of torch may have asynchronous events."""


@exhaustive(guarded_by="tests/backend/test_differential.py::test_500_calls_are_those_of_gloo")
@pytest.mark.timeout(400)
def test_torchs_own_tests_end_as_on_gloo() -> None:
    expected, found = (dict(verdicts(backend, 2, PARTS)) for backend in (PEER, OURS))
    passed = {name for name, (kind, _, _) in expected.items() if kind == "passed"}
    errors = {name: found[name] for name in passed if found[name][0] != "passed"}
    assert errors.keys() == DIFFER, errors
    calls = sum((Counter(made) for _, _, made in found.values()), Counter[str]())
    assert len(passed) >= 37 and all(any(part in name for name in passed) for part in PARTS), passed
    assert all(calls[op] for op in ("all_reduce", "all_gather", "all_to_all", "send", "recv")), calls
