# SPDX-License-Identifier: Apache-2.0
"""A `nn.Module` that repeats a recorded job: its layers sleep instead of computing.

So compute takes a known time and uses no core, as on an accelerator. The gradients are real: they
have the sizes of the job, are sent and applied, and their sums are checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn

from usbyte._core import Profile
from usbyte.errors import UsageError
from usbyte.planning.layout import tensor_specs, without_flags

# The resolution of sleep. Tensors whose times differ by less share a layer or a beat.
_MERGE_S = 100e-6
# Gradients differ from step to step, so that a gradient of a wrong step is detected. Their sum
# grows slowly, so that 16-bit types represent it for hundreds of steps.
_FACTORS = (4, -1, -2)
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}
_FLOATS = ("float32", "float64", "float16", "bfloat16")


@contextmanager
def giving_way() -> Iterator[None]:
    """Lowers the priority of this thread, which stands for an accelerator, inside the `with`.

    On a core that ranks of `usbyte lab run` share, communicating threads then run first. Elsewhere
    this does nothing. Start no threads inside: they would have the low priority for good.
    """
    shared = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH
    if not (shared and _may_come_back()):
        yield
        return
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@cache
def _may_come_back() -> bool:
    """Returns whether this process may raise a lowered priority again.

    A short-lived thread tries it, so that a failure has no effect on this thread.
    """

    def there_and_back() -> bool:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:
            return False
        return True

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(there_and_back).result()


class _Clock:
    """The clock of the current pass; only real waits for communication move it back."""

    def __init__(self) -> None:
        self._start = 0.0

    def set(self, now_s: float) -> None:
        """Sets the time since the beginning of the forward pass to `now_s`, in seconds."""
        self._start = time.perf_counter() - now_s

    def excuse(self, seconds: float) -> None:
        """Delays the rest of the pass by the seconds of a real wait."""
        self._start += seconds

    def wait_until(self, due_s: float) -> None:
        """Sleeps until `due_s`; returns at once if it is late, so that delays do not add up."""
        left = self._start + due_s - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass
class _Beat:
    """Tensors of one layer whose gradients are ready at the same time.

    Attributes:
        ready_s: Seconds since the beginning of the forward pass.
        tensors: Positions of the tensors in the profile.
    """

    ready_s: float
    tensors: list[int]


@dataclass
class _Layer:
    """Tensors that the forward pass needs at the same time, `need_s`; beats are in time order."""

    need_s: float
    beats: list[_Beat] = field(default_factory=list)


class _Wait(torch.autograd.Function):
    """Identity on x; its backward sleeps until the beat is ready and returns its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, replay: Replay, beat: _Beat, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.replay, ctx.beat, ctx.params = replay, beat, params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        replay: Replay = ctx.replay
        # Before the sleep, because the time to fill a large gradient is part of the compute.
        grads = replay._enter_backward(ctx.beat, ctx.params)
        replay.clock.wait_until(ctx.beat.ready_s)
        return grad, None, None, *grads


class ReplayLayer(nn.Module):
    """The parameters that the forward pass needs at one time; forward sleeps until `until_s`."""

    def __init__(
        self, replay: Replay, beats: Sequence[_Beat], params: dict[int, nn.Parameter]
    ) -> None:
        super().__init__()
        for i, param in params.items():
            self.register_parameter(f"tensor{i}", param)
        # A tuple hides the replay from nn.Module, which would take it for a child.
        self._replay = (replay,)
        self._beats = beats
        self._called_s = 0.0
        self.until_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs hooks and forward; the time of the forward pre-hooks counts as a real wait."""
        self._called_s = time.perf_counter()
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps, and returns x."""
        [replay] = self._replay
        replay.clock.excuse(time.perf_counter() - self._called_s)
        # Backward runs the chain of autograd functions in reverse.
        for beat in reversed(self._beats):
            params = [getattr(self, f"tensor{i}") for i in beat.tensors]
            x = _Wait.apply(x, replay, beat, *params)
        replay.clock.wait_until(self.until_s)
        return x


class Replay(nn.Module):
    """A module that needs parameters and gives gradients at the times of a profile.

    Each distinct need time is one layer. A wait in a layer's forward pre-hooks delays the rest of
    the pass, as in a real module. The time of hooks in backward delays nothing, since an
    accelerator would go on meanwhile. Backward runs the layers in the reverse order of forward. If
    the profile's ready times contradict that order, gradients come later than the profile says; the
    attribute `profile` has the corrected times.

    Forward takes a tensor of any shape that requires a gradient, and returns it. Parameters are
    1-d, start as zeros and have the dtypes of the profile. Train them with SGD and lr=1, then check
    them with `wrong`.

    Args:
        profile: The job to repeat. The control tensor and sparse gradients are left out.
        value: Factor of this rank's gradients, for example rank + 1.

    Attributes:
        profile: The job as it is repeated. It includes no update time, as updates are real.
        clock: The clock of the current pass.
        steps: Number of backward passes so far.

    Raises:
        UsageError: The profile has no tensors, or tensors of a dtype without gradients.
    """

    def __init__(self, profile: Profile, value: float = 1.0) -> None:
        super().__init__()
        profile = without_flags(profile)
        if not profile.tensors:
            raise UsageError("cannot replay a profile without tensors")
        self._params = [_parameter(t.name, t.numel, t.dtype) for t in profile.tensors]
        layers = _layers(profile)
        last_need_s = layers[-1].need_s
        first_ready_s = max(layers[-1].beats[0].ready_s, last_need_s)
        # Profiles do not have the end of forward. Backward takes about twice as long as forward.
        self._forward_end_s = last_need_s + (first_ready_s - last_need_s) / 3
        _delay_contradictions(layers, self._forward_end_s)
        self.layers = nn.ModuleList()
        for layer in layers:
            params = {i: self._params[i] for beat in layer.beats for i in beat.tensors}
            self.layers.append(ReplayLayer(self, layer.beats, params))
        ends = [layer.need_s for layer in layers[1:]] + [self._forward_end_s]
        for module, end_s in zip(self._modules_in_order(), ends, strict=True):
            module.until_s = end_s
        self._first_need_s = layers[0].need_s
        self._first_beat = layers[-1].beats[0]
        self._value = value
        self._memory: dict[int, numpy.ndarray] = {}
        self._rest_s = max(0.0, profile.iteration_s - profile.update_s - profile.backward_end_s)
        self.profile = _achieved(profile, layers, self._rest_s)
        self.clock = _Clock()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Passes through all layers."""
        self.clock.set(0.0)
        self.clock.wait_until(self._first_need_s)
        for layer in self.layers:
            x = layer(x)
        return x

    def rest(self) -> None:
        """Sleeps for the time of the job between the update and the next forward pass."""
        time.sleep(self._rest_s)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters with their names in the profile."""
        for spec, param in zip(self.profile.tensors, self._params, strict=True):
            yield spec.name, param

    def wrong(self, mean: float) -> list[str]:
        """Returns the names of the tensors whose values are wrong after `steps` steps of SGD.

        Args:
            mean: Mean of `value` over all ranks whose gradients were averaged.
        """
        rounds, rest = divmod(self.steps, len(_FACTORS))
        total = rounds * sum(_FACTORS) + sum(_FACTORS[:rest])
        found = []
        # FSDP replaces the parameters that were made above, so they are looked up again.
        now = {name: p for layer in self.layers for name, p in layer.named_parameters()}
        for i, spec in enumerate(self.profile.tensors):
            values = now[f"tensor{i}"].detach()
            values = values.to_local() if hasattr(values, "to_local") else values
            if values.numel() == 0:  # This rank's shard is empty.
                continue
            expected = -mean * total * _weight(i)
            low, high = (bound.item() for bound in values.aminmax())
            allowed = _TOLERANCE.get(values.dtype, 1e-4) * max(1.0, abs(expected))
            if not (abs(low - expected) <= allowed and abs(high - expected) <= allowed):
                found.append(spec.name)
        return found

    def _modules_in_order(self) -> Iterator[ReplayLayer]:
        for module in self.layers:
            assert isinstance(module, ReplayLayer)
            yield module

    def _enter_backward(self, beat: _Beat, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the gradients of the beat's tensors in this step, with the parameters' shapes."""
        if beat is self._first_beat:
            self.clock.set(self._forward_end_s)
            self.steps += 1
        factor = _FACTORS[(self.steps - 1) % len(_FACTORS)]
        grads = []
        for i, param in zip(beat.tensors, params, strict=True):
            # Each step uses the same memory: new pages from the system take many times as long as
            # filling them, and the caching allocator of an accelerator needs none. Autograd gets a
            # new tensor with a storage of its own on that memory, as a model gives it. If the
            # parameter still has a gradient, that memory is in use: autograd would add the new
            # gradient to itself.
            accumulates = param.is_leaf and param.grad is not None
            if accumulates or i not in self._memory:
                size = param.numel() * param.element_size()
                self._memory[i] = numpy.empty(size, dtype=numpy.uint8)
            memory = self._memory[i]
            torch.frombuffer(memory, dtype=param.dtype).fill_(self._value * factor * _weight(i))
            grads.append(torch.frombuffer(memory, dtype=param.dtype))
        return grads


def _weight(i: int) -> int:
    """Returns a factor that differs between neighbouring tensors, so that mix-ups show."""
    return 1 + i % 4


def _parameter(name: str, numel: int, dtype: str) -> nn.Parameter:
    if dtype not in _FLOATS:
        raise UsageError(
            f"cannot replay '{name}' of dtype {dtype}, which has no gradients; have a profile with "
            + ", ".join(_FLOATS)
        )
    return nn.Parameter(torch.zeros(numel, dtype=getattr(torch, dtype), device="cpu"))


def _layers(profile: Profile) -> list[_Layer]:
    """Groups the tensors of a profile into layers, in the order of forward."""
    layers: list[_Layer] = []
    groups: list[list[int]] = []
    for i in sorted(range(len(profile.tensors)), key=lambda i: profile.need_s[i]):
        if not layers or profile.need_s[i] > layers[-1].need_s + _MERGE_S:
            layers.append(_Layer(profile.need_s[i]))
            groups.append([])
        groups[-1].append(i)
    for layer, group in zip(layers, groups, strict=True):
        for i in sorted(group, key=lambda i: profile.ready_s[i]):
            ready_s = profile.ready_s[i]
            if not layer.beats or ready_s > layer.beats[-1].ready_s + _MERGE_S:
                layer.beats.append(_Beat(ready_s, []))
            layer.beats[-1].tensors.append(i)
    return layers


def _delay_contradictions(layers: Sequence[_Layer], forward_end_s: float) -> None:
    now = forward_end_s
    for layer in reversed(layers):
        for beat in layer.beats:
            now = beat.ready_s = max(now, beat.ready_s)


def _achieved(profile: Profile, layers: Sequence[_Layer], rest_s: float) -> Profile:
    need_s, ready_s = list(profile.need_s), list(profile.ready_s)
    for layer in layers:
        for beat in layer.beats:
            for i in beat.tensors:
                need_s[i], ready_s[i] = layer.need_s, beat.ready_s
    tensors = tensor_specs((t.name, t.numel, t.dtype) for t in profile.tensors)
    return Profile(tensors, need_s, ready_s, step_s=max(ready_s) + rest_s, model=profile.model)
