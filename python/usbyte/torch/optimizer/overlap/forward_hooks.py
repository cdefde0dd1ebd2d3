# SPDX-License-Identifier: Apache-2.0
"""Gates: what makes a layer's forward wait until its own parameters are updated.

The modules that own the parameters are found at the first forward pass (or in `model`, if the user
passes it). Each gets a forward pre-hook, so that all of its parameters are asked for at once; what
is read in any other way asks for itself (`awaited.py`). Compiled and traced modules run without the
hooks of what is inside, so they are asked for as a whole. Scripted ones take no hooks at all:
their updates do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from usbyte.torch.lazy_tensor import make_lazy, unwrap, weak_method
from usbyte.torch.runtime.device import Device, Mark
from usbyte.torch.torch_private import compiled_frames, is_compiled

# Their forward does nothing but to call what they contain.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ForwardPreHooks:
    """Calls `arrive` with the parameters that a module is about to use.

    While learning it also notes when each parameter is first used in an iteration, by its module or
    otherwise, and then calls `arrive` too; but not in the first iteration, in which modules may
    still be compiled.

    Args:
        params: The parameters, whose positions are the indices passed on.
        arrive: Called with the indices that a module's forward, or somebody else, needs now.
        enter: Called before an outermost module's forward, with whether it trains.
        device: Of the parameters.
        check: While learning, called before the forward of an outermost module or of one whose
            parameters are not known yet.

    Attributes:
        needed: By parameter, when it was first used in the current iteration; None: not yet.
        read_early: By parameter, in how many learning iterations it was read before the forward
            pass began.
        iterations: That were watched.
        roots: Where parameters were found.
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
        self._hooks: list[tuple[nn.Module, _Hook]] = []
        self._handles: list[RemovableHandle] = []  # of those, while they ask
        self._installed: set[nn.Module] = set()
        self.root_modules: list[nn.Module] = []
        self._unobserved_params: set[int] = set()  # got gradients, but nobody was seen to use them
        self._compiled_params: set[int] = set()  # read without a hook, by compiled or scripted code
        self._learning, self._watching = True, False
        self._begun = False  # the forward pass of this iteration
        self.needed: list[Mark | None] = [None] * len(params)
        self.read_early = [0] * len(params)
        self.iterations = 0
        self._fetch = weak_method(self._read)
        self._finder: RemovableHandle | None = None

    def install(self, model: nn.Module | None) -> None:
        """Begins to ask for parameters.

        Args:
            model: Where the parameters live; found at the first forward pass if None.
        """
        if model is None:
            self._finder = _Finder(self).handle
        else:
            self._install(model)

    def begin_iteration(self, used: Sequence[bool]) -> None:
        """Forgets the times of the iteration before; called when a learning step is done.

        Args:
            used: Which parameters got a gradient in it.
        """
        unseen = {i for i, n in enumerate(self.needed) if n is None and used[i]}
        if self._watching:
            self._unobserved_params |= unseen
            self.iterations += 1
        elif compiled_frames():
            self._compiled_params |= unseen
        self._watching, self._begun = True, False
        self.needed = [None] * len(self.needed)
        self._watch()

    def begin_learning(self) -> None:
        """Watches again when parameters are used."""
        self._learning, self._watching, self._begun = True, False, False
        self.needed = [None] * len(self.needed)
        self.read_early = [0] * len(self.needed)
        self.iterations = 0

    def finish_learning(self) -> set[int]:
        """Ends the watch.

        Returns:
            The indices whose use was not seen, so that their updates cannot wait for it.
        """
        self.stop_recording()
        self._learning = self._watching = False
        if self._finder is not None:
            self._finder.remove()
            self._finder = None
        return self._unobserved_params | self._compiled_params

    def set_enabled(self, wanted: bool) -> None:
        """Whether modules ask for their parameters from now on; else they run without hooks."""
        if wanted and not self._handles:
            self._handles = [m.register_forward_pre_hook(hook) for m, hook in self._hooks]
        elif not wanted:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def stop_recording(self) -> None:
        """Notes nothing more in this iteration: the optimizer is about to use all parameters."""
        for param in self._params if self._learning else ():
            unwrap(param)

    def close(self) -> None:
        """Removes every hook."""
        self.stop_recording()
        self.set_enabled(False)
        if self._finder is not None:
            self._finder.remove()

    def discover(self, module: nn.Module, args: Any) -> None:
        """Installs gates below a module that is about to run, if it has parameters of these."""
        if module in self._installed:
            return
        self._check(module)
        if all(p not in self._index for p in module.parameters()):
            return
        for hook in self._install(module):  # does not take part in this very call
            hook(module, args)

    def _install(self, root: nn.Module) -> list[Callable[..., None]]:
        """Puts gates below a root; returns the hooks of the root itself."""
        self.root_modules.append(root)
        self._compiled_params.update(self._index[p] for p in _scripted(root) if p in self._index)
        here: list[Callable[..., None]] = []
        for module, params in _gated(root):
            if module in self._installed:
                continue
            self._installed.add(module)
            own = [self._index[p] for p in params if p in self._index]
            below = [self._index[p] for p in module.parameters() if p in self._index]
            if own or module is root or (below and type(module) not in _CONTAINERS):
                hook = _Hook(partial(self._pre_forward, own, below, module is root))
                self._hooks.append((module, hook))
                self._handles.append(module.register_forward_pre_hook(hook))
                here += [hook] * (module is root)
        self._installed.update(root.modules())
        return here

    def _pre_forward(
        self, own: list[int], below: list[int], is_root: bool, module: nn.Module
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if is_root:
            self._pass_root(module)
        # In evaluation, attention and transformer layers look whether all parameters below them are
        # plain, and compute in another order if one is held.
        wanted = own if module.training and torch.is_grad_enabled() else below
        if not wanted:
            return
        if self._learning:
            if torch.is_grad_enabled():  # evaluation needs them too, but not as the next step does
                self._use(wanted)
            for i in wanted:
                unwrap(self._params[i])
        self._arrive(wanted)

    def _pass_root(self, module: nn.Module) -> None:
        if self._learning:
            self._check(module)
        trains = module.training and torch.is_grad_enabled()
        self._enter(trains)
        if not trains:
            # Torch looks for overridden tensors before it takes its fast paths.
            self.stop_recording()
        elif self._learning and not self._begun:
            self._begun = True
            self._watch()

    def _use(self, indices: Sequence[int]) -> None:
        if self._device.capturing():  # replays are not seen
            self._compiled_params.update(indices)
            return
        now = self._device.now()
        for i in indices:
            if self.needed[i] is None:
                self.needed[i] = now

    def _watch(self) -> None:
        """Notes who is the first to use a parameter that has not been used yet."""
        if self._watching:
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
    """Watches all modules, and keeps nothing alive."""

    def __init__(self, forward_hooks: ForwardPreHooks) -> None:
        self._forward_hooks = weakref.ref(forward_hooks)
        self.handle = register_module_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Inside a compiled region hooks are traced; its outermost module has been seen before.
        if torch.compiler.is_compiling():
            return
        forward_hooks = self._forward_hooks()
        if forward_hooks is not None:
            forward_hooks.discover(module, args)
        else:
            self.handle.remove()


class _Unscripted:
    """A hook that is no gate in pickles, and that torch.jit.script asks for its name to compile."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile the hooks by which modules wait for their parameters: "
            "script a model made anew that has loaded this one's state_dict(), or use "
            "torch.jit.trace"
        )

    def __reduce__(self) -> Any:
        return _no_gate, ()


class _Hook(_Unscripted):
    """A hook that copies of its module do without."""

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, _args: Any) -> None:
        self._call(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_gate


class _NoGate(_Unscripted):
    """What stands for a gate in copies and pickles of a model."""

    def __call__(self, *_args: Any) -> None:
        pass


no_gate = _NoGate()


def _no_gate() -> Callable[..., None]:
    return no_gate


def _gated(root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules whose hooks run, with the parameters that each is to be asked for."""
    if is_compiled(root) or isinstance(root, torch.jit.RecursiveScriptModule):
        return  # the hooks of the root itself are traced, or refused
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
        yield from _gated(child)


def _scripted(root: nn.Module) -> Iterator[nn.Parameter]:
    """What scripted code reads, whether or not Python reads it too."""
    for module in root.modules():
        if isinstance(module, torch.jit.RecursiveScriptModule):
            yield from module.parameters(recurse=False)
