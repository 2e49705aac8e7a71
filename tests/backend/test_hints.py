"""What callers tell the backend of a tensor; that groups heed it is shown by the tests of DeepSpeed."""

import threading

import pytest
import torch

from fusionlayer import UsageError, backend
from fusionlayer.backend import hints


def test_the_innermost_hint_of_the_calling_thread_counts() -> None:
    seen: list[bool] = []
    with backend.hint(plain=True):
        thread = threading.Thread(target=lambda: seen.append(hints.current().plain))
        thread.start()
        thread.join()
        with backend.hint():
            seen.append(hints.current().plain)
        seen.append(hints.current().plain)
        with pytest.raises(ZeroDivisionError), backend.hint():
            raise ZeroDivisionError
        seen.append(hints.current().plain)
    assert seen == [False, False, True, True] and hints.current() == hints.NONE


def test_a_residual_is_of_all_that_is_summed() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    assert hints.residual_of(tensors) is None
    with backend.hint(residual=torch.zeros(10)):
        assert hints.residual_of(tensors) is hints.current().residual
        with pytest.raises(UsageError, match="residual of 10 elements for an all-reduce of 4"):
            hints.residual_of(tensors[1:])


def test_padding_is_cleared() -> None:
    x = torch.full((2, 5), float("nan"))
    with backend.hint(padding=(slice(1, 3), slice(9, 10))):
        hints.clear_padding([x])
    assert x.view(-1).isnan().tolist() == [True, False, False, *[True] * 6, False]


def test_a_policy_for_groups_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="needs a default group"):
        backend.adopt({"rules": []})
