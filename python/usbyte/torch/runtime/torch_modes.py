"""Work that is done in the middle of the user's own computation, and is no part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch

from usbyte.torch.torch_private import no_user_modes

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_inference_mode(method: _F) -> _F:
    """Decorates what may make buffers or optimizer state: those are needed outside as well.

    A tensor that is made in `torch.inference_mode()` cannot be written to outside of it, and has no
    version counter. Gradients stay off, as they are inside.
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
    """Runs what is inside as if nothing were around it.

    Neither modes (inference, autocast, fake tensors, counters of operations) nor transforms of
    functions (`torch.func`) nor tracing (`torch.jit.trace`, `make_fx`) see it; gradients may be on.
    Nor is it compiled with `torch.compile`, where torch's optimizers round in other ways.

    Args:
        device: Type of the device that it works on.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(no_user_modes())
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
