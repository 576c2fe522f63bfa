"""What DistributedDataParallel offers and the decoupled all-reduce refuses: nothing is silently ignored."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from headway.errors import UnsupportedError


class RefusingDataParallel(DistributedDataParallel):
    """DistributedDataParallel without the methods that concern its own reducer: each raises UnsupportedError."""

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refuse: the collective is not an all-reduce that a hook could replace."""
        refuse("register_comm_hook()")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        refuse("_register_builtin_comm_hook()")

    def _register_buffer_comm_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("_register_buffer_comm_hook()")

    def _register_fused_optim(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("_register_fused_optim()")

    def _set_static_graph(self) -> NoReturn:
        refuse("static_graph=True")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        refuse("_update_process_group()")


def refuse(what: str, fix: str = "Use stock DDP.") -> NoReturn:
    """Raise UnsupportedError for ``what``."""
    raise UnsupportedError(f"{what} is not supported by the decoupled all-reduce", fix=fix)


def refuse_options(**options: Any) -> None:
    """Raise UnsupportedError for the first option that was given a value."""
    for name, value in options.items():
        if value is not None and value is not False and value != []:
            refuse(f"{name}={value if isinstance(value, bool | int | list) else '…'}")
