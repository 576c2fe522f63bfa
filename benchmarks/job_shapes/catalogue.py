"""The shapes of jobs: a script of ``strangers/``, how it is started, and what Headway is expected to make of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Launcher = Literal["torchrun", "itself"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One job. ``itself``: the script starts its own ranks, or is one.

    ``{node}``, ``{master}`` and ``{port}`` are filled in. ``refused`` says that no plan is expected for it, only a line
    that says why. On the CPU ``notebook_launcher`` starts workers on one host alone, and so over no shaped link.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    launcher: Launcher = "torchrun"
    variables: dict[str, str] = field(default_factory=dict)
    hosts: int = 2
    refused: bool = False
    tolerance: float = (
        2e-3  # of losses, relative: sums of two ranks are exact, bf16 and compiled code are not
    )


def _gpt(name: str, *arguments: str, tolerance: float = 2e-3) -> Shape:
    return Shape(name, "gpt.py", arguments, tolerance=tolerance)


_LIT = {"NODE_RANK": "{node}", "MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"}
_SLURM = {"SLURM_PROCID": "{node}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "{node}"}

SHAPES = (
    Shape("ddp-tutorial", "ddp_tutorial.py"),
    Shape(
        "imagenet-spawn", "imagenet.py",
        ("--world-size", "2", "--rank", "{node}", "--dist-url", "tcp://{master}:{port}"), "itself",
    ),
    Shape("srun-tcp", "slurm.py", ("--init", "tcp://{master}:{port}"), "itself", _SLURM),
    _gpt("gpt-clip"),
    _gpt("gpt-no-clip", "--clip", "0"),
    _gpt("gpt-accumulate-toggled", "--accumulate", "4"),
    _gpt("gpt-accumulate-no-sync", "--accumulate", "2", "--no-sync"),
    _gpt("gpt-bf16", "--dtype", "bfloat16", tolerance=1e-2),
    _gpt("gpt-fp16-scaler", "--dtype", "float16", tolerance=1e-2),
    _gpt("gpt-tied", "--tied"),
    _gpt("gpt-logged-norm", "--clip", "0", "--log-norm"),
    _gpt("gpt-recomputed", "--checkpoint"),
    _gpt("gpt-compiled-before", "--compile", "before", tolerance=1e-2),
    _gpt("gpt-compiled-after", "--compile", "after", tolerance=1e-2),
    Shape("lightning", "lit.py", ("--nodes", "2"), "itself", _LIT),
    Shape("lightning-torchrun", "lit.py", ("--nodes", "2")),
    Shape("lightning-clip-accumulate", "lit.py", ("--nodes", "2", "--clip", "1.0", "--accumulate", "2")),
    Shape("lightning-vision", "lit.py", ("--nodes", "2", "--model", "vision")),
    Shape("trainer-default", "trainer.py"),
    Shape("trainer-no-unused", "trainer.py", ("--find-unused", "no")),
    Shape("trainer-accumulate", "trainer.py", ("--accumulate", "2")),
    Shape("accelerate", "accelerated.py"),
    Shape("accelerate-accumulate", "accelerated.py", ("--accumulate", "2")),
    Shape(
        "notebook-launcher", "accelerated.py", ("--notebook", "--port", "{port}"), "itself",
        {"GLOO_SOCKET_IFNAME": "lo"},
        hosts=1,
    ),
    Shape("gan", "several.py", ("gan",), refused=True),
    Shape("distillation", "several.py", ("distil",)),
    Shape("lora", "several.py", ("lora",)),
    Shape("two-optimizers", "several.py", ("two-optimizers",)),
    Shape("find-unused", "features.py", ("find-unused",)),
    Shape("lstm-clip", "features.py", ("lstm",)),
    Shape("static-graph", "features.py", ("static-graph",)),
    Shape("lbfgs", "features.py", ("lbfgs",), tolerance=5e-2),
    Shape("moving-average", "features.py", ("ema",)),
    Shape("zero-redundancy", "features.py", ("zero",), refused=True),
    Shape("fp16-hook", "features.py", ("fp16-hook",), refused=True),
    Shape("fsdp2", "fsdp2.py", refused=True),
)  # fmt: skip
