"""Explanations of errors of torch and gloo: which part of the host or network has failed, and the remedy."""

from __future__ import annotations

import os
import re
import resource
import socket
from typing import NamedTuple

# A connection of gloo takes a few descriptors at a time. With fewer descriptors left, some call has failed for lack of
# them, though others may have been freed since.
_FEW_FILES = 6
_PROBE_SECONDS = 2.0


class Outage(NamedTuple):
    """A failure.

    Attributes:
        text: its text, with a remedy.
        here: whether it is in this process or its settings, so that no other rank is at fault.
    """

    text: str
    here: bool


def explain(error: BaseException, host: str | None = None, port: int | None = None) -> Outage:
    """Return the meaning of an error of torch, gloo or the system."""
    text = first_line(error)
    if _few_files_left(text):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return Outage(f"too many open files: this process may have {limit}; raise that, as by 'ulimit -n 4096'", True)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return Outage(f"port {port} is taken; end the program that has it, or set another MASTER_PORT", True)
    interface = re.search(r"Unable to find address for: (\S+)", text)
    if interface:
        return Outage(f"no network interface {interface[1]}; set GLOO_SOCKET_IFNAME to one of: {_interfaces()}", True)
    # Many systems give a host's own name a loopback address in /etc/hosts, and gloo announces it to other hosts.
    loopback = re.search(r"connect.*remote=\[(127\.[\d.]+|::1)\]", text)
    if loopback:
        return Outage(f"nothing listens at {loopback[1]}, an address of one host alone; {between_hosts()}", False)
    if host is not None and port is not None:
        return _probe(host, port) or Outage(text, False)
    return Outage(text, False)


def first_line(error: BaseException) -> str:
    """Return an error of torch or gloo in one line, without places in their source and advice to their developers."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    text = re.sub(r"^(\[[^]\s]*\.(cc|cpp|h|hpp):\d+\] *)+", "", text)
    return re.split(r"\. (?:This is typically caused|Check the logs)", text)[0]


def between_hosts() -> str:
    """Return a remedy for ranks of several hosts that have met but cannot connect."""
    return (
        "if ranks are on several hosts, set GLOO_SOCKET_IFNAME on each to the interface that joins them (here: "
        f"{_interfaces()}) and let firewalls pass all TCP ports between them"
    )


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def _few_files_left(text: str) -> bool:
    if "too many open files" in text.lower() or "EMFILE" in text:
        return True
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        # Listing takes a descriptor itself.
        return os.path.exists("/proc/self/fd")
    return used + _FEW_FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _probe(host: str, port: int) -> Outage | None:
    """Return why this place cannot be reached, None if it can."""
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except socket.gaierror as error:
        return Outage(f"the name {host} is unknown ({error.strerror}); set MASTER_ADDR to a host of the job", True)
    except ConnectionRefusedError:
        return Outage("nothing listens there; was rank 0 started, with the same MASTER_ADDR and MASTER_PORT?", False)
    except OSError as error:
        return Outage(f"it cannot be reached: {error.strerror or error}; is a firewall between the hosts?", False)
    return None
