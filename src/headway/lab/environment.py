"""The environment a lab's ranks see: torchrun's variables and the lab's own."""

from __future__ import annotations

from collections.abc import Mapping

from headway.lab.network import INTERFACE, address
from headway.lab.processes import LAB_ID
from headway.lab.spec import LabSpec

MASTER_PORT = 29500
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


def rank_environments(
    spec: LabSpec, base: Mapping[str, str], lab_id: str, *, mode: str, loopback_port: int | None = None
) -> list[dict[str, str]]:
    """One environment a rank, ``base`` with the lab's variables over it.

    With ``loopback_port`` the hosts are not namespaces: rank 0 listens there, on 127.0.0.1.
    ``OMP_NUM_THREADS`` and ``PYTHONUNBUFFERED`` are set to 1 where ``base`` does not set them.
    """
    loopback = loopback_port is not None
    interface = "lo" if loopback else INTERFACE
    common = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    common |= {name: value for name, value in base.items() if name not in _FOREIGN}
    common |= {
        "WORLD_SIZE": str(spec.world_size),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "GROUP_WORLD_SIZE": str(len(spec.links)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1" if loopback else address(0),
        "MASTER_PORT": str(loopback_port or MASTER_PORT),
        "TORCHELASTIC_RUN_ID": lab_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HEADWAY_LAB_MODE": mode,
        LAB_ID: lab_id,
    }
    environments: list[dict[str, str]] = []
    for group, link in enumerate(spec.links):
        for local_rank in range(link.workers):
            rank = len(environments)
            own = {
                "RANK": str(rank),
                "ROLE_RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(link.workers),
                "GROUP_RANK": str(group),
                "HEADWAY_HOST": link.name,
                "HEADWAY_PACE_FACTOR": f"{spec.pace.get(rank, 1.0):g}",
            }
            environments.append(common | own)
    return environments
