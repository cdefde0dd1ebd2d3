"""usbyte for PyTorch.

`import usbyte.torch as ub`, `ub.init()`, wrap the optimizer in `ub.DistributedOptimizer`, broadcast
the parameters once, and train as before; the README has the ten lines.
"""

# ruff: noqa: F403
from usbyte.torch.compression import Compression as Compression
from usbyte.torch.context import *
from usbyte.torch.daso import *
from usbyte.torch.ddp import *
from usbyte.torch.functions import *
from usbyte.torch.joining import *
from usbyte.torch.ops import *
from usbyte.torch.optimizer import *
from usbyte.torch.probe import *
from usbyte.torch.profiling import *
