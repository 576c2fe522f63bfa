"""The lab's links, in real namespaces where they are permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.behaviour.lab.jobs import Job, permitted

from headway.lab.launch import Mode
from headway.lab.spec import LabSpec, override, parse_event

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
def bulk(tmp_path: Path) -> Path:
    script = tmp_path / "bulk.py"
    script.write_text(BULK)
    return script


BULK = """
import os, socket, sys, time
rank, sender, total = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    peer, _ = socket.create_server(place).accept()
while rank == 1:
    try:
        peer = socket.create_connection(place)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
if rank == sender:
    peer.sendall(bytes(total))
    peer.recv(1)
else:
    got, began, buffer = 0, time.monotonic(), bytearray(1 << 18)
    while got < total:
        got += peer.recv_into(buffer)
    print("mbit/s", got * 8e-6 / (time.monotonic() - began))
    peer.sendall(b"x")
"""


def goodput_mbps(job: Job, receiver: int) -> float:
    assert job.status == 0, job.lines
    (line,) = job.text_of(receiver)
    return float(line.removeprefix("mbit/s "))


@pytest.mark.namespaces
def test_a_hosts_own_queue_is_short(namespaced: Mode) -> None:
    setting = "/proc/sys/net/ipv4/tcp_limit_output_bytes"
    if not Path(setting).exists():
        pytest.skip("this kernel has no such setting")
    job = Job(LabSpec(hosts=2, rate="100mbit"), ["cat", setting], mode=namespaced)
    assert [job.text_of(rank) for rank in range(2)] == [["65536"], ["65536"]]


LINK = """
from pathlib import Path
from pyroute2 import IPRoute
with IPRoute() as netlink:
    (link,) = netlink.link("get", ifname="eth0")
control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
print(control, link.get_attr("IFLA_GSO_MAX_SIZE"))
"""


@pytest.mark.namespaces
def test_connections_are_steady_and_packets_short(namespaced: Mode) -> None:
    job = Job(LabSpec(hosts=2, rate="80mbit"), [sys.executable, "-c", LINK], mode=namespaced)
    assert job.status == 0, job.lines
    assert [job.text_of(rank) for rank in range(2)] == [["reno 10000"]] * 2


@pytest.mark.namespaces
def test_hosts_have_networks_of_their_own(namespaced: Mode) -> None:
    before = sorted(os.listdir("/sys/class/net"))
    script = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | sort | tr '\\n' ' '"
    job = Job(LabSpec(hosts=2, rate="80mbit"), ["sh", "-c", script], mode=namespaced)
    for rank in range(2):
        (line,) = job.text_of(rank)
        assert {"eth0", "lo"} <= set(line.split())
        assert not {name for name in line.split() if name.startswith(("link", "bridge"))}
    assert sorted(os.listdir("/sys/class/net")) == before


@pytest.mark.namespaces
@pytest.mark.parametrize("sender", [0, 1])
def test_links_are_shaped_in_both_directions(namespaced: Mode, bulk: Path, sender: int) -> None:
    spec = LabSpec(hosts=2, rate="80mbit")
    job = Job(spec, [sys.executable, "-S", str(bulk), str(sender), "8000000"], mode=namespaced)
    assert 40 < goodput_mbps(job, 1 - sender) < 85


@pytest.mark.namespaces
def test_up_and_down_are_shaped_apart(bulk: Path) -> None:
    spec = LabSpec(hosts=2, up="160mbit", down="40mbit")
    job = Job(spec, [sys.executable, "-S", str(bulk), "0", "4000000"], mode=permitted("user"))
    assert 20 < goodput_mbps(job, 1) < 43


@pytest.mark.namespaces
@pytest.mark.parametrize("event", ["300ms link host1 down 20mbit", "0s traffic host0 host1 80mbit"])
def test_the_timeline_takes_effect(bulk: Path, event: str) -> None:
    """8 MB at 80 Mbit/s would take 0.85 s; a good part of them meets the change."""
    spec = override(None, hosts=2, rate="80mbit", timeline=[parse_event(event)])
    job = Job(spec, [sys.executable, "-S", str(bulk), "0", "8000000"], mode=permitted("user"))
    assert 10 < goodput_mbps(job, 1) < 65
    assert any(notice.startswith(f"{event.split(maxsplit=1)[0]}: ") for notice in job.notices)


@pytest.mark.namespaces
def test_gloo_works_between_hosts(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.full((1000,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(value)\n"
        "print(value.unique().tolist())\n"
        "dist.destroy_process_group()\n"
    )
    spec = LabSpec(hosts=2, rate="200mbit")
    job = Job(spec, [sys.executable, str(script)], mode=permitted("user"), timeout_s=100)
    assert [job.text_of(rank) for rank in range(2)] == [["[3.0]"], ["[3.0]"]], job.lines


CUT = """
import socket, sys
from headway.lab import isolation
isolation.isolate(sys.argv[1], processes=True)
from headway.lab.network import Network, address
network = Network([(0.1, 0.1)] * 2)
with network.inside(0):
    listener = socket.create_server((address(0), 0))

def reaches():
    with network.inside(1):
        connection = socket.socket()
    with connection:
        connection.settimeout(1.0)
        try:
            connection.connect(listener.getsockname())
        except OSError:
            return False
        return True

for up in (None, False, True):
    if up is not None:
        network.connect(1, up=up)
    while up and not reaches():  # addresses are looked up again
        pass
    print(reaches(), flush=True)
"""


@pytest.mark.namespaces
def test_a_host_whose_cable_is_pulled_reaches_nobody_until_it_is_back(namespaced: Mode) -> None:
    command = [sys.executable, "-c", CUT, namespaced]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout.split() == ["True", "False", "True"], found.stderr
