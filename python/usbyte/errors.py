# SPDX-License-Identifier: Apache-2.0
"""The exceptions that usbyte raises; each is the C++ exception class of the same name."""

from usbyte._core import EnvError, Error, FaultError, MismatchError, PlanError, UsageError

__all__ = ["EnvError", "Error", "FaultError", "MismatchError", "PlanError", "UsageError"]
