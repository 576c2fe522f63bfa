from __future__ import annotations

from headway.lab.session import rank_environments
from headway.lab.spec import LabSpec, parse_spec


def test_torchrun_variables_over_uneven_hosts() -> None:
    spec = parse_spec({"hosts": [{"name": "a", "workers": 2}, {"name": "b"}], "pace": {2: 1.5}})
    ranks = rank_environments(spec, {"HOME": "/h", "RANK": "9"}, "lab-1", mode="user")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "HEADWAY_HOST")
    assert [tuple(env[name] for name in names) for env in ranks] == [
        ("0", "0", "3", "2", "0", "a"),
        ("1", "1", "3", "2", "0", "a"),
        ("2", "0", "3", "1", "1", "b"),
    ]
    assert [env["HEADWAY_PACE_FACTOR"] for env in ranks] == ["1", "1", "1.5"]
    for env in ranks:
        assert env["HOME"] == "/h"
        assert env["MASTER_ADDR"] == "10.77.0.1"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["TORCHELASTIC_RUN_ID"] == env["HEADWAY_LAB_ID"] == "lab-1"
        assert env["HEADWAY_LAB_MODE"] == "user"
        assert env["GROUP_WORLD_SIZE"] == "2"
        assert env["OMP_NUM_THREADS"] == "1"


def test_threads_that_are_set_stay() -> None:
    env = {"OMP_NUM_THREADS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (rank,) = rank_environments(LabSpec(hosts=1), env, "lab-1", mode="loopback", loopback_port=1234)
    assert rank["OMP_NUM_THREADS"] == "3"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in rank
    assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("127.0.0.1", "1234")
    assert rank["GLOO_SOCKET_IFNAME"] == "lo"
