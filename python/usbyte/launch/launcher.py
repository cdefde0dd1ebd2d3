# SPDX-License-Identifier: Apache-2.0
"""Runs a job once: starts the agents, shows the ranks' output, and ends all processes."""

import errno
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from usbyte.launch import process_tree
from usbyte.launch.agent import GRACE_SECONDS
from usbyte.launch.job import Job, agent_env
from usbyte.launch.launcher_channel import AgentConnection
from usbyte.launch.output import Output
from usbyte.launch.protocol import EVENT, Frame, decode_event

# After their grace time, agents kill ranks and send the last output; a slow network takes time.
_END_SECONDS = GRACE_SECONDS + 10.0
_HURRY_SECONDS = 5.0


@dataclass(frozen=True)
class JobOutcome:
    """The end of a run.

    Attributes:
        code: 0 for success. Otherwise the exit code of the first rank that failed; 128 + n if
            signal n ended that rank or the launcher, SIGPIPE if the reader of stdout is gone; 1 if
            the job could not be started, a host was lost, or the output could not be written.
        message: The last line on stderr; None for no line.
        restartable: Whether a rank or a host was lost after all ranks had started.
        lost: Names of the hosts that were lost or could not be reached.
    """

    code: int
    message: str | None = None
    restartable: bool = False
    lost: frozenset[str] = frozenset()


class Launcher:
    """Runs a job once.

    Args:
        job: The job, with its placements.
        output: Destination of its output.
        wake: Signals that end the run.
        verbose: Whether to show the placements and the commands that start the agents.
    """

    def __init__(
        self, job: Job, output: Output, wake: process_tree.SignalWake, verbose: bool = False
    ) -> None:
        self._job = job
        self._output = output
        self._wake = wake
        self._verbose = verbose
        self._selector = selectors.DefaultSelector()
        self._links: list[AgentConnection] = []
        self._running = set(range(job.size))
        self._all_run = False
        self._outcome: JobOutcome | None = None
        self._master: tuple[str, int] | None = None
        self._deadline: float | None = time.monotonic() + job.start_timeout

    def run(self) -> JobOutcome:
        """Runs the job to its end; all its processes have then ended, except on lost hosts."""
        earlier = frozenset(process_tree.descendants())
        self._selector.register(self._wake.fd, selectors.EVENT_READ, self._on_signal)
        try:
            self._start_agents()
            while not all(link.gone for link in self._links):
                self._step()
        finally:
            for link in self._links:
                link.kill()
            # An agent ends its own ranks; processes are left only if the agent itself was killed.
            process_tree.end_descendants(0, spare=earlier)
            process_tree.reap()
            self._selector.close()
        self._output.finish()
        self._on_signal()  # A signal may have come while the last output was being written.
        outcome = self._outcome or JobOutcome(1, "no agent was started")
        return (outcome.code == 0 and self._lost_output()) or outcome

    def _start_agents(self) -> None:
        env = agent_env()
        for node, placement in enumerate(self._job.placements):
            command = self._job.agent_command(placement.host)
            if self._verbose:
                self._output.note(str(placement))
                self._output.note(shlex.join(command))
            spec = self._job.agent_spec(node).encode()
            try:
                link = AgentConnection(
                    placement, command, env, spec, self._selector, self._on_frame, self._on_text
                )
            except OSError as error:
                remedy = "; is it installed?" if isinstance(error, FileNotFoundError) else ""
                self._conclude(1, f"cannot run {command[0]}: {error.strerror}{remedy}")
                return
            self._links.append(link)

    def _step(self) -> None:
        deadline = self._deadline
        waits = [
            None if deadline is None else max(0.0, deadline - time.monotonic()),
            self._output.refresh_in_s(),
        ]
        ready = self._selector.select(min((s for s in waits if s is not None), default=None))
        began = time.monotonic()
        for key, _ in ready:
            # An earlier callback of this loop may have closed this descriptor.
            if key.fd in self._selector.get_map():
                key.data()
        self._output.refresh()
        if self._deadline is not None and self._outcome is not None and self._outcome.code == 0:
            # The time that the reader of the output takes does not count: the agents wait, too.
            self._deadline += time.monotonic() - began
        for link in self._links:
            # An agent that closes the connection without an "end" event is lost, too.
            if link.gone and not (link.ended and self._outcome):
                self._conclude(1, _describe_loss(link), self._all_run, [link])
                self._lose(link)
        if lost := self._lost_output():
            self._conclude(lost.code, lost.message)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

    def _on_frame(self, link: AgentConnection, frame: Frame) -> None:
        if frame.kind != EVENT:
            try:
                self._output.rank(frame.kind, frame.rank, frame.payload)
            except OSError as error:
                self._conclude(1, f"cannot write a file of --output-filename: {error}")
            return
        event = decode_event(frame.payload)
        match event["event"]:
            case "ready":
                link.ready = event
                if all(other.ready for other in self._links) and self._outcome is None:
                    self._go()
            case "started":
                link.started = True
                if all(other.started for other in self._links) and self._outcome is None:
                    self._all_run = True
                    self._deadline = None
            case "exit":
                self._on_exit(link, event["rank"], event["code"])
            case "error":
                lost = [link] if self._all_run else []
                self._conclude(1, f"host {link.name}: {event['message']}", self._all_run, lost)
            case "end":
                link.ended = True
                if event["left"]:
                    pids = ", ".join(map(str, event["left"]))
                    self._output.note(f"host {link.name}: SIGKILL did not end process {pids}")

    def _on_exit(self, link: AgentConnection, rank: int, code: int) -> None:
        link.check_rank(rank)
        if not -128 < code < 256:
            raise ValueError(f"its agent reported exit code {code}, which no process has")
        where = f"rank {rank} on host {link.name}"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
            self._conclude(128 - code, f"{where} was killed by signal {-code} ({name})", True)
        elif code > 0:
            self._conclude(code, f"{where} exited with code {code}", True)
        self._running.discard(rank)
        if not self._running:
            self._conclude(0)

    def _on_text(self, link: AgentConnection, line: bytes) -> None:
        # Before the agent's greeting, the text comes from ssh, and the final message repeats it.
        if link.greeted or self._verbose:
            self._output.host(link.name, line)

    def _on_signal(self) -> None:
        for number in self._wake.take():
            ended = JobOutcome(128 + number, f"ended by {number.name}")
            if self._outcome is None:
                self._conclude(ended.code, ended.message)
            else:
                # A job that has succeeded may still wait for the reader of its output.
                outcome = self._outcome if self._outcome.code else ended
                self._outcome = replace(outcome, restartable=False, lost=frozenset())
                self._output.hurry()
                self._tell_all("kill")
                self._deadline = time.monotonic() + _HURRY_SECONDS

    def _lost_output(self) -> JobOutcome | None:
        error = self._output.stdout.error
        if error is None:
            return None
        if error.errno == errno.EPIPE:
            return JobOutcome(128 + signal.SIGPIPE)
        return JobOutcome(1, f"cannot write to standard output: {error.strerror}")

    def _on_deadline(self) -> None:
        if self._outcome is None:
            silent = [link for link in self._links if link.ready is None]
            self._conclude(1, _describe_delay(self._links, self._job, self._master), False, silent)
            return
        for link in self._links:
            if not link.gone:
                self._output.note(
                    f"host {link.name} did not confirm that its ranks have ended, nor that all of "
                    "their output is here"
                )
                self._lose(link)
                link.kill()

    def _go(self) -> None:
        self._master = _master(self._links)
        if self._verbose:
            self._output.note(
                f"{self._job.size} ranks meet at {self._master[0]}, port {self._master[1]}"
            )
        self._tell_all("go", address=self._master[0], port=self._master[1])

    def _conclude(
        self,
        code: int,
        message: str | None = None,
        restartable: bool = False,
        lost: Sequence[AgentConnection] = (),
    ) -> None:
        """Sets the outcome and ends the job; later calls have no effect."""
        if self._outcome is not None:
            return
        self._outcome = JobOutcome(
            code, message, restartable, frozenset(link.name for link in lost)
        )
        self._deadline = time.monotonic() + _END_SECONDS
        if code:
            self._output.hurry()
        for link in self._links:
            if link.greeted:
                link.send("stop")
            else:
                link.kill()

    def _lose(self, link: AgentConnection) -> None:
        """Adds a host to the lost ones of the outcome, if the job can be restarted.

        The loss of a host may have ended the job even if a rank on another host failed first.
        """
        outcome = self._outcome
        if outcome is not None and outcome.restartable:
            self._outcome = replace(outcome, lost=outcome.lost | {link.name})

    def _tell_all(self, command: str, **fields: Any) -> None:
        for link in self._links:
            link.send(command, **fields)


def _master(links: list[AgentConnection]) -> tuple[str, int]:
    """Returns the address and port at which all agents can reach the first agent's store.

    Without an interface, the address comes from SSH_CONNECTION (client address and port, server
    address and port). That needs no name service, and works for names that only ssh's configuration
    has.
    """
    answers = [link.ready or {} for link in links]
    ssh_words = [(answer["ssh"] or "").split() for answer in answers]
    connections = [words if len(words) == 4 else None for words in ssh_words]
    first = links[0].placement.host
    address = answers[0]["address"]
    if address is None and len(links) == 1:
        address = "127.0.0.1"
    elif address is None and first.local:
        seen_from_others = (connection[0] for connection in connections if connection)
        address = next(seen_from_others, socket.gethostname())
    elif address is None:
        address = connections[0][2] if connections[0] else first.name.rpartition("@")[2]
    return address, answers[0]["port"]


def _describe_loss(link: AgentConnection) -> str:
    """Returns the message for an agent that has ended unexpectedly."""
    said = f": {link.complaint}" if link.complaint else ""
    if link.started:
        return f"lost host {link.name}{said}"
    if not link.greeted and not link.placement.host.local and link.code == 255:
        return f"cannot reach host {link.name} (ssh failed){said}"
    hint = "; is usbyte installed there, for the python of --remote-python?"
    hint = "" if link.greeted or link.placement.host.local else hint
    return f"cannot start the agent on host {link.name} (exit code {link.code}){said}{hint}"


def _describe_delay(links: list[AgentConnection], job: Job, master: tuple[str, int] | None) -> str:
    """Returns the message for agents that have not met in time."""
    late = [link for link in links if not link.started]
    if master is not None:
        problem = f"could not join the others at {master[0]}, port {master[1]}"
        remedy = "name an interface that connects the hosts with --network-interface"
    else:
        late = [link for link in late if link.ready is None]
        problem = "did not answer"
        remedy = "check that ssh gets there without a password"
        if all(link.greeted or link.placement.host.local for link in late):
            problem = "did not get ready (importing torch takes long?)"
            remedy = "check that host"
    names = ", ".join(link.name for link in late)
    subject = f"host {names}" if len(late) == 1 else f"hosts {names}"
    return f"{subject} {problem} within {job.start_timeout:g} s; {remedy} or raise --start-timeout"
