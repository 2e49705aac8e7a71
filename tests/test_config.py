import re
from pathlib import Path

import pytest

from fusionlayer import context
from fusionlayer.base import config
from fusionlayer.base.config import Config, PlanningSettings, load
from fusionlayer.base.errors import ConfigError
from tests.loops import looped


def from_file(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "fusionlayer.yaml"
    path.write_text(text)
    return load({"FUSIONLAYER_CONFIG": str(path), **environ})


def test_file_then_environment(tmp_path: Path) -> None:
    text = "codec: int4\ncodec_options: {group_size: 64}\ntimeout: 7\nalgorithm: null\nchecksum: true\nthreads: 2\n"
    settings = from_file(tmp_path, text, FUSIONLAYER_TIMELINE="/tmp/trace", FUSIONLAYER_TIMEOUT="9.5")
    assert settings == Config("int4", {"group_size": 64}, checksum=True, threads=2, timeout=9.5, timeline="/tmp/trace")
    assert from_file(tmp_path, text).timeout == 7
    assert from_file(tmp_path, "transport: sockets", FUSIONLAYER_TRANSPORT="mpi").transport == "mpi"
    with pytest.raises(ConfigError, match="transport 'horovod' was removed; leave it out"):
        from_file(tmp_path, "transport: horovod")


def test_an_empty_file_and_empty_variables_change_nothing(tmp_path: Path) -> None:
    assert from_file(tmp_path, "", FUSIONLAYER_TIMEOUT="", FUSIONLAYER_TIMELINE="") == Config()
    assert load({"FUSIONLAYER_CONFIG": ""}) == Config()


WRONG = {
    "planning": "[1]",
    "codec": "[raw]",
    "codec_options": "4",
    "algorithm": "true",
    "ahead": "1",
    "planner": "null",
    "planner_options": "[1]",
    "plan": "4",
    "profile": "[x.yaml]",
    "policy": "3",
    "fidelity": "null",
    "fallback": "1",
    "error_feedback": "1",
    "feedback_bits": "eight",
    "check_replicas": "often",
    "checksum": "'yes'",
    "transport": "[mpi]",
    "connections": "many",
    "interfaces": "eth0",
    "rates": "100mbit",
    "congestion": "[bbr]",
    "authenticate": "maybe",
    "encrypt": "maybe",
    "timeout": "soon",
    "stall_warning": "true",
    "watch": "maybe",
    "status": "7",
    "timeline": "7",
    "peer_memory_mb": "some",
    "ranks_per_node": "two",
    "lanes": "true",
    "backend": "[int8]",
    "threads": "2.5",
}


def test_every_setting_is_covered() -> None:
    assert {*WRONG} == {*config.flat(Config()), "planning"}


@looped("name", WRONG)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"config .*fusionlayer.yaml: (planning.)?{name}=.*; expected"):
        from_file(tmp_path, f"{name}: {WRONG[name]}")


@looped(
    "text, message",
    [
        ("threads: true", "threads=True"),
        ("feedback_bits: 4", "feedback_bits=4; expected 32 or 8"),
        ("threads: 0", "threads=0; expected at least 1"),
        ("transport: mpii", "config .*: unknown transport 'mpii'; did you mean 'mpi'[?]"),
        ("peer_memory_mb: -1", "peer_memory_mb=-1; expected a number of MiB, or 0 for none"),
        ("connections: 65", "connections=65; expected a number from 1 to 64"),
        ("connections: 1\ninterfaces: [eth0, eth1]", "connections=1 for 2 interfaces; expected one for each"),
        ("timeout: 0", "timeout=0.0; expected seconds above 0"),
        ("stall_warning: -1", "stall_warning=-1.0; expected seconds above 0"),
        ("timeout: .nan", "timeout=nan; expected seconds above 0"),
        ("codek: int4", "unknown key 'codek'; did you mean 'codec'[?]"),
        ("- codec", r"\['codec'\]; expected keys and values"),
        ("codec: [", "fusionlayer.yaml cannot be read"),
        ("codec: !!python/object/apply:os.getcwd []", "fusionlayer.yaml cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path, text)


def test_a_setting_that_was_removed_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FUSIONLAYER_CONFIG=.*: grace: this setting was removed: .*sync=fl.Local"):
        from_file(tmp_path, "grace: 0.05")
    with pytest.raises(ConfigError, match="^FUSIONLAYER_GRACE: this setting was removed"):
        load({"FUSIONLAYER_GRACE": "0.05"})


def test_a_missing_file_and_a_wrong_variable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        load({"FUSIONLAYER_CONFIG": str(tmp_path / "nowhere.yaml")})
    with pytest.raises(ConfigError, match="FUSIONLAYER_TIMEOUT='soon'; expected a number"):
        load({"FUSIONLAYER_TIMEOUT": "soon"})
    with pytest.raises(ConfigError, match="FUSIONLAYER_TIMEOUT=-3: timeout=-3.0; expected seconds above 0"):
        load({"FUSIONLAYER_TIMEOUT": "-3"})


def test_planning_stands_below_its_key_or_at_the_top(tmp_path: Path) -> None:
    wanted = Config(planning=PlanningSettings(planner="wfbp", ahead=False))
    for text in (
        "planning: {planner: wfbp, ahead: false}",
        "planner: wfbp\nahead: false",
        "planner: wfbp\nplanning: {ahead: false}",
    ):
        assert from_file(tmp_path, text) == wanted
    with pytest.raises(ConfigError, match="planner stands below `planning` and outside of it; write it once"):
        from_file(tmp_path, "planner: wfbp\nplanning: {planner: single}")
    with pytest.raises(ConfigError, match="planning='wfbp'; expected"):
        from_file(tmp_path, "planner: single\nplanning: wfbp")
    with pytest.raises(ConfigError, match="planning.*unknown.*planer"):
        from_file(tmp_path, "planning: {planer: wfbp}")


def test_every_setting_has_a_variable_that_wins_over_the_file(tmp_path: Path) -> None:
    text = "codec: topk\ncodec_options: {density: 0.1}\npolicy: p.yaml\nplan: plan.yaml\nahead: true\nlanes: 3\n"
    variables = {"CODEC": "int4", "AHEAD": "0", "PLANNER_OPTIONS": "{cap: 9}", "LANES": "null", "THREADS": "2"}
    settings = from_file(tmp_path, text, **{f"FUSIONLAYER_{key}": value for key, value in variables.items()})
    # The file's options, policy and plan are of other codecs.
    assert settings == Config(
        "int4", planning=PlanningSettings(ahead=False, planner_options={"cap": 9}), lanes=None, threads=2
    )
    for given in ("eth0,eth1", "[eth0, eth1]"):
        assert from_file(tmp_path, text, FUSIONLAYER_INTERFACES=given).interfaces == ("eth0", "eth1")
    mine = from_file(tmp_path, text, FUSIONLAYER_PLANNER="wfbp", FUSIONLAYER_PLAN="mine.yaml", FUSIONLAYER_AHEAD="off")
    assert mine.planning == PlanningSettings(planner="wfbp", plan="mine.yaml", policy="p.yaml", ahead=False)
    assert {f"FUSIONLAYER_{name.upper()}" for name in config.flat(Config())} < set(config.VARIABLES)


@looped(
    "variable, text, expected",
    [
        ("LANES", "two", "FUSIONLAYER_LANES='two'; expected a whole number"),
        ("LANES", "0", "FUSIONLAYER_LANES=0: lanes=0; expected at least 1, or null"),
        ("ENCRYPT", "maybe", "FUSIONLAYER_ENCRYPT='maybe'; expected 1 or 0"),
        ("ENCRYPT", "null", "FUSIONLAYER_ENCRYPT='null'; expected 1 or 0"),
        ("CODEC_OPTIONS", "{bits", "FUSIONLAYER_CODEC_OPTIONS='{bits'; expected keys and values, as YAML"),
        ("CODEC_OPTIONS", "bits", "FUSIONLAYER_CODEC_OPTIONS=bits: codec_options='bits'; expected keys and values"),
        ("TRANSPORT", "mpii", "FUSIONLAYER_TRANSPORT=mpii: unknown transport 'mpii'"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        load({f"FUSIONLAYER_{variable}": text})


def test_a_variable_that_is_misspelt_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSIONLAYER_TIMEUOT", "3")
    for _ in range(2):
        context.init()
        context.shutdown()
    named = [record.getMessage() for record in caplog.records if "TIMEUOT" in record.getMessage()]
    assert named == [
        "environment variable FUSIONLAYER_TIMEUOT is unknown and has no effect; did you mean 'FUSIONLAYER_TIMEOUT'? "
        "docs/config.md lists all"
    ]
