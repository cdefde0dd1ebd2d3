# SPDX-License-Identifier: Apache-2.0
"""Every private symbol of torch that usbyte uses, each with its reason, and a test of each.

Private symbols can change with any release of torch. No other module of usbyte names one, and
`usbyte doctor` runs `broken` against the torch that is installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import _ops
from torch.autograd import Variable
from torch.optim import optimizer as _optimizer
from torch.utils import _python_dispatch, _pytree

_F = TypeVar("_F", bound=Callable[..., Any])

# Tensors.

#: Reading a lazy tensor without materializing it. torch.Tensor.__torch_function__ has no public
#: counterpart for code in C++.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Undoes the changes of `tensor._version` at the end of the context.

    Parameters that share a version counter are found by writing to one and reading the others'.
    `_version` itself is read in place, for every parameter in every step: it is the one private
    name that stands in other modules.
    """
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)
    return context


#: Number of tensors that share a storage, given its `_cdata`; None in a torch without it. Finds
#: `state_dict()` and other aliases that a script keeps.
storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_handle(tensor: torch.Tensor) -> int:
    """Returns what `storage_use_count` takes."""
    return tensor.untyped_storage()._cdata


def is_functorch_tensor(tensor: torch.Tensor) -> bool:
    """Returns True inside a torch.func transform, where a tensor has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def gradient_hooks(param: torch.Tensor) -> Iterator[Any]:
    """Yields the hooks on a parameter's gradient; those of other reducers are found among them."""
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        yield from (hooks or {}).values()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies tensors in one call; torch's optimizers use the same function."""
    torch._foreach_copy_(targets, sources)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in tuples, lists, dictionaries and whatever else torch's trees have."""
    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


# Autograd.


#: Returns the number of the backward pass that this thread runs; -1 outside of one.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def call_after_backward(callback: Callable[[], None]) -> None:
    """Has the callback called at the end of the backward pass that runs, as DDP's reducer does."""
    Variable._execution_engine.queue_callback(callback)


#: True in a `backward(retain_graph=True)`; older torch does not tell, and gives False.
keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False
)


# Modes around the user's computation.


@contextmanager
def no_user_modes() -> Iterator[None]:
    """Turns off functorch transforms, dispatch modes, tracing and the mark of compiled code."""
    tracing = torch._C._get_tracing_state()
    compiling = getattr(torch.compiler, "_is_compiling_flag", False)
    with torch._C._DisableFuncTorch(), _no_dispatch_modes():
        if tracing is not None:
            torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        if compiling:
            torch.compiler._is_compiling_flag = False
        try:
            yield
        finally:
            if tracing is not None:
                torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
            if compiling:
                torch.compiler._is_compiling_flag = True


@contextmanager
def _no_dispatch_modes() -> Iterator[None]:
    if torch._C._len_torch_dispatch_stack() or _ops._len_torch_dispatch_stack_pre_dispatch():
        with _python_dispatch._disable_current_modes():
            yield
    else:
        yield


def not_compiled(function: _F) -> _F:
    """Decorates a function that torch.compile leaves as it is, like a method of an optimizer.

    `torch.compiler.disable` imports all of the compiler.
    """
    return cast("_F", torch._disable_dynamo(function))


def compiled_frames() -> bool:
    """Returns True if torch.compile has compiled anything in this process; imports no compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns True after `module.compile()`, which compiles the module's hooks too."""
    return getattr(module, "_compiled_call_impl", None) is not None


# Optimizers.

#: Dictionaries of hooks that an OptimizerWrapper shares with the optimizer inside.
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Returns the dictionaries of hooks that run around `step`, its own and the global ones.

    An optimizer that does not call `Optimizer.__init__` has no hooks of its own.
    """
    return [
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer, "_optimizer_step_post_hooks", {}),
        _optimizer._global_optimizer_pre_hooks,
        _optimizer._global_optimizer_post_hooks,
    ]


# Devices and processes.


def _stream_of(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


#: The current CUDA stream's address, given a device's index, without the object around it.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def default_store() -> dist.Store:
    """Returns the store of the default process group; `dist` gives the group only."""
    return dist.distributed_c10d._get_default_store()


# The self-test.


def _check_lazy_reads() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("__torch_function__ was called")

    tensor = torch.zeros(2, dtype=torch.float32, device="cpu").as_subclass(Refuses)
    with DisableTorchFunction():
        assert tensor.data_ptr() != 0


def _check_versions() -> None:
    tensor = torch.zeros(2, dtype=torch.float32, device="cpu")
    before = tensor._version
    with preserve_version(tensor):
        tensor.add_(1)
        assert tensor._version == before + 1
    assert tensor._version == before


def _check_storage_uses() -> None:
    if storage_use_count is None:
        return
    tensor = torch.zeros(2, dtype=torch.float32, device="cpu")
    handle = storage_handle(tensor)
    before = storage_use_count(handle)
    alias = tensor.view(2)
    assert storage_use_count(handle) == before + 1
    del alias


def _check_functorch() -> None:
    assert not is_functorch_tensor(torch.zeros(2, dtype=torch.float32, device="cpu"))
    torch.vmap(lambda x: [x, _must(is_functorch_tensor(x))][0])(
        torch.zeros(2, dtype=torch.float32, device="cpu")
    )


def _must(condition: bool) -> bool:
    assert condition
    return condition


def _check_trees() -> None:
    tensors = [torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(2)]
    found = list(tensors_in({"a": (tensors[0], "text"), "b": [3, tensors[1]]}))
    assert all(map(torch.Tensor.is_set_to, found, tensors))
    assert len(found) == 2


def _check_backward() -> None:
    param = torch.zeros(2, dtype=torch.float32, device="cpu", requires_grad=True)
    seen: list[int] = []
    param.register_hook(lambda grad: seen.append(backward_id()))
    param.register_post_accumulate_grad_hook(
        lambda p: call_after_backward(lambda: seen.append(int(keeps_graph())))
    )
    assert backward_id() == -1
    assert len(list(gradient_hooks(param))) == 2
    param.sum().backward()
    assert seen[0] >= 0
    assert seen[1] == 0


def _check_modes() -> None:
    class Counts(_python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counts.calls += 1
            return func(*args, **(kwargs or {}))

    with Counts(), no_user_modes():
        torch.zeros(2, dtype=torch.float32, device="cpu").add_(1)
    assert Counts.calls == 0


def _check_optimizers() -> None:
    optimizer = torch.optim.SGD(
        [torch.zeros(2, dtype=torch.float32, device="cpu", requires_grad=True)], lr=1.0
    )
    for name in OPTIMIZER_HOOKS:
        assert isinstance(getattr(optimizer, name), dict), name
    optimizer.register_step_pre_hook(lambda *_: None)
    assert len(step_hooks(optimizer)[0]) == 1
    target, source = (
        torch.zeros(2, dtype=torch.float32, device="cpu"),
        torch.ones(2, dtype=torch.float32, device="cpu"),
    )
    copy_all([target], [source])
    assert torch.equal(target, source)


def _check_compiler() -> None:
    assert not_compiled(lambda: 3)() == 3
    assert hasattr(torch.nn.Module(), "_compiled_call_impl")
    compiled_frames()


_CHECKS = {
    "reads of lazy tensors": _check_lazy_reads,
    "version counters": _check_versions,
    "users of a storage": _check_storage_uses,
    "torch.func tensors": _check_functorch,
    "trees of tensors": _check_trees,
    "backward passes": _check_backward,
    "modes": _check_modes,
    "optimizer hooks": _check_optimizers,
    "torch.compile": _check_compiler,
}


def broken() -> list[str]:
    """Returns what the installed torch does otherwise than usbyte expects; empty if nothing.

    Examples:
        >>> from usbyte.torch.torch_private import broken
        >>> broken()
        []
    """
    found: list[str] = []

    def run() -> None:  # in a thread of its own, so that no mode of the caller's is around
        for what, check in _CHECKS.items():
            try:
                check()
            except Exception as error:
                found.append(f"{what}: {type(error).__name__}: {error}".rstrip(": "))

    thread = threading.Thread(target=run, name="usbyte-torch-private")
    thread.start()
    thread.join()
    return found
