# SPDX-License-Identifier: Apache-2.0
"""Level and last-resort handler of the `usbyte` logger."""

from __future__ import annotations

import logging

from usbyte import _core

log = logging.getLogger("usbyte")


class _LastResort(logging.Handler):
    """Writes to stderr if the script has configured no logging handlers.

    Python's own `logging.lastResort` does the same, but only from level WARNING on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        others = [h for h in log.handlers if h is not self]
        if log.propagate:
            others += logging.getLogger().handlers
        if not others and logging.lastResort is not None:
            logging.lastResort.handle(record)


_last_resort = _LastResort()


def set_level(env: _core.Env) -> None:
    """Sets the logger's level from USBYTE_LOG_LEVEL.

    If the variable is not set, a level that the script has set stays; else the default applies.
    """
    asked = any(v.name == "USBYTE_LOG_LEVEL" and v.set for v in env.variables)
    if asked or log.level == logging.NOTSET:
        log.setLevel(env.log_level.upper())
    if asked:
        log.addHandler(_last_resort)
