"""The exceptions usbyte raises, each the Python side of a C++ class of the same name."""

from usbyte._core import EnvError, Error, FaultError, MismatchError, PlanError, UsageError

__all__ = ["EnvError", "Error", "FaultError", "MismatchError", "PlanError", "UsageError"]
