"""usbyte for PyTorch.

`import usbyte.torch as ub`, `ub.init()`, wrap the optimizer in `ub.DistributedOptimizer`, broadcast
the parameters once, and train as before; the README has the ten lines. Scripts for Horovod import
it as `hvd`; docs/migrating.md tells what differs.
"""

# ruff: noqa: F403
import typing as _typing

from usbyte.errors import UsageError as _UsageError
from usbyte.torch import scaling as _scaling  # noqa: F401
from usbyte.torch.basics import *
from usbyte.torch.compression import Compression as Compression
from usbyte.torch.context import *
from usbyte.torch.daso import *
from usbyte.torch.ddp import *
from usbyte.torch.functions import *
from usbyte.torch.joining import *
from usbyte.torch.ops import *
from usbyte.torch.optimizer import *
from usbyte.torch.probe import *
from usbyte.torch.process_sets import *
from usbyte.torch.profiling import *
from usbyte.torch.reductions import *

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
