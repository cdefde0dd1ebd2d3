"""The agent: starts the ranks of one host, passes on what they print, ends them.

`python -m usbyte.launch.agent` is started by the launcher, here or over ssh; stdin and stdout speak
`wire`. Two threads share the work. The main thread starts the ranks and waits for them; some of
its calls into torch cannot be interrupted. The control thread hears the launcher and signals, and
alone ends everything, whatever the main thread is doing.
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
    """One host's part of the job.

    Args:
        spec: What to start.
        channel: The way to the launcher.
        wake: Wakes the control thread.
    """

    def __init__(self, spec: AgentSpec, channel: Channel, wake: process_tree.SignalWake) -> None:
        self._spec = spec
        self._channel = channel
        self._wake = wake
        self._pump = Pump(channel)
        self._master: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._ending = False

    def run(self) -> NoReturn:
        """Runs the ranks; ends with the process."""
        threading.Thread(target=self._control, daemon=True).start()
        try:
            self._start()
        except Exception as error:
            self._channel.event("error", message=_one_line(error))
        self._park()

    def _start(self) -> None:
        spec = self._spec
        _enter(spec)
        allow_open_files(spec.size)  # the store's connections to all ranks, for one
        # The environment is complete only now, and torch takes a second or two.
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

        def watch(ranks: dict[int, int]) -> NoReturn:
            self._pump.start(pipes.ends)
            self._watch(ranks)

        master = self._master.get()
        _check_reachable(master, spec)
        torch_elastic.ElasticAgent(spec, master, pipes, watch).run()

    def _watch(self, ranks: dict[int, int]) -> NoReturn:
        """Reports how each rank ends; reaps adopted orphans, as init would."""
        self._wake.handle()  # torch has replaced the handlers
        self._channel.event("started")
        while True:
            try:
                pid, status = os.wait()
            except ChildProcessError:
                self._park()
            rank = ranks.pop(pid, None)
            if rank is None or self._ending:
                continue
            code = os.waitstatus_to_exitcode(status)
            self._channel.event("exit", rank=rank, code=code)
            if code:
                # The launcher will say so too, but perhaps late.
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
        """Leaves the rest to the control thread."""
        while True:
            threading.Event().wait()


def _enter(spec: AgentSpec) -> None:
    """Gives this process the directory and the environment that the ranks inherit."""
    try:
        os.chdir(spec.cwd)
    except OSError as error:
        raise ValueError(
            f"cannot enter the working directory {spec.cwd}: {error.strerror}; make it there, or "
            "start usbyterun from a directory that all hosts have"
        ) from error
    os.environ["PWD"] = spec.cwd
    # A login over ssh has not activated the virtual environment that this python is in, and who
    # runs usbyterun by its path has not either.
    own = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    os.environ.update(spec.env)
    # With it, torch would take all hosts to have equally many ranks.
    os.environ.pop("TORCH_ELASTIC_WORKER_IDENTICAL", None)
    if spec.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does


def _check_reachable(master: tuple[str, int], spec: AgentSpec) -> None:
    """Finds out by itself what torch would only tell after its timeout, and less clearly."""
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
        sys.exit()  # the launcher has gone already
    try:
        spec = AgentSpec.decode(line)
    except ValueError as error:
        sys.exit(f"usbyte.launch.agent: {error}")
    if spec.remote:
        process_tree.guard()  # for local agents the launcher does it
    process_tree.adopt_orphans()
    wake = process_tree.SignalWake(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    Agent(spec, channel, wake).run()


if __name__ == "__main__":
    main()
