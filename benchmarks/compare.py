# SPDX-License-Identifier: Apache-2.0
"""Step times of a replayed job under usbyte's policies, PyTorch DDP, FSDP2 and Horovod.

Run it on every rank, on this host or on the emulated cluster of `usbyte lab`:

    usbyterun -np 2 python benchmarks/compare.py --profile vgg16-half --scale-time 0.2
    usbyte lab run -- python benchmarks/compare.py --profile vgg16-half

All contenders run in one process group, in turns, round after round. Compute is sleep, see
`usbyte.lab.replay`; gradients are real, and what they add up to is checked after every turn. Where
all machines have counters of energy that can be read (see `_energy`), a column tells what a step
takes, idling included.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

import usbyte.torch as ub
from _comparison import Comparison, Result
from _contenders import OTHERS, training, unavailable
from _energy import Meter
from usbyte import _core
from usbyte.cli._options import (
    Parsed,
    all_policy_specs,
    listed,
    network_options,
    parse_policy_spec,
    read_network,
    scale_options,
    write_text,
)
from usbyte.lab.replay import Replay
from usbyte.planning import profiles

_SETTLING = 2  # steps of a plan that stays: at first it pays for fresh memory


def run(
    names: list[str],
    comparison: Comparison,
    rounds: int,
    warmup: int,
    steps: int,
    folder: Path | None,
) -> None:
    """Lets all contenders take their turns, every other round backwards.

    Args:
        names: Of the contenders.
        comparison: Where the results go.
        rounds: Turns of each contender.
        warmup: Steps at the beginning of a turn that are not measured.
        steps: Measured steps of a turn.
        folder: Where plans and traces go.
    """
    meter = Meter()
    comparison.energy = meter.what
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            result = comparison.results[name]
            with training(name, comparison.profile) as (step, optimizer):
                for _ in range(warmup):
                    step()
                if not getattr(optimizer, "settled", True):
                    while not optimizer.settled:
                        step()
                    for _ in range(_SETTLING):
                        step()
                decision = getattr(optimizer, "decision", None)
                if decision is not None:
                    result.foreseen_s.append(decision.predicted_s)
                    # What was measured here and now wins over what the user has given.
                    comparison.network = decision.network
                    if folder:
                        _record(folder / name.replace(":", "-"), decision)
                before_j = meter.joules()
                dist.barrier()
                last = time.perf_counter()
                for _ in range(steps):
                    step()
                    now = time.perf_counter()
                    result.step_s.append(now - last)
                    last = now
                after_j = meter.joules()
                if before_j is not None and after_j is not None and steps:
                    result.step_j.append((after_j - before_j) / steps)
            if folder:
                ub.stop_timeline()


def _record(stem: Path, decision: Any) -> None:
    """Writes what the ranks have agreed on, and begins a trace."""
    for what in ("plan", "profile", "network"):
        write_text(stem.with_suffix(f".{what}.json"), getattr(decision, what).to_json())
    ub.start_timeline(str(stem.with_suffix(".trace.json")))


def _policy_spec(text: str) -> str:
    mode, _, policy = text.strip().partition(":")
    if mode == "auto" and policy:  # what the simulator cannot know: the job chooses its overlap
        return f"auto:{parse_policy_spec(policy).policy}"
    return str(parse_policy_spec(text))


def _other(text: str) -> str:
    if text not in OTHERS:
        raise ValueError(f"{text!r} is none of {', '.join(OTHERS)}")
    return text


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--profile",
    "source",
    default=profiles.MADE_UP[0],
    metavar="FILE|NAME",
    help="What to replay: usbyte's JSON, a published trace, or "
    f"{', '.join((*profiles.MADE_UP, *profiles.RECORDED))}.",
)
@scale_options
@click.option(
    "--policies",
    type=Parsed("list", listed(_policy_spec)),
    show_default="all but tuned ones in forward overlap, and backward:ddp",
    help="POLICY (in forward overlap), OVERLAP:POLICY (forward, backward, or auto: what the job "
    "chooses), or sharded:POLICY for a sharded optimizer, separated by commas.",
)
@click.option(
    "--ddp-buckets",
    type=Parsed("list", listed(float)),
    default="5,25,100",
    help="Bucket sizes of PyTorch DDP, MiB.",
)
@click.option(
    "--others",
    type=Parsed("list", listed(_other)),
    default=",".join(OTHERS),
    help="Other contenders; those that cannot run are left out.",
)
@click.option("--rounds", default=3, help="How often each contender has its turn.")
@click.option("--steps", default=6, help="Measured steps of each turn.")
@click.option(
    "--warmup",
    default=8,
    help="Steps before, which include usbyte's learning; trials of plans come on top.",
)
@network_options
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Also write plans, profiles, networks and rank 0's traces, for `usbyte report`; takes "
    "some time of the steps.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON.")
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Also write a Markdown table; with -, print it in place of the other one.",
)
def main(
    source: str, scale_time: float, scale_bytes: float, policies: list[str] | None,
    ddp_buckets: list[float], others: list[str], rounds: int, steps: int, warmup: int,
    network_path: Path | None, ring: _core.NetworkModel | None,
    save: Path | None, json_path: Path | None, markdown: Path | None,
) -> None:  # fmt: skip
    """Compare step times of a replayed job; to be started on every rank."""
    profile = profiles.scaled(profiles.load(source), scale_time, scale_bytes)
    network = read_network(network_path) if network_path else ring
    ub.init()
    skipped = {}
    for name in others:
        reason = unavailable(name)
        if ub.allreduce(torch.tensor(bool(reason)).int(), op=ub.Max):
            skipped[name] = reason or "cannot run on all hosts"
    names = [name for name in others if name not in skipped]
    names += [f"ddp:{bucket:g}" for bucket in ddp_buckets]
    names += policies or [str(spec) for spec in all_policy_specs()]
    # Where the profile contradicts itself this is what is really replayed.
    replayed = Replay(profile).profile
    comparison = Comparison(replayed, {name: Result() for name in names}, skipped, network)
    folder = save if ub.rank() == 0 else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    run(names, comparison, rounds, warmup, steps, folder)
    if ub.rank() == 0:
        printed = markdown == Path("-")
        if printed:
            click.echo(comparison.to_markdown())
        else:
            comparison.show()
        if json_path:
            write_text(json_path, comparison.to_json())
        if markdown and not printed:
            write_text(markdown, comparison.to_markdown())
    ub.shutdown()


if __name__ == "__main__":
    main()
