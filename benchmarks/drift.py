# SPDX-License-Identifier: Apache-2.0
"""A network that changes under a running job: when usbyte plans anew, and what that is worth.

Run it on every rank of the emulated cluster of `usbyte lab`:

    usbyte lab up --hosts 4 --rate 1gbit
    usbyte lab run -- python benchmarks/drift.py --profile resnet50 --scale-time 0.43 \
        --scale-bytes 0.15 --from 1gbit --rate 200mbit

Every host shapes its own link, at first and anew in the middle of the run. Compute is sleep, see
`usbyte.lab.replay`; gradients are real, and what they add up to is checked at the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import click

import usbyte.torch as ub
from _contenders import training
from usbyte._core import Profile
from usbyte._util import units
from usbyte.cli._options import Parsed, PolicySpec, parse_policy_spec, scale_options
from usbyte.lab import shaping
from usbyte.planning import profiles


@dataclass
class Phase:
    """Steps under one plan, or all plans on trial, on one network."""

    network: str
    plan: str
    seconds: list[float]


def run(
    spec: str, job: Profile, rates: tuple[float, float], before: int, after: int
) -> list[Phase]:
    """Trains, and changes the network once `before` steps were made by the first plan that stayed.

    Args:
        spec: As in `compare.py`, for example "forward:auto".
        job: What is replayed.
        rates: Of the links before and after the change, bytes/s.
        before: Steps under that plan.
        after: Steps after the change.
    """
    phases: list[Phase] = []
    shaping.shape_own_link(rates[0])
    ub.barrier()
    with training(spec, job) as (step, optimizer):

        def go_on(network: str) -> None:
            plan = optimizer.plan.policy
            if optimizer.decision and optimizer.decision.trial_steps:
                plan += ", on trial"
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
            if not phases or (phases[-1].network, phases[-1].plan) != (network, plan):
                phases.append(Phase(network, plan, []))
            phases[-1].seconds.append(seconds)

        while not optimizer.settled:
            go_on("before")
        for _ in range(before):
            go_on("before")
        ub.barrier()
        shaping.shape_own_link(rates[1])
        for _ in range(after):
            go_on("after")
    return phases


@click.command(context_settings={"show_default": True})
@click.option("--profile", metavar="FILE|NAME", default=profiles.MADE_UP[0], help="What to replay.")
@scale_options
@click.option(
    "--from", "from_rate", type=Parsed("rate", units.parse_rate), default="1gbit",
    help="Of each link before the change, and when all is over.",
)  # fmt: skip
@click.option(
    "--rate", type=Parsed("rate", units.parse_rate), default="200mbit",
    help="Of each link after the change.",
)  # fmt: skip
@click.option("--spec", type=Parsed("spec", parse_policy_spec), default="forward:auto",
    help="POLICY, OVERLAP:POLICY, or sharded:POLICY.",
)  # fmt: skip
@click.option(
    "--before", type=click.IntRange(1), default=20, help="Steps before the change, trials over."
)
@click.option("--after", type=click.IntRange(1), default=150, help="Steps after the change.")
def main(
    profile: str, scale_time: float, scale_bytes: float, from_rate: float, rate: float,
    spec: PolicySpec, before: int, after: int,
) -> None:  # fmt: skip
    """Change the network under a replayed job; to be started on every rank of a lab."""
    job = profiles.scaled(profiles.load(profile), scale_time, scale_bytes)
    ub.init()
    if ub.size() == 1:
        raise click.ClickException("a single rank needs no network; start it by `usbyte lab run`")
    try:
        phases = run(str(spec), job, (from_rate, rate), before, after)
    finally:
        shaping.shape_own_link(from_rate)
    if ub.rank() == 0:
        click.echo("| network | plan | steps | median s | min | max |\n|---|---|---|---|---|---|")
        for p in phases:
            click.echo(
                f"| {p.network} | {p.plan} | {len(p.seconds)} | {median(p.seconds):.3f} "
                f"| {min(p.seconds):.3f} | {max(p.seconds):.3f} |"
            )
    ub.shutdown()


if __name__ == "__main__":
    main()
