"""What Headway answers about fixed traces: kept, so that a change of the code that is to change no answer can show it.

    python -m tests.answers.asked            prints what differs from the kept answers
    python -m tests.answers.asked --keep     keeps today's

Traces are synthetic, and questions are asked on the command line, which outlives what is behind it. Of a large answer
its digest is kept, with the numbers and sentences at its top.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from tests.synthetic import Connections, Extra, SyntheticJob, write_trace

from headway import files
from headway.cli.main import cli

KEPT = Path(__file__).with_name("kept.json")
VOLATILE = frozenset(
    ("elapsed_s", "headway", "plan", "path", "trace", "output", "sources", "commands", "job")
)
LARGEST = 400  # characters of an answer that is kept whole

JOB = SyntheticJob(steps=12, bucket_bytes=(400_000, 1_600_000, 800_000, 1_200_000), gbps=2.0, jitter=0.02)
JOBS: Mapping[str, SyntheticJob] = {
    "four": JOB,
    "two": replace(JOB, world_size=2, forward_ms=6.0, gbps=1.0),
    "hosts of two": replace(JOB, ranks_a_host=2, connections=Connections(spread=0.1)),
    "straggler": replace(JOB, slow={(2, "backward"): 15.0}),
    "slow link": replace(JOB, connections=Connections(gbps={(0, 1): 0.3}, spread=0.1)),
    "stalls": replace(JOB, steps=20, extras=(Extra(1, "rest", 60.0, range(2, 20, 5)),)),
    "blocking": replace(JOB, blocking_loss=True),
    "by hand": replace(JOB, by_hand=True),
}
REPLAYED = ("four", "two", "hosts of two", "straggler", "blocking")
WHAT_IFS = ("bandwidth=2x", "latency=0.5x", "compute=0.5x", "workers=8", "compute:1=2x")
PREDICTED = (
    ("resnet50", "gloo-10gbe", ("ddp", "decoupled", "decoupled:gather=gradients")),
    ("bert-large", "hdr-200g-nvlink", ("ddp", "decoupled")),
)


def answers(folder: Path) -> dict[str, Any]:
    """Every answer by its question; traces and files are made in ``folder``."""
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        trace = written(job, folder / name.replace(" ", "-"))
        found[f"{name}: diagnose"] = _asked("diagnose", trace)
        if name in REPLAYED:
            found |= {f"{name}: {question}": answer for question, answer in _of_plans(trace, folder)}
    trace = folder / "four"
    for form, target in (("perfetto", "trace.pftrace"), ("chakra", "chakra"), ("goal", "trace.goal")):
        _asked("export", trace, "--to", form, "-o", folder / target)
        found[f"four: export {form}"] = _digest_of_files(folder / target)
    for model, cluster, strategies in PREDICTED:
        options = [option for strategy in strategies for option in ("--strategy", strategy)]
        found[f"predict {model} on {cluster}"] = _asked(
            "predict", model, "--cluster", cluster, "--workers", "4,16", *options
        )
    return found


def written(job: SyntheticJob, folder: Path) -> Path:
    """The job's trace, which says that DDP made its buckets, each of one parameter."""
    trace = write_trace(job, folder)
    manifest = json.loads((trace / "manifest.json").read_text())
    for rank in manifest["ranks"]:
        rank["strategy"] = {"ddp": {"bucket_cap_mb": 0.01}}
    (trace / "manifest.json").write_text(json.dumps(manifest))
    return trace


def _of_plans(trace: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "replay", _asked("replay", trace)
    for what_if in WHAT_IFS:
        yield f"replay {what_if}", _asked("replay", trace, "--what-if", what_if)
    for strategy in ("any", "decoupled"):
        plan = folder / f"{strategy}.yaml"
        yield f"optimize {strategy}", _asked("optimize", trace, "-o", plan, "--strategy", strategy)
        yield f"plan {strategy}", _brief(_as_format_1(plan.read_text()))
        yield f"replay {strategy}", _asked("replay", trace, "--plan", plan)


def _asked(*arguments: object) -> Any:
    """The document that a command prints, or its refusal."""
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    if result.exit_code or result.exception is not None:
        return f"refused: {result.exception or result.output}"
    return _brief(_steady(json.loads(result.stdout)))


def _steady(value: Any) -> Any:
    """``value`` without what differs from run to run, and numbers to a tenth of a nanosecond in milliseconds."""
    if isinstance(value, dict):
        return {key: _steady(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_steady(each) for each in value]
    return round(value, 7) if isinstance(value, float) and math.isfinite(value) else value


def _brief(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= LARGEST:
        return value
    top = value.items() if isinstance(value, dict) else ()
    plain = {key: each for key, each in top if isinstance(each, int | float | str)}
    return plain | {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _as_format_1(text: str) -> str:
    """A plan of one dimension as it was written when answers were kept: what was decided must not change."""
    plan = yaml.safe_load(text)
    assert (plan.pop("format"), plan.pop("passes")) == (2, [])
    (world_size,), (strategy,) = plan.pop("mesh").values(), plan.pop("parallel").values()
    if "ddp" in strategy:
        assert strategy["ddp"].pop("wire") == []
    old = {
        "format": 1,
        "headway": plan.pop("headway"),
        "strategy": strategy,
        "world_size": world_size,
        **plan,
    }
    return files.dump_yaml(old)


def _digest_of_files(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def main(*, keep: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = answers(Path(folder))
    if keep:
        KEPT.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return 0
    kept = json.loads(KEPT.read_text())
    differing = [question for question in {**kept, **found} if kept.get(question) != found.get(question)]
    for question in differing:
        print(f"{question}\n  kept: {kept.get(question)}\n  now:  {found.get(question)}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(keep="--keep" in sys.argv))
