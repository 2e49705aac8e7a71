"""Makes the hosts of a network, in network and mount namespaces of its own; run as process 1 of a process namespace.

Nothing here is ever taken down: namespaces, links, shapers and the switch end with the process that made them.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from benchmarks.lab.network import Network, Obstacle
from benchmarks.lab.switch import start_switch

__all__ = ["Host", "address_of", "existing_hosts", "make_hosts"]

_QUEUE = 0.05
"""Seconds of sending that may wait in a shaper."""


@dataclass(frozen=True)
class Host:
    """A place for workers.

    Attributes:
        name: what it calls itself where that matters.
        address: IPv4, of its first device.
        devices: its network devices.
        namespace: number of the open file, of process 1, that is its network namespace; None: that of this process.
    """

    name: str
    address: str
    devices: tuple[str, ...]
    namespace: int | None = None

    @property
    def device(self) -> str:
        """Its first network device."""
        return self.devices[0]

    @property
    def path(self) -> str:
        """Path of the network namespace."""
        return "/proc/self/ns/net" if self.namespace is None else f"/proc/1/fd/{self.namespace}"

    @property
    def enter(self) -> tuple[str, ...]:
        """Start of a command that runs in this host."""
        return () if self.namespace is None else ("nsenter", f"--net={self.path}", "--")


def existing_hosts(namespaces: list[int], network: Network) -> list[Host]:
    """Return the hosts whose network namespaces are these open files; none: the one host that this process is in."""
    if not namespaces:
        return [Host("node0", "127.0.0.1", ("lo",))]
    return [Host(f"node{i}", address_of(i), network.devices, namespace) for i, namespace in enumerate(namespaces)]


def address_of(host: int, interface: int = 0) -> str:
    """Return the IPv4 address of a host's interface; both count from 0."""
    return f"10.77.{interface}.{host + 1}"


def make_hosts(network: Network) -> tuple[list[Host], subprocess.Popen[str] | None]:
    """Return new hosts, and the switch that joins them where that is a process.

    Raises:
        Obstacle: the machine refuses something.
    """
    _run("ip", "link", "set", "lo", "up")
    hosts = existing_hosts([_new_namespace() for _ in range(network.hosts)] if network.hosts > 1 else [], network)
    if network.congestion is not None:
        for host in hosts:
            _choose_congestion(host, network.congestion)
    if network.hosts == 1:
        return hosts, None
    # Netem repairs the checksum before it flips a bit, so TCP would notice; and it holds back all frames but some.
    netem = network.impaired and not network.corruption and not network.reordering and _has_netem()
    switch = start_switch(network, [host.path for host in hosts]) if network.impaired and not netem else None
    for number, device in enumerate(network.devices):
        if switch is None:
            _join_by_bridge(hosts, network, number, netem)
        for i, host in enumerate(hosts):
            rate = network.rate_of(i, number)
            if switch is not None:
                _run(*host.enter, "ip", "link", "set", device, "gso_max_size", str(_burst(rate)))
            _run(*host.enter, "ip", "link", "set", "lo", "up")
            _run(*host.enter, "ip", "address", "add", f"{address_of(i, number)}/24", "dev", device)
            _run(*host.enter, "ip", "link", "set", device, "up")
            _shape(device, rate, host.enter)
    return hosts, switch


def _new_namespace() -> int:
    # `cat` keeps the namespace until it is open here; its echo tells that the namespace is there.
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        keeper.stdin.write(b"\n")
        if not keeper.stdout.read(1):
            raise Obstacle("unshare --net: this user may make no network namespace")
        return os.open(f"/proc/{keeper.pid}/ns/net", os.O_RDONLY)


def _join_by_bridge(hosts: list[Host], network: Network, number: int, netem: bool) -> None:
    """Join the interfaces of this number of all hosts."""
    bridge, device = f"switch{number}", network.devices[number]
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "link", "set", bridge, "up")
    for i, host in enumerate(hosts):
        rate = network.rate_of(i, number)
        longest = ("gso_max_size", str(_burst(rate)))
        port = f"port{i}" if number == 0 else f"port{i}.{number}"
        veth = (*longest, "type", "veth", "peer", "name", port, *longest)
        _run("ip", "link", "add", device, "netns", host.path, *veth)
        _run("ip", "link", "set", port, "master", bridge, "up")
        _keep_order(device, host.enter)
        _keep_order(port)
        if netem and network.loss > 0:  # one chance for each frame, rather than for a packet of many
            _run(*host.enter, "ip", "link", "set", device, "gso_max_segs", "1")
        _shape(port, rate, leaf=_netem(network) if netem else None)


def _keep_order(device: str, enter: tuple[str, ...] = ()) -> None:
    """Have one core receive all frames of a connection, chosen by its addresses; a kernel without this goes on.

    Otherwise the core that sends a frame also receives it. Timers of shapers run on any core, so on a busy machine
    frames overtake each other.
    """
    cores = f"{(1 << min(32, os.cpu_count() or 1)) - 1:x}"  # more would need words of 32 bits
    script = f"mount -t sysfs sysfs /sys && echo {cores} >/sys/class/net/{device}/queues/rx-0/rps_cpus"
    subprocess.run([*enter, "unshare", "--mount", "sh", "-c", script], capture_output=True, check=False)


def _burst(rate: float | None) -> int:
    """Return how many bytes an idle link passes faster than its rate, and the longest packet that TCP hands to it.

    Longer packets cost less CPU, but a shaper lets one through as soon as it owes nothing. So it is what leaves in
    1/8 ms, but three full frames at least, which is what slow links need to reach their rate.
    """
    return 65536 if rate is None else int(min(65536, max(4608, rate / 8 * 125e-6)))


def _shape(device: str, rate: float | None, enter: tuple[str, ...] = (), leaf: tuple[str, ...] | None = None) -> None:
    """Limit what ``device`` sends to the rate; what it has let pass goes through ``leaf``.

    htb rather than tbf: while both directions of a link are full, tbf falls to nine tenths of its rate.
    """
    add = (*enter, "tc", "qdisc", "add", "dev", device)
    if rate is None:
        if leaf:
            _run(*add, "root", *leaf)
        return
    burst = str(_burst(rate))
    limits = ("rate", f"{rate:.0f}bit", "burst", burst, "cburst", burst, "quantum", burst)
    _run(*add, "root", "handle", "1:", "htb", "default", "1")
    _run(*enter, "tc", "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", *limits)
    _run(*add, "parent", "1:1", *(leaf or ("bfifo", "limit", f"{max(rate / 8 * _QUEUE, 65536):.0f}")))


def _netem(network: Network) -> tuple[str, ...]:
    # Whatever is on its way at 1 Gbit/s, and 50 ms of queue, must fit; the default of 1000 packets would lose some.
    packets = int((network.delay_seconds + _QUEUE) * 1e9 / 8 / 1500) + 1000
    delay = ("delay", f"{network.delay_seconds * 1e6:.0f}us") if network.delay_seconds > 0 else ()
    loss = ("loss", f"{network.loss * 100:g}%") if network.loss > 0 else ()
    return ("netem", "limit", str(packets), *delay, *loss)


def _has_netem() -> bool:
    probe = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem"], capture_output=True)
    if probe.returncode == 0:
        _run("tc", "qdisc", "del", "dev", "lo", "root")
    return probe.returncode == 0


def _choose_congestion(host: Host, name: str) -> None:
    settings = "/proc/sys/net/ipv4/tcp_"
    script = f'echo "$1" > {settings}congestion_control'
    done = subprocess.run([*host.enter, "sh", "-c", script, "sh", name], capture_output=True, text=True)
    if done.returncode:
        with open(f"{settings}allowed_congestion_control") as file:
            allowed = ", ".join(file.read().split())
        raise Obstacle(f"congestion={name!r} is not allowed by this kernel; expected one of: {allowed}")


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no word why"]
        raise Obstacle(f"{' '.join(command)}: {lines[0]}")
