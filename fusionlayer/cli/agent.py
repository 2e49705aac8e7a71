"""torchrun on one host, as ``fusionrun`` starts it: it ends with the exit status of the rank that failed first."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .arguments import REPORT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun's command line, that of the process by default; return the exit status."""
    try:
        run.main(arguments)
    except ChildFailedError as error:
        # A rank whose peer has failed fails because of that one.
        _, (rank, failure) = min(
            enumerate(sorted(error.failures.items(), key=lambda item: item[1].timestamp)),
            key=lambda item: ("TransportError" in str(item[1][1].message), item[0]),
        )
        _report(_describe(rank, failure))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # fusionrun ends the job, as another host's rank has failed
        return 128 + int(error.sigval)
    return 0


def _describe(rank: int, failure: ProcessFailure) -> str:
    said = failure.message
    trace = said["extraInfo"].get("py_callstack", said["message"]) if isinstance(said, dict) else ""
    code = failure.exitcode
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    where = "" if trace else "; what it has printed says why"
    return f"{trace}fusionrun: rank {rank} on {socket.gethostname()} {how}{where}\n"


def _report(text: str) -> None:
    path = os.environ.get(REPORT)
    if path is None:
        print(text, end="", file=sys.stderr, flush=True)
    else:
        with open(path, "w") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())
