# SPDX-License-Identifier: Apache-2.0
"""Restarts a job when a rank or a host is lost: `--max-restarts` and `--nnodes`.

As with torch's elastic launcher, a restart starts every rank, and the program loads its own
checkpoint. Unlike there, the launcher alone decides, since it knows all hosts. The hosts need not
agree on who is left, and a host that comes back is used at the next restart, not at once.
"""

import select
from collections.abc import Collection
from dataclasses import dataclass

from usbyte.cluster_env import MOST_RANKS
from usbyte.launch.agent import GRACE_SECONDS
from usbyte.launch.hosts import Host, Placement, place
from usbyte.launch.job import Job
from usbyte.launch.launcher import Launcher
from usbyte.launch.output import Output
from usbyte.launch.process_tree import SignalWake

# Wait before a lost host is tried again: its agent may still be ending the ranks of the last run.
_PAUSE_SECONDS = GRACE_SECONDS + 6.0


@dataclass(frozen=True)
class Pool:
    """The hosts that a job may run on.

    Attributes:
        hosts: The hosts, in the order in which they are used.
        ranks: Ranks of the job; None for one rank on each slot of the used hosts.
        least: The fewest hosts with which the job runs.
        most: The most hosts that are used at once; the others are spare.

    Raises:
        ValueError: There are fewer hosts than `least`, fewer slots than `ranks`, or more slots than
            a job may have ranks.
    """

    hosts: list[Host]
    ranks: int | None
    least: int
    most: int

    def __post_init__(self) -> None:
        if self.least > len(self.hosts):
            names = ",".join(host.name for host in self.hosts)
            raise ValueError(
                f"--nnodes needs {self.least} hosts or more, and {len(self.hosts)} are named "
                f"({names}); name more hosts, or lower MIN"
            )
        if self.size > MOST_RANKS:
            raise ValueError(
                f"the hosts have {self.size} slots, and a job may have {MOST_RANKS} ranks at most; "
                "ask for fewer with -np, or lower the slots"
            )
        self.placements()

    @property
    def size(self) -> int:
        """The most ranks that the job can have."""
        slots = sorted((host.slots for host in self.hosts), reverse=True)
        return self.ranks or sum(slots[: self.most])

    def enough(self, absent: Collection[str]) -> bool:
        """Returns whether enough hosts are left without the hosts of these names."""
        return len(self._present(absent)) >= self.least

    def placements(self, absent: Collection[str] = ()) -> list[Placement]:
        """Places the ranks, without the hosts of these names."""
        taken = self._present(absent)[: self.most]
        return place(taken, self.ranks or sum(host.slots for host in taken))

    def _present(self, absent: Collection[str]) -> list[Host]:
        return [host for host in self.hosts if host.name not in absent]


class RestartPolicy:
    """Runs a job, with all its restarts.

    Args:
        job: The job, without placements.
        pool: The hosts that it may use.
        output: Destination of its output.
        wake: Signals that end the job.
        verbose: Whether to show the placements and the commands that start the agents.
    """

    def __init__(
        self,
        job: Job,
        pool: Pool,
        output: Output,
        wake: SignalWake,
        verbose: bool,
    ) -> None:
        self._job = job
        self._pool = pool
        self._output = output
        self._wake = wake
        self._verbose = verbose

    def run(self) -> int:
        """Runs the job; returns the exit code of its last run, as `JobOutcome.code`."""
        most = self._job.max_restarts
        restarts = 0
        has_run = False
        absent: frozenset[str] = frozenset()
        while True:
            job = self._job.attempt(self._pool.placements(absent), restarts)
            outcome = Launcher(job, self._output, self._wake, self._verbose).run()
            has_run |= outcome.restartable
            missing = absent | outcome.lost
            if outcome.lost and not outcome.restartable and self._pool.enough(missing):
                absent = missing
                self._output.note(f"{outcome.message}; going on without")
            elif restarts < most and (outcome.restartable or (outcome.lost and has_run)):
                restarts += 1
                absent = outcome.lost if self._pool.enough(outcome.lost) else frozenset()
                self._output.note(f"{outcome.message}; restart {restarts} of {most}")
                if outcome.lost - absent or not outcome.restartable:
                    select.select([self._wake.fd], [], [], _PAUSE_SECONDS)
            else:
                break
            self._output.calm()
        self._output.tell_lost()
        if outcome.message is not None:
            after = f" (after {restarts} of {most} restarts)" if restarts else ""
            about_hosts = "; see docs/errors.md#launcher" if outcome.lost else ""
            self._output.note(outcome.message + after + about_hosts)
        return outcome.code
