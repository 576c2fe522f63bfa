"""``headway optimize``: search for the best plan and write it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from headway import files
from headway.cli import output
from headway.cli.measuring import (
    UNDECIDED,
    command_to_measure_with,
    decide_by_runs,
    measured_document,
    measured_sentences,
    measured_table,
)
from headway.cli.output import allow_option
from headway.errors import LaunchError, one_line
from headway.units import counted, format_bytes, parse_size_bytes

if TYPE_CHECKING:
    from headway.bound import StepBound
    from headway.optimization.candidate import Candidate
    from headway.optimization.explanation import Explanation
    from headway.optimization.measured import MeasuredChoice
    from headway.optimization.result import SearchResult
    from headway.trace.format import Trace


MOST_NAMED = 2
MOST_ROWS, MOST_ROWS_OF_OTHER_SCRIPTS = 10, 3
FOLLOWED_BY = ("headway.parallelize", "headway run")
UNKNOWN_COMMAND = ("COMMAND",)
WITHIN = "The gain is within ±: this plan may not help."


@dataclass(frozen=True)
class Answer:
    """A search, and the plan chosen from it (``best``, written to ``plan_path``); ``measured`` if short runs decided.

    ``strategy`` is the requested one, "" for any. ``measure_line`` and ``run_line`` are shell commands; the former is
    "" if short runs cannot measure this job here. ``contention`` says that ranks competed for cores while recording,
    or is "".
    """

    result: SearchResult
    best: Candidate
    measured: MeasuredChoice | None
    strategy: str
    plan_path: Path
    measure_line: str
    run_line: str
    follows_network: bool = False
    contention: str = ""

    @property
    def keeps_recorded(self) -> bool:
        """Whether the plan is the recorded one."""
        return not self.best.changed

    @property
    def is_in_doubt(self) -> bool:
        """Whether only short runs can say if the plan is faster than what was recorded."""
        return self.measured is None and (
            not self.result.can_rank or (self.best.changed and self.best.expected.may_gain_nothing)
        )

    def headline(self) -> str:
        """What to do, in fewer than twenty words."""
        result, best = self.result, self.best
        if self.measured is not None:
            if self.keeps_recorded:
                return "Keep what you have: no other plan was faster by more than the noise between runs."
            taken = self.measured.taken
            times = (
                1 / taken.beside.ratio
                if self.measured.left_with is not None
                else result.baseline_ms / taken.step_ms
            )
            figures = (
                f"{times:.2f} times as fast, measured {taken.step_ms:.1f} ± {taken.spread_ms:.1f} ms a step"
            )
            return f"Use {best.short_name}: {figures}."
        if not result.can_rank and not self.follows_network:
            return (
                f"This recording cannot rank plans: its replay is {reproduction(result)} the recorded step."
            )
        if self.keeps_recorded and not (self.strategy or self.follows_network):
            return "Keep what you have: no other plan is predicted to be faster by more than its ±."
        use = f"Best of {self.strategy}: " if self.strategy else "Use "
        figures = f"predicted {best.predicted_ms:.1f} ± {best.uncertainty_ms:.1f} ms a step"
        return f"{use}{best.short_name}: {best.expected.speedup:.2f} times as fast, {figures}."

    def reasons(self) -> Iterator[str]:
        """Further remarks on the plan, a sentence or two each."""
        result, best = self.result, self.best
        if self.measured is None and not result.can_rank:
            yield (
                "Record again while nothing else runs on the machine, or let short runs decide. Until then, keep what "
                "you have."
            )
        yield self._comparison_with_recorded()
        if best.changes_training:
            yield f"This plan changes what is trained: {best.changes_training}."
        if not best.is_runnable:
            yield "This plan needs a change to the script: it must call headway.parallelize."
        if self.measured is not None:
            return
        yield from doubts_of(best, result.like(best) if best.changed else ())
        ahead = [candidate for candidate in result.candidates if candidate.predicted_ms < best.predicted_ms]
        if best.changed and best.is_runnable and ahead and not self.strategy:
            are = "plan is" if len(ahead) == 1 else "plans are"
            yield (
                f"{len(ahead)} other {are} predicted to be faster, but within the uncertainty: this one "
                "changes less or needs less memory."
            )

    def _comparison_with_recorded(self) -> str:
        result = self.result
        recorded = result.recorded
        there = f"{recorded.short_name}, " if recorded is not None else ""
        sentence = f"What you have: {there}{result.baseline_ms:.1f} ms a step as recorded."
        if recorded is None:
            return f"{sentence} It needs more memory than the limit."
        rival = next((candidate for candidate in result.candidates if candidate.changed), None)
        if self.keeps_recorded and self.measured is None and rival is not None:
            sentence += (
                f" The best other plan, {rival.short_name}, is predicted to take {rival.predicted_ms:.1f} ± "
                f"{rival.uncertainty_ms:.1f} ms."
            )
        return sentence

    def next_steps(self) -> Iterator[str]:
        """The written file, and the commands to run next."""
        same = ": it is the plan that you have, so running it changes nothing" * self.keeps_recorded
        yield f"Wrote {self.plan_path}{same}."
        if self.measured is None and self.measure_line:
            yield "Let short runs of your command decide:"
            yield f"  {self.measure_line}"
        if self.best.is_runnable:
            yield "Train under the plan:"
            yield f"  {self.run_line}"

    def notes(self) -> list[str]:
        """Notes on what the recording lacks, and what was left out of the search and why."""
        notes = [f"Note: {note}." for note in self.result.notes]
        return [f"Note: {one_line(self.contention)}", *notes] if self.contention else notes

    def document(self, explained: Explanation | None) -> dict[str, Any]:
        """The answer as JSON data, without measurements."""
        result, best = self.result, self.best
        return {
            "baseline_ms": result.baseline_ms,
            "recorded_ms": result.baseline_ms,
            "replayed_ms": result.replayed_ms,
            "reproduction_error": result.reproduction_error,
            "can_rank_plans": result.can_rank,
            "answer": self.headline(),
            "taken": best.name,
            "keeps_recorded": self.keeps_recorded,
            "plans": [_plan_document(result, candidate) for candidate in result.candidates],
            "plans_for_other_scripts": [
                _plan_document(result, candidate) for candidate in result.for_other_scripts
            ],
            "excluded": [
                {
                    "name": candidate.name,
                    "predicted_ms": candidate.predicted_ms,
                    "peak_bytes": candidate.peak_bytes,
                }
                for candidate in result.excluded
            ],
            "bound_ms": result.bound_ms,
            "bound": None if result.bound is None else bound_document(result.bound),
            "searched": result.replayed,
            "pruned": result.pruned,
            "not_searched": result.unseen,
            "cut_short": result.cut_short,
            "elapsed_s": result.elapsed_s,
            "like_best": [candidate.name for candidate in result.like(best)],
            "may_gain_nothing": best.expected.may_gain_nothing,
            "changes_training": best.changes_training,
            "note": result.note,
            "plan": str(self.plan_path),
            "commands": {"measure": self.measure_line or None, "run": self.run_line},
            "explanation": None if explained is None else explained.to_document(),
        }


def reproduction(result: SearchResult) -> str:
    """The replay's error on the recorded step, in words: "26 % slower than"."""
    error = result.reproduction_error
    return f"{abs(error):.0%} {'slower' if error > 0 else 'faster'} than".replace("%", " %", 1)


def command_lines(
    traces: Sequence[Path],
    plan_path: Path,
    options: Sequence[str],
    recorded_command: Sequence[str],
    world_size: int,
) -> tuple[str, str]:
    """The shell commands that measure plans of the recorded job, with these search ``options``, and that run the plan.

    The former is "" if the job has several launchers. A recorded command that cannot be printed becomes COMMAND.
    """
    from headway.integrations.short_runs import check_command

    command = job_command(recorded_command)
    if not all(word.isprintable() for word in command):
        command = ()
    run = ["headway", "run", "--plan", str(plan_path), "--", *(command or UNKNOWN_COMMAND)]
    paths = map(str, traces)
    measure = ["headway", "optimize", *paths, "-o", str(plan_path), *options, "--measure", "--"]
    measure += command or UNKNOWN_COMMAND
    try:
        if command:
            check_command(command, world_size)
    except LaunchError:
        return "", shlex.join(run)
    return shlex.join(measure), shlex.join(run)


def job_command(command: Sequence[str]) -> tuple[str, ...]:
    """The job's own command, without commands of Headway that it was recorded under, such as ``headway run``.

    ``headway lab run`` stays: it is the job's launcher.
    """
    words = tuple(command)
    while "--" in words:
        before = words[: words.index("--")]
        as_module = any(pair == ("-m", "headway") for pair in pairwise(before))
        if not before or not (Path(before[0]).name == "headway" or as_module) or "lab" in before:
            break
        words = words[len(before) + 1 :]
    return words


def _plan_document(result: SearchResult, candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "short_name": candidate.short_name,
        "predicted_ms": candidate.predicted_ms,
        "uncertainty_ms": candidate.uncertainty_ms,
        "speedup": candidate.expected.speedup,
        "peak_bytes": candidate.peak_bytes,
        "dominated": result.dominated(candidate),
        "followed_by": FOLLOWED_BY[candidate.is_runnable],
        "changes": list(candidate.changes),
        "changes_training": candidate.changes_training,
    }


def bound_document(bound: StepBound) -> dict[str, Any]:
    """The bound as JSON data: the binding resource, why it binds, and the step time that each part alone implies."""
    parts_ms = {name: part_ns / 1e6 for name, part_ns in bound.parts_ns.items()}
    return {"binds": bound.binds, "reason": bound.reason, "parts_ms": parts_ms}


def doubts_of(best: Candidate, like: Sequence[Candidate]) -> list[str]:
    """Caveats on the best plan: it may gain nothing, or other plans may be as good."""
    doubts = []
    if best.changed and best.expected.is_slower:
        doubts.append("The job would be slower with this plan, by more than ±: keep what you have.")
    elif best.changed and best.expected.may_gain_nothing:
        doubts.append(WITHIN)
    if like:
        names = [
            name
            for name in dict.fromkeys(candidate.short_name for candidate in like)
            if name != best.short_name
        ]
        more = [f"and {len(like) - MOST_NAMED} more"] if len(like) > MOST_NAMED else []
        doubts.append(
            f"Predictions cannot distinguish it from {' | '.join(names[:MOST_NAMED] + more)}."
            if names
            else f"Predictions cannot distinguish it from {counted(len(like), 'variant')} of it."
        )
    return doubts


def searched(result: SearchResult) -> str:
    """How many plans were searched, how many were not and why, and how well replay reproduces the recording."""
    text = f"{counted(result.replayed, 'plan')} replayed in {result.elapsed_s:.1f} s"
    if result.pruned:
        text += f", {result.pruned} more pruned as provably slower"
    if result.unseen:
        text += f"; {result.unseen} were not searched, as the budget ran out"
    elif result.cut_short:
        text += "; the budget ran out before all plans were generated"
    return f"{text}. Replay reproduces the recorded step with an error of {result.reproduction_error:+.1%}."


def plans_tables(result: SearchResult, best: Candidate, *, every: bool) -> Iterator[Table | str]:
    """Tables of the plans that the command can run, fastest first, and of those that need a change to the script.

    They list the best plan of each kind, the recorded and the chosen one; with ``every`` all plans in detail.
    """
    from headway.optimization.measured import best_of_each_kind_first

    for candidates, title, most in (
        (result.candidates, "Plans that your command can run as it is", MOST_ROWS),
        (
            result.for_other_scripts,
            "Plans that need a change to the script, to call headway.parallelize",
            MOST_ROWS_OF_OTHER_SCRIPTS,
        ),
    ):
        if not candidates:
            continue
        rows: Sequence[Candidate] = candidates
        if not every:
            kinds = len({candidate.kind for candidate in candidates})
            always = [
                candidate for candidate in (result.recorded, result.stock, best) if candidate in candidates
            ]
            best_of_kinds = best_of_each_kind_first(candidates)[:kinds]
            leading = [candidate for candidate in best_of_kinds if candidate not in always]
            leading = leading[: max(0, most - len(dict.fromkeys(always)))]
            chosen = {id(candidate) for candidate in (*always, *leading)}
            rows = [candidate for candidate in candidates if id(candidate) in chosen]
        yield _table(result, best, rows, title, every=every)
        yield from _marks(result, rows, every=every)
        if left_out := len(candidates) - len(rows):
            yield f"{counted(left_out, 'more plan')} of the same kinds, or slower: headway optimize --all"


def _table(
    result: SearchResult, best: Candidate, rows: Sequence[Candidate], title: str, *, every: bool
) -> Table:
    more = ("ratio to bound", "changes") if every else ()
    table = Table(title=f"{title}, fastest first", title_justify="left", box=None, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for header in ("predicted ms", "± ms", "times as fast", "memory"):
        table.add_column(header, justify="right")
    for header in more:
        table.add_column(header, overflow="fold")
    for row in rows:
        name = row.name if every else row.short_name
        name += " (what you have)" * (not row.changed) + " (taken)" * (row is best and row.changed)
        cells = [
            name + " ‡" * bool(row.changes_training),
            f"{row.predicted_ms:.1f}",
            f"{row.uncertainty_ms:.1f}",
            f"{row.expected.speedup:.2f}",
            _memory(row) + " *" * (every and result.dominated(row)),
        ]
        if every:
            has_bound = row.is_runnable and not row.changes_training
            ratio = f"{row.predicted_ms / result.bound_ms:.2f}" if has_bound else ""
            cells += [ratio, "; ".join(row.changes)]
        table.add_row(*cells)
    return table


def _marks(result: SearchResult, rows: Sequence[Candidate], *, every: bool) -> Iterator[str]:
    """Legends of the marks that occur in a table of ``rows``."""
    if every and any(map(result.dominated, rows)):
        yield "* Another plan is no slower and needs no more memory."
    if any(row.peak_is_rough and row.peak_bytes is not None for row in rows):
        yield "~ Memory is a rough estimate, as it was not tracked while recording."
    permissions = {permission for row in rows for permission in row.permissions}
    if any(row.changes_training for row in rows):
        from headway.plan.permissions import changes_in_words
        from headway.strategies.registry import plugin_of

        apart = any(plugin_of(row.strategy).has_horizon for row in rows)
        mean = " Without synchronous steps, ms are those of a mean iteration." * apart
        yield f"‡ Changes what is trained, as --allow permits ({changes_in_words(permissions)}).{mean}"


def _memory(candidate: Candidate) -> str:
    """The most that a rank holds."""
    if candidate.peak_bytes is None:
        return ""
    return "~" * candidate.peak_is_rough + format_bytes(candidate.peak_bytes)


def explanation_parts(explained: Explanation | None, *, in_full: bool) -> Iterator[str | Table]:
    """The explanation: the largest saving and the next bottleneck; ``in_full`` adds all choices."""
    if explained is None:
        if in_full:
            yield "This plan cannot be explained: replay cannot apply it to the recorded job."
        return
    largest = max(explained.choices, key=lambda choice: choice.saved_ms, default=None)
    if largest is not None and largest.saved_ms > 0:
        where = f" ({largest.where})" if largest.where else ""
        yield f"The largest saving is {largest.name}: {largest.saved_ms:.1f} ms{where}."
    yield explained.next_bottleneck
    if explained.further is not None:
        yield explained.further.sentence
    if not in_full or not explained.choices:
        return
    table = Table("choice", "saves ms", "step ms", "on the critical path", box=None, pad_edge=False)
    table.add_row("as recorded", "", f"{explained.from_ms:.1f}", "")
    for choice in explained.choices:
        table.add_row(choice.name, f"{choice.saved_ms:+.1f}", f"{choice.step_ms:.1f}", choice.where)
    yield table
    yield "Choices are cumulative, from top to bottom."


ANY = "any"


@click.command()
@click.argument(
    "traces", metavar="TRACE [TRACE]...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("-o", "--output", "plan_path", type=click.Path(path_type=Path, dir_okay=False), default=Path("plan.yaml"),
              show_default=True, help="The plan file to write.")  # fmt: skip
@click.option(
    "--cluster",
    "cluster_path",
    type=click.Path(path_type=Path),
    help="A cluster file with the links, instead of those measured or fitted from the trace.",
)
@click.option(
    "--strategy", "only", metavar="NAME", default="any",
    show_default=True, help="Write the best plan of this strategy, whatever was recorded: ddp, decoupled, "
    "parameter_server, pipeline, with --allow also partial-all-reduce, or one of a plug-in. "
    "stages: the best pipeline split that is not in the script (needs headway.parallelize).",
)  # fmt: skip
@click.option(
    "--memory-limit", "limit", metavar="SIZE",
    help="Exclude plans that need more memory per rank than this, such as 800M or 16GiB.",
)  # fmt: skip
@click.option(
    "--follow-network", "follow", is_flag=True,
    help="Write a plan that adapts to the network during training; only for pipelines.",
)  # fmt: skip
@allow_option
@click.option(
    "--explain", "in_full", is_flag=True,
    help="Explain every choice of the plan, and what would bring it closer to the bound.",
)  # fmt: skip
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="List all plans, with their full names, instead of the best of each kind.",
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with the plan and its explanation."
)  # fmt: skip
@click.option(
    "--measure", "measured", type=click.IntRange(min=0), is_flag=False, flag_value=UNDECIDED, metavar="[N]",
    help="Choose by short runs of the command after --, among plans that predictions cannot distinguish or among the "
    "N best.",
)  # fmt: skip
@click.option(
    "--budget", "budget_s", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
    help="Search for at most this time, and write the best plan found by then.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def optimize(
    ctx: click.Context,
    traces: tuple[Path, ...],
    plan_path: Path,
    cluster_path: Path | None,
    only: str,
    limit: str | None,
    follow: bool,
    allow: tuple[str, ...],
    in_full: bool,
    every: bool,
    html: Path | None,
    measured: int | None,
    budget_s: float | None,
    as_json: bool,
) -> None:
    """Replay TRACE under every candidate plan, and write the plan to use to a file.

    This is the recorded plan, unless another is predicted to be faster by more than the uncertainty.

    headway optimize trace -o plan.yaml

    headway optimize trace -o plan.yaml --measure -- torchrun --nproc-per-node 2 train.py

    More TRACEs are recordings of the same pipeline with other numbers of micro-batches; these are tried too.
    """
    from headway.cluster import Cluster

    command = command_to_measure_with(ctx, measured, follow=follow)
    limit_bytes = None if limit is None else parse_size_bytes(limit, "--memory-limit")
    cluster = Cluster.load(cluster_path) if cluster_path else None
    loaded = _loaded(traces, (plan_path, html), command if measured is not None else None)

    from headway.diagnosis.details import contention
    from headway.optimization.explanation import explain
    from headway.optimization.result import check_strategy, following, plan_of
    from headway.optimization.search import search
    from headway.optimization.sizes import others_of
    from headway.replayer.replayer import Replayer
    from headway.report.plan_page import plan_page

    wanted = None if only == ANY else only
    check_strategy(wanted)
    with output.progress("searching") as advance:
        replayer = Replayer(loaded[0], cluster)
        other_sizes = others_of(replayer, loaded[1:])
        result = search(
            replayer, advance, memory_limit_bytes=limit_bytes, other_recordings=other_sizes, allow=allow,
            budget_s=budget_s,
            needed=wanted or "",
        )  # fmt: skip
    predicted = following(result, wanted) if follow else result.best(wanted)
    best, chosen = decide_by_runs(predicted, result, replayer, measured, wanted, command, plan_path)
    plan_of(best, replayer).save(plan_path)
    with output.progress("explaining"):
        explained = None if follow else explain(replayer, result, best, go_further=in_full)
    options = [
        *(("--cluster", str(cluster_path)) if cluster_path else ()),
        *(("--strategy", only) if wanted else ()),
        *(("--memory-limit", limit) if limit else ()),
        *(word for permission in allow for word in ("--allow", permission)),
    ]
    measure_line, run_line = command_lines(
        traces, plan_path, options, command or loaded[0].manifest.command, replayer.trace.world_size
    )
    answer = Answer(
        result, best, chosen, wanted or "", plan_path, "" if follow else measure_line, run_line,
        follows_network=follow, contention=contention(loaded[0].manifest.ranks),
    )  # fmt: skip
    if html is not None:
        name = traces[0].resolve().name or "a trace"
        files.write_text(html, plan_page(name, best, result, explained, answer.headline()))
    if as_json:
        fields = answer.document(explained)
        output.print_document("optimization", {**fields, "measured": measured_document(chosen, predicted)})
        return
    measures = [] if measured is None else [*measured_table(chosen)]
    sentences = [] if chosen is None else measured_sentences(chosen, predicted)
    console = output.console()
    for line in (answer.headline(), *answer.reasons(), *sentences, *answer.next_steps(), ""):
        console.print(line)
    if result.can_rank and result.bound is not None and best.is_runnable and not best.changes_training:
        console.print(result.bound.distance(best.predicted_ms))
    for part in (*explanation_parts(explained, in_full=in_full), *answer.notes(), *measures):
        console.print(part)
    for part in plans_tables(result, best, every=every):
        console.print(part)
    output.print_order(console, best.schedule)
    console.print(f"{searched(result)} Links: {replayer.cluster.source}.")
    if html is not None:
        console.print(f"Wrote {html}")


def _loaded(
    traces: Sequence[Path], written: Sequence[Path | None], measured_with: Sequence[str] | None
) -> list[Trace]:
    """Load the recordings. Raises UserError early if the rest of the command would fail."""
    from headway.integrations.short_runs import check_command
    from headway.replayer.incomplete import check_takes_plans
    from headway.report.timeline import require_bokeh
    from headway.trace.folder import load_trace

    _, html = written
    if html is not None:
        require_bokeh()
    for path in filter(None, written):
        files.check_writable(path)
    loaded = [load_trace(trace) for trace in traces]
    for recording in loaded:
        check_takes_plans(recording)
    if measured_with is not None:
        check_command(measured_with, loaded[0].world_size)
    return loaded
