"""Open MPI in a lab: one mpirun in the first host, which reaches the others without ssh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.hosts import Host

__all__ = ["mpirun", "why_no_mpi"]

_SHELL = Path(__file__).with_name("remote_shell")


def why_no_mpi() -> str | None:
    """Return why Open MPI cannot be used on this machine, in one line; None if it can."""
    for program, package in (("mpirun", "Open MPI 4: openmpi-bin of Debian"), ("hostname", "hostname")):
        if shutil.which(program) is None:
            return f"the program {program} is missing (install {package})"
    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    if not re.match(r"mpirun \(Open MPI\) 4\.", told):
        return f"mpirun is {(told.splitlines() or ['unknown'])[0]!r}; expected Open MPI 4"
    if not os.access(_SHELL, os.X_OK):
        return f"{_SHELL} may not be executed; make it executable (chmod +x)"
    return None


def mpirun(
    command: Sequence[str], hosts: Sequence[Host], workers: int, scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ``command`` ``workers`` times on each host, and what it needs in its environment.

    Args:
        command: program and arguments.
        hosts: where it is to run; the first has mpirun too.
        workers: on each host.
        scratch: folder for the files that Open MPI makes; it leaves some behind when it is ended.
    """
    slots = ",".join(f"{host.address}:{workers}" for host in hosts)
    # Each daemon must see another name of its machine, or it takes the others for itself.
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hosts[0].name]
    start = ["mpirun", "--host", slots, "--bind-to", "none", "--oversubscribe", *command]
    device = hosts[0].device
    settings = {
        "plm": "rsh",
        "plm_rsh_agent": _SHELL.name,
        "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": device,
        "pml": "ob1",
        "btl": "self,tcp",  # no shared memory, whose files would outlive workers that are ended
        "btl_tcp_if_include": device,
        "orte_tmpdir_base": str(scratch),
    }
    environment = {
        **{f"OMPI_MCA_{name}": value for name, value in settings.items()},
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{os.environ.get('PATH', os.defpath)}:{_SHELL.parent}",
        "MPI4PY_LIBMPI": "libmpi.so.40",  # this Python may have another Open MPI beside it
        "LAB_HOSTS": " ".join(f"{host.address}={host.name}={host.path}" for host in hosts),
    }
    return [*hosts[0].enter, *named, *start], environment
