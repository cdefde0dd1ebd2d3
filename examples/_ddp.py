# SPDX-License-Identifier: Apache-2.0
"""The few `usbyte.torch` names that the examples use, over plain PyTorch DDP (`--ddp`).

The model has to be wrapped in `DistributedDataParallel` as well; the examples do that.
"""

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # which keeps for ever the group that it finds
from torch import Tensor
from torch.optim import Optimizer

Sum, Average = "sum", "average"


def init() -> None:
    """Joins the process group that the launcher describes; alone where there is none."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def shutdown() -> None:
    """Leaves the process group, all workers together."""
    # The group's threads go on while there is a wrapped model; it should be out of use by now. One
    # that drops its last tensor while the interpreter is ending aborts the process, so they are
    # joined here: by the last reference to the group, which is let go of without Python's lock.
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    del group


def rank() -> int:
    """Returns this worker's number among all workers."""
    return dist.get_rank()


def size() -> int:
    """Returns the number of workers."""
    return dist.get_world_size()


def local_rank() -> int:
    """Returns this worker's number among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Returns the number of workers on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def DistributedOptimizer(optimizer: Optimizer, **_: Any) -> Optimizer:
    """Returns the optimizer as it is: in DDP the wrapped model averages the gradients."""
    return optimizer


def broadcast_parameters(parameters: Mapping[str, Tensor], root_rank: int) -> None:
    """Copies the tensors of one worker into those of all others."""
    for tensor in parameters.values():
        dist.broadcast(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Loads the optimizer state of one worker into all others."""
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def broadcast_object(obj: Any, root_rank: int) -> Any:
    """Returns one worker's object on every worker."""
    box = [obj]
    dist.broadcast_object_list(box, root_rank)
    return box[0]


def allreduce(tensor: Tensor, op: str, name: str) -> Tensor:
    """Returns the sum or the average over all workers; `name` is there for usbyte's sake."""
    result = tensor.clone()
    dist.all_reduce(result)
    return result / size() if op == Average else result
