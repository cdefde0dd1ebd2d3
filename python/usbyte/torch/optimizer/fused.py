# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam and AdamW in one kernel launch for all parameters of an update, on CUDA devices.

Results equal those of torch.optim up to rounding of the last bit. The state has the same form, so
that a checkpoint can move between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.layout import dtype_name, is_dense, laid_out_alike, laid_out_like
from usbyte.torch.optimizer.compat.known_optimizers import has_step_hooks, step_is_replaced
from usbyte.torch.runtime.device import device_of
from usbyte.torch.torch_private import DisableTorchFunction

StepClosure = Callable[[], float] | None

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_REFUSED = ("amsgrad", "differentiable", "capturable", "fused")


class FusedUpdate:
    """Runs the steps of an optimizer, which keeps its own groups, state and hyper-parameters.

    Args:
        optimizer: A torch.optim.SGD, Adam or AdamW; no subclass.
        names: Names of its parameters, by parameter index.
        params: Its parameters, by parameter index; on one CUDA device.

    Raises:
        UsageError: An option of the optimizer, or a parameter, is not supported.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
    ) -> None:
        kind = type(optimizer)
        device = device_of(names, params)
        if kind not in _KINDS:
            known = ", ".join(k.__name__ for k in _KINDS)
            raise UsageError(f"fused_update=True supports torch.optim.{known}, not {kind.__name__}")
        _check_step(optimizer)
        if device.core is None:
            raise UsageError("fused_update=True needs parameters on CUDA devices: remove it")
        self._names = dict(zip(params, names, strict=True))
        self._optimizer, self._device, self._core = optimizer, device, device.core
        self._update = self._update_sgd if kind is torch.optim.SGD else self._update_adam
        self._decoupled = kind is torch.optim.AdamW
        for group in optimizer.param_groups:
            self._check(group)

    @torch.no_grad()
    def step(self, closure: StepClosure = None) -> float | None:
        """Updates every parameter of the optimizer's groups that has a gradient.

        Args:
            closure: Called first, with gradients enabled; None (default) for none.

        Returns:
            The result of `closure`; None without one.

        Raises:
            UsageError: Step hooks or an option of the optimizer are not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_options()
        for group in self._optimizer.param_groups:
            by_dtype: dict[str, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_dtype[dtype_name("of the optimizer", param)].append(param)
            for dtype, params in by_dtype.items():
                self._update(group, dtype, params)
        return loss

    def check(self) -> None:
        """Raises UsageError, before any update, if `step` would differ from the optimizer's."""
        _check_step(self._optimizer)  # not in `step`: a deferred one may predate a replaced step()
        self._check_options()

    def _check_options(self) -> None:
        if has_step_hooks(self._optimizer):
            raise UsageError("fused_update=True does not call step hooks: leave one of them out")
        with DisableTorchFunction():  # lazy parameters stay lazy
            for group in self._optimizer.param_groups:
                self._check(group)

    def _check(self, group: dict[str, Any]) -> None:
        for option in _REFUSED:
            if group.get(option):
                raise UsageError(f"fused_update=True does not support {option}=True: remove one")
        if isinstance(group["lr"], torch.Tensor) and group["lr"].device.type != "cpu":
            raise UsageError("fused_update=True needs a learning rate on the host: lr=float(...)")
        for param in group["params"]:
            name = self._names.get(param)
            if name is not None and not (param.is_contiguous() or is_dense(param)):
                raise UsageError(
                    f"fused_update=True needs parameters without gaps, and '{name}' has strides "
                    f"{param.stride()}"
                )

    def _update_sgd(self, group: dict[str, Any], dtype: str, params: list[nn.Parameter]) -> None:
        momentum = float(group["momentum"])
        rows = []
        for param in params:
            state = self._optimizer.state[param]
            first = momentum != 0 and state.get("momentum_buffer") is None
            if first:
                state["momentum_buffer"] = torch.empty_like(param)
            address = _state(state, "momentum_buffer", param) if momentum else 0
            rows.append((param.data_ptr(), _grad(param), address, param.numel(), first))
        _core.update_sgd(
            self._core,
            rows,
            dtype,
            _core.SgdOptions(
                lr=float(group["lr"]),
                momentum=momentum,
                dampening=float(group["dampening"]),
                weight_decay=float(group["weight_decay"]),
                nesterov=bool(group["nesterov"]),
                maximize=bool(group["maximize"]),
            ),
            self._device.stream(),
        )
        _written(params)

    def _update_adam(self, group: dict[str, Any], dtype: str, params: list[nn.Parameter]) -> None:
        beta1, beta2 = map(float, group["betas"])
        rows = []
        for param in params:
            state = self._optimizer.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            if state["step"].device.type != "cpu":  # as loaded from a checkpoint
                state["step"] = state["step"].cpu()
            state["step"] += 1
            rows.append(
                (
                    param.data_ptr(),
                    _grad(param),
                    _state(state, "exp_avg", param),
                    _state(state, "exp_avg_sq", param),
                    param.numel(),
                    int(state["step"]),
                )
            )
        _core.update_adam(
            self._core,
            rows,
            dtype,
            _core.AdamOptions(
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                decoupled=self._decoupled or bool(group.get("decoupled_weight_decay")),
                maximize=bool(group["maximize"]),
            ),
            self._device.stream(),
        )
        _written(params)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    if step_is_replaced(optimizer):
        raise UsageError(
            f"fused_update=True runs the step of torch.optim.{type(optimizer).__name__}, and "
            "step() of this optimizer was replaced by another function: remove one of the two"
        )


def _grad(param: nn.Parameter) -> int:
    """Returns the address of the gradient, after a copy if its layout is not the parameter's."""
    grad = param.grad
    assert grad is not None
    if not laid_out_alike(grad, param):
        param.grad = grad = torch.empty_like(param).copy_(grad)
    return grad.data_ptr()


def _state(state: dict[str, Any], key: str, param: nn.Parameter) -> int:
    """Returns the address of a state tensor with one value for each element of the parameter.

    The tensor gets the dtype and the order of elements of the parameter; those of a checkpoint may
    differ.
    """
    state[key] = value = laid_out_like(state[key].to(param.dtype), param)
    return value.data_ptr()


def _written(params: Sequence[nn.Parameter]) -> None:
    """Increments the version counters of parameters, because autograd cannot see our kernels."""
    for param in params:
        torch.autograd.graph.increment_version(param)
