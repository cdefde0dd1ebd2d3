"""How much of its log usbyte tells, and to whom."""

from __future__ import annotations

import logging

from usbyte import _core

log = logging.getLogger("usbyte")


class _LastResort(logging.Handler):
    """Writes to stderr while the script has set up no logging, as Python itself does warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = [h for h in log.handlers if h is not self]
        if log.propagate:
            theirs += logging.getLogger().handlers
        if not theirs and logging.lastResort is not None:
            logging.lastResort.handle(record)


_last_resort = _LastResort()


def set_level(env: _core.Env) -> None:
    """Sets the log's level by the environment; without a word there, by the script if it has."""
    asked = any(v.name == "USBYTE_LOG_LEVEL" and v.set for v in env.variables)
    if asked or log.level == logging.NOTSET:
        log.setLevel(env.log_level.upper())
    if asked:
        log.addHandler(_last_resort)
