# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine that take themselves for those of several hosts."""

from __future__ import annotations

import os
import socket


def on_hosts(rank: int, slots: int) -> None:
    """As a launcher that fills one host after the other; to be called before `init`."""
    os.environ["LOCAL_RANK"] = str(rank % slots)
    os.environ["LOCAL_WORLD_SIZE"] = str(slots)
    host = f"host{rank // slots}"
    socket.gethostname = lambda: host
