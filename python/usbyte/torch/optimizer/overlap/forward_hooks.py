# SPDX-License-Identifier: Apache-2.0
"""Forward pre-hooks that make a module's forward wait until its parameters are updated.

Modules that own parameters are found in `model`, or at the first forward pass if the user passes
none. The forward pre-hook of a module applies the pending updates of all parameters that the module
owns. Any other read of a parameter materializes the lazy tensor (`lazy_tensor.py`).

Compiled and traced modules run without the hooks of their submodules, so one hook waits for all of
their parameters. Scripted modules take no hooks at all, so their updates are never deferred.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from usbyte.torch.lazy_tensor import make_lazy, unwrap, weak_method
from usbyte.torch.runtime.device import Device, Mark
from usbyte.torch.torch_private import compiled_frames, is_compiled

# Their forward only calls their children, so they need no hook of their own.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ForwardPreHooks:
    """Calls `arrive` with the parameters that a module is about to use.

    In learning steps it also records when each parameter is first used in an iteration, by its
    module or by another read, and calls `arrive` then. The first iteration records only uses by
    modules, because modules may still be compiled in it.

    Args:
        params: Parameters of the optimizer. Indices of parameters are positions in it.
        arrive: Called with the indices of the parameters that are needed now.
        enter: Called before the forward of an outermost module, with whether it trains.
        device: Device of the parameters.
        check: In learning steps, called before the forward of an outermost module and of a module
            that has no hooks yet.

    Attributes:
        needed: By parameter, when it was first used in the current iteration; None if not yet.
        read_early: By parameter, the number of learning iterations in which it was read before the
            forward pass began.
        iterations: Number of learning iterations whose uses were recorded.
        root_modules: Modules below which parameters were found.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        arrive: Callable[[Sequence[int]], None],
        enter: Callable[[bool], None],
        device: Device,
        check: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self._params, self._check = params, check
        self._index = {p: i for i, p in enumerate(params)}
        self._arrive, self._enter, self._device = arrive, enter, device
        self._hooks: list[tuple[nn.Module, _PreForward]] = []
        self._handles: list[RemovableHandle] = []  # empty while the hooks are not installed
        self._installed: set[nn.Module] = set()
        self.root_modules: list[nn.Module] = []
        self._unobserved_params: set[int] = set()  # got a gradient, without an observed use
        self._compiled_params: set[int] = set()  # read by compiled or scripted code, without a hook
        self._learning, self._observing = True, False
        self._begun = False  # whether the forward pass of this iteration has begun
        self.needed: list[Mark | None] = [None] * len(params)
        self.read_early = [0] * len(params)
        self.iterations = 0
        self._fetch = weak_method(self._read)
        self._finder: RemovableHandle | None = None

    def install(self, model: nn.Module | None) -> None:
        """Installs the hooks.

        Args:
            model: Module that owns the parameters. If None, modules are found in the first forward
                pass.
        """
        if model is None:
            self._finder = _Finder(self).handle
        else:
            self._install(model)

    def begin_iteration(self, used: Sequence[bool]) -> None:
        """Ends a learning iteration and clears its times.

        Args:
            used: By parameter, whether it got a gradient in that iteration.
        """
        unseen = {i for i, n in enumerate(self.needed) if n is None and used[i]}
        if self._observing:
            self._unobserved_params |= unseen
            self.iterations += 1
        elif compiled_frames():
            self._compiled_params |= unseen
        self._observing, self._begun = True, False
        self.needed = [None] * len(self.needed)
        self._observe_reads()

    def begin_learning(self) -> None:
        """Starts recording the uses of parameters again, as after construction."""
        self._learning, self._observing, self._begun = True, False, False
        self.needed = [None] * len(self.needed)
        self.read_early = [0] * len(self.needed)
        self.iterations = 0

    def finish_learning(self) -> set[int]:
        """Stops recording.

        Returns:
            Indices of the parameters whose use was not observed. Their updates cannot be deferred.
        """
        self.stop_recording()
        self._learning = self._observing = False
        if self._finder is not None:
            self._finder.remove()
            self._finder = None
        return self._unobserved_params | self._compiled_params

    def set_enabled(self, wanted: bool) -> None:
        """Installs (True) or removes (False) the forward pre-hooks."""
        if wanted and not self._handles:
            self._handles = [m.register_forward_pre_hook(hook) for m, hook in self._hooks]
        elif not wanted:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def stop_recording(self) -> None:
        """Stops recording in this iteration, because the optimizer is about to read parameters."""
        for param in self._params if self._learning else ():
            unwrap(param)

    def close(self) -> None:
        """Removes all hooks."""
        self.stop_recording()
        self.set_enabled(False)
        if self._finder is not None:
            self._finder.remove()

    def discover(self, module: nn.Module, args: Any) -> None:
        """Installs hooks at and below a module that is about to run, if it has parameters."""
        if module in self._installed:
            return
        self._check(module)
        if all(p not in self._index for p in module.parameters()):
            return
        for hook in self._install(module):  # torch does not run a new hook in the current call
            hook(module, args)

    def _install(self, root: nn.Module) -> list[Callable[..., None]]:
        """Installs hooks on `root` and its submodules; returns the hooks of `root` itself."""
        self.root_modules.append(root)
        self._compiled_params.update(self._index[p] for p in _scripted(root) if p in self._index)
        here: list[Callable[..., None]] = []
        for module, params in _hooked_modules(root):
            if module in self._installed:
                continue
            self._installed.add(module)
            own = [self._index[p] for p in params if p in self._index]
            below = [self._index[p] for p in module.parameters() if p in self._index]
            if own or module is root or (below and type(module) not in _CONTAINERS):
                hook = _PreForward(self, own, below, module is root)
                self._hooks.append((module, hook))
                self._handles.append(module.register_forward_pre_hook(hook))
                here += [hook] * (module is root)
        self._installed.update(root.modules())
        return here

    def _record_use(self, wanted: Sequence[int]) -> None:
        """In learning steps: records that a module is about to use the parameters `wanted`."""
        if torch.is_grad_enabled():  # evaluation uses them in other ways than training
            self._use(wanted)
        for i in wanted:
            unwrap(self._params[i])

    def _pass_root(self, module: nn.Module) -> None:
        if self._learning:
            self._check(module)
        trains = module.training and torch.is_grad_enabled()
        self._enter(trains)
        if not trains:
            # Torch takes its fast paths only if no tensor overrides __torch_function__.
            self.stop_recording()
        elif self._learning and not self._begun:
            self._begun = True
            self._observe_reads()

    def _use(self, indices: Sequence[int]) -> None:
        if self._device.capturing():  # no hook runs in a replay of the CUDA graph
            self._compiled_params.update(indices)
            return
        now = self._device.now()
        for i in indices:
            if self.needed[i] is None:
                self.needed[i] = now

    def _observe_reads(self) -> None:
        """Makes the parameters that are unused so far lazy, to record their first use."""
        if self._observing:
            for i, param in enumerate(self._params):
                if self.needed[i] is None and i not in self._compiled_params:
                    make_lazy(param, self._fetch)

    def _read(self, param: torch.Tensor) -> None:
        unwrap(param)
        i = self._index[param]  # type: ignore[index]
        if not self._begun:
            self.read_early[i] += 1
        self._use([i])
        self._arrive([i])


class _Finder:
    """Global forward pre-hook that finds modules. It keeps no `ForwardPreHooks` alive."""

    def __init__(self, forward_hooks: ForwardPreHooks) -> None:
        self._forward_hooks = weakref.ref(forward_hooks)
        self.handle = register_module_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Inside a compiled region hooks are traced. Its outermost module has been found before.
        if torch.compiler.is_compiling():
            return
        forward_hooks = self._forward_hooks()
        if forward_hooks is not None:
            forward_hooks.discover(module, args)
        else:
            self.handle.remove()


class ModuleHook:
    """Base of hooks: a no-op in copies and pickles, refused by torch.jit.script with a remedy."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile the hooks by which modules wait for their parameters, "
            "or by which a timeline records them: script a new model that has loaded this one's "
            "state_dict(), or use torch.jit.trace"
        )

    def __reduce__(self) -> Any:
        return _make_no_op_hook, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_op_hook


class _PreForward(ModuleHook):
    """Forward pre-hook of one module.

    It is one function, because it runs for each module in each forward pass.

    Args:
        hooks: The hooks that it is one of.
        own: Indices of the parameters that the module owns.
        below: Indices of the parameters of the module and of all modules below it.
        is_root: Whether the module is an outermost one.
    """

    def __init__(
        self, hooks: ForwardPreHooks, own: list[int], below: list[int], is_root: bool
    ) -> None:
        self._hooks, self._own, self._below, self._is_root = hooks, own, below, is_root

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        hooks = self._hooks
        if self._is_root:
            hooks._pass_root(module)
        # In evaluation, attention and transformer layers check that all parameters below them are
        # plain tensors. If one is lazy, they compute in another order.
        wanted = self._own if module.training and torch.is_grad_enabled() else self._below
        if not wanted:
            return
        if hooks._learning:
            hooks._record_use(wanted)
        hooks._arrive(wanted)


class _NoOpHook(ModuleHook):
    """No-op that replaces a hook in copies and pickles of a model."""

    def __call__(self, *_args: Any) -> None:
        pass


no_op_hook = _NoOpHook()


def _make_no_op_hook() -> Callable[..., None]:
    return no_op_hook


def takes_hooks(module: nn.Module) -> bool:
    """Returns False for compiled modules, which trace their own hooks, and for scripted ones."""
    return not (is_compiled(module) or isinstance(module, torch.jit.RecursiveScriptModule))


def _hooked_modules(root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields the modules whose hooks run, with the parameters that each hook waits for."""
    if not takes_hooks(root):
        return
    own = list(root.parameters(recurse=False))
    if hasattr(root, "_orig_mod") or isinstance(root, torch.jit.ScriptModule):
        yield root, list(root.parameters())
        return
    inside = []
    for child in root.children():
        if is_compiled(child):
            own += child.parameters()
        else:
            inside.append(child)
    yield root, own
    for child in inside:
        yield from _hooked_modules(child)


def _scripted(root: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of scripted modules, whether or not Python reads them too."""
    for module in root.modules():
        if isinstance(module, torch.jit.RecursiveScriptModule):
            yield from module.parameters(recurse=False)
