# SPDX-License-Identifier: Apache-2.0
"""Sends the gradients of a backward pass, each as soon as autograd has accumulated it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.compression.state import CodecState
from usbyte.torch.optimizer.compat.shared_memory import shares_memory
from usbyte.torch.optimizer.gradients.grad_writer import GradWriter
from usbyte.torch.optimizer.gradients.in_flight_grads import InFlightGrads
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.sparse import Rows, empty_like
from usbyte.torch.reduce_op import Sum
from usbyte.torch.runtime.device import Device
from usbyte.torch.runtime.tensor_checks import check_dtype, check_sendable
from usbyte.torch.torch_private import DisableTorchFunction, not_compiled


def _one_reference() -> int:
    """Returns `sys.getrefcount` for a tensor that only one local variable refers to."""
    tensor = torch.empty(0, dtype=torch.float32, device="cpu")
    return sys.getrefcount(tensor)


_ONE_REFERENCE = _one_reference()


def _closed(_: int) -> bool:
    return False


class GradientChannel(Protocol):
    """The parts of the plan executor that take gradients.

    Attributes:
        device: Device of the parameters.
        engine: Engine that runs the plan in force.
        grad_writer: Writes gradients to the flat buffer.
        rows: By parameter, the rows of its sparse gradient in flight.
        tensor_of_param: By parameter, the index of its tensor in the plan.
    """

    device: Device
    engine: _core.Engine
    grad_writer: GradWriter
    rows: dict[int, Rows]
    tensor_of_param: list[int]


class GradientSender:
    """Checks each gradient of a backward pass and passes it to the plan executor.

    It also knows which gradients were sent since the script last reset them.

    Args:
        settings: Arguments of the DistributedOptimizer.
        param_table: Parameters of the optimizer. Indices of parameters are positions in it.
        executor: Takes the gradients.
        in_flight: Tracks the gradients that are sent.
        codec_state: Codec state.

    Attributes:
        is_sending: Whether a backward pass that sends its gradients runs.
        missed: Parameters with a deferred update that the current forward pass did not wait for.
            A gradient of one of them is an error.
        begin_pass: Called with the index of a parameter whose gradient is ready although
            `is_sending` is False, or that is in `missed`. It begins the backward pass and returns
            whether the gradient is to be sent.
        shows_parts: Whether gradients of the last backward pass are in memory that the script uses
            in other ways, such as its own flat buffer.
    """

    def __init__(
        self,
        settings: Settings,
        param_table: ParamTable,
        executor: GradientChannel,
        in_flight: InFlightGrads,
        codec_state: CodecState,
    ) -> None:
        self._names, self._params = param_table.names, param_table.params
        self._executor, self._in_flight, self._codec_state = executor, in_flight, codec_state
        self._densifies, self._sums = settings.sparse_as_dense, settings.op == Sum
        self.is_sending = self.shows_parts = False
        self.missed: set[int] = set()
        self.begin_pass: Callable[[int], bool] = _closed
        # By parameter, a gradient, or zeros in its place, was sent since the last reset.
        self._holds_result = [False] * len(self._params)
        self._at_reset = self._gradients_now()  # their identities and versions at the last reset
        self._this = weakref.ref(self)

    def register_hooks(self) -> list[RemovableHandle]:
        """Registers a hook on each parameter, which sends its gradient. Returns their handles."""
        # Weak: Python's garbage collector cannot see references from torch's hooks.
        return [
            param.register_post_accumulate_grad_hook(partial(_send, self._this, i))
            for i, param in enumerate(self._params)
        ]

    def close(self) -> None:
        """Drops the reference to the owner of `begin_pass`."""
        self.begin_pass = _closed

    def send_rest(self) -> None:
        """Sends gradients that the backward pass has left alone, and zeros where there is none."""
        self.missed = set()  # these gradients are not new
        for i, param in enumerate(self._params):
            if self._in_flight.own[i]:
                continue
            if param.grad is not None:  # of an earlier micro-batch or step: counts, as in DDP
                _send(self._this, i, param)
                continue
            self._holds_result[i] = True
            if self._in_flight.sparse[i]:
                self._send_rows(i, empty_like(param))
            else:
                self._codec_state.snapshot(self._names[i])
                self._executor.grad_writer.send_zeros(i)
                self._in_flight.shown[i] = self._in_flight.tensors[i]
                self._in_flight.record_version(i)

    def unsent_gradient(self) -> int:
        """Returns a parameter whose gradient was set since the last reset but not sent; else -1.

        Zeros do not count: torch.distributed.checkpoint sets them to make optimizers allocate
        state.
        """
        with DisableTorchFunction():  # lazy parameters stay lazy
            for i, param in enumerate(self._params):
                own = param.grad
                if own is None or self._is_result(i, own) or _state_of(own) == self._at_reset[i]:
                    continue
                if own.is_sparse or own.any():
                    return i
        return -1

    def _is_result(self, i: int, grad: torch.Tensor) -> bool:
        # Another tensor than the one shown for other ranks' gradients was set by hand.
        sent = self._in_flight
        return self._holds_result[i] and (sent.own[i] or grad is sent.shown[i])

    def forget_results(self, set_to_none: bool) -> None:
        """Records that the script has reset the gradients, to None (`set_to_none`) or to zeros."""
        self._holds_result = [False] * len(self._params)
        self._at_reset = [None] * len(self._params) if set_to_none else self._gradients_now()

    def _gradients_now(self) -> list[tuple[int, int] | None]:
        with DisableTorchFunction():  # lazy parameters stay lazy
            return [None if p.grad is None else _state_of(p.grad) for p in self._params]

    def _send_rows(self, i: int, grad: torch.Tensor) -> None:
        executor, sent = self._executor, self._in_flight
        executor.rows[i] = Rows(self._names[i], grad, self._params[i], executor.device)
        executor.rows[i].give(executor.engine, executor.tensor_of_param[i])
        sent.tensors[i] = sent.shown[i] = grad
        sent.record_version(i)

    def _check_not_summed(self, i: int) -> None:
        # Averaging an average changes nothing; summing a sum multiplies it.
        if self._sums and self._holds_result[i]:
            raise UsageError(
                f"the gradient of '{self._names[i]}' is a sum over ranks and would be summed "
                "again: with op=Sum, call optimizer.zero_grad() after each step and accumulate "
                "under optimizer.no_sync()"
            )

    def _second_gradient(self, i: int) -> UsageError:
        return UsageError(
            f"backward() has given a second gradient of '{self._names[i]}' after the first was "
            "sent, as where checkpoint() runs a module twice: pass use_reentrant=False there, or "
            "run backward() under optimizer.no_sync(), so that step() sends the sum. If an earlier "
            "backward() has failed, restart the job from its last checkpoint"
        )


def _send(of: weakref.ref[GradientSender], i: int, _param: object) -> None:
    """Sends the gradient of parameter `i`: the hook that torch calls once it is accumulated.

    One function, because it runs for each parameter in each step. No local variable but `grad` may
    refer to the gradient: references are counted to find those of the script.
    """
    # torch passes the result of an earlier hook as `_param`, not always the parameter.
    sender = of()
    if sender is None:
        raise UsageError(
            "a parameter has a gradient, but its DistributedOptimizer was deleted: make one for "
            "the parameters that are trained"
        )
    if (not sender.is_sending or i in sender.missed) and not sender.begin_pass(i):
        return
    param, sent = sender._params[i], sender._in_flight
    if sent.own[i]:
        raise sender._second_gradient(i)
    grad = param.grad
    if grad is None:
        raise UsageError(
            f"the gradient of '{sender._names[i]}' was reset by a hook of its parameter before it "
            "was sent: do not change gradients before step()"
        )
    if grad is sent.shown[i]:
        sender._check_not_summed(i)
    sent.own[i] = sender._holds_result[i] = True
    if type(grad) is not torch.Tensor:
        check_sendable(f"the gradient of '{sender._names[i]}'", grad, or_sparse=True)
    if sent.sparse[i]:
        return sender._send_rows(i, grad)
    is_shared = False
    # torch makes a new gradient, or adds to an older one. Only an older one can be used by the
    # script in other ways: as a part of its own flat buffer, or in a list.
    # A hook in compiled code cannot read a version directly.
    is_older = _is_older(grad) if torch.compiler.is_compiling() else grad._version > 0
    if is_older and grad is not sent.tensors[i]:
        is_shared = is_part = shares_memory(grad)
        is_shared = is_shared or sys.getrefcount(grad) > _ONE_REFERENCE
        sender.shows_parts = sender.shows_parts or is_part
    if grad.layout is not torch.strided:
        if not sender._densifies:
            raise UsageError(
                f"the gradient of '{sender._names[i]}' is sparse, which could not be detected when "
                "the optimizer was wrapped: give DistributedOptimizer model= or "
                "sparse_as_dense=True"
            )
        param.grad = grad = grad.to_dense()
    if grad.dtype != sent.tensors[i].dtype:
        check_dtype(sender._names[i], grad, sent.tensors[i].dtype)
    if is_shared or sent.has_private:
        shown = sent.show(i, grad, is_shared)
    else:
        sent.shown[i] = shown = sent.tensors[i]
    sender._executor.grad_writer.send(i, grad, shown)
    sent.versions[i] = sent.shown[i]._version


@not_compiled
def _is_older(grad: torch.Tensor) -> bool:
    """Returns whether the gradient existed before: torch has not just made it."""
    return grad._version > 0


def _state_of(grad: torch.Tensor) -> tuple[int, int]:
    """Returns a value that changes when the gradient is replaced or written to; no reference."""
    return id(grad), grad._version
