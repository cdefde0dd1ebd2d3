# SPDX-License-Identifier: Apache-2.0
"""Autograd functions of the eager collectives, with Horovod's gradients.

Horovod defines the loss as the mean of the ranks' losses. The gradient of an averaging collective
is averaged, and that of a summing collective is summed. Every rank must run backward through the
collective. Each backward collective blocks, so all ranks must run several of them in one order.
A backward collective has the name of its forward collective, with `.backward` appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from usbyte.errors import UsageError
from usbyte.torch.eager import operations
from usbyte.torch.eager.operation_names import OperationName
from usbyte.torch.eager.operations import Factors
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.reduce_op import ReduceOp

Grad = torch.Tensor | None


class Allreduce(torch.autograd.Function):
    """Gradient of each input: the same reduction of the outputs' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        queue: EagerQueue,
        name: OperationName,
        op: ReduceOp,
        factors: Factors,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Reduces the tensors elementwise across ranks; returns one result for each."""
        ctx.call = queue, name.backward(), op, factors
        request = operations.allreduce(queue.peers, name, tensors, op, factors)
        return tuple(queue.submit(request).synchronize())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, ...]:
        """Reduces the gradients of the outputs in the same way as the inputs."""
        queue, name, op, factors = ctx.call
        _check_differentiable(name, op)
        return (None, None, None, None, *Allreduce.apply(queue, name, op, factors, *grads))


class Allgather(torch.autograd.Function):
    """Gradient of each input: this rank's rows of the average of the output's gradients.

    Tensors that have no gradient (for example an integer or bool mask) may be gathered in the same
    call, even if their dtype cannot be averaged.
    """

    @staticmethod
    def forward(
        ctx: Any, queue: EagerQueue, name: OperationName, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Concatenates each tensor's rows of all ranks; returns one result for each tensor."""
        request = operations.allgather(queue.peers, name, tensors)
        gathered = queue.submit(request).synchronize()
        rank = queue.peers.rank
        ctx.call = queue, name.backward()
        ctx.own = [(sum(rows[:rank]), rows[rank]) for _, rows in gathered]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(out for out, _ in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, ...]:
        """Averages the gradients and returns this rank's rows of them."""
        queue, name = ctx.call
        local: list[Grad] = [None] * len(grads)
        some = [i for i, g in enumerate(grads) if g.is_floating_point() or g.is_complex()]
        for i, mean in zip(some, _averaged(queue, name, [grads[i] for i in some]), strict=True):
            local[i] = mean.narrow(0, *ctx.own[i]).reshape(ctx.shapes[i])
        return None, None, *local


class Broadcast(torch.autograd.Function):
    """Gradient of the input: the average of the outputs' gradients on the root, else zero."""

    @staticmethod
    def forward(
        ctx: Any, queue: EagerQueue, name: OperationName, root: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Returns the tensor of the rank `root` on every rank."""
        ctx.call = queue, name.backward()
        ctx.is_root = queue.peers.name == root
        request = operations.broadcast(queue.peers, name, tensor, root)
        out: torch.Tensor = queue.submit(request).synchronize()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, ...]:
        """Averages the gradient across ranks; returns zeros on ranks other than the root."""
        queue, name = ctx.call
        mean = _averaged(queue, name, grads)[0]
        return None, None, None, mean if ctx.is_root else torch.zeros_like(mean)


class Reducescatter(torch.autograd.Function):
    """Gradient of each input: the gathered gradients of the outputs.

    They are multiplied by the prescale and postscale factors, and for Sum by the number of ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queue: EagerQueue,
        name: OperationName,
        op: ReduceOp,
        factors: Factors,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Reduces the tensors elementwise; returns this rank's rows of each."""
        ctx.call = queue, name.backward(), op
        ctx.scale = factors[0] * factors[1] * (queue.peers.size if op is ReduceOp.SUM else 1)
        request = operations.reducescatter(queue.peers, name, tensors, op, factors)
        return tuple(queue.submit(request).synchronize())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, ...]:
        """Scales the gradients and gathers those of all ranks."""
        queue, name, op = ctx.call
        _check_differentiable(name, op)
        scaled = [grad * ctx.scale for grad in grads]
        return None, None, None, None, *Allgather.apply(queue, name, *scaled)


class Alltoall(torch.autograd.Function):
    """Gradient of the input: each row's gradient, sent back to the rank that the row is from."""

    @staticmethod
    def forward(
        ctx: Any, queue: EagerQueue, name: OperationName, splits: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends `splits[r]` rows to each rank r; returns the received rows and their counts."""
        request = operations.alltoall(queue.peers, name, tensor, splits)
        out, received = queue.submit(request).synchronize()
        ctx.call = queue, name.backward(), received
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Grad, ...]:
        """Returns each row's gradient to the rank that sent the row."""
        queue, name, received = ctx.call
        return None, None, None, Alltoall.apply(queue, name, received, grads[0])[0]


def _averaged(
    queue: EagerQueue, name: OperationName, grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    means: tuple[torch.Tensor, ...]
    means = Allreduce.apply(queue, name, ReduceOp.AVERAGE, (1.0, 1.0), *grads)
    return means


def _check_differentiable(name: OperationName, op: ReduceOp) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise UsageError(
            f"'{name}': a reduction with {op} has no gradient here: use Sum or Average, or "
            "detach the tensor before"
        )
