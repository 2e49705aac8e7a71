"""The limit of open files follows the number of ranks."""

import logging
import resource

import pytest

from fusionlayer.base.errors import ConfigError
from fusionlayer.process import descriptors


def test_the_soft_limit_is_raised_once_to_what_the_ranks_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 20000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    with caplog.at_level(logging.INFO, "fusionlayer"):
        descriptors.reserve(64, keeps_store=True)
        assert len(limits) == 1 and not caplog.records, "64 ranks need no more"
        for _ in range(2):
            descriptors.reserve(1000, keeps_store=True)
    assert limits == [(1024, 20000), (8256, 20000)]
    (said,) = caplog.records
    assert said.getMessage() == "raised the limit of open files from 1024 to 8256, for 1000 ranks"
    descriptors.reserve(3000, keeps_store=True)
    assert limits[-1] == (20000, 20000), "some sums need more than there is, and most jobs make none of them"


def test_a_hard_limit_that_is_too_low_is_an_error_that_says_how_many_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: None)
    descriptors.reserve(1000, keeps_store=False)
    with pytest.raises(
        ConfigError, match="1000 ranks needs 6064 open files in this process, and the hard limit is 4096"
    ):
        descriptors.reserve(1000, keeps_store=True)
    with pytest.raises(ConfigError, match="needs 15064 open files"):
        descriptors.reserve(1000, keeps_store=False, connections=4)
