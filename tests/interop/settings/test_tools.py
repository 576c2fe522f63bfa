from __future__ import annotations

import re

import pytest
from tests.interop.settings.plans import asked

from headway.cli.settings import NAMES
from headway.errors import PlanError
from headway.interop.settings.request import CollectiveOptions
from headway.interop.settings.tools import OF_COLLECTIVES, TOOLS
from headway.plugins import is_own
from headway.strategies.registry import plugins

BUCKETED = {"ddp", "decoupled", "parameter_server"}
SUMMED = {"ddp", "decoupled"}
DONE = {
    "ddp": BUCKETED, "fsdp2": {"decoupled"}, "deepspeed": BUCKETED, "megatron": BUCKETED,
    "nccl": SUMMED, "rccl": SUMMED,
}  # fmt: skip
STRATEGIES = [name for name, plugin in plugins().items() if is_own(plugin) and name != "pipeline"]
AS_REPLAYED = CollectiveOptions(as_replayed=True)


def test_the_command_line_knows_every_tool() -> None:
    assert tuple(TOOLS) == NAMES == tuple(DONE)
    assert set(OF_COLLECTIVES) < set(TOOLS)


@pytest.mark.parametrize(
    ("tool", "name"), [(tool, name) for tool, done in DONE.items() for name in sorted(done)]
)
def test_settings_say_what_they_lack(tool: str, name: str) -> None:
    found = TOOLS[tool](asked(name, collectives=AS_REPLAYED))
    assert found.files or found.arguments or found.environment
    assert found.sentence().startswith(f"{found.tool} can {found.part}")
    assert found.complete == ("left out" not in found.sentence())
    assert all("\n" not in lack and not lack.endswith(".") for lack in (*found.lacks, *found.cautions))


@pytest.mark.parametrize(
    ("tool", "name"),
    # Adaptive plans are asked for what they begin with.
    [(tool, name) for tool, done in DONE.items() for name in STRATEGIES if name not in {*done, "adaptive"}],
)
def test_other_plans_are_refused_in_words(tool: str, name: str) -> None:
    plan = asked(name, collectives=AS_REPLAYED)
    assert plan.data is not None
    with pytest.raises(
        PlanError, match=f"no settings for this plan; got {re.escape(plan.data.describe())}; expected"
    ):
        TOOLS[tool](plan)
