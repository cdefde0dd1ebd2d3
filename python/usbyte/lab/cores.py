# SPDX-License-Identifier: Apache-2.0
"""How the hosts of the lab share the cores of this machine."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

from usbyte.errors import UsageError
from usbyte.lab.system_commands import run_command

log = logging.getLogger("usbyte")

_CGROUPS = Path("/sys/fs/cgroup")
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_TRIES, _PAUSE_S = 100, 0.05  # Killed processes take a while to leave their control group.


class ControlGroup:
    """The control group of a lab's ranks, in which they yield to each other.

    Args:
        name: Name of the lab.

    Attributes:
        path: Folder of the group; it does not exist where the ranks need no group.
    """

    def __init__(self, name: str) -> None:
        legacy = _CGROUPS / "cpu"  # cgroup v1.
        self.path = (legacy if legacy.is_dir() else _CGROUPS) / f"usbyte-lab-{name}"

    def make(self) -> None:
        """Makes the group if ranks need it; warns if it cannot be made."""
        # With autogroups, the scheduler shares a core among sessions, and so among ranks. A
        # low-priority thread of one rank then does not yield to threads of another. Autogroups have
        # no effect inside a control group.
        if not _AUTOGROUP.exists() or _AUTOGROUP.read_text().strip() == "0":
            return
        try:
            controllers = self.path.parent / "cgroup.subtree_control"  # of version 2
            if controllers.exists() and "cpu" not in controllers.read_text().split():
                controllers.write_text("+cpu")
            if not (self.path.parent / "cgroup.procs").exists():
                raise UsageError(f"no control groups can be made in {self.path.parent}")
            self.path.mkdir(exist_ok=True)
            run_command("sh", "-c", f"echo 0 > {self.path / 'cgroup.procs'}")  # As ranks will do.
        except (OSError, UsageError) as error:
            log.warning("ranks that share a core do not yield to each other: %s", error)
            self.remove()

    def remove(self) -> None:
        """Removes the group, if there is one.

        Raises:
            UsageError: It cannot be removed, or processes still run in it.
        """
        for _ in range(_TRIES):
            if not self.path.is_dir():
                return
            try:
                self.path.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise UsageError(f"cannot remove {self.path}: {error.strerror}") from error
                time.sleep(_PAUSE_S)
        raise UsageError(f"something still runs in {self.path}; end it, then remove that folder")


def core_shares(hosts: int) -> list[list[int]]:
    """Returns the cores of each host, equally many, out of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if hosts > len(cores):
        return [[cores[i % len(cores)]] for i in range(hosts)]
    each = len(cores) // hosts
    return [cores[i * each : (i + 1) * each] for i in range(hosts)]


def _place(core: int) -> tuple[int, ...]:
    """Returns a sort key that puts the hardware threads of a core next to each other."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        names = ("physical_package_id", "core_id")
        return (*(int((topology / name).read_text()) for name in names), core)
    except OSError:
        return (0, core, core)
