"""A model that repeats a recorded job: its layers wait instead of computing.

Compute then takes a known time and no core, as on an accelerator, while gradients are real: they
have the job's sizes, are sent and applied, and what they add up to is checked.
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

import torch
from torch import nn

from usbyte._core import Profile
from usbyte.errors import UsageError
from usbyte.planning.layout import tensor_specs, without_flags

# Sleep is no finer than this; tensors that are nearer to each other share a layer or a beat.
_MERGE_S = 100e-6
# Gradients differ from step to step, so that one of another step is noticed. Their sum grows so
# slowly that 16-bit types hold it for hundreds of steps.
_FACTORS = (4, -1, -2)
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}
_FLOATS = ("float32", "float64", "float16", "bfloat16")


@contextmanager
def giving_way() -> Iterator[None]:
    """This thread does what an accelerator, and a core of its host's own, would do.

    On a core that ranks of `usbyte lab run` share, threads that communicate go before it; elsewhere
    it is like any other. Threads that it starts meanwhile would give way for ever.
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
    """Tried by a thread that ends then, as not everybody may raise a priority again."""

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
    """The time of the current pass, in which only what the pass is to wait for makes it later."""

    def __init__(self) -> None:
        self._start = 0.0

    def set(self, now_s: float) -> None:
        """It is `now_s` seconds since the forward pass began."""
        self._start = time.perf_counter() - now_s

    def excuse(self, seconds: float) -> None:
        """Moves the rest of the pass, since it really had to wait."""
        self._start += seconds

    def wait_until(self, due_s: float) -> None:
        """Sleeps; not at all where it is late, so that overshoot does not add up."""
        left = self._start + due_s - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass
class _Beat:
    """Tensors of one layer whose gradients are ready together.

    Attributes:
        ready_s: When, since the forward pass began.
        tensors: Their positions in the profile.
    """

    ready_s: float
    tensors: list[int]


@dataclass
class _Layer:
    """Tensors that forward needs together, since `need_s`; the beats are in order of time."""

    need_s: float
    beats: list[_Beat] = field(default_factory=list)


class _Wait(torch.autograd.Function):
    """Identity on x whose backward takes until the beat's time and gives its tensors gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, replay: Replay, beat: _Beat, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.replay, ctx.beat, ctx.params = replay, beat, params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        replay: Replay = ctx.replay
        # Before the wait: filling a large gradient takes a while, which is part of the compute.
        grads = replay._enter_backward(ctx.beat, ctx.params)
        replay.clock.wait_until(ctx.beat.ready_s)
        return grad, None, None, *grads


class ReplayLayer(nn.Module):
    """What forward needs at one time. Its parameters' forward is a wait until `until_s`."""

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
        """Runs hooks and forward; what the hooks before forward take is waiting."""
        self._called_s = time.perf_counter()
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Waits and returns x."""
        [replay] = self._replay
        replay.clock.excuse(time.perf_counter() - self._called_s)
        # The last one of the chain is the first one in backward.
        for beat in reversed(self._beats):
            params = [getattr(self, f"tensor{i}") for i in beat.tensors]
            x = _Wait.apply(x, replay, beat, *params)
        replay.clock.wait_until(self.until_s)
        return x


class Replay(nn.Module):
    """A model that needs parameters and gives gradients when a profile says so.

    Each distinct need time is one layer. Waiting at a layer's gate delays what comes after it, as
    in a real model; the time that hooks take in backward does not, since an accelerator would go
    on. Backward visits the layers in the reverse of forward's order: where the profile's ready
    times contradict that, gradients come later than it says, and `profile` tells when.

    Forward takes a tensor of any shape, which wants a gradient, and returns it. Parameters start
    as zeros and have the profile's dtypes; train them by SGD with lr=1, and see `wrong`.

    Args:
        profile: What to repeat. The flags that usbyte sends with gradients are left out.
        value: What this rank's gradients are made of; for example rank + 1.

    Attributes:
        profile: What is repeated. Updates take what they take, so their time is not in it.
        clock: The time of the current pass.
        steps: Backward passes so far.

    Raises:
        UsageError: The profile is empty or has tensors without gradients.
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
        # Nobody records where forward ends; backward takes about twice as long.
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
        self._grads: dict[int, torch.Tensor] = {}
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
        """Waits for what the job does between the update and the next forward pass."""
        time.sleep(self._rest_s)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under the names that they have in the profile."""
        for spec, param in zip(self.profile.tensors, self._params, strict=True):
            yield spec.name, param

    def wrong(self, mean: float) -> list[str]:
        """Names of the tensors that do not hold what `steps` steps of SGD with lr=1 make of them.

        Args:
            mean: Of `value`, over all ranks whose gradients were averaged.
        """
        rounds, rest = divmod(self.steps, len(_FACTORS))
        total = rounds * sum(_FACTORS) + sum(_FACTORS[:rest])
        found = []
        # Not the parameters made above: sharding replaces them.
        now = {name: p for layer in self.layers for name, p in layer.named_parameters()}
        for i, spec in enumerate(self.profile.tensors):
            values = now[f"tensor{i}"].detach()
            values = values.to_local() if hasattr(values, "to_local") else values
            if values.numel() == 0:  # this rank's shard
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
        """Gradients of the beat's tensors in this step, for parameters of these shapes."""
        if beat is self._first_beat:
            self.clock.set(self._forward_end_s)
            self.steps += 1
        factor = _FACTORS[(self.steps - 1) % len(_FACTORS)]
        grads = []
        for i, param in zip(beat.tensors, params, strict=True):
            # The same memory in each step: the system takes many times as long to hand out new
            # pages as to fill them, and an accelerator's allocator does not ask it. What autograd
            # gets shares that memory but is nobody else's, so that it makes no copy. What was kept
            # from the step before would be overwritten, and then added to itself.
            kept = param.is_leaf and param.grad is not None
            if kept or i not in self._grads:
                self._grads[i] = torch.empty_like(param)
            grads.append(self._grads[i].fill_(self._value * factor * _weight(i)).detach())
        return grads


def _weight(i: int) -> int:
    """Tells neighbouring tensors apart."""
    return 1 + i % 4


def _parameter(name: str, numel: int, dtype: str) -> nn.Parameter:
    if dtype not in _FLOATS:
        raise UsageError(
            f"cannot replay '{name}' of dtype {dtype}, which has no gradients; have a profile with "
            + ", ".join(_FLOATS)
        )
    return nn.Parameter(torch.zeros(numel, dtype=getattr(torch, dtype), device="cpu"))


def _layers(profile: Profile) -> list[_Layer]:
    """In the order of forward."""
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
