# SPDX-License-Identifier: Apache-2.0
"""The agent: starts the ranks of one host, forwards their output, and ends them.

The launcher starts `python -m usbyte.launch.agent` on each host, directly or over ssh, and talks to
it through stdin and stdout; `usbyte.launch.protocol` defines the messages. The agent has two
threads. The main thread starts the ranks and waits for them; some of its calls into torch cannot be
interrupted. The control thread receives commands and signals. It alone ends the processes and the
agent, in any state of the main thread.
"""

import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

from usbyte._util.fd_limit import allow_open_files
from usbyte.launch import process_tree
from usbyte.launch.agent_channel import Channel, Pump
from usbyte.launch.protocol import AgentSpec

GRACE_SECONDS = 4.0
_CONNECT_SECONDS = 5.0


class Agent:
    """Runs the ranks of one host.

    Args:
        spec: The ranks to start, and how.
        channel: The connection to the launcher.
        wake: Signals of this process; they wake the control thread.
    """

    def __init__(self, spec: AgentSpec, channel: Channel, wake: process_tree.SignalWake) -> None:
        self._spec = spec
        self._channel = channel
        self._wake = wake
        self._pump = Pump(channel)
        self._master: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._ending = False

    def run(self) -> NoReturn:
        """Runs the ranks; never returns, as the control thread ends the process."""
        threading.Thread(target=self._control, daemon=True).start()
        try:
            self._start()
        except Exception as error:
            self._channel.event("error", message=_one_line(error))
        self._park()

    def _start(self) -> None:
        spec = self._spec
        _enter(spec)
        allow_open_files(spec.size)  # For example, the store has connections to all ranks.
        # Imported here: the environment is complete only now, and the import takes seconds.
        from usbyte.launch import torch_elastic

        address = torch_elastic.interface_address(spec.interface) if spec.interface else None
        store = None
        if spec.node == 0:
            own = "127.0.0.1" if spec.nodes == 1 else ""
            token = spec.env["USBYTE_JOB_TOKEN"]
            store = torch_elastic.serve_store(spec.start_timeout, address or own, token)
        self._channel.event(
            "ready",
            port=store.port if store else None,
            address=address,
            ssh=os.environ.get("SSH_CONNECTION") if spec.remote else None,
        )
        pipes = torch_elastic.Pipes((spec.restarts, spec.max_restarts))

        def on_started(ranks: dict[int, int]) -> NoReturn:
            self._pump.start(pipes.ends)
            self._report_exits(ranks)

        master = self._master.get()
        _check_reachable(master, spec)
        torch_elastic.ElasticAgent(spec, master, pipes, on_started).run()

    def _report_exits(self, ranks: dict[int, int]) -> NoReturn:
        """Reports the exit code of each rank, and reaps adopted orphans.

        Args:
            ranks: Global rank of each process id.
        """
        self._wake.handle()  # torch has replaced the handlers.
        self._channel.event("started")
        order = process_tree.ExitOrder(ranks)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                self._park()
            assert ended is not None
            for pid in [pid for pid in order.take() if pid in ranks] or [ended.si_pid]:
                _, status = os.waitpid(pid, 0)
                self._report_exit(ranks.pop(pid, None), status)

    def _report_exit(self, rank: int | None, status: int) -> None:
        if rank is None or self._ending:
            return
        code = os.waitstatus_to_exitcode(status)
        self._channel.event("exit", rank=rank, code=code)
        if code:
            # Ends the other ranks at once; the launcher's command for that may come late.
            self._wake.poke()

    def _control(self) -> NoReturn:
        while True:
            command = self._channel.next_command(self._wake.fd)
            if command.get("command") != "go":
                break
            self._master.put((command["address"], command["port"]))
        self._ending = True
        self._channel.close()
        for number in self._wake.take():
            self._channel.event("error", message=f"the agent was sent {number.name}")
        left = process_tree.end_descendants(GRACE_SECONDS, self._told_to_hurry)
        self._pump.finish()
        self._channel.event("end", left=left)
        os._exit(0)

    def _told_to_hurry(self) -> bool:
        return self._channel.next_command(timeout=0).get("command") == "kill"

    def _park(self) -> NoReturn:
        """Blocks the main thread until the control thread ends the process."""
        while True:
            threading.Event().wait()


def _enter(spec: AgentSpec) -> None:
    """Sets the working directory and the environment of this process, which the ranks inherit."""
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        raise ValueError(
            f"cannot enter the working directory {spec.cwd}: {error.strerror}; make it there, or "
            "start usbyterun from a directory that all hosts have"
        ) from error
    os.environ["PWD"] = spec.cwd
    # The virtual environment of this python may not be activated: ssh does not activate it, nor
    # does a user who runs usbyterun by its path.
    own = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    os.environ.update(spec.env)
    # If this is set, torch assumes the same number of ranks on every host.
    os.environ.pop("TORCH_ELASTIC_WORKER_IDENTICAL", None)
    if spec.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # As torchrun does.


def _check_reachable(master: tuple[str, int], spec: AgentSpec) -> None:
    """Raises ValueError if this host cannot connect to the store.

    torch would report this only after its timeout, and less clearly.
    """
    try:
        timeout = min(_CONNECT_SECONDS, spec.start_timeout / 2)
        socket.create_connection(master, timeout=timeout).close()
    except OSError as error:
        raise ValueError(
            f"cannot reach the first host at {master[0]}, port {master[1]} ({error}); name the "
            "interface that connects the hosts with --network-interface, or open the firewall"
        ) from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)


def main() -> NoReturn:
    """Entry point of the agent process."""
    channel = Channel.over_stdio()
    line = channel.read_line()
    if not line:
        sys.exit()  # The launcher is gone already.
    try:
        spec = AgentSpec.decode(line)
    except ValueError as error:
        sys.exit(f"usbyte.launch.agent: {error}")
    if spec.remote:
        process_tree.guard()  # Below a local agent, the launcher does the clean-up.
    process_tree.adopt_orphans()
    wake = process_tree.SignalWake(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    Agent(spec, channel, wake).run()


if __name__ == "__main__":
    main()
