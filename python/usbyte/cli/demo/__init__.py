# SPDX-License-Identifier: Apache-2.0
"""`usbyte demo`: trains under DDP and usbyte over a slow network that this machine emulates."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from usbyte._util import units
from usbyte.cli._options import check_writable

if TYPE_CHECKING:
    from rich.console import RenderableType

_READY = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 140000 limit 4000000"
_START = 'ip link set lo up && exec "$@"'
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("usbyte-demo.svg"),
    help="Where to draw a step of DDP above one of usbyte: .svg, .png, .html (matplotlib).",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=4, help="Turns of each contender.")
@click.option("--steps", type=click.IntRange(1), default=8, help="Steps of a turn.")
def demo(output: Path, rounds: int, steps: int) -> None:
    """Train on this machine, and see what usbyte gains over DDP.

    Two ranks train a small GPT on the source of Python's standard library: under DDP with two
    bucket sizes and under usbyte, in turns, with the same batches. Their loopback network, which no
    other program sees, is slowed down until communication takes 1.2 times as long as compute. That
    needs no root where users may make network namespaces. It takes one to three minutes.
    """
    check_writable(output, inputs=[])
    draws = importlib.util.find_spec("matplotlib") is not None
    if draws:
        from usbyte.cli import _figures

        _figures.check_format(output)
    reason = unshapable()
    if reason:
        click.echo(f"The network is not slowed down, so expect no gain: {reason}.", err=True)
    run = _Run(rounds)
    _watch(run, _messages(rounds, steps, shaped=not reason))
    click.echo(run.summary())
    if draws:
        _draw(run, output)
        click.echo(f"A step of each, predicted from what was measured: {output}")
    else:
        click.echo("For a picture of a step: pip install 'usbyte[plot]'")


def unshapable() -> str:
    """Returns why this process cannot make a slow network; "" if it can."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool, path=_path()) is None:
            return f"the command '{tool}' is missing; install {package}"
    command = [*_namespace(), "sh", "-c", _READY]
    env = os.environ | {"PATH": _path()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    remedy = "try it as root"
    if os.geteuid() == 0:
        remedy = "in a container, add the capabilities SYS_ADMIN and NET_ADMIN"
    return f"the system does not allow a network namespace ({lines[-1]}); {remedy}"


def _path() -> str:
    """Returns PATH with the folders of `tc`, which Debian's users do not have in it."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _namespace() -> list[str]:
    if os.geteuid() == 0:
        return ["unshare", "--net"]
    return ["unshare", "--user", "--map-root-user", "--net"]


class _Run:
    """What the ranks have told so far.

    Args:
        rounds: Turns that each contender will have.
    """

    def __init__(self, rounds: int) -> None:
        self.setup: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.phase = "starting two ranks"
        self.steps_s: dict[str, list[float]] = {}
        self.losses: dict[str, float] = {}
        self._rounds = rounds

    def take(self, message: Mapping[str, Any]) -> None:
        """Takes in a message of rank 0, as in `usbyte.cli.demo.worker`."""
        kind = message["kind"]
        if kind == "setup":
            self.setup = message
            self.phase = "usbyte learns, as in the first steps of each job"
        elif kind == "warmup":
            purpose = "measures and plans" if message["name"] == "usbyte" else "catches up"
            self.phase = f"{message['name']} {purpose}, step {message['steps']}"
        elif kind == "block":
            self.steps_s.setdefault(message["name"], []).append(message["step_s"])
            self.losses[message["name"]] = message["loss"]
            self.phase = f"turn {message['round'] + 1} of {self._rounds}"
        else:
            self.end = message

    def medians(self) -> dict[str, float]:
        """Returns the median seconds a step of each contender that had a turn."""
        return {name: statistics.median(times) for name, times in self.steps_s.items()}

    def table(self) -> RenderableType:
        """Returns what a person sees meanwhile."""
        from rich.table import Table

        title = self.phase
        if self.setup:
            rate = self.setup["bytes_per_s"]
            link = f"at {rate * 8e-6:.0f} Mb/s" if rate else "over the loopback"
            title = f"GPT, {self.setup['parameters'] / 1e6:.1f} M parameters, 2 ranks {link}"
        table = Table(title=title, caption=None if self.end else self.phase)
        for column in ("", "ms a step", "", "loss"):
            table.add_column(column, justify="left" if not column else "right")
        medians = self.medians()
        for name, step_s in medians.items():
            bar = "█" * round(30 * step_s / max(medians.values()))
            table.add_row(name, f"{step_s * 1e3:.1f}", bar, f"{self.losses[name]:.6f}")
        return table

    def summary(self) -> str:
        """Returns the result in words."""
        medians = self.medians()
        usbyte_s = medians.pop("usbyte")
        best = min(medians, key=medians.__getitem__)
        lines = [
            f"usbyte's step is {ratio:.2f} times as fast as that of {name}."
            for name, ratio in ((name, step_s / usbyte_s) for name, step_s in medians.items())
        ]
        if medians[best] < usbyte_s:
            why = "" if self.setup["bytes_per_s"] else ", as the network is not slowed down"
            lines.append(f"Here it does not pay{why}.")
        if len(set(self.losses.values())) == 1:
            lines.append(f"After {self.end['steps']} steps all losses are equal, to the last bit.")
        else:
            lines.append(f"Losses differ: {self.losses}. Please report this.")
        return "\n".join(lines)


def _messages(rounds: int, steps: int, shaped: bool) -> Iterator[Mapping[str, Any]]:
    worker = [sys.executable, "-m", "usbyte.cli.demo.worker"]
    worker += ["shaped" if shaped else "as-is", str(rounds), str(steps)]
    command = [sys.executable, "-m", "usbyte.launch", "-np", "2", *worker]
    if shaped:
        command = [*_namespace(), "sh", "-c", _START, "sh", *command]
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", "PATH": _path(),
    }  # fmt: skip
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _, found, text = line.partition('[0] {"kind"')
                if found:
                    yield json.loads('{"kind"' + text)
                else:
                    said.append(line)
        finally:
            process.terminate()
    if process.returncode != 0:
        raise click.ClickException("the ranks failed:\n" + "".join(said[-40:]))


def _watch(run: _Run, messages: Iterator[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for message in messages:
            before = run.phase
            run.take(message)
            if message["kind"] in ("setup", "block") and run.phase != before:
                click.echo(run.phase)
    else:
        with Live(run.table(), console=console, auto_refresh=False, transient=True) as live:
            for message in messages:
                run.take(message)
                live.update(run.table(), refresh=True)
    console.print(run.table())


def _draw(run: _Run, output: Path) -> None:
    from usbyte import _core
    from usbyte.cli import _figures
    from usbyte.planning.whatif import best_ddp
    from usbyte.report import picture
    from usbyte.report.scene import Scene

    job = _core.Profile.from_json(run.end["profile"])
    network = _core.NetworkModel.from_json(run.end["network"])
    plan = _core.Plan.from_json(run.end["plan"])
    ddp, _ = best_ddp(job, network)
    scenes = (
        Scene.predicted(ddp, job, network, "backward"),
        Scene.predicted(plan, job, network, run.end["overlap"]),
    )
    _figures.save(picture.comparison(*scenes, f"usbyte demo, predicted; {_measured(run)}"), output)


def _measured(run: _Run) -> str:
    times = [f"{name} {units.format_seconds(s)}" for name, s in run.medians().items()]
    return "measured: " + "; ".join(times)
