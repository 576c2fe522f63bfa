"""What a torchrun command line says of the job's size, where it says so plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.plugins import RANK_VARIABLES

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SPREADING = ("srun", "mpirun", "mpiexec", "prun", "orterun", "jsrun", "aprun", "flux", "ssh", "pdsh", "dsh")
_NODES, _PER_NODE = ("--nnodes",), ("--nproc-per-node", "--nproc_per_node")


def stated_world_size(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The number of ranks that ``command`` starts on all hosts together; None where that cannot be read off it."""
    options = _options(command)
    if options is None:
        return None
    per_node = _stated(options, _PER_NODE, environment.get("PET_NPROC_PER_NODE", ""))
    nodes = _stated(options, _NODES, environment.get("PET_NNODES", "1"))
    return int(per_node) * int(nodes) if per_node.isdecimal() and nodes.isdecimal() else None


def spreads(command: Sequence[str]) -> bool:
    """Whether ``command`` starts processes on other hosts, which do not see this host's temporary folder."""
    return Path(command[0]).name in _SPREADING


def starts_all_here(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether all ranks of the job are on this host, as far as can be read off ``command`` and where it is started."""
    if any(environment.get(name) for name in RANK_VARIABLES):
        return False
    options = _options(command)
    return options is None or _stated(options, _NODES, environment.get("PET_NNODES", "1")) == "1"


def _options(command: Sequence[str]) -> Sequence[str] | None:
    """The words between torchrun and the script."""
    for number, word in enumerate(command):
        if Path(word).name == "torchrun" or (number and command[number - 1] == "-m" and word in _MODULES):
            words = command[number + 1 :]
            ends = [at for at, each in enumerate(words) if each.endswith(".py") or each in ("-m", "--module")]
            return words[: ends[0]] if ends else None
    return None


def _stated(options: Sequence[str], names: tuple[str, ...], default: str) -> str:
    """The last value given to an option, or "" where it is given in a form that is not read here."""
    found = default
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else "".join(options[at + 1 : at + 2])
        elif name.startswith("--n") and any(full.startswith(name) for full in names):
            return ""  # an abbreviation, which torchrun takes too
    return found
