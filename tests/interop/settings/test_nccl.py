from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.interop.settings.plans import BY_NAME, asked, meshed, of_tables, piped
from tests.interop.settings.tuner_reader import COLLECTIVES, Choice, answer

from headway.cluster import AlgorithmCost, Cluster, Host, NcclModel
from headway.collectives.selection import SizeClass
from headway.errors import PlanError, UserError
from headway.interop.settings import nccl
from headway.interop.settings.request import CollectiveOptions, SettingsRequest, unexpressed
from headway.interop.settings.tuner_table import ANY_SIZE, TunerRule
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.tool_settings import Settings

AS_REPLAYED = CollectiveOptions(as_replayed=True)
CHANNELS = CollectiveOptions(channels=8)
SMALL = SizeClass(size_bytes=1000, reduce_scatter="direct", all_gather="ring")


def test_the_halves_of_a_decoupled_plan_are_chosen_by_function() -> None:
    both = nccl.nccl(asked("decoupled", traced=False))
    assert both.environment == {"NCCL_ALGO": "reducescatter:ring;allgather:ring"}
    assert both.complete
    assert "every communicator of the process" in both.cautions[0]
    one = nccl.nccl(asked("decoupled", traced=False, reduce_scatter="native"))
    assert one.environment == {"NCCL_ALGO": "allgather:ring"}, "the other is NCCL's own choice"
    assert one.gist == "ring for allgather"


def test_what_the_library_has_no_algorithm_for_is_said() -> None:
    one = nccl.nccl(asked("decoupled", traced=False, all_gather="tree"))
    assert one.lacks == ("tree collectives: allgather is left to the library",)
    options: dict[str, Any] = {
        "reduce_scatter": "direct",
        "ring_order": (1, 0, 3, 2),
        "by_size": (SMALL,),
    }
    fixed = nccl.rccl(asked("decoupled", collectives=AS_REPLAYED, **options))
    assert fixed.lacks == (
        "direct collectives: rings for reducescatter",
        "other algorithms for smaller buckets: all use rings",
        "the order of ranks in rings: the library chooses its own",
    )
    assert not fixed.complete


def test_a_plan_that_adapts_is_asked_for_what_it_begins_with() -> None:
    begins = DistributedDataParallelStrategy(bucket_cap_mb=5.0)
    plan = asked("decoupled", adapt=True, begin_as=begins)
    assert plan.data == begins
    assert any("search for better options" in each for each in unexpressed(plan))


@pytest.mark.parametrize("library", [nccl.nccl, nccl.rccl])
def test_a_plan_that_leaves_algorithms_to_the_library_needs_no_settings(
    library: Callable[[SettingsRequest], Settings],
) -> None:
    for plan in (
        asked("ddp"),
        asked("decoupled", reduce_scatter="native", all_gather="native"),
    ):
        found = library(plan)
        assert "nothing needs to be set" in found.sentence()
        assert (found.complete, found.environment, found.files) == (True, {}, {})
        assert "--as-replayed" in found.use
        assert library(replace(plan, collectives=AS_REPLAYED)).environment
    for plan in (asked("parameter_server"), asked("partial-all-reduce"), piped()):
        with pytest.raises(PlanError, match="do not use collectives"):
            library(replace(plan, collectives=AS_REPLAYED))


def test_as_replayed_fixes_the_protocol_too() -> None:
    found = nccl.nccl(asked("ddp", collectives=AS_REPLAYED))
    assert found.environment == {"NCCL_ALGO": "allreduce:ring", "NCCL_PROTO": "allreduce:simple"}


def on_slow_trees(plan: SettingsRequest, tree_factor: float = 3.0, fit_error: float = 0.0) -> SettingsRequest:
    """The plan on four hosts of eight H100 whose trees take longer than NCCL expects."""
    cluster = Cluster(
        hosts=tuple(Host(name=f"h{at}", workers=8, up_gbps=3072, down_gbps=3072) for at in range(4)),
        library="nccl",
        nccl=NcclModel(tree_factor=tree_factor),
        algorithms={"nccl-all-reduce": AlgorithmCost(fit_error=fit_error)},
    )
    return replace(plan, plan=plan.plan.model_copy(update={"cluster": cluster}))


def test_where_nccl_expects_wrongly_its_choice_is_changed() -> None:
    """A tree with LL takes 107 us for 16 kB there, and a ring with LL 80 us."""
    found = nccl.nccl(on_slow_trees(asked("ddp", ranks=32)))
    assert found.environment == {"NCCL_ALGO": "allreduce:ring", "NCCL_PROTO": "allreduce:ll"}
    assert "1.3 times as fast" in found.cautions[0]
    table = nccl.nccl(on_slow_trees(asked("ddp", ranks=32, collectives=CHANNELS))).files[nccl.FILE]
    assert answer(table, "allreduce", 16_160, 4, 32) == Choice("ring", "ll", 8)
    assert answer(table, "allgather", 16_160, 4, 32) == Choice("ring", "simple", 8)


@pytest.mark.parametrize(("tree_factor", "fit_error"), [(1.0, 0.05), (3.0, 0.5)])
def test_nothing_is_set_for_what_the_model_cannot_tell_apart(tree_factor: float, fit_error: float) -> None:
    for options in (None, AS_REPLAYED, CHANNELS):
        found = nccl.nccl(on_slow_trees(asked("ddp", ranks=32, collectives=options), tree_factor, fit_error))
        assert (found.environment, found.files) == ({}, {})
        assert f"the model's error, {fit_error:.0%}" in found.gist
        assert "--as-replayed fixes nothing" in found.use


def test_sizes_that_are_not_known_are_asked_for() -> None:
    found = nccl.nccl(on_slow_trees(asked("ddp", ranks=32, traced=False)))
    assert not found.environment
    assert "--trace" in found.use
    assert "leaves the choice" in nccl.nccl(on_slow_trees(asked("ddp", ranks=4))).gist, (
        "not the whole cluster"
    )


def test_the_table_of_nccl_leaves_nothing_to_its_tuner() -> None:
    """What no rule fits would be sent through one channel."""
    found = nccl.nccl(asked("decoupled", buckets=BY_NAME, collectives=CHANNELS))
    text = found.files[nccl.FILE]
    for collective in COLLECTIVES:
        for size_bytes in (0, 4040, 8040, 5 * 2**30):
            assert answer(text, collective, size_bytes, 2, 4) == Choice("ring", "simple", 8)
    assert [fields[0] for fields in of_tables(text)] == ["reducescatter", "allgather", *COLLECTIVES]
    assert found.environment["NCCL_TUNER_CONFIG_FILE"] == nccl.FILE
    assert "NCCL_ALGO" not in found.environment
    assert any("one channel" in each for each in found.cautions)
    assert any("Blackwell" in each for each in found.cautions)


def test_rules_are_for_the_sizes_of_buckets_padded_to_even_shares() -> None:
    rules = of_tables(nccl.rccl(asked("decoupled", buckets=BY_NAME)).files[nccl.FILE])
    low, high = int(rules[0][1]), int(rules[0][2])
    assert low == 4040
    for numel in (1010, 1020, 2010):
        assert low <= -(-numel // 4) * 4 * 4 <= high
    assert rules[0][3:] == ["ring", "simple", "-1", "-1", "4"]
    unknown = of_tables(nccl.rccl(asked("decoupled", traced=False)).files[nccl.FILE])
    assert unknown[0][1:3] == ["0", str(ANY_SIZE)]


def test_rules_name_the_nodes_of_the_plans_cluster() -> None:
    hosts = tuple(Host(name=f"h{number}", workers=2, up_gbps=1, down_gbps=1) for number in range(2))
    plain = asked("decoupled")
    on = replace(plain, plan=plain.plan.model_copy(update={"cluster": Cluster(hosts=hosts)}))
    assert of_tables(nccl.rccl(on).files[nccl.FILE])[0][6:] == ["2", "4"]
    mesh = meshed(DistributedDataParallelStrategy())
    mesh = replace(
        mesh, collectives=AS_REPLAYED, plan=mesh.plan.model_copy(update={"cluster": Cluster(hosts=hosts)})
    )
    assert of_tables(nccl.rccl(mesh).files[nccl.FILE])[0][6:] == ["-1", "3"], (
        "on which hosts replicas are is not known"
    )


def test_rccl_keeps_what_it_decides_by_itself_and_rules_that_are_carried_over() -> None:
    plain = nccl.rccl(asked("decoupled", buckets=BY_NAME))
    text = plain.files[nccl.FILE]
    assert answer(text, "allgather", 8040, 1, 4, rccl=True) == Choice("ring", "simple", 0)
    assert answer(text, "allreduce", 8040, 1, 4, rccl=True) == Choice("", "", 0)
    assert any("--append" in each for each in plain.cautions)
    theirs = TunerRule("allreduce", 0, 65536, "tree", "ll", 2, 1, 8)
    carried = nccl.rccl(asked("decoupled", collectives=CollectiveOptions(channels=4, appended=(theirs,))))
    assert carried.files[nccl.FILE].splitlines()[-1] == theirs.line()
    assert not any("--append" in each for each in carried.cautions)
    assert of_tables(carried.files[nccl.FILE])[0][5] == "4"


def test_rules_that_nccls_tuner_would_carry_out_with_one_channel_are_refused() -> None:
    theirs = TunerRule("allreduce", 0, 65536, "tree", "ll")
    with pytest.raises(UserError, match="would use one"):
        nccl.nccl(asked("decoupled", collectives=CollectiveOptions(channels=4, appended=(theirs,))))
    named = replace(theirs, channels=2)
    found = nccl.nccl(asked("decoupled", collectives=CollectiveOptions(channels=4, appended=(named,))))
    assert answer(found.files[nccl.FILE], "allreduce", 100, 1, 4) == Choice("tree", "ll", 2)
