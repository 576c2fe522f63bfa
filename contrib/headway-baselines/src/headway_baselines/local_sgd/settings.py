"""Local SGD as torch's own: a hook that reduces no gradients, and an optimizer that averages after each period."""

from __future__ import annotations

from headway.ext import Settings
from headway.interop.settings.python_passes import python_file
from headway_baselines.local_sgd.policy import LocalSGDStrategy

FILE = "ddp_settings.py"

_BODY = """
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = {steps}  # of each rank in a period


def wrap(module, **options):
    \"\"\"The module in DistributedDataParallel, whose gradients stay each rank's own.\"\"\"
    wrapped = DistributedDataParallel(module, **{{**options, "broadcast_buffers": False}})
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    return wrapped


def wrap_optimizer(optimizer, process_group=None):
    \"\"\"The optimizer, after every period of which parameters are averaged. The averager counts steps from 0.\"\"\"
    averager = PeriodicModelAverager(period=STEPS, warmup_steps=STEPS - 1, process_group=process_group)
    return PostLocalSGDOptimizer(optimizer, averager)
"""


def settings(strategy: LocalSGDStrategy) -> Settings:
    """Torch's local SGD of the same period."""
    lacks = []
    if strategy.outer is not None:
        lacks.append("the outer optimizer: ranks go on with the mean of their models, so it trains otherwise")
    if strategy.moments == "averaged":
        lacks.append("the optimizer's state: it stays each rank's own")
    if strategy.buffers == "averaged":
        lacks.append("the buffers of normalisation layers: they stay each rank's own")
    gist = f"torch's local SGD with a period of {strategy.steps} steps"
    text = python_file(gist, tuple(lacks), _BODY.format(steps=strategy.steps))
    use = f"Wrap the model with wrap() and its optimizer with wrap_optimizer() of {FILE}."
    return Settings("DDP", gist, use, tuple(lacks), files={FILE: text})
