"""usbyte for PyTorch.

`import usbyte.torch as ub`, `ub.init()`, wrap the optimizer in `ub.DistributedOptimizer`, broadcast
the parameters once, and train as before; the README has the ten lines. Scripts for Horovod import
it as `hvd`; docs/migrating.md tells what differs.
"""

# ruff: noqa: F403
import typing as _typing

from usbyte.errors import UsageError as _UsageError
from usbyte.torch.api.basics import *
from usbyte.torch.api.broadcast import *
from usbyte.torch.api.collectives import *
from usbyte.torch.api.ddp_comm_hook import *
from usbyte.torch.api.join import *
from usbyte.torch.api.reductions import *
from usbyte.torch.comm.probe_network import *
from usbyte.torch.compression.codecs import Compression as Compression
from usbyte.torch.daso.optimizer import *
from usbyte.torch.optimizer.distributed_optimizer import *
from usbyte.torch.profiler.api import *
from usbyte.torch.world.process_sets import *
from usbyte.torch.world.world import *

_NOT_HERE = {
    "Adasum": "usbyte has no Adasum: use op=Average, and scale the learning rate by size()",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, as torch.nn.SyncBatchNorm.convert_sync_batchnorm("
    "model); init() has made the process group that it works on",
    "elastic": "usbyte.torch has no elastic mode: save checkpoints, and let `usbyterun "
    "--max-restarts N --nnodes MIN:MAX` or torchrun's options of these names start ranks again",
}


if not _typing.TYPE_CHECKING:  # or every misspelt name would be one

    def __getattr__(name: str) -> object:
        """What Horovod has and usbyte has not is an error that says what to do."""
        if name in _NOT_HERE:
            raise _UsageError(f"usbyte.torch.{name}: {_NOT_HERE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
