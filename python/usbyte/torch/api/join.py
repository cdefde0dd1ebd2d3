"""Ranks that run out of data before others."""

from __future__ import annotations

import gc

from usbyte.errors import UsageError
from usbyte.torch.api.broadcast import broadcast_optimizer_state, broadcast_parameters
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.world.world import current

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Takes part in the other ranks' steps without data, until every rank has called it.

    Meanwhile this rank's gradients count as zeros, and averages are still over all ranks, as in
    Horovod and in DDP's `Join`. Other ranks' allreduce with Sum or Average, grouped and within
    autograd too, is answered with zeros as well; other functions of `ops` among all ranks are
    errors on the ranks that call them. What else all ranks do together waits for this one, and so
    do process sets: do it before or after. What this rank submitted to all ranks before ends
    inside, and it submits nothing of the user's there; and with an optimizer, others must come to
    their next step within the stall limit. The plan of communication stays as it is.

    In the end all ranks have the parameters of the optimizer and its state from the rank that came
    last, whatever it did between `backward()` and `step()`; buffers stay each rank's own.
    Collective.

    Args:
        device: Horovod's; of no effect, as nothing has to be made on one.

    Returns:
        The rank that came last.

    Raises:
        UsageError: There are several DistributedOptimizers, whose steps could follow each other in
            any order, or one of some ranks, as a DasoOptimizer's inside each node.
    """
    context = current()
    gc.collect()  # what nobody refers to any more counts on no rank
    context.drain()
    optimizers = [o for o in context.active_optimizers() if isinstance(o, DistributedOptimizer)]
    if len(optimizers) > 1 or any(o.size != context.size for o in optimizers):
        raise UsageError(
            "join() needs a single DistributedOptimizer, of all ranks: close() the others, or give "
            "all ranks the same number of batches"
        )
    context.eager.begin_join()
    for optimizer in optimizers:
        optimizer.join_with_zeros()
    last = context.eager.end_join()
    for optimizer in optimizers:
        broadcast_parameters(optimizer.named(), last)
        broadcast_optimizer_state(optimizer, last)
    return last
