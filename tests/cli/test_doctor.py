"""``fusionlayer doctor``, and the processes that commands start for themselves."""

import importlib.util
import json
import tempfile
from importlib import metadata

import pytest
import torch

import fusionlayer
from fusionlayer import codecs
from fusionlayer.base import libraries
from fusionlayer.base.errors import FusionLayerError
from fusionlayer.cli import doctor, main
from fusionlayer.cli.spawn import run_on_ranks, without_launcher
from fusionlayer.codecs.quantized.cast import Raw
from fusionlayer.process.interfaces import addresses
from tests.mpi import mpirun
from tests.tiers import exhaustive


def run_json(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
    """Return the exit status, and (state, detail) by (section, name)."""
    status = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (status == 0)
    return status, {(f["section"], f["name"]): (f["state"], f["detail"]) for f in told["findings"]}


@pytest.mark.medium
@exhaustive(guarded_by="tests/cli/test_doctor.py::test_what_does_not_work_is_told_and_is_the_exit_status")
def test_all_that_is_installed_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys)
    assert status == 0, [(key, told) for key, told in found.items() if told[0] == "FAIL"]
    assert {name for section, name in found if section == "codecs"} == {*codecs.names()}
    assert found["versions", "torch"] == ("ok", torch.__version__)
    assert found["codecs", "int8"][1].startswith("8.81 bits an element, error ")
    assert found["codecs", "raw"][1].endswith("lossless")
    assert found["network", "lo"] == ("ok", ", ".join(addresses()["lo"]))
    assert found["transports", "local"] == ("ok", "2 threads")
    assert found["transports", "c10d"] == ("ok", "gloo, 2 processes, C10dTransport")
    if mpirun() and importlib.util.find_spec("mpi4py"):
        assert found["transports", "mpi"][0] == "ok"
        assert found["transports", "mpi"][1].endswith("2 processes, MpiTransport")
    else:
        assert found["transports", "mpi"][0] == "none"


class Lossy(Raw):
    """Says that it is lossless."""

    def decompress(self, payload, shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        return super().decompress(payload, shape, dtype) + 1


def test_what_does_not_work_is_told_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_transports", lambda: [])
    wrong = {"raw_but_wrong": Lossy(), "fine": codecs.get("int4")}
    monkeypatch.setattr(doctor.codecs, "names", lambda: [*wrong])
    monkeypatch.setattr(doctor.codecs, "get", wrong.__getitem__)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("FUSIONLAYER_CONFIG", "/no/such/file")
    monkeypatch.setenv("FUSIONLAYER_TIMEOT", "3")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status, found = run_json(capsys)
    assert status == 1
    wanted = {
        ("codecs", "raw_but_wrong"): ("FAIL", "what was decoded is not what was encoded"),
        ("codecs", "fine"): ("ok", "bits an element"),
        ("network", "GLOO_SOCKET_IFNAME"): ("FAIL", "'nosuch0' is no interface"),
        ("environment", "settings"): ("FAIL", "FUSIONLAYER_CONFIG=/no/such/file"),
        ("environment", "launcher"): ("FAIL", "RANK is set and WORLD_SIZE is not"),
        ("environment", "FUSIONLAYER_TIMEOT"): ("note", "did you mean 'FUSIONLAYER_TIMEOUT'?"),
        ("environment", "HOROVOD_CYCLE_TIME"): ("note", "means nothing here"),
        ("environment", "HOROVOD_FUSION_THRESHOLD"): ("ok", "1000 (bytes of small tensors that are sent as one"),
    }
    for key, (state, words) in wanted.items():
        assert found[key][0] == state and words in found[key][1], (key, found[key])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 failed: network GLOO_SOCKET_IFNAME, codecs raw_but_")


@pytest.mark.parametrize("address, state", [("127.0.1.1", "note"), ("10.0.0.7", "ok"), (None, "note")])
def test_a_name_of_this_host_that_leads_nowhere_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str | None, state: str
) -> None:
    def look_up(name: str) -> str:
        assert name == "boxa"
        if address is None:
            raise OSError
        return address

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "boxa")
    monkeypatch.setattr(doctor.socket, "gethostbyname", look_up)
    (told,) = [finding for finding in doctor._network() if finding.name == "boxa"]
    assert told.state == state and ("set GLOO_SOCKET_IFNAME" in told.detail) == (state == "note")


def test_version_is_two_lines_or_one_that_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--version"]) == 0
    versions, built = capsys.readouterr().out.splitlines()
    assert versions == f"fusionlayer {fusionlayer.__version__}, torch {metadata.version('torch')}"
    info = fusionlayer.build_info()
    cuda = info.cuda.get("archs", "none")
    assert built == f"CPU library: {info.isa} of {', '.join(info.isas)}; CUDA library: {cuda}"
    monkeypatch.setattr(libraries, "__file__", "/nowhere/libraries.py")
    libraries._cpu_on_one_thread.cache_clear()
    try:
        assert main(["--version"]) == 1
    finally:
        monkeypatch.undo()
        libraries._cpu_on_one_thread.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fusionlayer --version: libfusionlayer_cpu.so is not installed; reinstall the package")


def test_ranks_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID"} & {*without_launcher()}
    show = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'X')))"
    with tempfile.TemporaryFile("w+") as out:
        run_on_ranks(["-c", show], 2, 180, {"X": "y"}, out)
        out.seek(0)
        assert out.read() == "0 2 0 2 y\n"
    fail = "import os, sys, time; sys.exit('no luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    with pytest.raises(FusionLayerError, match="rank 1 ended with status 1: no luck"):
        run_on_ranks(["-c", fail], 2, 180)
    with pytest.raises(FusionLayerError, match="rank 0 timed out: it wrote nothing"):
        run_on_ranks(["-c", "import time; time.sleep(60)"], 1, 0.5)
