"""Gates: what makes a layer's forward wait until its own parameters are updated.

The modules that own the parameters are found at the first forward pass (or in `model`, if the user
passes it). Each gets a forward pre-hook. During the learning steps a torch function mode watches
which parameters are read before the gate of their owner has been passed (functional use); those are
waited for at the gate of the outermost module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from usbyte.torch.device import Device, Mark


class Gates:
    """Calls `arrive` with the parameters that a module is about to use.

    Args:
        params: The parameters, whose positions are the indices passed on.
        arrive: Called before a module's forward with the indices it needs.
        drain: Called before anything reads parameters in another way (state_dict, evaluation).
        device: Of the parameters.
        model: Where the parameters live; found at the first forward pass if None.

    Attributes:
        needed: By parameter, when it was first used in the current iteration; None: not yet.
        roots: Where parameters were found.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        arrive: Callable[[Sequence[int]], None],
        drain: Callable[[], None],
        device: Device,
        model: nn.Module | None = None,
    ) -> None:
        self._index = {p: i for i, p in enumerate(params)}
        self._arrive, self._drain, self._device = arrive, drain, device
        self._handles: list[RemovableHandle] = []
        self._installed: set[nn.Module] = set()
        self._owned: set[int] = set()
        self.roots: list[nn.Module] = []
        self._at_root: set[int] = set()  # waited for at the outermost module's gate
        self._outside: set[int] = set()  # read outside any forward
        self._learning = True
        self._reads: _Reads | None = None
        self.needed: list[Mark | None] = [None] * len(params)
        self._finder: RemovableHandle | None = None
        if model is None:
            self._finder = register_module_forward_pre_hook(self._find)
        else:
            self._install(model)

    def begin_iteration(self, used: Sequence[bool]) -> None:
        """Forgets the times of the iteration before; called when a learning step is done.

        Args:
            used: Which parameters got a gradient in it.
        """
        for i, need in enumerate(self.needed):
            if used[i] and need is None:
                self._outside.add(i)
        self.needed = [None] * len(self.needed)

    def begin_learning(self) -> None:
        """Watches again when parameters are used."""
        self._learning = True
        self.needed = [None] * len(self.needed)

    def finish_learning(self) -> set[int]:
        """Ends the watch for functional use.

        Returns:
            The indices without a gate, or read past it; their updates cannot be deferred.
        """
        self._learning = False
        if self._finder is not None:
            self._finder.remove()
            self._finder = None
        return (set(self._index.values()) - self._owned) | self._outside

    def close(self) -> None:
        """Removes every hook."""
        if self._reads is not None:  # what ended the forward pass was no Exception
            self._reads.__exit__(None, None, None)
            self._reads = None
        for handle in [*self._handles, self._finder]:
            if handle is not None:
                handle.remove()

    def _find(self, module: nn.Module, _args: Any) -> None:
        # Inside a compiled region hooks are traced; its outermost module has been seen before.
        if torch.compiler.is_compiling() or module in self._installed:
            return
        if all(p not in self._index for p in module.parameters()):
            return
        self._install(module)
        # The hooks just installed on `module` itself do not take part in this very call.
        self._enter_root(module, ())
        own = self._own(module)
        if own:
            self._gate(own, module, ())

    def _own(self, module: nn.Module) -> list[int]:
        direct = module.parameters(recurse=False)
        return [self._index[p] for p in direct if p in self._index]

    def _install(self, root: nn.Module) -> None:
        self.roots.append(root)
        self._handles.append(root.register_forward_pre_hook(self._enter_root))
        self._handles.append(root.register_forward_hook(self._leave_root, always_call=True))
        for module in root.modules():
            if module in self._installed:
                continue
            self._installed.add(module)
            self._handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            self._handles.append(_on_load(module, self._before_state_dict))
            own = self._own(module)
            if own and hasattr(root, "_orig_mod"):  # torch.compile: gates inside would be traced
                self._owned.update(own)
                self._at_root.update(own)
            elif own:
                self._owned.update(own)
                self._handles.append(module.register_forward_pre_hook(partial(self._gate, own)))

    def _before_state_dict(self, *_args: Any) -> None:
        self._drain()

    def _enter_root(self, module: nn.Module, _args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            # Evaluation may take other paths through the model than those that were learned.
            self._drain()
        elif self._learning:
            if self._reads is None:
                self._reads = _Reads(self._index, self.needed, self._at_root, self._device)
                self._reads.__enter__()
                self._reads.root = module
        elif self._at_root:
            self._arrive(sorted(self._at_root))

    def _leave_root(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._reads is not None and self._reads.root is module:
            self._reads.__exit__(None, None, None)
            self._reads = None

    def _gate(self, own: list[int], _module: nn.Module, _args: Any) -> None:
        # Evaluation needs parameters too, but not as the next step does.
        if self._learning and (self._reads is not None or torch.is_grad_enabled()):
            now = self._device.now()
            for i in own:
                if self.needed[i] is None:
                    self.needed[i] = now
        self._arrive(own)


def _on_load(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Calls `hook` before `module.load_state_dict`; registering was private before torch 2.5."""
    public = getattr(module, "register_load_state_dict_pre_hook", None)
    register = public or module._register_load_state_dict_pre_hook
    handle: RemovableHandle = register(hook)
    return handle


class _Reads(TorchFunctionMode):
    """Notes parameters that a torch function reads before their owner's gate."""

    root: nn.Module

    def __init__(
        self,
        index: dict[nn.Parameter, int],
        needed: list[Mark | None],
        at_root: set[int],
        device: Device,
    ) -> None:
        super().__init__()
        self._index, self._needed, self._at_root = index, needed, at_root
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for arg in (*args, *(kwargs or {}).values()):
            for item in arg if isinstance(arg, list | tuple) else (arg,):
                if isinstance(item, nn.Parameter):
                    i = self._index.get(item)
                    if i is not None and self._needed[i] is None and not _is_metadata(func):
                        self._needed[i] = self._device.now()
                        self._at_root.add(i)
        return func(*args, **(kwargs or {}))


_METADATA_METHODS = frozenset(
    [
        "dim",
        "size",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_floating_point",
        "is_contiguous",
        "data_ptr",
    ]
)
_ALIASES = frozenset(
    ["T", "mT", "H", "mH", "data", "real", "imag"]
)  # attributes that give access to the values


def _is_metadata(func: Any) -> bool:
    """True for what does not look at a tensor's values: `.shape`, `.device`, `.dim()`, ..."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _ALIASES
    return name in _METADATA_METHODS
