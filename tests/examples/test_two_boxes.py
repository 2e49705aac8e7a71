"""The page about two boxes, to the letter: two hosts of the lab with names of their own, by torchrun and over ssh."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Network, launch
from tests.tiers import exhaustive, long

from .places import ROOT, needs_namespaces

pytestmark = [pytest.mark.medium, pytest.mark.netns, needs_namespaces]

PAGE = (ROOT / "docs/start/two_boxes.md").read_text()
COMMANDS = [line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
SSHD = shutil.which("sshd")

# What becomes a box: a name of its own that leads to its loopback, as Debian's installer has it, and the other's name.
BOX = """\
box=$([ "$RANK" = 0 ] && echo boxa || echo boxb)
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS
exec unshare --mount --uts sh -ec '
    hostname $0
    printf "127.0.0.1 localhost\\n127.0.1.1 $0\\n" > {place}/hosts-$0
    [ $0 = boxa ] && echo 10.77.0.2 boxb >> {place}/hosts-$0 || echo 10.77.0.1 boxa >> {place}/hosts-$0
    mount --bind {place}/hosts-$0 /etc/hosts
    cd {root}
    . {place}/$0.sh' $box
"""

SERVER = """\
mount -t tmpfs none /run && mkdir /run/sshd
{sshd} -D -e -f {place}/sshd_config & server=$!
until [ -e {place}/done ]; do kill -0 $server; sleep 0.1; done
kill $server
"""

CLIENT = """\
tries=0
until ssh boxb true 2>/dev/null; do tries=$((tries + 1)); [ $tries -lt 150 ]; sleep 0.2; done
trap 'touch {place}/done' EXIT
{commands}
"""


def walk(tmp_path: Path, boxa: str, boxb: str) -> str:
    """Run a script on each box; return what they print."""
    for name, script in (("boxa", boxa), ("boxb", boxb)):
        (tmp_path / f"{name}.sh").write_text(script)
    output = tmp_path / "output"
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = ["env", f"PATH={path}", f"PYTHONPATH={ROOT}", "FUSIONLAYER_TIMEOUT=60"]
    command = [*variables, "sh", "-c", BOX.format(place=tmp_path, root=ROOT)]
    with (
        output.open("w") as out,
        launch(
            command, Network(hosts=2, rate="100mbit"), timeout=200, stdout=out.fileno(), stderr=out.fileno()
        ) as process,
    ):
        status = process.wait()
    told = output.read_text()
    assert status == 0, told
    return told


def small(line: str) -> str:
    """Return a command of the page with a small model, or with few calls."""
    return line.replace("--steps 20", "--steps 2 --width 32 --layers 1").replace("--max 4M", "--max 16K --calls 2")


@long(guarded_by="tests/test_commands.py::test_every_command_is_understood")
def test_by_torchrun(tmp_path: Path) -> None:
    (export,) = (line for line in COMMANDS if line.startswith("export"))
    first, second = (small(line) for line in COMMANDS if line.startswith("torchrun"))
    told = walk(tmp_path, f"getent hosts boxb\n{export}\n{first}\n", f"{export}\n{second}\n")
    assert "10.77.0.2" in told and "all that eth0 carried" in told and "replicas          identical" in told


@exhaustive(guarded_by="tests/cli/test_fusionrun.py::test_agents_of_torchrun")
@pytest.mark.skipif(SSHD is None, reason="no sshd: install openssh-server")
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is not root, which sshd needs")
def test_over_ssh(tmp_path: Path) -> None:
    key, ssh = tmp_path / "key", tmp_path / "ssh"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "sshd_config").write_text(
        f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    options = f"-o IdentityFile={key} -o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=no"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F none {options} "$@"\n')  # no file of this user's own
    ssh.chmod(0o755)
    commands = [small(line) for line in COMMANDS if line.startswith("fusionrun")]
    assert len(commands) == 4 and "train_gpt" in commands[0] and "bench" in commands[1]
    told = walk(
        tmp_path,
        CLIENT.format(place=tmp_path, commands="\n".join(commands[:2])),
        SERVER.format(place=tmp_path, sshd=SSHD),
    )
    assert "replicas          identical" in told and re.search(r"all_reduce +int4 +\w+ +16 ", told), told
