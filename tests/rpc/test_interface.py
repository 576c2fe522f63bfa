"""Which address of this machine other processes of a job use."""

from __future__ import annotations

import pytest

from headway.rpc import interface
from headway.rpc.interface import is_on_one_host, job_address, reachable_address


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_address_is_that_of_the_interface_told_else_that_on_the_way_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "_of_the_host", lambda: "10.0.0.9")
    assert job_address() == "10.0.0.9"
    monkeypatch.setenv("MASTER_ADDR", "no such name.invalid")
    assert job_address() == "10.0.0.9"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert job_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    assert job_address() == "127.0.0.1"


def test_a_rank_whose_name_stands_for_its_loopback_takes_the_address_on_the_way_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "address_towards", {"10.0.0.2": "10.0.0.1"}.get)
    assert reachable_address(["127.0.1.1", "10.0.0.2"], 0) == "10.0.0.1"
    assert reachable_address(["127.0.1.1", "10.0.0.2"], 1) == "10.0.0.2"
    assert reachable_address(["127.0.0.1", "127.0.0.1"], 1) == "127.0.0.1"
    assert reachable_address(["127.0.1.1", "10.9.9.9"], 0) == "127.0.1.1", "there is no way to the other"


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        ({}, False),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "::1"}, True),
        ({"MASTER_ADDR": "node0"}, False),
        ({"MASTER_ADDR": "node0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "node0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}, True),
    ],
)
def test_a_job_is_on_one_host_where_it_says_so(
    environment: dict[str, str], local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_on_one_host() == local
