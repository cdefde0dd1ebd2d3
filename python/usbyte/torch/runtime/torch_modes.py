"""Runs usbyte's own work, in the middle of the user's computation, outside of the user's modes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import _ops
from torch.utils import _python_dispatch

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_inference_mode(method: _F) -> _F:
    """Decorator that leaves `torch.inference_mode()` for methods that may make lasting tensors.

    Such tensors are buffers and optimizer state. A tensor that is made in inference mode cannot be
    written to outside of it and has no version counter. Autograd stays off in the method.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return cast("_F", call)


@contextmanager
def disable_user_modes(device: str) -> Iterator[None]:
    """Context manager that disables all modes of the user but autograd's.

    It disables inference mode, autocast, dispatch modes (fake tensors, counters of operations),
    transforms of functions (`torch.func`) and tracing (`torch.jit.trace`, `make_fx`). It also
    clears the flag of `torch.compile`, under which torch's optimizers round differently.

    Args:
        device: Device type of the work inside, such as "cuda".
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C._DisableFuncTorch())
        if torch._C._len_torch_dispatch_stack() or _ops._len_torch_dispatch_stack_pre_dispatch():
            stack.enter_context(_python_dispatch._disable_current_modes())
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        tracing = torch._C._get_tracing_state()
        if tracing is not None:
            set_tracing = torch._C._set_tracing_state  # type: ignore[attr-defined]
            set_tracing(None)
            stack.callback(set_tracing, tracing)
        if getattr(torch.compiler, "_is_compiling_flag", False):
            stack.callback(setattr, torch.compiler, "_is_compiling_flag", True)
            torch.compiler._is_compiling_flag = False
        yield
