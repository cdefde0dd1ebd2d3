# SPDX-License-Identifier: Apache-2.0
"""Detects wrappers of other libraries that also reduce gradients, which would reduce them twice."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from usbyte.errors import UsageError
from usbyte.torch.torch_private import gradient_hooks

# By name, whatever the library: the classes themselves would have to be imported.
_MODULES = frozenset(
    [
        "DeepSpeedEngine",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "ShardedDataParallel",
    ]
)
# Libraries whose hooks on parameters send gradients.
_LIBRARIES = frozenset(["apex", "bagua", "byteps", "colossalai", "deepspeed", "fairscale",
                        "horovod", "megatron"])  # fmt: skip


def check_unreduced(
    optimizer: torch.optim.Optimizer, names: Sequence[str], params: Sequence[nn.Parameter]
) -> None:
    """Raises UsageError if something else in this process reduces the gradients of parameters.

    It searches all objects that Python's garbage collector tracks, which takes about 10 ms.

    Args:
        optimizer: The optimizer to wrap.
        names: Names of its parameters, by parameter index.
        params: Its parameters, by parameter index.
    """
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise UsageError(
            "the optimizer is Horovod's DistributedOptimizer, which reduces gradients by itself: "
            "pass the optimizer inside it to usbyte's DistributedOptimizer"
        )
    named = dict(zip(params, names, strict=True))
    for param, name in named.items():
        for library in map(_library_of, gradient_hooks(param)):
            if library in _LIBRARIES:
                raise _reduced_twice(name, f"a hook of {library}'s")
    if _first_reduced(_living(), named) is not None:
        gc.collect()  # a deleted wrapper may live on in a reference cycle
        if (found := _first_reduced(_living(), named)) is not None:
            raise found


def check_module(module: nn.Module, named: Mapping[nn.Parameter, str]) -> None:
    """Raises UsageError if a module that is about to run reduces the gradients of parameters.

    Args:
        module: The module that is about to run its forward.
        named: The parameters that usbyte reduces, with their names.
    """
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    found = _first_reduced([module] if active is None else [module, active], named)
    if found is not None:
        raise found


def _living() -> list[nn.Module]:
    # By type, because isinstance would run code of proxy objects.
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def _first_reduced(
    modules: Iterable[nn.Module], named: Mapping[nn.Parameter, str]
) -> UsageError | None:
    """Returns the error for the first module that reduces one of the parameters, or None."""
    for module in modules:
        kind = next((k.__name__ for k in type(module).__mro__ if k.__name__ in _MODULES), "")
        if kind and _reduces(module):
            for param in _reduced_by(module):
                if param in named:
                    return _reduced_twice(named[param], f"a {kind} module around the model")
    return None


def _reduces(module: nn.Module) -> bool:
    """Returns whether a wrapper reduces over several ranks, or would in a larger run."""
    if type(module).__name__ == "FullyShardedDataParallel":
        return True  # its parameters are flat shards, even with a single rank
    group = getattr(module, "process_group", None)
    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized():
        return True
    return group.size() > 1 or dist.get_world_size() == 1


def _reduced_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Returns the wrapper's parameters, without those that DDP was told to ignore."""
    ignored = getattr(module, "parameters_to_ignore", ())
    inner = module.module if ignored and isinstance(module.module, nn.Module) else module
    return (param for name, param in inner.named_parameters() if name not in ignored)


def _reduced_twice(name: str, by: str) -> UsageError:
    return UsageError(
        f"the gradient of '{name}' is reduced by {by} too, so it would be averaged twice and be "
        "too small. Remove one of the two: train the model that is inside the wrapper "
        "(wrapper.module) and delete the wrapper, or remove DistributedOptimizer. A Hugging Face "
        "Trainer under a launcher, Accelerate's prepare(model) and Lightning's default strategy "
        "wrap models by themselves: docs/migrating.md describes how to prevent this"
    )


def _library_of(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # the function inside a functools.partial
    return str(getattr(hook, "__module__", "")).partition(".")[0]
