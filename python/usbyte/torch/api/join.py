# SPDX-License-Identifier: Apache-2.0
"""`join`, for ranks that run out of data before others."""

from __future__ import annotations

import gc

from usbyte.errors import UsageError
from usbyte.torch.api.broadcast import broadcast_optimizer_state, broadcast_parameters
from usbyte.torch.world.world import current

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Takes part in the steps of the other ranks without data, until every rank has called it.

    Until then this rank contributes zeros as gradients. Averages still divide by the number of all
    ranks, as in Horovod and in DDP's `Join`. An `allreduce` of other ranks with Sum or Average,
    also grouped or from autograd, gets zeros too. Any other eager collective among all ranks is an
    error on the ranks that call it. Internal collectives of all ranks, and operations of process
    sets, wait for this rank: run them before or after `join`.

    Operations that this rank submitted to all ranks earlier complete inside `join`; if another
    thread submits one meanwhile, it raises UsageError. With an optimizer, the other ranks must
    begin their next step within the stall limit. The plan does not change during `join`.

    At the end all ranks get the parameters and the state of the optimizer from the rank that joined
    last, including changes that it made between `backward()` and `step()`. Buffers stay as they are
    on each rank. Collective.

    Args:
        device: Horovod's; ignored.

    Returns:
        The rank that joined last.

    Raises:
        UsageError: There are several DistributedOptimizers, whose steps could come in any order; or
            the only one spans a subset of the ranks, as does a DasoOptimizer inside each node.
        FaultError: The job has failed.

    Examples:
        >>> import usbyte.torch as ub
        >>> ub.init()
        >>> ub.join()  # after the last batch; a single rank is the last one
        0
    """
    context = current()
    gc.collect()  # unreferenced optimizers must not count, on any rank
    context.drain()
    joining = [
        (participant, optimizer)
        for participant in context.participants.sending()
        if (optimizer := participant.optimizer) is not None
    ]
    if len(joining) > 1 or any(each.size != context.size for each, _ in joining):
        raise UsageError(
            "join() needs a single DistributedOptimizer, of all ranks: close() the others, or give "
            "all ranks the same number of batches"
        )
    context.eager.begin_join()
    for participant, _ in joining:
        participant.join_with_zeros()
    last = context.eager.end_join()
    for participant, optimizer in joining:
        broadcast_parameters(participant.named(), last)
        broadcast_optimizer_state(optimizer, last)
    return last
