"""usbyte for PyTorch.

    import usbyte.torch as ub

    ub.init()
    optimizer = ub.DistributedOptimizer(optimizer, model.named_parameters(), overlap="forward")
    ub.broadcast_parameters(model.state_dict(), root_rank=0)
    ub.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from usbyte.torch.context import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from usbyte.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from usbyte.torch.ops import *  # noqa: F403
from usbyte.torch.optimizer import DistributedOptimizer
