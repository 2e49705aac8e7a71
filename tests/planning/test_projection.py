from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionlayer.base.errors import ConfigError
from fusionlayer.base.plan import TensorInfo
from fusionlayer.planning.cluster import Scenario
from fusionlayer.planning.profile import Profile, Validation
from fusionlayer.planning.projection import Method, break_even, project, projected_band
from tests.loops import looped

from .profiles import write_example

VALIDATED = Validation("r.json", 3, (2, 4), ("100mbit", "1gbit"), ("ddp", "int4"), (0.1, 0.05, 0.25), 0.9, 1.0, 1.25)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return Profile.from_yaml(write_example(tmp_path_factory.mktemp("profile")))


def sizes(method: Method, nbytes: list[int]) -> list[list[int]]:
    """Return the bytes of tensors in each bucket."""
    runs = method.fuse([TensorInfo(str(i), n // 4, "float32", 4) for i, n in enumerate(nbytes)])
    return [[tensor.nbytes for tensor in run] for run in runs]


def test_ddp_closes_a_bucket_with_the_tensor_that_fills_it(profile: Profile) -> None:
    mib = 1 << 20
    model = [mib // 2, mib // 2, 20 * mib, 6 * mib, mib]
    assert sizes(Method.named("ddp", profile), model) == [model[:2], model[2:4], model[4:]]
    model = [mib, 2 * mib, 3 * mib, mib]
    assert sizes(Method.named("ddp-tuned", profile), model) == [model[:3], model[3:]]


def test_collectives_are_those_of_the_engine(profile: Profile) -> None:
    method, codec = Method.named("int4", profile), profile.codec("int4")
    assert [method.algorithm_for(codec, (1,) * workers) for workers in (2, 3)] == ["one_shot", "two_shot"]
    assert method.algorithm_for(profile.codec("raw"), (8,)) == "dense"
    assert method.algorithm_for(replace(codec, algorithm="one_shot"), (8,)) == "one_shot"
    assert replace(method, algorithm="ring").algorithm_for(codec, (8,)) == "ring"


@looped(
    "name, algorithm, message",
    [
        ("ddp-fp61", None, "unknown method 'ddp-fp61'; did you mean 'ddp-fp16'"),
        ("ddp-fp16", None, "no costs of codec 'fp16'"),
        ("powersgd", None, "no costs of codec 'powersgd'"),
        ("int4", "rign", "unknown algorithm 'rign'; did you mean 'ring'"),
    ],
)
def test_methods_without_costs_are_refused(profile: Profile, name: str, algorithm: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Method.named(name, profile, algorithm)


def test_a_step_by_hand(profile: Profile) -> None:
    line = profile.link("1gbit")
    step = project(profile, Method.named("ddp", profile), Scenario("1gbit", cores=100), 2)
    assert [round(span.start, 9) for span in step.spans] == [0.05, 0.2], "4 MB, and the other 12"
    last = 2 * profile.copy(3e6) + line.all_reduce(12e6)
    assert step.seconds == pytest.approx(0.2 + last + 0.02 + 0.1)
    assert step.sent == 16e6


def test_a_step_is_as_fast_where_ranks_shared_cores_while_it_was_measured(profile: Profile) -> None:
    """Twice the ranks on the same cores have taken twice as long; what is projected has cores of its own."""
    model = profile.model
    tensors = tuple(replace(each, ready=2 * each.ready, used=2 * each.used) for each in model.tensors)
    slowed = replace(model, forward=0.2, backward=0.4, optimizer=0.04, tensors=tensors)
    shared = replace(profile, machine=replace(profile.machine, workers=4), model=slowed)
    own = Scenario("1gbit", cores=1.0)
    for name in ("ddp", "int4"):
        steps = [project(each, Method.named(name, each), own, 2).seconds for each in (profile, shared)]
        assert steps[1] == pytest.approx(steps[0])


def test_scenarios(profile: Profile) -> None:
    method = Method.named("int4", profile)
    base = project(profile, method, Scenario("1gbit"), 8).seconds
    assert project(profile, method, Scenario("100mbit"), 8).seconds > base
    assert project(profile, method, Scenario("1gbit", cores=0.5), 8).seconds > base
    assert project(profile, method, Scenario("1gbit", latency=0.1), 8).seconds > base + 0.1
    assert project(profile, method, Scenario("1gbit", curves=True), 8).seconds == pytest.approx(base, rel=0.05)
    with pytest.raises(ConfigError, match="cannot be put into measured curves"):
        Scenario("1gbit", latency=0.1, curves=True)
    with pytest.raises(ConfigError, match="the profile has no costs of a link inside"):
        project(profile, method, Scenario("1gbit", per_host=2), 8)
    inside = replace(profile, inside=profile.links["1gbit"])
    assert project(inside, method, Scenario("1gbit", per_host=2), 8).seconds > 0
    with pytest.raises(ConfigError, match="rate '1gb'"):
        Scenario("1gb")


def test_the_band_is_that_of_the_validation(profile: Profile) -> None:
    known = replace(profile, validation=VALIDATED)
    int4, raw = Method.named("int4", known), Method.named("raw", known)
    assert projected_band(known, int4, Scenario("1gbit"), 4, 2.0).extrapolated == ()
    band = projected_band(known, int4, Scenario("1gbit"), 4, 2.0)
    assert (band.low, band.high) == (1.8, 2.5)
    assert projected_band(known, raw, Scenario("10gbit"), 8, 2.0).extrapolated == ("8 workers", "10gbit", "raw")
    assert projected_band(profile, int4, Scenario("1gbit"), 2, 2.0).extrapolated == ("the profile is not validated",)


@given(st.integers(1, 4), st.sets(st.integers(1, 500), min_size=2, max_size=6), st.integers(0, 2000), st.booleans())
def test_break_even_is_where_the_order_changes(per_host: int, hosts: set[int], place: int, first: bool) -> None:
    workers = [count * per_host for count in sorted(hosts)]
    changes = break_even(lambda count: (count < place) == first, workers, per_host)
    expected = [count for count in range(workers[0], workers[-1] + 1, per_host) if count >= place][:1]
    assert changes == (expected if workers[0] < place <= workers[-1] else [])
