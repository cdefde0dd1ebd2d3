"""Runs a job again when a rank or a host is lost: `--max-restarts` and `--nnodes`.

As with torch's elastic launcher, every rank starts anew and finds its own checkpoint. Unlike
there, the launcher decides, which knows all hosts: no host has to be told that others are gone,
and a host that comes back is taken at the next restart, not at once.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from usbyte.run.hosts import Host, Placement, place
from usbyte.run.job import Job
from usbyte.run.launcher import Launcher, Verdict
from usbyte.run.output import Output
from usbyte.run.processes import SignalWake


@dataclass(frozen=True)
class Pool:
    """The hosts that a job may run on.

    Attributes:
        hosts: In the order in which they are taken.
        ranks: Of the job; None for as many as there are slots on the hosts taken.
        least: Hosts without which there is no job.
        most: Hosts that are taken at once; the others are spare.

    Raises:
        ValueError: There are fewer hosts than `least`, or fewer slots than `ranks`.
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
        self.placements()

    def enough(self, absent: Collection[str]) -> bool:
        """Whether the job can do without the hosts of these names."""
        return len(self._present(absent)) >= self.least

    def placements(self, absent: Collection[str] = ()) -> list[Placement]:
        """Which ranks run where, without the hosts of these names."""
        taken = self._present(absent)[: self.most]
        return place(taken, self.ranks or sum(host.slots for host in taken))

    def _present(self, absent: Collection[str]) -> list[Host]:
        return [host for host in self.hosts if host.name not in absent]


class Attempts:
    """A job, from its first attempt to its end.

    Args:
        job: What to run.
        pool: Where.
        directory: Where each rank's output is also written; see `Output`.
        wake: Signals that end it.
        verbose: See `Launcher`.
    """

    def __init__(
        self,
        job: Job,
        pool: Pool,
        directory: Path | None,
        wake: SignalWake,
        verbose: bool,
    ) -> None:
        self._job = job
        self._pool = pool
        self._directory = directory
        self._wake = wake
        self._verbose = verbose
        self._begun = False

    def run(self) -> int:
        """Runs the job; returns the exit code of its last attempt, see `Verdict`.

        Raises:
            OutputError: The directory or a file in it cannot be written.
        """
        restarts = 0
        absent: frozenset[str] = frozenset()
        while True:
            output, verdict = self._attempt(restarts, absent)
            if verdict.restartable and restarts < self._job.max_restarts:
                restarts += 1
                absent = verdict.lost if self._pool.enough(verdict.lost) else frozenset()
                output.note(f"{verdict.message}; restart {restarts} of {self._job.max_restarts}")
            elif not verdict.restartable and verdict.lost and self._pool.enough(
                absent | verdict.lost
            ):
                absent |= verdict.lost
                output.note(f"{verdict.message}; going on without")
            else:
                break
        if verdict.message is not None:
            after = f" (after {restarts} of {self._job.max_restarts} restarts)" if restarts else ""
            output.note(verdict.message + after)
        return verdict.code

    def _attempt(self, restarts: int, absent: frozenset[str]) -> tuple[Output, Verdict]:
        job = self._job.attempt(self._pool.placements(absent), restarts)
        output = Output(job.size, self._wake.fd, self._directory, append=self._begun)
        self._begun = True
        return output, Launcher(job, output, self._wake, self._verbose).run()
