"""Plans as calls of torch's FSDP2: groups of modules, what stays whole after forward, and what is gathered ahead.

Of what FSDP2 does, groups that are not resharded after forward come closest to the decoupled all-reduce: gradients are
reduce-scattered under backward, each rank updates its share, and parameters are gathered under the next forward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from headway.errors import PlanError
from headway.interop.settings.python_passes import in_torch, literal, python_file
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

# Modules that share one reduce-scatter and one all-gather, in the order in which forward needs them.
GROUPS = {groups}
AHEAD = {ahead}  # groups that are gathered before it is their turn
{passes}

def shard(model, **options):
    \"\"\"The model with its groups sharded. Construct its optimizer after it, and load its state as FSDP2 has it.\"\"\"
{prepare}    options["reshard_after_forward"] = False
    frozen = {{parameter for parameter in model.parameters() if not parameter.requires_grad}}
    if frozen:  # whole on every rank, never gathered, and left on the device where they are
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
    \"\"\"The groups with all that shares a parameter in one of them: FSDP2 takes no parameter of two groups.\"\"\"
    joined = []
    for group in groups:
        modules, held = list(group), parameters_in(group)
        sharing = [place for place, other in enumerate(joined) if other[1] & held]
        for place in reversed(sharing):  # they go where the first of them is
            others, theirs = joined.pop(place)
            modules, held = others + modules, theirs | held
        joined.insert(sharing[0] if sharing else len(joined), (modules, held))
    for module in model.modules():
        own = {{id(parameter) for parameter in module.parameters(recurse=False)}}
        for modules, held in joined:
            inside = any(module is each for root in modules for each in root.modules())
            if own & held and not inside and module is not model:
                modules.append(module)
    return [modules for modules, _ in joined]


def parameters_in(modules):
    return {{id(p) for module in modules for p in module.parameters() if p.requires_grad}}
"""


@dataclass(frozen=True)
class Grouping:
    """Modules in groups, and how many of a model's modules had to leave a bucket of the plan."""

    groups: tuple[tuple[str, ...], ...]
    moved: int
    in_root: int
    """How many parameters the model holds itself: they are gathered before all others."""


def settings(asked: SettingsRequest) -> Settings:
    """Groups of modules and what is gathered ahead, for a decoupled plan of a model in one piece.

    Raises PlanError for other plans, without the model, for a model without modules to group, and for one with
    parameters that have no dimension.
    """
    if not isinstance(asked.data, DecoupledStrategy) or asked.pipeline is not None:
        asked.refuse(
            FSDP2, "decoupled along data: FSDP2 scatters sums and gathers parameters, it does not all-reduce"
        )
    strategy = asked.data
    (model,) = asked.models(WHY)
    (schedule,) = asked.schedules(WHY)
    if scalars := [parameter.name for parameter in model.parameters if not parameter.shape]:
        raise PlanError(
            "FSDP2 does not shard parameters without a dimension", got=", ".join(scalars[:3]),
            expected="parameters of one dimension or more", fix="Give them the shape (1,), or use DDP.",
        )  # fmt: skip
    grouping = grouped(model, schedule)
    if not grouping.groups:
        raise PlanError(
            "FSDP2 has no settings for this model", got="parameters that the model itself holds",
            expected="modules with parameters",
        )  # fmt: skip
    lacks = _lacks(strategy, schedule, grouping)
    told = in_torch(asked.plan.passes, "behind model.set_requires_gradient_sync(False)")
    lacks += unexpressed(asked, told.lacks)
    count = len(grouping.groups)
    groups = f"{count} group{'s' * (count > 1)} of modules"
    gist = f"{groups}, not resharded after forward, {strategy.channels} gathered ahead"
    gist = ", ".join([gist, *told.gists])
    body = _BODY.format(
        groups=literal([list(group) for group in grouping.groups]), ahead=strategy.channels, imports=told.imports,
        passes=told.code, prepare=told.call("model"),
    )  # fmt: skip
    use = f"Call shard(model) of {FILE} before the optimizer is constructed.{told.use}"
    if model.frozen_bytes:
        use += " Frozen parameters stay whole, where they are: move the model to its device before."
    text = python_file(f"{FSDP2}, {gist}", tuple(lacks), body)
    return Settings(FSDP2, gist, use, tuple(lacks), files={FILE: text})


def grouped(model: ModelSpec, schedule: BucketSchedule) -> Grouping:
    """The modules of each bucket, in the order in which buckets are gathered and forward needs modules.

    A module is the outermost one that holds parameters itself: what is below may be used without being called. It is
    in the bucket that has most of its bytes. The model itself is no module of a group.
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
    lacks = [
        "gathers from the end of backward on: they begin with the next forward, which waits for the first one"
    ]
    if grouping.moved:
        lacks.append(
            f"buckets that share a module: {grouping.moved} modules are in the one bucket that has most of them"
        )
    if len(grouping.groups) < len(schedule.buckets):
        lacks.append(f"{len(schedule.buckets)} buckets: there are {len(grouping.groups)} groups")
    if grouping.in_root:
        lacks.append(
            f"buckets for {grouping.in_root} parameters that the model itself holds: they are a group of their own, "
            "which is gathered first"
        )
    if strategy.gather == "gradients":
        lacks.append(
            "gathered gradients: parameters are gathered, so optimizers that look at whole tensors train otherwise"
        )
    lacks.append("its rings: collectives are those of the process group, as many at a time as it carries")
    return lacks
