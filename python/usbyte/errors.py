# SPDX-License-Identifier: Apache-2.0
"""The exceptions that usbyte raises; each is the C++ exception class of the same name.

Each carries a note that Python 3.11 and newer print below the message: the section of
docs/errors.md that explains it. The class decides, or, for `UsageError` and `Error`, the module
that raises. So the hundreds of places that raise need no code each, and nor does the C++ core.
"""

import sys
from collections.abc import Mapping
from types import FrameType

from usbyte._core import EnvError, Error, FaultError, MismatchError, PlanError, UsageError

__all__ = ["EnvError", "Error", "FaultError", "MismatchError", "PlanError", "UsageError"]

_PAGE = "docs/errors.md"

_BY_CLASS: Mapping[type[Error], str] = {
    EnvError: "environment",
    FaultError: "faults",
    MismatchError: "ranks-differ",
    PlanError: "plans",
}

#: Sections by module or package; the closest name counts. "" stands for the section of the caller.
_BY_MODULE: Mapping[str, str] = {
    "usbyte._util": "",
    "usbyte.cli": "commands",
    "usbyte.lab": "commands",
    "usbyte.planning": "plans",
    "usbyte.report": "commands",
    "usbyte.torch": "collectives",
    "usbyte.torch.api.ddp_comm_hook": "compression",
    "usbyte.torch.comm": "network",
    "usbyte.torch.compression": "compression",
    "usbyte.torch.compression.state": "checkpoints",
    "usbyte.torch.daso": "daso",
    "usbyte.torch.daso.param_averaging": "checkpoints",
    "usbyte.torch.fault": "training",
    "usbyte.torch.layout": "wrapping",
    "usbyte.torch.lazy_tensor": "training",
    "usbyte.torch.optimizer": "training",
    "usbyte.torch.optimizer.compat": "wrapping",
    "usbyte.torch.optimizer.config": "wrapping",
    "usbyte.torch.optimizer.distributed_optimizer": "wrapping",
    "usbyte.torch.optimizer.fused": "wrapping",
    "usbyte.torch.optimizer.param_owner": "wrapping",
    "usbyte.torch.optimizer.sharded": "wrapping",
    "usbyte.torch.optimizer.validation": "wrapping",
    "usbyte.torch.optimizer.wrapper": "checkpoints",
    "usbyte.torch.plan": "plans",
    "usbyte.torch.plan.job": "wrapping",
    "usbyte.torch.plan.sparse": "training",
    "usbyte.torch.profiler": "commands",
    "usbyte.torch.runtime": "start",
    "usbyte.torch.runtime.device": "wrapping",
    "usbyte.torch.runtime.messages": "",
    "usbyte.torch.runtime.ring": "",
    "usbyte.torch.runtime.tensor_checks": "",
    "usbyte.torch.world.consistency": "",
    "usbyte.torch.world.world": "start",
}


def _section_of(kind: type[Error], frame: FrameType | None) -> str:
    """Returns the section for an error of this class that is made in this frame; "" for none."""
    for known, section in _BY_CLASS.items():
        if issubclass(kind, known):
            return section
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        while name and name not in _BY_MODULE:
            name = name.rpartition(".")[0]
        if section := _BY_MODULE.get(name, ""):
            return section
        frame = frame.f_back
    return ""


def _init(self: Error, *args: object) -> None:
    RuntimeError.__init__(self, *args)
    section = _section_of(type(self), sys._getframe().f_back)
    # As `add_note` does, which Python 3.10 lacks.
    vars(self)["__notes__"] = [f"See {_PAGE}{'#' * bool(section)}{section}"]


# The C++ core has made the class. This also takes effect where the core raises.
Error.__init__ = _init  # type: ignore[assignment,method-assign]
