"""Parameters whose value or gradient is still on its way, and which notice being used.

While something is in flight the class of a parameter is changed in place, as torch itself does when it materialises
an ``UninitializedParameter``. Every use from Python of a ``DeferredParameter`` passes ``__torch_function__``, which
first brings the parameter up to date. Where merely the gradient is in flight the parameter is a ``DeferredGradient``,
whose ``.grad`` is brought up to date and whose value is used at torch's own speed. When nothing is in flight it is an
ordinary ``nn.Parameter`` again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from headway import torch_private
from headway.strategies.decoupled.condition import LOCK


class Pending(Protocol):
    """What is in flight for one parameter."""

    def before_value(self) -> None:
        """Make the parameter's value current."""

    def before_gradient_read(self) -> None:
        """Make the parameter's ``.grad`` current."""

    def before_gradient_write(self) -> None:
        """Take note that the user is about to replace ``.grad``."""


Given = TypeVar("Given", bound=torch.Tensor)

_pending: dict[int, weakref.ref[Any]] = {}

_GRADIENT: Any = torch.Tensor.grad
_GRADIENT_READ = _GRADIENT.__get__
_GRADIENT_WRITE = _GRADIENT.__set__
_GRADIENT_CHANGES = (_GRADIENT_WRITE, _GRADIENT.__delete__)
GRADIENT_ACCESS = frozenset((_GRADIENT_READ, *_GRADIENT_CHANGES))
"""What ``__torch_function__`` is given for ``.grad``."""
_READ_ONLY_PROPERTIES = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim", "is_cuda", "is_sparse",
    "is_cpu", "is_meta", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "nbytes", "retains_grad", "_base",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "get_device", "register_hook", "register_post_accumulate_grad_hook", "__len__",
)  # fmt: skip
ABOUT_NEITHER = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _READ_ONLY_PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""What ``__torch_function__`` is given for what concerns neither a parameter's value nor its gradient."""


class DeferredParameter(torch_private.StandsInForParameter):
    """An ``nn.Parameter`` while its update is in flight, and perhaps its reduced gradient. Never constructed.

    Methods name ``nn.Parameter`` rather than ``super()``: by then the parameter may be an ordinary one again.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring every deferred parameter among the arguments up to date, then do ``func``."""
        kwargs = kwargs or {}
        if func == _GRADIENT_READ:
            _entry(args[0]).before_gradient_read()
        elif func in _GRADIENT_CHANGES:
            with LOCK:  # another thread's update may have put an average there for a moment
                _entry(args[0]).before_gradient_write()
                with torch_private.without_subclass_dispatch():
                    return func(*args, **kwargs)
        elif func not in ABOUT_NEITHER:
            for parameter in tensors_in((args, kwargs), DeferredParameter):
                _entry(parameter).before_value()
        with torch_private.without_subclass_dispatch():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the current value into an ordinary parameter."""
        if id(self) not in memo:
            _entry(self).before_value()
        with torch_private.without_subclass_dispatch():
            return ordinary_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the current value as an ordinary parameter."""
        _entry(self).before_value()
        with torch_private.without_subclass_dispatch():
            return nn.Parameter.__reduce_ex__(self, protocol)

    def __repr__(self) -> Any:  # type: ignore[override]
        """Show the current value as an ordinary parameter."""
        _entry(self).before_value()
        with torch_private.without_subclass_dispatch():
            return nn.Parameter.__repr__(self)


class DeferredGradient(torch_private.StandsInForParameter):
    """An ``nn.Parameter`` while its reduced gradient is in flight and its value is current. Never constructed.

    ``nn.Parameter`` takes no part in ``__torch_function__``, so only ``.grad`` costs anything.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, once it is current."""
        _entry(self).before_gradient_read()
        return gradient_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with LOCK:
            _entry(self).before_gradient_write()
            set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        with LOCK:
            _entry(self).before_gradient_write()
            set_gradient(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the value into an ordinary parameter."""
        return ordinary_copy(self, memo)


def ordinary_copy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
    """What ``deepcopy`` makes of a parameter of any class: an ordinary one of the same value."""
    if id(parameter) not in memo:
        copied = parameter.data.clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = nn.Parameter(copied, parameter.requires_grad)
    return memo[id(parameter)]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """``.grad`` as it physically is, without bringing it up to date."""
    if type(parameter) is not DeferredParameter:
        return _GRADIENT_READ(parameter)  # type: ignore[no-any-return]
    with torch_private.without_subclass_dispatch():
        return _GRADIENT_READ(parameter)  # type: ignore[no-any-return]


def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set ``.grad``, whatever is in flight."""
    if type(parameter) is not DeferredParameter:
        _GRADIENT_WRITE(parameter, value)
        return
    with torch_private.without_subclass_dispatch():
        _GRADIENT_WRITE(parameter, value)


def clear_gradient(parameter: torch.Tensor) -> None:
    """Have no ``.grad``, whatever is in flight; to be called without subclass dispatch."""
    _GRADIENT_WRITE(parameter, None)


def register(parameter: nn.Parameter, entry: Pending) -> None:
    """Let ``entry`` answer for ``parameter`` whenever it is deferred. The caller keeps ``entry`` alive."""
    _pending[id(parameter)] = weakref.ref(entry)


def unregister(parameter: nn.Parameter) -> None:
    """Forget ``parameter``."""
    _pending.pop(id(parameter), None)


def anything_registered() -> bool:
    """Whether any parameter is, in this process."""
    return bool(_pending)


def entry_of(parameter: torch.Tensor) -> Any | None:
    """The entry that answers for ``parameter``, if it is registered."""
    reference = _pending.get(id(parameter))
    return None if reference is None else reference()


class _Nothing:
    """What is in flight for a parameter that another thread has just let go of."""

    def before_value(self) -> None:
        """It is current."""

    before_gradient_read = before_gradient_write = before_value


_NOTHING = _Nothing()


def _entry(parameter: torch.Tensor) -> Pending:
    entry = entry_of(parameter)
    if entry is None:
        assert type(parameter) not in {DeferredParameter, DeferredGradient}, "it has lost its runtime"
        return _NOTHING
    return cast(Pending, entry)


def tensors_in(value: Any, kind: type[Given]) -> Iterator[Given]:
    """The tensors of exactly the class ``kind`` among a function's arguments, in containers too."""
    if type(value) is kind:
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, kind)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, kind)
