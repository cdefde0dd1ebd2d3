# SPDX-License-Identifier: Apache-2.0
"""Runs usbyte's own work, in the middle of the user's computation, outside of the user's modes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import torch

from usbyte.torch.torch_private import no_user_modes

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
        stack.enter_context(no_user_modes())
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
