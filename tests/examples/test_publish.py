"""The example of a trainer and a generator: text comes from several versions, the last one the trainer's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import exhaustive

from .places import EXAMPLES


@pytest.mark.medium
@exhaustive(guarded_by="tests/publishing/test_processes.py::test_every_version_that_a_follower_shows_is_the_publishers")
@pytest.mark.parametrize("way", ["tcp", "folder"])
def test_a_generator_switches_versions_while_it_runs(way: str, tmp_path: Path) -> None:
    address = ["--address", f"file://{tmp_path}"]
    if way == "tcp":
        secret = tmp_path / "secret"
        secret.touch(0o600)
        secret.write_text("0123456789abcdef")
        address = ["--secret-file", str(secret)]
    command = [sys.executable, str(EXAMPLES / "publish_weights.py"), *address, "--bytes", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^generator  version +(\d+) (\w{32})  'def", done.stdout, re.MULTILINE)
    ended = re.findall(r"^trainer    loss \d\.\d+, version (59) (\w{32})$", done.stdout, re.MULTILINE)
    assert len(ended) == 1, done.stdout
    versions = [int(version) for version, _ in shown]
    assert versions == sorted(versions) and shown[-1] == ended[0]
    assert way == "folder" or len({*versions}) > 1
