"""Exports plans as calls of torch's FSDP2: groups of modules, resharding, and prefetching.

Groups without resharding after forward are FSDP2's closest equivalent of the decoupled all-reduce: gradients are
reduce-scattered during backward, each rank updates its share, and parameters are gathered during the next forward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from headway.errors import PlanError
from headway.interop.settings.python_passes import literal, python_file, torch_code
from headway.interop.settings.request import SettingsRequest, unexpressed
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.tool_settings import Settings

FSDP2 = "FSDP2"
FILE = "fsdp2_settings.py"
WHY = "its groups are modules"

_BODY = """
{imports}from torch.distributed.fsdp import fully_shard

# Modules that share one reduce-scatter and one all-gather, in forward order.
GROUPS = {groups}
AHEAD = {ahead}  # groups to prefetch
{passes}

def shard(model, **options):
    \"\"\"Shard the groups of the model. Construct its optimizer afterwards, and load state dicts as FSDP2 requires.\"\"\"
{prepare}    options["reshard_after_forward"] = False
    frozen = {{parameter for parameter in model.parameters() if not parameter.requires_grad}}
    if frozen:  # they stay unsharded on every rank, on their current device
        options["ignored_params"] = frozen | set(options.get("ignored_params") or ())
        computed_in = getattr(options.get("mp_policy"), "param_dtype", None)
        for parameter in frozen if computed_in is not None else ():
            parameter.data = parameter.data.to(computed_in)
    groups = with_tied_modules(model, [[model.get_submodule(name) for name in group] for group in GROUPS])
    for group in groups:
        fully_shard(group, **options)
    fully_shard(model, **options)
    first = [group[0] for group in groups]
    model.set_modules_to_forward_prefetch(first[:AHEAD])
    for place, module in enumerate(first):
        module.set_modules_to_forward_prefetch(first[place + 1 : place + 1 + AHEAD])
    return model


def with_tied_modules(model, groups):
    \"\"\"Merge groups that share parameters: FSDP2 does not allow a parameter in two groups.\"\"\"
    joined = []
    for group in groups:
        modules, held = list(group), parameters_in(group)
        sharing = [place for place, (_, earlier) in enumerate(joined) if earlier & held]
        for place in reversed(sharing):  # merged into the first of them
            earlier_modules, earlier = joined.pop(place)
            modules, held = earlier_modules + modules, earlier | held
        joined.insert(sharing[0] if sharing else len(joined), (modules, held))
    for module in model.modules():
        parameters = {{id(parameter) for parameter in module.parameters(recurse=False)}}
        for modules, held in joined:
            inside = any(module is inner for root in modules for inner in root.modules())
            if parameters & held and not inside and module is not model:
                modules.append(module)
    return [modules for modules, _ in joined]


def parameters_in(modules):
    return {{id(p) for module in modules for p in module.parameters() if p.requires_grad}}
"""


@dataclass(frozen=True)
class Grouping:
    """Groups of modules. ``moved`` counts modules whose parameters are in several of the plan's buckets."""

    groups: tuple[tuple[str, ...], ...]
    moved: int
    in_root: int
    """The number of parameters of the root module, which are gathered first."""


def settings(request: SettingsRequest) -> Settings:
    """Groups of modules and prefetching, for a decoupled plan without a pipeline.

    Raises PlanError for other plans, without the model, and for models without modules to group or with parameters
    that have no dimension.
    """
    if not isinstance(request.data, DecoupledStrategy) or request.pipeline is not None:
        request.refuse(
            FSDP2,
            "decoupled along data: FSDP2 reduce-scatters gradients and gathers parameters, without all-reduce",
        )
    strategy = request.data
    (model,) = request.models(WHY)
    (schedule,) = request.schedules(WHY)
    if scalars := [parameter.name for parameter in model.parameters if not parameter.shape]:
        raise PlanError(
            "FSDP2 cannot shard parameters without a dimension", got=", ".join(scalars[:3]),
            expected="parameters with at least one dimension", fix="Give them the shape (1,), or use DDP.",
        )  # fmt: skip
    grouping = grouped(model, schedule)
    if not grouping.groups:
        raise PlanError(
            "FSDP2 has no settings for this model", got="parameters only in the root module",
            expected="submodules with parameters",
        )  # fmt: skip
    lacks = _lacks(strategy, schedule, grouping)
    in_script = torch_code(request.plan.passes, "behind model.set_requires_gradient_sync(False)")
    lacks += unexpressed(request, in_script.lacks)
    count = len(grouping.groups)
    groups = f"{count} group{'s' * (count > 1)} of modules"
    gist = f"{groups}, not resharded after forward, {strategy.channels} gathered ahead"
    gist = ", ".join([gist, *in_script.gists])
    body = _BODY.format(
        groups=literal([list(group) for group in grouping.groups]), ahead=strategy.channels, imports=in_script.imports,
        passes=in_script.code, prepare=in_script.call("model"),
    )  # fmt: skip
    use = f"Call shard(model) of {FILE} before the optimizer is constructed.{in_script.use}"
    if model.frozen_bytes:
        use += " Frozen parameters are not sharded or moved: move the model to its device first."
    text = python_file(f"{FSDP2}, {gist}", tuple(lacks), body)
    return Settings(FSDP2, gist, use, tuple(lacks), files={FILE: text})


def grouped(model: ModelSpec, schedule: BucketSchedule) -> Grouping:
    """Group modules by bucket: buckets in gather order, modules in forward order.

    A grouped module is the outermost one with parameters of its own, because its submodules may be used without being
    called. It goes to the bucket with most of its bytes. The root module is in no group.
    """
    owners = {parameter.module for parameter in model.parameters}
    unit_of = {parameter.name: _unit(parameter.module, owners) for parameter in model.parameters}
    held: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in schedule.buckets:
        for part in bucket.parts:
            parameter = model.by_name[part.parameter]
            held[unit_of[part.parameter]][bucket.index] += (
                part.numel * parameter.size_bytes // max(parameter.numel, 1)
            )
    in_forward = dict.fromkeys(unit_of[parameter.name] for parameter in model.forward_parameters())
    of_bucket: dict[int, list[str]] = defaultdict(list)
    for unit in in_forward:
        if unit:
            of_bucket[max(held[unit], key=lambda index: (held[unit][index], -index))].append(unit)
    order = schedule.gather_order or tuple(range(len(schedule.buckets)))
    return Grouping(
        groups=tuple(tuple(of_bucket[index]) for index in order if of_bucket[index]),
        moved=sum(len(buckets) > 1 for unit, buckets in held.items() if unit),
        in_root=sum(not unit for unit in unit_of.values()),
    )


def _unit(module: str, owners: set[str]) -> str:
    names = module.split(".")
    above = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((name for name in above if name in owners), module)


def _lacks(strategy: DecoupledStrategy, schedule: BucketSchedule, grouping: Grouping) -> list[str]:
    lacks = ["gathers right after backward: they begin with the next forward, which waits for the first"]
    if grouping.moved:
        lacks.append(
            f"buckets that share a module: {grouping.moved} modules are in the bucket with most of their bytes"
        )
    if len(grouping.groups) < len(schedule.buckets):
        lacks.append(f"{len(schedule.buckets)} buckets: there are {len(grouping.groups)} groups")
    if grouping.in_root:
        lacks.append(
            f"buckets for {grouping.in_root} parameters of the root module: they form a separate group, which is "
            "gathered first"
        )
    if strategy.gather == "gradients":
        lacks.append(
            "gathered gradients: parameters are gathered, so optimizers that use whole tensors train differently"
        )
    lacks.append("its rings: the process group chooses algorithms and concurrency")
    return lacks
