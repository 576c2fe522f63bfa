"""The live runtime of pipelines: a schedule's program carried out on torch's stages.

Receives are posted early, into memory that is allocated then and let go of when it has been used: torch's own runtime
keeps memory for every micro-batch of a batch. The program of the next step may be another one.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, PlanError, UserError, one_line
from headway.scheduling.pipeline.program import (
    Await,
    ComputeAndSend,
    Message,
    Post,
    Release,
    Send,
    program_of,
)
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule
from headway.strategies.pipeline.tuning.observed import StepWatch
from headway.strategies.silent import gives_up, in_words, silent_ranks
from headway.torch_private.pipelining import (
    PipelineSteps,
    ReceiveBuffers,
    is_non_tensor_output_error,
    tensors_in,
)

_KEY = "headway/pipeline/lost"
_CONNECTION = "gloo"  # in what it raises where a connection is gone


@contextlib.contextmanager
def named(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """Raise CommunicationError instead of what ``group`` raises in here, where ``what`` is done with ``neighbour``.

    Whoever loses a neighbour ends its own connections: those who wait for it fail in turn. All say so, and name the
    ranks that do not.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        _abort(group)
        other = dist.get_global_rank(group, neighbour)
        closed = None if _in_vain(str(failure)) else other
        lost = silent_ranks(_KEY, range(dist.get_world_size()), neighbour=closed) or (other,)
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what} failed: {in_words(lost)} "
            f"({one_line(str(failure), 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def among(what: str, ranks: Sequence[int] = (), group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise CommunicationError where a connection is gone in here: ``ranks``, by default all, do ``what`` together.

    A collective does not say which of several ranks it has lost: one that misses its neighbour does. ``group`` are
    those who wait for this rank, and whose connections to it end.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        said = _of_connection(failure)
        if said is None:
            raise
        rank = dist.get_rank()
        everyone = range(dist.get_world_size())
        others = [each for each in ranks or everyone if each != rank]
        if group is not None:
            _abort(group)
        waited = _in_vain(said)
        only = others[0] if len(others) == 1 else None
        # Who waits for a rank that is left meets the failure when that ends, unless all wait in vain.
        lost = silent_ranks(_KEY, everyone, neighbour=None if waited else only, decides=waited)
        if not lost and only is not None:
            lost = (only,)
        raise CommunicationError(
            f"rank {rank}: {what} failed: {in_words(lost)} "
            f"({one_line(said, 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def leaving(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """As ``named``, for failures of connections alone; of any other this rank says that it is the one that is lost."""
    try:
        yield
    except RuntimeError as failure:
        if _CONNECTION in str(failure).lower():
            with named(group, neighbour, what):
                raise
        gives_up(_KEY)
        raise


def _of_connection(failure: BaseException) -> str | None:
    """What a failure, or one that it came of, says of a connection: torch wraps what a stage's backward raises."""
    found: BaseException | None = failure
    while found is not None:
        if _CONNECTION in str(found).lower():
            return str(found)
        found = found.__cause__ or found.__context__
    return None


def _in_vain(said: str) -> bool:
    """Whether nothing came in time: then all wait at about the same time, and not all for a rank that is lost."""
    return "timed out" in said.lower()


def _abort(group: dist.ProcessGroup) -> None:
    """Have those who wait for this rank in ``group`` meet the failure, too."""
    with contextlib.suppress(RuntimeError):
        torch_private.abort_group(group)


Given = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]
_LONGEST = 2**16  # of what a rank says, in bytes


class BatchCheck:
    """Holds the micro-batches of every step against each other, and against those of the first step."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._first: dict[str, Shapes] = {}

    def trouble(self, given: Given) -> str:
        """What is wrong with the micro-batches that a step of this rank is given; "" where nothing is."""
        for name, what in (("arg_mbs", "batch"), ("kwarg_mbs", "batch"), ("target_mbs", "target")):
            shapes = [_shapes(each) for each in given.get(name) or ()]
            if shapes and (found := self._trouble(what, name, shapes)):
                return found
        return ""

    def _trouble(self, what: str, name: str, shapes: Sequence[Shapes]) -> str:
        count = self._micro_batches
        if len(shapes) != count or any(0 in shape for own in shapes for shape in own):
            return f"the {what} has fewer samples than the {count} micro-batches that it is to be split into"
        if any(own != shapes[0] for own in shapes):
            sizes = ", ".join(str(own[0][0]) if own and own[0] else "?" for own in shapes)
            return f"the {what} cannot be split into {count} micro-batches of one size: they have {sizes} samples"
        first = self._first.setdefault(name, shapes[0])
        if first != shapes[0]:
            return (
                f"the {what} has micro-batches of other shapes ({_said(shapes[0])}) than in the first step "
                f"({_said(first)})"
            )
        return ""


def agree(steps: PipelineSteps, trouble: str) -> None:
    """Raise UserError on all ranks of a pipeline where one of them has ``trouble`` with what its step is given."""
    for rank, said in enumerate(_from_every_rank(steps, {"trouble": trouble})):
        if said["trouble"]:
            refuse(f"rank {rank}: {said['trouble']}")


def refuse(trouble: str) -> None:
    """Raise UserError for a batch with ``trouble``."""
    raise UserError(
        "a step of a pipeline was given what it cannot train on",
        got=trouble,
        expected="micro-batches of one size, the same in every step",
        fix="Leave out what is left at the end of an epoch (drop_last=True in a DataLoader), or choose another number "
        "of micro-batches.",
    )


def check(steps: PipelineSteps) -> None:
    """Raise UserError on all ranks where a stage expects something else than the one before it hands on.

    Every rank calls it in the same step, when its stages are prepared. Raises it too for stages that hand on what no
    message carries as it is: torch receives a DTensor of ranks that do not take part as an empty tensor.
    """
    own = {
        str(stage): {"in": steps.received_tensors(stage), "out": steps.sent_tensors(stage)}
        for stage in steps.stages
    }
    said = {int(stage): ends for of_rank in _from_every_rank(steps, own) for stage, ends in of_rank.items()}
    for stage in range(steps.stage_count - 1):
        out, into = said[stage]["out"], said[stage + 1]["in"]
        if any("DTensor" in each for each in (*out, *into)):
            raise UserError(
                "a stage hands on a DTensor", got=f"{', '.join(out)} of stage {stage}", expected="plain tensors",
                fix="Return output.full_tensor() or output.to_local() from the stage.",
            )  # fmt: skip
        if out and out != into:
            raise UserError(
                f"stages {stage} and {stage + 1} disagree about what is handed on",
                got=f"{', '.join(out)} of stage {stage}",
                expected=f"{', '.join(into) or 'nothing'}, which stage {stage + 1} is to be given",
                fix="Give PipelineStage input_args and output_args that are those of its module, or neither.",
            )


def _shapes(given: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(given))


def _said(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"


def _from_every_rank(steps: PipelineSteps, own: Any) -> list[Any]:
    """What each rank of the pipeline says, as JSON."""
    text = json.dumps(own).encode()
    assert len(text) <= _LONGEST, "a rank says too much"
    ranks = dist.get_world_size(steps.group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=steps.device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=steps.device), group=steps.group)
    longest = int(max(lengths))
    mine = torch.zeros(longest, dtype=torch.uint8, device=steps.device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(texts, mine, group=steps.group)
    return [
        json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(texts, lengths, strict=True)
    ]


class PipelineRuntime:
    """Carries out the steps of one of torch's schedule objects in the order of ``schedule``.

    Raises PlanError where that is of other stages, or splits batches into another number of micro-batches.
    """

    def __init__(self, steps: PipelineSteps, schedule: PipelineSchedule) -> None:
        self._steps = steps
        self._templates: dict[tuple[int, bool], tuple[list[torch.Tensor | None], torch.device]] = {}
        self._batches = BatchCheck(steps.micro_batches)
        self._is_first = True
        self._watch: StepWatch | None = None
        self._before_step: Callable[[], object] = _nothing
        self._after_step: Callable[[], object] = _nothing
        self.follow(schedule)
        steps.replace_step(self._step)

    def follow(self, schedule: PipelineSchedule) -> None:
        """Carry out steps in the order of ``schedule`` from now on; every rank says so before the same step."""
        _check(self._steps, schedule)
        self._program = program_of(schedule, self._steps.rank, self._steps.replicated)
        self._steps.halves_backwards = any(
            action.kind is Pass.WEIGHT_GRADIENT for rank in schedule.ranks for action in rank
        )
        self._gradients = Counter(
            action.stage
            for action in schedule.ranks[self._steps.rank]
            if action.kind in (Pass.BACKWARD, Pass.WEIGHT_GRADIENT)
        )

    def received_bytes(self) -> int:
        """The size of the activations that this rank's first stage is given of a micro-batch; 0 where none are sent."""
        templates, _ = self._templates.get((min(self._steps.stages), False), ([], None))
        return sum(like.nbytes for like in templates if like is not None)

    def observe(
        self, watch: StepWatch, before_step: Callable[[], object], after_step: Callable[[], object]
    ) -> None:
        """Tell ``watch`` of every step that trains, and call the others before and after it."""
        self._watch, self._before_step, self._after_step = watch, before_step, after_step

    def _step(self, given: dict[str, Any]) -> None:
        if not self._steps.trains:
            self._with_all_buffers()
            self._steps.run_torch_step(given)
            return
        watch = self._watch
        if watch is not None:
            watch.called()
        self._before_step()
        args, kwargs = self._prepare(given)
        if watch is not None:
            watch.begins()
        received: dict[Message, Sequence[dist.Work]] = {}
        sent: dict[Message, Sequence[dist.Work]] = {}
        left = self._gradients.copy()
        for instruction in self._program:
            match instruction:
                case Post(message):
                    received[message] = self._post(message)
                    if watch is not None:
                        watch.posted(message, received[message])
                case Await(message):
                    works = received.pop(message)
                    with self._named(message):
                        _wait(works) if watch is None else watch.wait(message)
                case Send(message):
                    self._send(message, sent)
                case Release(message):
                    with self._named(message):
                        _wait(sent.pop(message))
                case Action() as action:
                    compute = partial(self._compute, action, args, kwargs, given, left)
                    compute() if watch is None else watch.computed(action, compute)
                case ComputeAndSend(action, message):
                    send = partial(self._send, message, sent)
                    compute = partial(self._compute, action, args, kwargs, given, left, send)
                    compute() if watch is None else watch.computed(action, compute)
        for message, works in sent.items():
            with self._named(message):
                _wait(works)
        self._steps.end(given)
        self._after_step()

    def _prepare(self, given: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Refuse what no step can be trained on; returns each micro-batch's arguments, and keyword ones."""
        trouble = self._batches.trouble(given)
        ranks = dist.get_process_group_ranks(self._steps.group)
        if self._is_first:
            with among("the first step", ranks):
                agree(self._steps, trouble)
        elif trouble:
            refuse(f"rank {self._steps.rank}: {trouble}")
        neighbour = (self._steps.rank or 2) - 1
        with leaving(self._steps.group, neighbour, "working out what stages hand on"):
            try:
                found = self._steps.begin(given)
            except RuntimeError as failure:
                if not is_non_tensor_output_error(failure):
                    raise
                raise UserError(
                    f"stage {' or '.join(map(str, self._steps.stages))} hands on what no message carries",
                    got=one_line(str(failure), 200), expected="a tensor, or a tuple or a list of tensors",
                ) from failure  # fmt: skip
        if self._is_first:
            with among("the first step", ranks):
                check(self._steps)
        self._is_first = False
        self._release_all_buffers()
        return found

    def _compute(
        self,
        action: Action,
        args: Sequence[Any],
        kwargs: Sequence[Any],
        given: dict[str, Any],
        left: Counter[int],
        send: Callable[[], None] | None = None,
    ) -> None:
        kind, stage, micro_batch = action
        if kind is Pass.FORWARD:
            self._steps.forward(stage, micro_batch, args[micro_batch], kwargs[micro_batch], given)
            self._steps.receive_buffers(stage, micro_batch, gradients=False).release()
            return
        left[stage] -= kind is not Pass.INPUT_GRADIENT
        if kind is Pass.WEIGHT_GRADIENT:
            self._steps.backward_of_weights(stage, micro_batch, last=not left[stage])
            return
        whole = kind is Pass.BACKWARD
        last = whole and not left[stage]
        with self._named_among_replicas(stage) if last else contextlib.nullcontext():
            self._steps.backward(stage, micro_batch, full=whole, last=last, send=send)
        self._steps.receive_buffers(stage, micro_batch, gradients=True).release()

    def _named(self, message: Message) -> AbstractContextManager[None]:
        """Name who is gone where a message fails."""
        sends = message.sender == self._steps.rank
        neighbour, way = (message.receiver, "to") if sends else (message.sender, "from")
        kind = "gradient" if message.is_gradient else "activation"
        stage = message.to_stage if sends else message.of.stage
        what = f"the {kind} of micro-batch {message.of.micro_batch} {way} stage {stage}"
        return named(self._steps.group, neighbour, what)

    def _named_among_replicas(self, stage: int) -> AbstractContextManager[None]:
        """Name who is gone where replicas add up gradients."""
        replicas = self._steps.replicas_of(stage)
        if len(replicas) < 2:
            return contextlib.nullcontext()
        return among(
            f"adding up the gradients of stage {stage} among its replicas", replicas, self._steps.group
        )

    # Messages ----------------------------------------------------------------------------------------

    def _post(self, message: Message) -> Sequence[dist.Work]:
        stage, micro_batch, gradients = message.to_stage, message.of.micro_batch, message.is_gradient
        buffers = self._steps.receive_buffers(stage, micro_batch, gradients=gradients)
        buffers.allocate(*self._templates[stage, gradients])
        receives = self._steps.receives(stage, micro_batch, gradients=gradients)
        with self._named(message):
            return dist.batch_isend_irecv(receives) if receives else ()

    def _send(self, message: Message, sent: dict[Message, Sequence[dist.Work]]) -> None:
        if self._watch is not None:
            self._watch.sending(message)
        of = message.of
        sends = self._steps.sends(of.stage, of.micro_batch, gradients=message.is_gradient)
        with self._named(message):
            sent[message] = dist.batch_isend_irecv(sends) if sends else ()

    def _all_buffers(self) -> Iterator[tuple[tuple[int, bool], ReceiveBuffers]]:
        """What messages are received into, by stage and whether they are gradients, of every micro-batch."""
        for stage in self._steps.stages:
            for gradients in (False, True):
                if (stage == 0 and not gradients) or (stage == self._steps.stage_count - 1 and gradients):
                    continue
                for micro_batch in range(self._steps.micro_batches):
                    yield (
                        (stage, gradients),
                        self._steps.receive_buffers(stage, micro_batch, gradients=gradients),
                    )

    def _release_all_buffers(self) -> None:
        """Let go of what torch has allocated, and note what it was like."""
        for key, buffers in self._all_buffers():
            if buffers.device.type != "meta":  # in later steps they are let go of already
                self._templates[key] = buffers.templates(), buffers.device
                buffers.release()

    def _with_all_buffers(self) -> None:
        """Give torch's own order the memory that it expects, where it was let go of."""
        if not self._templates:
            return
        for key, buffers in self._all_buffers():
            if key in self._templates:
                buffers.allocate(*self._templates[key])


def _nothing() -> None: ...


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _check(steps: PipelineSteps, schedule: PipelineSchedule) -> None:
    if schedule.micro_batches != steps.micro_batches:
        raise PlanError(
            "the plan is for another number of micro-batches",
            got=f"{steps.micro_batches}",
            expected=f"{schedule.micro_batches}",
            fix="Construct the schedule with n_microbatches as planned, or plan again from a recording of this script.",
        )
    if schedule.rank_of_stage != steps.rank_of_stage:
        raise PlanError(
            "the plan is for stages on other ranks",
            got=", ".join(map(str, steps.rank_of_stage)),
            expected=", ".join(map(str, schedule.rank_of_stage)),
        )
