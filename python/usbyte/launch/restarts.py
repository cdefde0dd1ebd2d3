"""Runs a job again when a rank or a host is lost: `--max-restarts` and `--nnodes`.

As with torch's elastic launcher, every rank starts anew and finds its own checkpoint. Unlike
there, the launcher decides, which knows all hosts: no host has to be told that others are gone,
and a host that comes back is taken at the next restart, not at once.
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

# Before a host that was lost is tried again: its agent may be ending ranks, cut off as it is.
_PAUSE_SECONDS = GRACE_SECONDS + 6.0


@dataclass(frozen=True)
class Pool:
    """The hosts that a job may run on.

    Attributes:
        hosts: In the order in which they are taken.
        ranks: Of the job; None for as many as there are slots on the hosts taken.
        least: Hosts without which there is no job.
        most: Hosts that are taken at once; the others are spare.

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
                f"--nnodes wants {self.least} hosts or more, and {len(self.hosts)} are named "
                f"({names}); name more, or ask for fewer"
            )
        if self.size > MOST_RANKS:
            raise ValueError(
                f"the hosts have {self.size} slots, and a job may have {MOST_RANKS} ranks at most; "
                "ask for fewer with -np, or lower the slots"
            )
        self.placements()

    @property
    def size(self) -> int:
        """The most ranks that the job may have."""
        slots = sorted((host.slots for host in self.hosts), reverse=True)
        return self.ranks or sum(slots[: self.most])

    def enough(self, absent: Collection[str]) -> bool:
        """Whether the job can do without the hosts of these names."""
        return len(self._present(absent)) >= self.least

    def placements(self, absent: Collection[str] = ()) -> list[Placement]:
        """Which ranks run where, without the hosts of these names."""
        taken = self._present(absent)[: self.most]
        return place(taken, self.ranks or sum(host.slots for host in taken))

    def _present(self, absent: Collection[str]) -> list[Host]:
        return [host for host in self.hosts if host.name not in absent]


class RestartPolicy:
    """A job, from its first attempt to its end.

    Args:
        job: What to run.
        pool: Where.
        output: Where its output goes.
        wake: Signals that end it.
        verbose: See `Launcher`.
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
        """Runs the job; returns the exit code of its last attempt, see `Verdict`."""
        most = self._job.max_restarts
        restarts = 0
        has_run = False
        absent: frozenset[str] = frozenset()
        while True:
            job = self._job.attempt(self._pool.placements(absent), restarts)
            verdict = Launcher(job, self._output, self._wake, self._verbose).run()
            has_run |= verdict.restartable
            missing = absent | verdict.lost
            if verdict.lost and not verdict.restartable and self._pool.enough(missing):
                absent = missing
                self._output.note(f"{verdict.message}; going on without")
            elif restarts < most and (verdict.restartable or (verdict.lost and has_run)):
                restarts += 1
                absent = verdict.lost if self._pool.enough(verdict.lost) else frozenset()
                self._output.note(f"{verdict.message}; restart {restarts} of {most}")
                if verdict.lost - absent or not verdict.restartable:
                    select.select([self._wake.fd], [], [], _PAUSE_SECONDS)
            else:
                break
            self._output.calm()
        self._output.tell_lost()
        if verdict.message is not None:
            after = f" (after {restarts} of {most} restarts)" if restarts else ""
            self._output.note(verdict.message + after)
        return verdict.code
