# SPDX-License-Identifier: Apache-2.0
"""`usbyte profile`: runs a training script and records a profile of its iterations."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from usbyte.cli._options import check_writable, write_text
from usbyte.cluster_env import detect

if TYPE_CHECKING:
    from usbyte import _core

# Above this share of a step, even the median of ten ready times errs by about a tenth of the step,
# which is as much as a good plan gains. On an idle machine, spreads stay far below it.
_MOST_SPREAD = 0.25

_EXAMPLES = """\b
Example:
  usbyte profile -o job.json train.py --epochs 1
  usbyte profile -m package.train --epochs 1
  usbyterun -np 4 usbyte profile train.py
  usbyte plan job.json --ring 8,25us,10gbit
"""


@click.command(
    context_settings={
        "show_default": True,
        "max_content_width": 100,
        "allow_interspersed_args": False,
    },
    epilog=_EXAMPLES,
)
@click.option("--steps", type=click.IntRange(1), default=10, help="Optimizer steps to record.")
@click.option("--skip", type=click.IntRange(1), default=3, help="Warm-up steps before them.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="profile.json", help="Output file."
)
@click.option("--name", show_default="the model's class", help="Name of the job.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option(
    "--continue",
    "go_on",
    is_flag=True,
    help="Let the script run to its end. Otherwise it is stopped after the recorded steps.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def profile(
    steps: int,
    skip: int,
    output: Path,
    name: str | None,
    module: bool,
    go_on: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Record a profile of a training script.

    SCRIPT runs unchanged in this process, as python would run it; only torch is imported before
    it. It must train one model with one optimizer. Each step of the optimizer ends an iteration.

    On several ranks, the profile has the times of the slowest rank. A DistributedOptimizer in the
    script records the profile itself, in its first steps and without the waits for the network;
    --steps and --skip then have no effect. DDP and FSDP raise an error. Any other communication
    counts as compute.

    The spread of a ready time is half the distance between its 10th and 90th percentiles over the
    steps. A warning says if it is too large for plans.
    """
    if not module and not Path(script).is_file():
        raise click.ClickException(
            f"there is no script '{script}'; give a Python file, or -m and a module"
        )
    cluster = detect()
    if cluster.rank == 0:
        check_writable(output, inputs=[] if module else [script])
    from usbyte.torch.profiler.api import to_json
    from usbyte.torch.profiler.script_recorder import ScriptRecorder, StopRecording
    from usbyte.torch.world.world import is_initialized

    def finish(result: _core.Profile) -> None:
        if cluster.rank > 0:
            return
        write_text(output, to_json(result))
        click.echo(_summary(result))
        if warning := _unsteady(result, recorder.is_learned):
            click.echo(f"warning: {warning}", err=True)
        if cluster.size > 1 and not is_initialized():
            click.echo("times are those of rank 0: the script has not called ub.init()")
        click.echo(f"wrote {output}" + ("" if go_on else f" and stopped {script}"))

    recorder = ScriptRecorder(skip, steps, name, finish, stop=not go_on)
    with _arguments(script, arguments, module), recorder:
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except StopRecording:
            pass
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise
    if not recorder.finished:
        raise click.ClickException(f"no profile of '{script}': {recorder.missing()}")


@contextmanager
def _arguments(script: str, arguments: tuple[str, ...], module: bool) -> Iterator[None]:
    """Sets sys.argv and the first entry of sys.path for a script, inside the `with`."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path.cwd() if module else Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def _summary(job: _core.Profile) -> str:
    """Returns a short text about a profile."""
    first, last = min(job.ready_s), max(job.ready_s)
    return (
        f"{job.model}: {job.bytes / 1e6:.1f} MB of gradients in {len(job.tensors)} tensors\n"
        f"step {_ms(job.step_s)}: forward {_ms(first)} until the first gradient is ready, "
        f"backward {_ms(last - first)} until the last, update {_ms(job.update_s)}\n"
        f"spread of ready times: {_ms(_middle_spread_s(job))} in the middle, "
        f"{_ms(max(job.ready_spread_s, default=0.0))} at most"
    )


def _unsteady(job: _core.Profile, is_learned: bool) -> str:
    """Returns what is wrong with a profile of unsteady times and the remedy, or "".

    Args:
        job: The profile.
        is_learned: Whether a DistributedOptimizer has measured it, in its learning steps.
    """
    middle_s = _middle_spread_s(job)
    if middle_s <= _MOST_SPREAD * job.step_s:
        return ""
    longer = "USBYTE_LEARNING_STEPS=50" if is_learned else "--steps 50 --skip 10"
    return (
        f"ready times vary by {_ms(middle_s)} from step to step, and a step takes "
        f"{_ms(job.step_s)}: plans for this profile would follow noise. End other work on this "
        "machine, let its processes have no more threads than cores (OMP_NUM_THREADS), and record "
        f"again, over more steps: {longer}"
    )


def _middle_spread_s(job: _core.Profile) -> float:
    spread_s = sorted(job.ready_spread_s)
    return spread_s[len(spread_s) // 2] if spread_s else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
