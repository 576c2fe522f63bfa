"""What ``headway run`` says of a run: when it begins, and how its steps compare with what was predicted."""

from __future__ import annotations

import pytest

from headway.cli.run import _RunReporter, steps_in_words
from headway.cluster import Cluster, Host
from headway.integrations.launch import CommandOutcome
from headway.integrations.reports import Report
from headway.model import ModelSpec
from headway.plan import Plan
from headway.plan.plan import Prediction
from headway.strategies.ddp.policy import DistributedDataParallelStrategy

PREDICTION = Prediction(step_ms=70.0, baseline_ms=100.0, uncertainty_ms=8.0)
RANK_0 = Report(
    host="a", host_in_plans="host0", rank=0, world_size=2, applied=True, began_s=2.0, steps=120, timed_steps=115,
    step_ms=72.0, spread_ms=6.0,
)  # fmt: skip


def plan(prediction: Prediction | None = PREDICTION, cluster: Cluster | None = None) -> Plan:
    return Plan.data_parallel(
        DistributedDataParallelStrategy(bucket_cap_mb=5), 2, ModelSpec(parameters=()),
        prediction=prediction, cluster=cluster,
    )  # fmt: skip


def changed(**fields: object) -> Report:
    return Report(**{**{name: getattr(RANK_0, name) for name in Report.__slots__}, **fields})


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (RANK_0, "over the last 115; predicted 70.0 ± 8.0, recorded before 100.0: 1.39 times as fast"),
        (changed(step_ms=98.0), "no difference beyond noise, not as predicted"),
        (changed(step_ms=150.0), "slower, 1.50 times as long, not as predicted"),
        (changed(spread_ms=200.0), "no difference beyond noise"),
        (changed(world_size=3), "72.0 ms a step, over the last 115; the plan's prediction is for 2 ranks"),
        (changed(timed_steps=2, steps=7), "7 optimizer steps: too few to time"),
        (changed(timed_steps=0, steps=0), "no optimizer step: too few to time"),
    ],
)  # fmt: skip
def test_steps_are_compared_with_what_was_predicted(report: Report, words: str) -> None:
    assert steps_in_words(plan(), report).partition(". Other load")[0].endswith(words)


def test_of_the_recorded_plan_no_gain_is_claimed() -> None:
    made = plan()
    recorded = made.model_copy(update={"prediction": PREDICTION.model_copy(update={"recorded": made.digest})})
    words = "recorded before 100.0: the same plan as recorded, so the machine or its load changed"
    assert steps_in_words(recorded, RANK_0).endswith(words)
    assert steps_in_words(recorded, changed(step_ms=150.0)).endswith(words)
    same = changed(step_ms=101.0)
    assert "no difference beyond noise" in steps_in_words(recorded, same)
    edited = recorded.model_copy(
        update={"parallel": {"data": DistributedDataParallelStrategy(bucket_cap_mb=9)}}
    )
    assert "1.39 times as fast" in steps_in_words(edited, RANK_0)


def test_a_plan_without_a_prediction_or_of_other_machines() -> None:
    assert steps_in_words(plan(None), RANK_0) == "72.0 ms a step, over the last 115"
    elsewhere = Cluster(hosts=(Host(name="b", workers=2, up_gbps=1, down_gbps=1),))
    assert steps_in_words(plan(cluster=elsewhere), RANK_0).endswith("; the prediction is for other machines")
    lab = Cluster(hosts=(Host(name="host0", workers=2, up_gbps=1, down_gbps=1),))
    assert steps_in_words(plan(cluster=lab), RANK_0) == steps_in_words(plan(), RANK_0)


def test_one_line_at_the_start_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(rank=1)
    began = changed(steps=0, timed_steps=0)
    story = _RunReporter(plan(), quiet=False)
    story.look([changed(applied=False), other])
    assert capsys.readouterr().err == ""
    story.look([began, other])
    story.look([began, other])
    first = "headway: running under DDP, bucket_cap_mb=5, on 2 ranks; predicted 70.0 ± 8.0 ms a step\n"
    assert capsys.readouterr().err == first
    # Ranks were started again, and the job failed in the end.
    story.end(CommandOutcome(1, 0, (changed(began_s=1.0, step_ms=5.0), RANK_0, other)))
    last = capsys.readouterr().err
    assert last.startswith("headway: the command ended with status 1; until then 72.0 ms a step")
    assert last.endswith("(since the last of 1 restart)\n")


def test_what_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = _RunReporter(plan(), quiet=True)
    quiet.look([RANK_0])
    quiet.end(CommandOutcome(0, 0, (RANK_0,)))
    elsewhere = _RunReporter(plan(), quiet=False)  # rank 0 is another launcher's
    elsewhere.end(CommandOutcome(0, 0, (changed(rank=1),)))
    assert capsys.readouterr().err == ""
