# SPDX-License-Identifier: Apache-2.0
"""usbyte for PyTorch.

Write `import usbyte.torch as ub`, call `ub.init()`, wrap the optimizer in
`ub.DistributedOptimizer`, broadcast the parameters once, and train as before. The README shows
these ten lines. Scripts written for Horovod can use `import usbyte.torch as hvd`; docs/migrating.md
lists the differences.
"""

import typing as _typing

from usbyte.errors import UsageError as _UsageError
from usbyte.torch.api.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from usbyte.torch.api.basics import (
    HorovodInternalError,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from usbyte.torch.api.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from usbyte.torch.api.collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    poll,
    synchronize,
)
from usbyte.torch.api.ddp_comm_hook import ddp_comm_hook
from usbyte.torch.api.join import join
from usbyte.torch.api.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from usbyte.torch.comm.probe_network import probe
from usbyte.torch.compression.codecs import Compression
from usbyte.torch.daso.optimizer import DasoOptimizer
from usbyte.torch.optimizer.distributed_optimizer import DistributedOptimizer
from usbyte.torch.profiler.api import Recording, profile
from usbyte.torch.reduce_op import Average, Max, Min, Product, ReduceOp, Sum
from usbyte.torch.world.process_sets import ProcessSet, global_process_set
from usbyte.torch.world.world import init, is_initialized, shutdown

__all__ = [
    "Average",
    "Compression",
    "DasoOptimizer",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Recording",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_comm_hook",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "probe",
    "profile",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_NOT_HERE = {
    "Adasum": "usbyte has no Adasum: use op=Average, and scale the learning rate by size()",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, as torch.nn.SyncBatchNorm.convert_sync_batchnorm("
    "model); init() has made the process group that it works on",
    "elastic": "usbyte.torch has no elastic mode: save checkpoints, and let `usbyterun "
    "--max-restarts N --nnodes MIN:MAX` or torchrun's options of these names start ranks again",
}


if not _typing.TYPE_CHECKING:  # else type checkers would accept every misspelt name

    def __getattr__(name: str) -> object:
        """Raises an error that names the substitute for a Horovod name that usbyte lacks."""
        if name in _NOT_HERE:
            raise _UsageError(f"usbyte.torch.{name}: {_NOT_HERE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
