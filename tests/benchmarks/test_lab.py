"""The network lab: hosts that are namespaces, links that are shaped, workers that end."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Network
from tests.loops import looped
from tests.tiers import exhaustive

from .labs import netns, run, thorough

GREET = """
import os, socket, subprocess
rank, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
if rank == 0:
    with socket.create_server((master, 4000)) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            peer, (address, _) = server.accept()
            print(address, len(peer.makefile("rb").read()))
else:
    while True:
        try:
            peer = socket.create_connection((master, 4000), timeout=180)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(bytes(100_000))
    peer.close()
print(subprocess.run(["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True).stdout)
"""

NOT_SHAPED = 200e6
"""Bits per second. A link that is not shaped has ten times more; one that is may seem to have twice as many as asked,
where the process that counts them does not run while they come."""


def links() -> str:
    """Return the network devices of this machine."""
    return "\n".join(line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines())


class TestLink:
    pytestmark = netns

    @pytest.mark.parametrize("hosts", [2, pytest.param(8, marks=exhaustive)])
    def test_hosts_reach_each_other_over_shaped_links(self, hosts: int) -> None:
        before = links()
        status, output = run([sys.executable, "-c", GREET], Network(hosts, "20mbit"))
        assert status == 0, output
        greeted = sorted(line for line in output.splitlines() if line.endswith(" 100000"))
        assert greeted == [f"10.77.0.{host} 100000" for host in range(2, hosts + 1)]
        assert output.count("rate 20Mbit") == hosts
        assert links() == before

    @thorough
    def test_each_interface_has_a_network_and_a_rate_of_its_own(self) -> None:
        script = "ip -brief -4 address; tc class show dev eth0; tc class show dev eth1"
        status, output = run(["sh", "-c", script], Network(2, interfaces=("30mbit", "90mbit")))
        assert status == 0, output
        addresses = sorted(re.findall(r"10\.77\.\d\.\d/24", output))
        assert addresses == [f"10.77.{interface}.{host}/24" for interface in (0, 1) for host in (1, 2)]
        assert (output.count("rate 30Mbit"), output.count("rate 90Mbit")) == (2, 2)


@looped(
    "arguments, complaint",
    [
        ({"hosts": 0}, "hosts=0; expected 1 to 250"),
        ({"hosts": 2, "rate": "0mbit"}, "rate='0mbit'; expected a number"),
        ({"hosts": 2, "rate": "fast"}, "rate='fast'; expected a number with kbit, mbit or gbit"),
        ({"hosts": 1, "rate": "1gbit"}, "needs two"),
        ({"hosts": 1, "delay": "1ms"}, "delay='1ms' with one host; a link needs two"),
        ({"rate": "10gbit"}, "above 1gbit the cores of this machine limit an emulated link"),
        ({"delay": "1"}, "delay='1'; expected a number with us, ms or s"),
        ({"loss": 1.0}, "loss=1; expected a chance from 0 to below 1"),
        ({"corruption": -0.1}, "corruption=-0.1; expected a chance from 0 to 1"),
        ({"congestion": "not one"}, "congestion='not one'; expected the kernel's name"),
        ({"reordering": 2.0}, "reordering=2; expected a chance from 0 to 1"),
        ({"hosts": 3, "rates": ("1mbit", "2mbit")}, "rates of 2 hosts, and hosts=3; give one for each host"),
        ({"rate": "1mbit", "interfaces": ("1mbit",)}, "rate='1mbit' and interfaces=.*; give one of them"),
        ({"interfaces": ("1mbit", "fast")}, "interfaces='fast'; expected a number with kbit, mbit or gbit"),
        ({"interfaces": ("1mbit",) * 9}, "9 interfaces; expected at most 8"),
        ({"interfaces": ("2gbit", "1mbit")}, "interfaces='2gbit'; above 1gbit the cores"),
        ({"rate": ""}, "rate=''; expected a number"),
        ({"hosts": 2, "isolated": False}, "more than one host needs them"),
    ],
)
def test_impossible_networks_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Network(**arguments)
