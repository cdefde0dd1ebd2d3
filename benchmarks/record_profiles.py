# SPDX-License-Identifier: Apache-2.0
"""Records the profiles that usbyte comes with, on this machine's CPU.

    python benchmarks/record_profiles.py --steps 6 vgg16 resnet50 bert-base gpt2

Inputs are random; what is measured is when gradients are ready and parameters needed.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.nn.functional as F

import usbyte.torch as ub
from _models import JOBS
from usbyte.torch.profiler.api import to_json

_FOLDER = Path(__file__).parents[1] / "python" / "usbyte" / "planning" / "recorded"


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, required=True, type=click.Choice(list(JOBS)))
@click.option("--steps", default=10, help="Steps to record, after two of warm-up.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), default=_FOLDER)
def main(names: tuple[str, ...], steps: int, folder: Path) -> None:
    """Record the jobs of these NAMES."""
    for name in names:
        job = JOBS[name]
        torch.manual_seed(0)
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        inputs, targets = job.sample(model)
        with ub.profile(model, optimizer, steps=steps, skip=2, name=name) as recording:
            while not recording.done:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        profile = recording.result()
        circumstances = {"batch": job.batch} | ({"tokens": job.tokens} if job.tokens else {})
        text = to_json(profile, steps=steps, optimizer=type(optimizer).__name__, **circumstances)
        (folder / f"{name}.json").write_text(text)
        elements = sum(tensor.numel for tensor in profile.tensors)
        click.echo(f"{name}: {elements} parameters, step {profile.iteration_s:.3f} s")


if __name__ == "__main__":
    main()
