"""The processes with which ``fusionrun`` starts the ranks of each host, from their start to the end of the job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ConfigError
from .arguments import REPORT

# Seconds that agents get to end their processes once the job has failed.
_GRACE = 10.0
# Bytes that a pipe holds, and the most that it can be made to hold without privileges.
_PIPE_BYTES, _MOST_BYTES = 1 << 16, 1 << 20
# The status of ssh where it has not reached the other host.
_SSH_FAILED = 255


@dataclass(frozen=True)
class Agent:
    """The process that starts the ranks of one host (``agent``).

    Attributes:
        host: its name, for messages.
        command: the command that starts the agent.
        environment: the environment of that command.
        is_here: whether the host is this one.
        sent: names of the variables that go to another host.
        opening: the first input of the command: these variables. Every user can read a command, and not this.
    """

    host: str
    command: list[str]
    environment: dict[str, str]
    is_here: bool = True
    sent: tuple[str, ...] = ()
    opening: bytes = b""


def run(agents: Sequence[Agent], least: int) -> int:
    """Start all agents; end them once fewer than ``least`` can succeed. Return the exit status of the job."""
    started: list[subprocess.Popen[bytes]] = []
    reports = tempfile.mkdtemp(prefix="fusionrun-")
    last = ""
    try:
        for rank, agent in enumerate(agents):
            report = {REPORT: os.path.join(reports, str(rank))} if agent.is_here else {}
            try:
                started.append(_start(agent, {**agent.environment, **report}))
            except OSError as error:
                raise ConfigError(f"cannot run {agent.command[0]}: {error.strerror}") from error
        while True:
            states = [process.poll() for process in started]
            failed = [rank for rank, state in enumerate(states) if state not in (None, 0)]
            if len(agents) - len(failed) < least:
                worst = failed[0]
                state = states[worst]
                last = f"fusionrun: {_ending(agents[worst], state)}\n"
                with suppress(OSError):
                    last = Path(reports, str(worst)).read_text()
                return state if state is not None and state > 0 else 1
            if None not in states:
                return 0
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 130
    finally:
        _end(started)
        shutil.rmtree(reports, ignore_errors=True)
        print(last, end="", file=sys.stderr, flush=True)  # after all that other ranks have to say


def _start(agent: Agent, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an agent. Its standard input stays open: so an agent on another host sees that this process lives."""
    length = len(agent.opening)
    if length > _MOST_BYTES:
        raise ConfigError(
            f"the variables for {agent.host} take {length} bytes; expected at most {_MOST_BYTES}: forward fewer by -x"
        )
    # The pipe holds all of them, so that no write waits until ssh has connected.
    room = length if length > _PIPE_BYTES else -1
    process = subprocess.Popen(agent.command, env=environment, stdin=subprocess.PIPE, pipesize=room)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has failed, and its status says so
        process.stdin.write(agent.opening)
        process.stdin.flush()
    return process


def _ending(agent: Agent, state: int | None) -> str:
    """Return how the processes of a host have ended, as far as the status of their agent shows."""
    if not agent.is_here and state == _SSH_FAILED:
        return (
            f"ssh to {agent.host} failed, for the reason that it printed; 'ssh {agent.host} true' must work without a "
            "question (a host that ssh does not know: connect once by hand, or give --accept-new-host-keys)"
        )
    return f"the processes on {agent.host} ended with status {state}"


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()
    running = [process for process in started if process.poll() is None]
    for process in running:
        process.terminate()
    end = time.monotonic() + _GRACE
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
