"""What a pass holds where some modules keep only what they are given, and compute the rest again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.errors import UnsupportedError
from headway.model import ModelSpec, ModuleMemory, PassMemory
from headway.passes.regions import lies_in, region_of


def savings_bytes(memory: PassMemory, regions: Sequence[str]) -> dict[str, int]:
    """What each region no longer keeps from forward to backward. Raises UnsupportedError for one not called once."""
    return {region: call.kept_bytes for region, call in _calls(memory, regions).items()}


def recomputed_memory(memory: PassMemory, model: ModelSpec, regions: Sequence[str]) -> PassMemory:
    """``memory`` as it is where each of ``regions`` recomputes. Raises UnsupportedError for one not called once."""
    calls = _calls(memory, regions)
    open_ = dict(calls)  # those that have not been computed again
    backward = []
    owners = {each.name: each.module for each in model.parameters}
    for name, held_bytes in memory.backward:
        region = region_of(owners.get(name, ""), regions)
        open_.pop(region, None)
        saved_bytes = sum(each.kept_bytes for each in open_.values())
        backward.append((name, max(0, held_bytes - saved_bytes)))
    return memory.model_copy(
        update={
            "forward_bytes": max(_forward_bytes(memory, calls), default=memory.forward_bytes),
            "backward": tuple(backward),
            "modules": (),  # of what was watched, and is not so any more
        }
    )


def _calls(memory: PassMemory, regions: Sequence[str]) -> dict[str, ModuleMemory]:
    found = {}
    for region in regions:
        calls = [each for each in memory.modules if each.module == region]
        if len(calls) != 1:
            raise UnsupportedError(
                "recomputation is predicted of modules that a forward calls once",
                got=f"{region}, which is called {len(calls)} times" if calls else f"no call of {region}",
                fix="Name modules that forward calls once.",
            )  # fmt: skip
        (found[region],) = calls
    return found


def _forward_bytes(memory: PassMemory, calls: dict[str, ModuleMemory]) -> Iterator[int]:
    """The most during each call outside of regions and within, and what is there at the end of forward."""
    regions = tuple(calls)
    gone_bytes = end_bytes = 0
    for call in memory.modules:
        region = region_of(call.module, regions)
        if region == call.module:
            inner = [each for each in memory.modules if each is not call and lies_in(each.module, region)]
            rise_bytes = max((each.peak_bytes - each.begin_bytes for each in inner), default=0)
            yield call.begin_bytes - gone_bytes + max(rise_bytes, call.output_bytes)
            gone_bytes += call.kept_bytes
        elif not region and not any(lies_in(each, call.module) for each in regions):
            yield call.peak_bytes - gone_bytes
        end_bytes = calls.get(region, call).end_bytes
    yield max(0, end_bytes - gone_bytes)
