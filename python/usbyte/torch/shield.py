"""Work that is done in the middle of the user's own computation, and is no part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import _ops
from torch.utils import _python_dispatch


@contextmanager
def shielded(device: str) -> Iterator[None]:
    """Runs what is inside as if nothing were around it.

    Neither modes (inference, autocast, fake tensors, counters of operations) nor transforms of
    functions (`torch.func`) nor tracing (`torch.jit.trace`, `make_fx`) see it; gradients may be on.
    Nor is it compiled with `torch.compile`, where torch's optimizers round in other ways.

    Args:
        device: Type of the device that it works on.
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
