"""The one adapter to names of torch that are not public. Nothing else in Headway may use such a name."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

DispatchMode = TorchDispatchMode
"""The base of modes that see every operator's call, through ``__torch_dispatch__``."""

_stores = cast(Any, dist)  # its stores are public, and missing from its annotations


def ddp_bucket_assignment(
    shapes: Sequence[tuple[tuple[int, ...], str]], limits_bytes: list[int]
) -> list[list[int]]:
    """Ask DDP's own bucketing how it would group tensors of these shapes and dtypes, in this order."""
    if not shapes:
        return []
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in shapes]
    assigned, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        tensors, limits_bytes, [False] * len(tensors), list(range(len(tensors)))
    )
    return [list(group) for group in assigned]


class KernelOverlay:
    """Python kernels laid over an operator library's own, each called with the original first."""

    def __init__(self, namespace: str, dispatch_key: str) -> None:
        self._namespace = namespace
        self._key = dispatch_key
        self._library = torch.library.Library(namespace, "IMPL")

    def put(self, operation: str, kernel: Callable[..., Any]) -> None:
        """Have ``operation`` call ``kernel(original, *args)``."""
        original = torch.library.get_kernel(f"{self._namespace}::{operation}", self._key)

        def overlaid(keyset: Any, *args: Any) -> Any:
            return kernel(lambda *passed: original.call_boxed(keyset, *passed), *args)

        with _override_unwarned():
            self._library.impl(operation, overlaid, self._key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Put the original kernels back in force."""
        self._library._destroy()


@contextmanager
def _override_unwarned() -> Iterator[None]:
    """Overriding a kernel warns once from C++; the override is meant and is taken back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def process_group(boxed: Any) -> dist.ProcessGroup:
    """A process group as operators are handed it."""
    return dist.ProcessGroup.unbox(boxed)


def source_of(work: dist.Work) -> int:
    """Which member of its group sent what the finished ``work`` received from anybody."""
    return int(work._source_rank())


def when_work_completes(boxed: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` when a boxed work is done, on whichever thread completes it."""
    dist.Work.unbox(boxed).get_future().then(lambda _: callback())


def wait_for_work(boxed: Any) -> None:
    """Return when a boxed work is done."""
    dist.Work.unbox(boxed).wait()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, as torch takes them apart."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """From inside a backward: call ``callback`` when its graph is done, before later-queued callbacks."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def data_loader_iterator() -> type:
    """The base class of the data loader's iterators, whose ``__next__`` is the wait for input."""
    return _BaseDataLoaderIter


def default_store() -> Any:
    """The key-value store of the default process group."""
    return _get_default_store()


def kept_in_a_file() -> bool:
    """Whether the default group met in a file: its store's operations never end where the file's folder is gone."""
    return dist.is_initialized() and isinstance(_without_prefixes(_get_default_store()), _stores.FileStore)


def _without_prefixes(store: Any) -> Any:
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    return store


def ddp_buckets(ddp: torch.nn.parallel.DistributedDataParallel) -> list[list[int]]:
    """DDP's buckets in force, as positions among its parameters that take gradients; empty where unknown."""
    text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in str(text).split(",") if bucket.strip()]


def ddp_bucket_cap_mb(ddp: torch.nn.parallel.DistributedDataParallel) -> float | None:
    """The ``bucket_cap_mb`` a DDP was built with; None where the default is in force."""
    if getattr(ddp, "bucket_bytes_cap_default", False):
        return None
    config = getattr(ddp, "_bucket_config", ddp)  # the attribute may be what ``compile_in_parts_of`` says
    return float(config.bucket_bytes_cap) / 2**20


def inside_backward() -> bool:
    """Whether this thread is computing a node of a backward pass.

    In an end-of-backward callback this is true exactly where that backward was nested in another one, as
    reentrant activation checkpointing nests them.
    """
    return torch._C._current_autograd_node() is not None


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of ``tensor``, plus a constant for the asking."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def without_subclass_dispatch() -> AbstractContextManager[Any]:
    """A context in which tensor subclasses' ``__torch_function__`` is not called."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


@contextmanager
def without_user_modes() -> Iterator[None]:
    """A context in which work of our own is invisible to function modes, dispatch modes and autocast.

    Inference mode and recording of gradients are off in it too.
    """
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside it tensors have shapes, devices and lives as ever, and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one of ``fake_tensors``, without data."""
    return isinstance(tensor, FakeTensor)


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that there are: the same for all tensors that share it."""
    key: int = storage._cdata
    return key


def operator_name(operator: Any) -> str:
    """The qualified name of the operator that a dispatch mode is told of, such as "aten::detach"."""
    return str(operator._schema.name)


def operator_packet(operator: Any) -> Any:
    """The operator that a dispatch mode is told of, whichever overload it is."""
    return operator._overloadpacket


def returns_given_memory(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given: a view, or what it wrote to."""
    return any(each.alias_info for each in operator._schema.returns)


def returns_view(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given and did not write to."""
    return any(each.alias_info and not each.alias_info.is_write for each in operator._schema.returns)


def dispatch_modes() -> list[Any]:
    """The dispatch modes in force, the innermost last."""
    return _get_current_dispatch_mode_stack()


def inside_transform() -> bool:
    """Whether a transform of torch.func is under way, whose wrapped tensors nobody can tell from ordinary ones."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def unhooked_step(optimizer_type: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The ``step`` of an optimizer class without the step hooks that torch wraps around it."""
    step: Any = optimizer_type.step
    return cast("Callable[..., Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of ``group``, for tensors on the CPU where it takes them, or None where it cannot be learned."""
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return None


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The lower-case name of the backend that ``group`` has for each type of device, such as "nccl" for "cuda"."""
    config = torch.distributed.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":") for pair in config.split(","))


def device_index(device: Any) -> int:
    """The index of a CUDA device given in any of the forms that DDP's ``device_ids`` takes."""
    return int(_get_device_index(device, True))


def moved_as_ddp_does(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward with their tensors on ``device``, as DDP moves them where it has ``device_ids``."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
    if not moved_inputs:
        return (), {}
    return moved_inputs[0], moved_kwargs[0]


def group_name(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same on all of its ranks."""
    return str(group.group_name)


def gloo_devices(group: dist.ProcessGroup) -> list[Any]:
    """The network devices of ``group``, each with a thread that serves its connections; none without Gloo."""
    with suppress(RuntimeError, AttributeError):
        options: Any = group._get_backend(torch.device("cpu")).options
        return list(options._devices)
    return []


def new_gloo_group(
    ranks: list[int],
    timeout: timedelta | None,
    devices: Sequence[Any],
    *,
    local: bool,
    description: str,
) -> dist.ProcessGroup:
    """A new group over Gloo for one collective at a time, on the ``devices`` of another group. Collective.

    ``local`` says that only ``ranks`` make it, and not all ranks of the job.

    ``new_group("gloo")`` gives each group a device with a thread that wakes a hundred times a second, and two threads
    for collectives. So the group is made by a backend of our own, which is registered only meanwhile: others may look
    at which backends there are.
    """

    def make(options: Any, _backend_options: Any) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        own = gloo._Options()
        own._devices, own._threads, own._timeout = list(devices), 1, options.timeout
        own.global_ranks_in_group, own.group_name = options.global_ranks_in_group, options.group_id
        return gloo(options.store, options.group_rank, options.group_size, own)

    dist.Backend.register_backend(_OWN_BACKEND, make, extended_api=True, devices=["cpu"])
    try:
        group = dist.new_group(
            ranks, timeout, backend=_OWN_BACKEND, use_local_synchronization=local, group_desc=description
        )
    finally:
        del dist.Backend._plugins[_OWN_BACKEND.upper()]
        dist.Backend.backend_list.remove(_OWN_BACKEND)
    assert isinstance(group, dist.ProcessGroup)
    return group


_OWN_BACKEND = "headway_gloo"


def abort_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, so that peers waiting on this rank fail rather than wait."""
    with suppress(RuntimeError, AttributeError):
        group.abort()


def join_config_disabled() -> Any:
    """What a module that can be joined carries outside of ``join()``."""
    return _JoinConfig.construct_disabled_join_config()


def before_group_shutdown(callback: Callable[[dist.ProcessGroup], None]) -> None:
    """Call ``callback`` with every process group just before it is shut down, from now on.

    ``destroy_process_group`` shuts groups down through this method however a script imported it.
    """
    shutdown = dist.ProcessGroup.shutdown

    @functools.wraps(shutdown)
    def shutdown_after_callback(self: dist.ProcessGroup) -> None:
        callback(self)
        shutdown(self)

    dist.ProcessGroup.shutdown = shutdown_after_callback  # type: ignore[method-assign]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of ``module`` itself run through torch.compile."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable") or is_compiled_copy(module)


@contextmanager
def compiled_in_parts(cap_bytes: int) -> Iterator[None]:
    """While this lasts code is compiled as inside a DDP whose buckets take ``cap_bytes``: a graph for about as much.

    The gradients of one graph are all there at its backward's end, so only between graphs can communication begin.
    """
    wrapper: Any = DistributedDataParallel
    before = wrapper._active_ddp_module
    wrapper._active_ddp_module = SimpleNamespace(bucket_bytes_cap=_least_part_bytes(cap_bytes))
    try:
        yield
    finally:
        wrapper._active_ddp_module = before


def compile_in_parts_of(ddp: DistributedDataParallel, cap_bytes: int) -> None:
    """Have what ``ddp`` calls compiled in parts of ``cap_bytes``, whatever its buckets are. It has made these."""
    ddp.bucket_bytes_cap = _least_part_bytes(cap_bytes)


def _least_part_bytes(cap_bytes: int) -> int:
    """Code is compiled in no smaller parts than DDP's own first bucket: a smaller cap fails there."""
    least_bytes: int = cast(Any, dist)._DEFAULT_FIRST_BUCKET_BYTES
    return max(cap_bytes, least_bytes)


def sharded_by_fully_shard() -> type | None:
    """The class of modules that ``fully_shard`` was called on, where it has been in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: type | None = getattr(fsdp, "FSDPModule", None)
    return sharded if sharded is not None and sharded.__subclasses__() else None


def pipeline_stage() -> Any:
    """The class of the stages of ``torch.distributed.pipelining``, where this process has imported that, or None."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    return getattr(stages, "_PipelineStageBase", None)


def is_compiled_copy(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what torch.compile has made of another one: its own hooks run outside of compiled code."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def compiled_from(module: Any) -> Any:
    """The module that torch.compile has made ``module`` of; ``module`` itself where it has not."""
    return module._orig_mod if is_compiled_copy(module) else module


def eager_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``root`` whose own hooks run outside of compiled code."""
    if is_compiled(root):
        return [root] if is_compiled_copy(root) else []
    found = {id(root): root}
    for child in root.children():
        found |= {id(module): module for module in eager_modules(child)}
    return list(found.values())


def has_compiled() -> bool:
    """Whether torch.compile has made code of anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"] or utils.counters["stats"])


class StandsInForParameter(torch.nn.Parameter):
    """What a parameter's class is changed to, in place, for a while. Never constructed: ``type(p)(...)`` is ordinary.

    torch makes an ``nn.Parameter`` of a tensor of another class only where ``detach()`` keeps that class. So from the
    first such class on whatever is constructed of one of these, or as one, is ordinary.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if torch.nn.Parameter.__new__ is not _new_ordinary:
            torch.nn.Parameter.__new__ = _new_ordinary  # type: ignore[method-assign]


_new_parameter: Any = torch.nn.Parameter.__new__


def _new_ordinary(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    if issubclass(type(data), StandsInForParameter):
        data = data.detach()
    kind = torch.nn.Parameter if issubclass(cls, StandsInForParameter) else cls
    return _new_parameter(kind, data, requires_grad)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """A context in which writing to ``tensors`` does not invalidate graphs that saved them."""
    autograd = cast(Any, torch.autograd)
    return cast("AbstractContextManager[Any]", autograd._unsafe_preserve_version_counter(tuple(tensors)))


Unscaling = Callable[[torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], Any]


def around_unscaling(
    around: Callable[[Unscaling, torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], Any],
) -> None:
    """Have every ``GradScaler`` call ``around`` to unscale, which is given what it did before, and its arguments.

    These are (optimizer, inverse scale, found_inf, allow_fp16), and found_inf by device is returned.
    """
    stock = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(stock)
    def unscale_grads(scaler: Any, *args: Any) -> Any:
        return around(functools.partial(stock, scaler), *args)

    torch.amp.GradScaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign, assignment]


def unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``gradients``, of one dtype; set ``found_inf`` to 1 where an element was not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def let_gloo_finish() -> None:
    """Give Gloo's threads a moment of the interpreter; to be called before a process group is destroyed.

    torch joins these threads without letting go of the interpreter, and a thread that drops the tensors of a
    finished collective needs it: a group destroyed right after a collective can hang or abort.
    """
    time.sleep(0.2)
