# SPDX-License-Identifier: Apache-2.0
"""Runs the system's commands for the lab, and finds out whether labs work here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from usbyte.errors import UsageError


def unusable() -> str:
    """Returns the reason why labs do not work here, with a remedy; "" if they work."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux's network namespaces; use a Linux machine"
    tools = {"iproute2": ("ip", "tc"), "util-linux": ("taskset", "chrt")}
    for package, commands in tools.items():
        for command in commands:
            if shutil.which(command) is None:
                return f"the command '{command}' is missing; install {package}"
    if os.geteuid() != 0:
        return "network namespaces need root; run the command with sudo"
    return ""


def run_json(*command: str) -> list[dict[str, Any]]:
    """Runs a command that prints a JSON list of objects; returns those that are not empty.

    Raises:
        UsageError: The command failed.
    """
    text = run_command(*command).strip()
    return [entry for entry in json.loads(text or "[]") if entry]


def run_command(*command: str, stdin: str | None = None) -> str:
    """Runs a command and returns what it printed.

    Args:
        command: The program and its arguments.
        stdin: Its standard input; None: that of this process.

    Raises:
        UsageError: The command failed.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").strip()
        raise UsageError(
            f"`{' '.join(command)}` failed: {reason}. The lab needs permission to create network "
            "namespaces, and the kernel's bridge, veth and sch_tbf"
        )
    return done.stdout
