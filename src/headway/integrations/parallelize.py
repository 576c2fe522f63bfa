"""``headway.parallelize``: wraps a model as a plan says, or tunes its schedule during training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.errors import UnsupportedError, UserError
from headway.integrations.fitted import strategy_for
from headway.passes.other_forward import apply_all
from headway.plan import Plan
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import plugin_of, plugins, without_a_plan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | Strategy | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_batch: Any = None,
    mesh: DeviceMesh | None = None,
    **ddp_options: Any,
) -> nn.Module:
    """Wrap ``model`` for training as ``plan`` says; ``optimizer`` is the one that updates it.

    The result replaces ``DistributedDataParallel(model, **ddp_options)``; the rest of the script stays the same. Call
    it on every rank, after ``torch.distributed.init_process_group``.

    Without a plan the strategy is ``adaptive``: the all-reduce is decoupled, and its schedule is tuned during the first
    steps. That needs no recording, but some tens of steps are not optimal. Stock DDP is measured too, and is used from
    then on unless a schedule is faster. A plan from ``headway.optimize`` applies from the first step, and keeps stock
    DDP if nothing else is predicted to be faster.

    Under a pipeline plan, the model is split into one stage per rank, and the result's ``train_step(batch, target)``
    replaces forward, ``loss_fn`` and backward (``headway.strategies.pipeline.pipelined.PipelinedModel``).
    ``optimizer`` then updates this rank's stage. Modules other than ``torch.nn.Sequential`` need ``example_batch``, a
    batch like those passed to ``train_step``: only shapes and dtypes of its tensors matter. With it the stage exists
    at once: an optimizer's state can be loaded, and a model that cannot be split is refused here.
    On a ``mesh`` with the dimensions "pipeline" and "data", pipelines are replicated, each with a batch of its own,
    and the plan's strategy for "data" averages the gradients of a stage's replicas: stock DDP by default. ``mesh``
    defaults to that of the plan.

    Raises PlanError if the plan is for another model, or another number of workers unless it adapts, UnsupportedError
    if the model or an option would train wrongly, UserError if there is no process group or the optimizer updates
    another model.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from headway import torch_private

    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group", expected="torch.distributed to be initialised",
            fix="Call torch.distributed.init_process_group first, under torchrun.",
        )  # fmt: skip
    if isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "the model is already wrapped", got=type(model).__name__, fix="Pass its .module."
        )
    torch_private.let_gloo_finish_before_shutdown()
    strategy = without_a_plan()
    planned = plan if isinstance(plan, Strategy) else plan and plan.strategy
    if isinstance(planned, PipelineStrategy | MeshStrategy):
        _check_updates(optimizer, model)
        if ddp_options:
            raise UnsupportedError("a pipeline accepts no DDP options", got=", ".join(sorted(ddp_options)))
        return _pipelined(model, optimizer, plan, planned, loss_fn, example_batch, mesh)
    if loss_fn is not None or example_batch is not None:
        raise UserError(
            "loss_fn and example_batch are only for pipelines",
            fix="Remove them, and compute the loss as before.",
        )
    if mesh is not None:
        raise UserError("mesh is only for pipelines", fix="Remove it, or pass process_group.")
    if isinstance(plan, Strategy):
        strategy = plan
    elif plan is not None:
        strategy = strategy_for(plan, model, ddp_options.get("process_group"))
        model = apply_all(plan.passes, model, optimizer)
    _check_updates(optimizer, model)
    plugin = plugin_of(strategy)
    wrapped = plugin.wrap(model, strategy, **ddp_options)
    plugin.updated_by(wrapped, optimizer)
    return wrapped


def finish(model: nn.Module, *, timeout_s: float = 300.0) -> tuple[int, ...]:
    """End the training of ``model``, which a plan has wrapped, with the same model on all ranks.

    Call it once, on every rank, after the last step and before the final evaluation or checkpoint. Under partial
    all-reduce each rank, or each host, has trained its own model: all get the mean of these. Strategies of other
    packages say how they end. Under other strategies all ranks have the same model, and nothing happens. Returns the
    ranks that contributed to the model: under partial all-reduce, ranks that were lost or did not arrive within half
    of ``timeout_s`` are missing.

    Raises CommunicationError if no rank provides the final model in time, or if the strategy lost a rank; the model is
    then this rank's own.
    """
    import torch.distributed as dist

    for plugin in plugins().values():
        if (ranks := plugin.finish(model, timeout_s)) is not None:
            return ranks
    alone = not dist.is_available() or not dist.is_initialized()
    return tuple(range(1 if alone else dist.get_world_size()))


def _pipelined(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | Strategy | None,
    strategy: PipelineStrategy | MeshStrategy,
    loss_fn: Callable[..., Any] | None,
    example: Any,
    mesh: DeviceMesh | None,
) -> nn.Module:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from headway.strategies.live.module_spec import model_spec
    from headway.strategies.pipeline.pipelined import placed
    from headway.strategies.pipeline.plugin import pipelined

    order = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    data = strategy.data if isinstance(strategy, MeshStrategy) else DistributedDataParallelStrategy()
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    placement = placed(strategy, mesh, plan.mesh if isinstance(plan, Plan) else None, device)

    def replicate(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        # Synchronise buffers once per step, not in every micro-batch's forward.
        options = inspect.signature(DistributedDataParallel.__init__).parameters
        shares = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
        return plugin_of(data).wrap(stage, data, process_group=group, **{shares: False})

    wrapped = pipelined(model, optimizer, order, loss_fn, example, placement=placement, replicate=replicate)
    if isinstance(plan, Plan):
        plan.check_stage(model_spec(wrapped.stage), placement.stage, placement.stages, dist.get_world_size())
    return wrapped


def _check_updates(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError unless ``optimizer`` has parameters of ``model``: otherwise the model would not train."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise UserError(
            "no optimizer was passed", got=type(optimizer).__name__, expected="a torch.optim.Optimizer",
            fix="Call headway.parallelize(model, optimizer, plan).",
        )  # fmt: skip
    trained = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in trained for group in groups for parameter in group["params"]):
        raise UserError(
            "the optimizer updates no parameter of the model",
            got=f"{type(optimizer).__name__} with {sum(len(group['params']) for group in groups)} other parameters",
            expected="the optimizer of this model",
            fix="Construct it with model.parameters(), after the model is moved to its device.",
        )  # fmt: skip
