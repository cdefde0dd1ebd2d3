# SPDX-License-Identifier: Apache-2.0
"""usbyte against PyTorch DDP on models that really compute, over shaped links, on one machine.

    python benchmarks/gpu_training.py --json training.json

ResNet-50, BERT-base and GPT-2 of their published shapes train on random data, the forward pass by
autocast in bfloat16, gradients of float32. Each rank is in a network namespace of its own (see
`usbyte lab`; needs root), joined by links of the given rates; where that cannot be, ranks talk over
loopback, unshaped. Ranks may share a GPU: then compute takes as many times as long, for all
contenders alike, and backend gloo is taken, since NCCL's kernels would wait for the network on the
GPU, at the cost of the other rank's compute. All contenders of a model run in one process group,
on the same backend, in turns.

`--device cpu --models tiny --rates ""` tries the benchmark itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from _gpu_models import GPU_JOBS
from usbyte._util.units import parse_rate
from usbyte.errors import UsageError
from usbyte.lab import netns
from usbyte.lab.system_commands import unusable

_RANK = Path(__file__).with_name("_gpu_rank.py")
_LOOPBACK = "loopback, unshaped"
_STARTUP_S = 25.0  # of ranks, before they look at the time
_TEARDOWN_S = 20.0  # of ranks, from their deadline on: a probe may have to end
_WORTH_S = 80.0  # a launch with less shows too little: rather one network than two halves
_COLUMNS = {
    "network": "rate of each rank's link in each direction",
    "contender": "alone: no communication; ddp:N: PyTorch DDP with buckets of N MiB; "
    "OVERLAP:POLICY: usbyte",
    "median": "seconds of a step: of a turn of steps, over their number; median over turns",
    "least, most": "over turns",
    "against ddp": "how many times as fast as the best of DDP's bucket sizes",
    "predicted, bound": "what usbyte's simulator says of its plan, and the least time of a step "
    "whatever the plan, both from the network and the profile measured in the job; updates are in "
    "neither",
    "operations": "collectives of usbyte's plan",
}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextmanager
def _lab(rate: str, hosts: int) -> Iterator[list[str]]:
    """A lab of this process; yields the words before a command that run it on every host.

    Raises:
        UsageError: It cannot be had here.
    """
    lab = netns.Lab(f"gpu{os.getpid() % 100000}")
    lab.up(hosts, parse_rate(rate))
    code = f"import sys; from usbyte.lab.netns import Lab; Lab({lab.name!r}).run(sys.argv[1:])"
    try:
        yield [sys.executable, "-c", code]
    finally:
        lab.down(kill=True)


@contextmanager
def _loopback(hosts: int) -> Iterator[list[str]]:
    yield [sys.executable, "-m", "usbyte.launch", "-np", str(hosts)]


def _run(words: list[str], spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What rank 0 has found, by model; "error" is among them if the ranks failed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        spec = spec | {"results": str(results)}
        env = os.environ | {"USBYTE_BACKEND": spec["backend"], "NCCL_IB_DISABLE": "1"}
        if spec["network"] == _LOOPBACK:
            env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        known = [str(Path(netns.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, known))
        command = [*words, sys.executable, str(_RANK), json.dumps(spec)]
        with subprocess.Popen(command, env=env) as ranks:
            try:
                code = ranks.wait(limit_s)
                error = "" if code == 0 else f"exit code {code}; the ranks have said why"
            except subprocess.TimeoutExpired:
                error = f"not over after {limit_s:.0f} s"
            finally:
                ranks.terminate()  # the launcher ends its ranks
        found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
        return found | ({"error": error} if error else {})


class _Findings:
    """What goes into the JSON.

    Args:
        about: Circumstances, by name.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.failed = False
        self._about = about
        self._rows: list[dict[str, Any]] = []
        self._skipped: dict[str, str] = {}
        self._details: dict[str, Any] = {}
        self._notes: list[str] = []

    def skip(self, what: str, why: str) -> None:
        """Something that cannot be measured here, or not in time."""
        self._skipped[what] = why
        click.echo(f"{what}: not run: {why}")

    def add(self, network: str, found: dict[str, Any]) -> None:
        """The results of one launch."""
        if error := found.pop("error", ""):
            self.failed = True
            self._notes.append(f"{network}: the ranks failed: {error}")
            click.echo(self._notes[-1])
        for model, result in found.items():
            if why := result.get("skipped"):
                self.skip(f"{model}, {network}", why)
                continue
            rows = result.pop("rows")
            self._rows += rows
            self._details[f"{model}, {network}"] = result
            if result["wrong"]:
                self.failed = True
                names = ", ".join(result["wrong"])
                self._notes.append(f"{model}, {network}: ranks ended apart under {names}")
            for name in result["planning_anew"]:
                self._notes.append(f"{model}, {network}: {name} planned anew while measured")
            for row in rows:
                ratio = f"{row['against_ddp']:.2f}x" if row["against_ddp"] else ""
                low, middle, high = (row[f"{k}_s"] * 1e3 for k in ("least", "median", "most"))
                click.echo(
                    f"{network:18} {model:10} {row['contender']:14} {middle:9.2f} ms "
                    f"({low:.2f} to {high:.2f}) {ratio}"
                )

    def to_json(self) -> str:
        """Everything."""
        root = {"benchmark": "training", **self._about, "columns": _COLUMNS, "notes": self._notes}
        root |= {"rows": self._rows, "skipped": self._skipped, "details": self._details}
        return json.dumps(root, indent=1) + "\n"


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option("--models", default="resnet50,gpt2,bert-base", help="Separated by commas.")
@click.option("--rates", default="10gbit,25gbit", help="Of the links; empty for loopback only.")
@click.option("--hosts", default=2, help="Ranks, each on a host of its own.")
@click.option(
    "--contenders", default="alone,ddp:1,ddp:5,ddp:25,backward:auto,forward:auto,auto:auto"
)
@click.option("--rounds", default=5, help="Turns of each contender.")
@click.option("--steps", default=10, help="Steps of a turn.")
@click.option("--warmup", default=5, help="Steps before; usbyte's learning and trials come on top.")
@click.option("--tune-steps", type=int, help="Steps of each trial of a plan; else the product's.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--backend", type=click.Choice(["auto", "nccl", "gloo"]), default="auto",
              help="auto: NCCL if each rank has a GPU of its own.")  # fmt: skip
@click.option("--budget", default=1800.0, help="Seconds; what does not fit is left out.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON.")
def main(
    models: str, rates: str, hosts: int, contenders: str, rounds: int, steps: int, warmup: int,
    tune_steps: int | None, device: str, backend: str, budget: float, json_path: Path | None,
) -> None:  # fmt: skip
    """Compare step times of models that really compute."""
    # The lab must not outlive this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + budget - 10.0  # to end in
    for name in _names(models):
        if name not in GPU_JOBS:
            raise click.UsageError(f"no model '{name}'; there are {', '.join(GPU_JOBS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no GPU; try --device cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if backend == "auto":
        backend = "nccl" if gpus >= hosts else "gloo"
    spec: dict[str, Any] = {
        "models": _names(models), "contenders": _names(contenders), "rounds": rounds,
        "steps": steps, "warmup": warmup, "tune_steps": tune_steps, "device": device,
        "backend": backend,
    }  # fmt: skip
    about = {
        "ranks": hosts, "device": device, "GPUs": gpus, "backend": backend,
        "torch": torch.__version__, "steps_of_a_turn": steps, "tune_steps": tune_steps,
    }  # fmt: skip
    findings = _Findings(about)
    networks = _names(rates)
    if networks and (why := unusable()):
        findings.skip("shaped links", why)
        networks = []
    for i, network in enumerate(networks or [_LOOPBACK]):
        left = deadline - time.monotonic()
        share = left / max(len(networks) - i, 1)
        share = share if share >= _WORTH_S else min(left, _WORTH_S)
        if share < 2 * _STARTUP_S and device == "cuda":
            findings.skip(network, f"{left:.0f} s were left")
            continue
        limit_s = max(share, 2 * _STARTUP_S)
        spec |= {"network": network, "deadline": time.monotonic() + share - _TEARDOWN_S}
        try:
            with _lab(network, hosts) if network != _LOOPBACK else _loopback(hosts) as words:
                findings.add(network, _run(words, spec, limit_s))
        except UsageError as error:
            findings.skip(network, str(error))
            if _LOOPBACK not in networks:
                networks.append(_LOOPBACK)
        if json_path:
            json_path.write_text(findings.to_json())
    if json_path:
        json_path.write_text(findings.to_json())
    sys.exit(1 if findings.failed else 0)


if __name__ == "__main__":
    main()
