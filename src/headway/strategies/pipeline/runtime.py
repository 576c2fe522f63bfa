"""Runs pipelines live: carries out a schedule's program on torch's stages.

Receives are posted early. Their memory is allocated when they are posted and freed after use; torch's own runtime keeps
memory for every micro-batch of a batch. The program may change between steps.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
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
from headway.strategies.pipeline.tuning.observed import RankStep, Span
from headway.strategies.silent import gives_up, in_words, silent_ranks
from headway.torch_private.pipelining import (
    PipelineSteps,
    ReceiveBuffers,
    is_non_tensor_output_error,
    tensors_in,
)

_KEY = "headway/pipeline/lost"
_CONNECTION = "gloo"  # part of the error text when a connection is lost


@contextlib.contextmanager
def named(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """Turn errors of ``group`` into CommunicationError while ``what`` is done with ``neighbour``.

    A rank that loses a neighbour closes its own connections, so that ranks that wait for it fail in turn. Every failing
    rank reports itself; the error names the ranks that did not.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        _abort(group)
        peer = dist.get_global_rank(group, neighbour)
        closed = None if _in_vain(str(failure)) else peer
        lost = silent_ranks(_KEY, range(dist.get_world_size()), neighbour=closed) or (peer,)
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what} failed: {in_words(lost)} "
            f"({one_line(str(failure), 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def among(what: str, ranks: Sequence[int] = (), group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn lost connections into CommunicationError while ``ranks`` (by default all) do ``what`` together.

    A collective does not tell which rank is lost; a neighbour that misses it does. The connections of ``group``, whose
    ranks wait for this one, are closed.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        message = _of_connection(failure)
        if message is None:
            raise
        rank = dist.get_rank()
        everyone = range(dist.get_world_size())
        peers = [peer for peer in ranks or everyone if peer != rank]
        if group is not None:
            _abort(group)
        waited = _in_vain(message)
        only = peers[0] if len(peers) == 1 else None
        # Who waits for a rank that is left meets the failure when that ends, unless all wait in vain.
        lost = silent_ranks(_KEY, everyone, neighbour=None if waited else only, decides=waited)
        if not lost and only is not None:
            lost = (only,)
        raise CommunicationError(
            f"rank {rank}: {what} failed: {in_words(lost)} "
            f"({one_line(message, 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def leaving(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """Like ``named`` for lost connections; for any other error this rank reports itself as lost."""
    try:
        yield
    except RuntimeError as failure:
        if _CONNECTION in str(failure).lower():
            with named(group, neighbour, what):
                raise
        gives_up(_KEY)
        raise


def _of_connection(failure: BaseException) -> str | None:
    """The message of the connection error in a chain of exceptions, or None: torch wraps errors of a stage's backward."""
    cause: BaseException | None = failure
    while cause is not None:
        if _CONNECTION in str(cause).lower():
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _in_vain(message: str) -> bool:
    """Whether a wait timed out: then all ranks wait at about the same time, not only for a lost rank."""
    return "timed out" in message.lower()


def _abort(group: dist.ProcessGroup) -> None:
    """Abort ``group``, so that ranks that wait for this one fail too."""
    with contextlib.suppress(RuntimeError):
        torch_private.abort_group(group)


Given = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]
_LONGEST = 2**16  # bytes that a rank may send in an agreement


class BatchCheck:
    """Checks that micro-batches have equal shapes within a step and across steps."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._first: dict[str, Shapes] = {}

    def trouble(self, arguments: Given) -> str:
        """Describes what is wrong with this rank's micro-batches of a step; "" if nothing is."""
        for name, what in (("arg_mbs", "batch"), ("kwarg_mbs", "batch"), ("target_mbs", "target")):
            shapes = [_shapes(micro_batch) for micro_batch in arguments.get(name) or ()]
            if shapes and (problem := self._trouble(what, name, shapes)):
                return problem
        return ""

    def _trouble(self, what: str, name: str, shapes: Sequence[Shapes]) -> str:
        count = self._micro_batches
        if len(shapes) != count or any(0 in shape for of_micro_batch in shapes for shape in of_micro_batch):
            return f"the {what} has fewer samples than {count} micro-batches"
        if any(of_micro_batch != shapes[0] for of_micro_batch in shapes):
            sizes = ", ".join(
                str(of_micro_batch[0][0]) if of_micro_batch and of_micro_batch[0] else "?"
                for of_micro_batch in shapes
            )
            return f"the {what} does not split into {count} micro-batches of equal size: they have {sizes} samples"
        first = self._first.setdefault(name, shapes[0])
        if first != shapes[0]:
            return (
                f"the {what} has micro-batches of different shapes ({_describe_shapes(shapes[0])}) "
                f"than in the first step ({_describe_shapes(first)})"
            )
        return ""


def agree(steps: PipelineSteps, trouble: str) -> None:
    """Raise UserError on all ranks of a pipeline if one of them has ``trouble`` with its batch."""
    for rank, reply in enumerate(_from_every_rank(steps, {"trouble": trouble})):
        if reply["trouble"]:
            refuse(f"rank {rank}: {reply['trouble']}")


def refuse(trouble: str) -> None:
    """Raise the UserError for a batch with ``trouble``."""
    raise UserError(
        "a pipeline step received a batch that it cannot train on",
        got=trouble,
        expected="micro-batches of equal size, the same in every step",
        fix="Drop the incomplete last batch (drop_last=True in a DataLoader), or choose another number "
        "of micro-batches.",
    )


def check(steps: PipelineSteps) -> None:
    """Raise UserError on all ranks if a stage expects other tensors than the stage before it outputs.

    Collective, in the same step on every rank, once stages are prepared. DTensors are refused too: torch would receive
    them as empty tensors on ranks outside their mesh.
    """
    local_ends = {
        str(stage): {"in": steps.received_tensors(stage), "out": steps.sent_tensors(stage)}
        for stage in steps.stages
    }
    ends_of_stage = {
        int(stage): ends for of_rank in _from_every_rank(steps, local_ends) for stage, ends in of_rank.items()
    }
    for stage in range(steps.stage_count - 1):
        out, into = ends_of_stage[stage]["out"], ends_of_stage[stage + 1]["in"]
        if any("DTensor" in text for text in (*out, *into)):
            raise UserError(
                "a stage outputs a DTensor", got=f"{', '.join(out)} of stage {stage}", expected="plain tensors",
                fix="Return output.full_tensor() or output.to_local() from the stage.",
            )  # fmt: skip
        if out and out != into:
            raise UserError(
                f"stages {stage} and {stage + 1} disagree about the tensors between them",
                got=f"{', '.join(out)} of stage {stage}",
                expected=f"{', '.join(into) or 'nothing'}, which stage {stage + 1} expects",
                fix="Pass PipelineStage the module's actual input_args and output_args, or neither.",
            )


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def _describe_shapes(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"


def _from_every_rank(steps: PipelineSteps, document: Any) -> list[Any]:
    """Gather the JSON ``document`` of every rank of the pipeline."""
    text = json.dumps(document).encode()
    assert len(text) <= _LONGEST, "a rank says too much"
    ranks = dist.get_world_size(steps.group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=steps.device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=steps.device), group=steps.group)
    longest = int(max(lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=steps.device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=steps.group)
    return [
        json.loads(bytes(row[: int(length)].tolist())) for row, length in zip(texts, lengths, strict=True)
    ]


_Request = tuple[Sequence[dist.Work], "Future[int]"]


class StepWatch:
    """Notes when passes of a step run, when messages are sent, and when they arrive.

    ``offset_ns`` brings this rank's clock onto rank 0's. A thread for each sender waits for its messages, so that an
    arrival is noted when it happens rather than when the message is needed.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self._arrivals_from: dict[int, _Arrivals] = {}
        self._ended_ns = 0
        self._begin()

    def _begin(self) -> None:
        self._begin_ns = self._between_ns = 0
        self._passes: dict[Action, Span] = {}
        self._sent_ns: dict[Message, int] = {}
        self._posted_ns: dict[Message, int] = {}
        self._arrivals: dict[Message, Future[int]] = {}

    def called(self) -> None:
        """The script calls a step: the time since the last step was spent outside of it."""
        self._between_ns = time.monotonic_ns() - self._ended_ns if self._ended_ns else 0

    def begins(self) -> None:
        """The program of a step begins now."""
        self._begin_ns = time.monotonic_ns()

    def computed(self, action: Action, compute: Callable[[], None]) -> None:
        """Run ``compute`` and note when ``action`` ran."""
        begin_ns = time.monotonic_ns()
        compute()
        self._passes[action] = Span(begin_ns, time.monotonic_ns())

    def sending(self, message: Message) -> None:
        """Note that a send begins."""
        self._sent_ns[message] = time.monotonic_ns()

    def posted(self, message: Message, works: Sequence[dist.Work]) -> None:
        """Note that a receive was posted."""
        self._posted_ns[message] = time.monotonic_ns()
        if message.sender not in self._arrivals_from:
            self._arrivals_from[message.sender] = _Arrivals()
        self._arrivals[message] = self._arrivals_from[message.sender].of(works)

    def wait(self, message: Message) -> None:
        """Wait until a message has arrived; raises the error of the receive."""
        self._arrivals[message].result()

    def ended(self) -> RankStep:
        """End the step and return its times."""
        self._ended_ns = time.monotonic_ns()
        offset_ns = self.offset_ns
        step = RankStep(
            self._begin_ns + offset_ns,
            self._ended_ns + offset_ns,
            self._between_ns,
            {
                action: Span(span.begin_ns + offset_ns, span.end_ns + offset_ns)
                for action, span in self._passes.items()
            },
            {message: sent_ns + offset_ns for message, sent_ns in self._sent_ns.items()},
            {
                message: Span(posted_ns + offset_ns, self._arrivals[message].result() + offset_ns)
                for message, posted_ns in self._posted_ns.items()
            },
        )
        self._begin()
        return step


class _Arrivals:
    """Waits for the messages of one sender in order, on a thread that ends with this object."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(
            target=_await_arrivals, args=(self._requests,), name="headway-arrivals", daemon=True
        ).start()
        weakref.finalize(self, self._requests.put, None)

    def of(self, works: Sequence[dist.Work]) -> Future[int]:
        """A future of the arrival time (ns) of ``works``, or of the error of waiting for them."""
        future: Future[int] = Future()
        self._requests.put((works, future))
        return future


def _await_arrivals(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        works, future = request
        try:
            for work in works:
                work.wait()
            future.set_result(time.monotonic_ns())
        except Exception as failure:  # raised again where the message is needed
            future.set_exception(failure)


class PipelineRuntime:
    """Runs the steps of a torch schedule object in the order of ``schedule``.

    Raises PlanError if ``schedule`` has other stages or another number of micro-batches.
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
        """Switch to the order of ``schedule``; every rank calls this before the same step."""
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
        """The bytes of activations that this rank's first stage receives per micro-batch; 0 if it receives none."""
        templates, _ = self._templates.get((min(self._steps.stages), False), ([], None))
        return sum(like.nbytes for like in templates if like is not None)

    def observe(
        self, watch: StepWatch, before_step: Callable[[], object], after_step: Callable[[], object]
    ) -> None:
        """Have ``watch`` note every training step, and call ``before_step`` and ``after_step`` around it."""
        self._watch, self._before_step, self._after_step = watch, before_step, after_step

    def _step(self, arguments: dict[str, Any]) -> None:
        if not self._steps.trains:
            self._with_all_buffers()
            self._steps.run_torch_step(arguments)
            return
        watch = self._watch
        if watch is not None:
            watch.called()
        self._before_step()
        args, kwargs = self._prepare(arguments)
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
                    compute = partial(self._compute, action, args, kwargs, arguments, left)
                    compute() if watch is None else watch.computed(action, compute)
                case ComputeAndSend(action, message):
                    send = partial(self._send, message, sent)
                    compute = partial(self._compute, action, args, kwargs, arguments, left, send)
                    compute() if watch is None else watch.computed(action, compute)
        for message, works in sent.items():
            with self._named(message):
                _wait(works)
        self._steps.end(arguments)
        self._after_step()

    def _prepare(self, arguments: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Check the batch and prepare the stages; returns every micro-batch's positional and keyword arguments."""
        trouble = self._batches.trouble(arguments)
        ranks = dist.get_process_group_ranks(self._steps.group)
        if self._is_first:
            with among("the first step", ranks):
                agree(self._steps, trouble)
        elif trouble:
            refuse(f"rank {self._steps.rank}: {trouble}")
        neighbour = (self._steps.rank or 2) - 1
        with leaving(self._steps.group, neighbour, "inferring the shapes between stages"):
            try:
                prepared = self._steps.begin(arguments)
            except RuntimeError as failure:
                if not is_non_tensor_output_error(failure):
                    raise
                raise UserError(
                    f"stage {' or '.join(map(str, self._steps.stages))} outputs something that cannot be sent",
                    got=one_line(str(failure), 200), expected="a tensor, or a tuple or a list of tensors",
                ) from failure  # fmt: skip
        if self._is_first:
            with among("the first step", ranks):
                check(self._steps)
        self._is_first = False
        self._release_all_buffers()
        return prepared

    def _compute(
        self,
        action: Action,
        args: Sequence[Any],
        kwargs: Sequence[Any],
        arguments: dict[str, Any],
        left: Counter[int],
        send: Callable[[], None] | None = None,
    ) -> None:
        kind, stage, micro_batch = action
        if kind is Pass.FORWARD:
            self._steps.forward(stage, micro_batch, args[micro_batch], kwargs[micro_batch], arguments)
            self._steps.receive_buffers(stage, micro_batch, gradients=False).release()
            return
        left[stage] -= kind is not Pass.INPUT_GRADIENT
        if kind is Pass.WEIGHT_GRADIENT:
            self._steps.backward_of_weights(stage, micro_batch, last=not left[stage])
            return
        is_full = kind is Pass.BACKWARD
        last = is_full and not left[stage]
        with self._named_among_replicas(stage) if last else contextlib.nullcontext():
            self._steps.backward(stage, micro_batch, full=is_full, last=last, send=send)
        self._steps.receive_buffers(stage, micro_batch, gradients=True).release()

    def _named(self, message: Message) -> AbstractContextManager[None]:
        """Name the lost ranks if a message fails."""
        sends = message.sender == self._steps.rank
        neighbour, way = (message.receiver, "to") if sends else (message.sender, "from")
        kind = "gradient" if message.is_gradient else "activation"
        stage = message.to_stage if sends else message.of.stage
        what = f"the {kind} of micro-batch {message.of.micro_batch} {way} stage {stage}"
        return named(self._steps.group, neighbour, what)

    def _named_among_replicas(self, stage: int) -> AbstractContextManager[None]:
        """Name the lost ranks if replicas fail to reduce gradients."""
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
        """The receive buffers of every micro-batch, by stage and whether they hold gradients."""
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
        """Free the buffers that torch allocated, and keep their shapes as templates."""
        for key, buffers in self._all_buffers():
            if buffers.device.type != "meta":  # in later steps they are let go of already
                self._templates[key] = buffers.templates(), buffers.device
                buffers.release()

    def _with_all_buffers(self) -> None:
        """Allocate the freed buffers again for torch's own order, as in evaluation."""
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
            "the plan places stages on other ranks",
            got=", ".join(map(str, steps.rank_of_stage)),
            expected=", ".join(map(str, schedule.rank_of_stage)),
        )
