# SPDX-License-Identifier: Apache-2.0
"""What usbyte costs where it cannot help: a single rank, and the host's time for each block.

    python benchmarks/gpu_overhead.py --json overhead.json

`--device cpu --models tiny` tries the benchmark itself.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import usbyte
import usbyte.torch as ub
from _gpu_models import GPU_JOBS, Training, start

_COLUMNS = {
    "single rank": "seconds of a step: of a turn of steps, device idle at both ends, over their "
    "number; of the bare optimizer, of the same in DistributedOptimizer on one rank, and of the "
    "bare one once more; medians over turns, all three in turns",
    "overhead": "wrapped over bare, minus 1",
    "noise": "bare once more over bare, minus 1: what a difference may be worth",
    "two ranks": "host seconds of a step and its phases while the GPU sleeps, so that the host "
    "waits for nothing but itself, bare, with usbyte, and under DDP with as many buckets as usbyte "
    "has blocks; medians over steps, all three in turns",
    "per block": "(with usbyte - bare) / blocks of the plan: hooks, pre-hooks and engine together, "
    "for each block that is sent",
    "per gradient": "the same / number of gradients, and (DDP - bare) / number of gradients",
    "NCCL_COMM_BLOCKING": "as set for all of NCCL's communicators; empty: as who makes one asks",
}
_OVERHEAD_LIMIT = 0.01
_BLOCK_LIMIT_S = 15e-6
_ASLEEP_CYCLES = 100_000_000  # some 50 ms
_PHASES = ("zero_grad", "forward", "backward", "step", "whole")
_LAYERS, _WIDTH = 12, 64  # few enough launches and events for the queues of sleeping streams


def single_rank(model: str, device: str, turns: int, steps: int) -> dict[str, Any]:
    """Step times of one rank, bare, wrapped, and bare again."""
    kinds = ("bare", "wrapped", "bare again")
    trainings = {kind: start(model, device, 0) for kind in kinds}
    made = trainings["wrapped"]
    wrapped = ub.DistributedOptimizer(made.optimizer, made.model.named_parameters(),
                                      overlap="forward")  # fmt: skip
    made.optimizer, made.finish = wrapped, wrapped.synchronize
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for made in trainings.values():
        _turn(made, steps)
    for turn in range(turns):
        # Each kind comes equally often in each place.
        for k in range(len(kinds)):
            kind = kinds[(turn + k) % len(kinds)]
            times[kind].append(_turn(trainings[kind], steps))
    wrapped.close()
    bare, mine, again = (statistics.median(times[kind]) for kind in kinds)
    return {
        "model": model,
        "bare_s": bare,
        "wrapped_s": mine,
        "bare_again_s": again,
        "overhead": mine / bare - 1,
        "noise": again / bare - 1,
        "turns": turns,
        "steps_of_a_turn": steps,
    }


def _turn(made: Training, steps: int) -> float:
    made.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        made.step()
    made.wait()
    return (time.perf_counter() - begin) / steps


def host_times(device: str, policy: str, samples: int) -> dict[str, Any]:
    """Host seconds of a step on this rank of several: bare, with usbyte, and with DDP."""
    kinds = ("bare", "usbyte", "DDP")
    steps = {}
    for kind in kinds:
        torch.manual_seed(0)
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        model: nn.Module = nn.Sequential(*layers).to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        if kind == "DDP":  # a bucket for each gradient, or for all
            model = DistributedDataParallel(model, bucket_cap_mb=25 if policy == "ddp" else 1e-6)
        elif kind == "usbyte":
            optimizer = wrapped = ub.DistributedOptimizer(
                optimizer, model.named_parameters(), overlap="backward", policy=policy
            )
        steps[kind] = _stepper(model, optimizer, torch.randn(16, _WIDTH, device=device))
    while not wrapped.settled:
        steps["usbyte"]()
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for sample in range(samples + 2):
        # Each kind comes equally often in each place.
        for k in range(len(kinds)):
            kind = kinds[(sample + k) % len(kinds)]
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda._sleep(_ASLEEP_CYCLES)
            marks = steps[kind]()
            if sample >= 2:  # the first ones allocate
                spans = [end - begin for begin, end in pairwise(marks)]
                times[kind].append([*spans, marks[-1] - marks[0]])
    found = {
        kind: dict(zip(_PHASES, map(statistics.median, zip(*each, strict=True)), strict=True))
        for kind, each in times.items()
    }
    bare, mine, ddp = (found[kind]["whole"] for kind in kinds)
    plan = wrapped.plan
    assert plan is not None
    blocks = sum(len(op.blocks) for op in plan.ops)
    wrapped.close()
    return {
        "policy": policy,
        "gradients": 2 * _LAYERS,
        "blocks": blocks,
        "bare_s": bare,
        "with_usbyte_s": mine,
        "with_ddp_s": ddp,
        "per_block_s": (mine - bare) / blocks,
        "per_gradient_s": (mine - bare) / (2 * _LAYERS),
        "ddp_per_gradient_s": (ddp - bare) / (2 * _LAYERS),
        "phases_s": found,
        "samples": samples,
    }


def _stepper(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Callable[[], list[float]]:
    def step() -> list[float]:
        marks = [time.perf_counter()]
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        loss = model(x).square().mean()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        return marks

    return step


def _rank_of_two(device: str, results: Path) -> None:
    """One of two ranks; rank 0 writes."""
    if device == "cuda":
        rank = int(os.environ["RANK"])
        # Ranks that share a GPU are none of the same host to NCCL.
        os.environ["NCCL_HOSTID"] = f"usbyte-{rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # What plans cost is not asked here, and probing takes long where ranks share a GPU.
    vars(importlib.import_module("usbyte.torch.comm.probe")).update(_SPAN=1, _FEWEST_GROUPS=2)
    vars(importlib.import_module("usbyte.torch.optimizer.gradients.plan_executor")).update(
        LARGEST_BYTES=1 << 14
    )
    ub.init()
    found = [host_times(device, policy, 12) for policy in ("wfbp", "ddp")]
    if ub.rank() == 0:
        results.write_text(json.dumps(found))
    ub.shutdown()


def _two_ranks(device: str, limit_s: float, blocking: str) -> tuple[list[dict[str, Any]], str]:
    """Rows, or why there are none; with NCCL_COMM_BLOCKING as given, if it is."""
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        known = [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, known)),
            "USBYTE_BACKEND": backend,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        }
        if blocking:
            env["NCCL_COMM_BLOCKING"] = blocking
        command = [sys.executable, "-m", "usbyte.launch", "-np", "2", sys.executable, __file__]
        command += ["--device", device, "--rank-of-two", str(results)]
        with subprocess.Popen(command, env=env) as ranks:
            try:
                code = ranks.wait(limit_s)
            except subprocess.TimeoutExpired:
                return [], f"two ranks over {backend} were not over after {limit_s:.0f} s"
            finally:
                ranks.terminate()
        if code != 0:
            return [], f"two ranks over {backend} ended with exit code {code}; the log tells why"
        rows: list[dict[str, Any]] = json.loads(results.read_text())
        return [{"NCCL_COMM_BLOCKING": blocking, **row} for row in rows], ""


@click.command(context_settings={"show_default": True})
@click.option("--models", default="resnet50,gpt2", help="For a single rank, separated by commas.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--turns", default=6, help="Of each kind.")
@click.option("--steps", default=6, help="Of a turn.")
@click.option("--limit", default=45.0, help="Seconds for each run of two ranks.")
@click.option("--rank-of-two", type=click.Path(path_type=Path), hidden=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write JSON.")
def main(
    models: str, device: str, turns: int, steps: int, limit: float, rank_of_two: Path | None,
    json_path: Path | None,
) -> None:  # fmt: skip
    """Measure what usbyte costs where it cannot help."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no GPU; try --device cpu")
    if rank_of_two is not None:
        _rank_of_two(device, rank_of_two)
        return
    names = [name.strip() for name in models.split(",") if name.strip()]
    for name in names:
        if name not in GPU_JOBS:
            raise click.UsageError(f"no model '{name}'; there are {', '.join(GPU_JOBS)}")
    found: dict[str, Any] = {
        "benchmark": "overhead", "columns": _COLUMNS, "torch": torch.__version__, "device": device,
        "single rank": [], "two ranks": [], "skipped": {}, "targets": [],
    }  # fmt: skip
    ub.init()
    for name in names:
        row = single_rank(name, device, turns, steps)
        found["single rank"].append(row)
        click.echo(f"{name}: bare {row['bare_s'] * 1e3:.2f} ms, wrapped {row['overhead']:+.2%}, "
                   f"noise {row['noise']:+.2%}")  # fmt: skip
        found["targets"].append(_target(
            f"overhead of a single rank, {name}", f"{row['overhead']:+.2%}",
            f"at most {_OVERHEAD_LIMIT:.0%}", row["overhead"] <= _OVERHEAD_LIMIT,
        ))  # fmt: skip
        _write(json_path, found)  # what there is, should time run out
    ub.shutdown()
    # usbyte's communicators do not block, for which NCCL starts threads: at what cost?
    for blocking in ("", "1") if device == "cuda" else ("",):
        rows, why = _two_ranks(device, limit, blocking)
        found["two ranks"] += rows
        if why:
            how = f", NCCL_COMM_BLOCKING={blocking}" if blocking else ""
            found["skipped"]["host time of two ranks" + how] = why
            click.echo(why)
        for row in rows:
            _report(row)
            if not blocking:
                found["targets"].append(_host_target(row))
        _write(json_path, found)


def _report(row: dict[str, Any]) -> None:
    how = " with NCCL_COMM_BLOCKING=1" if row["NCCL_COMM_BLOCKING"] else ""
    click.echo(
        f"{row['policy']}{how}: {row['blocks']} blocks, {row['per_block_s'] * 1e6:.1f} us for "
        f"each; by gradient {row['per_gradient_s'] * 1e6:.1f} us, under DDP "
        f"{row['ddp_per_gradient_s'] * 1e6:.1f}"
    )


def _host_target(row: dict[str, Any]) -> dict[str, Any]:
    per_block = row["per_block_s"]
    return _target(
        f"host time for each block, 2 ranks, {row['blocks']} blocks of {row['gradients']} "
        "gradients", f"{per_block * 1e6:.1f} us", f"at most {_BLOCK_LIMIT_S * 1e6:.0f} us",
        per_block <= _BLOCK_LIMIT_S,
    )  # fmt: skip


def _write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def _target(what: str, measured: str, wanted: str, met: bool) -> dict[str, Any]:
    return {"what": what, "measured": measured, "wanted": wanted, "met": met}


if __name__ == "__main__":
    main()
