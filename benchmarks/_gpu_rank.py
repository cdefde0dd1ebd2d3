# SPDX-License-Identifier: Apache-2.0
"""What every rank of `gpu_training.py` runs: all contenders for one model after the other.

    python _gpu_rank.py '{"models": ["tiny"], "contenders": ["ddp:25", "forward:auto"], ...}'

All contenders are alive at once, each with a model of its own, and train in turns. A turn's time is
that of its steps, one after the other as in any training, until all parameters are final and the
device is idle. Rank 0 writes what it finds after every model.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _gpu_models import Training, start

_CHECKED = 10  # steps after which ranks agree whether there is time left


def _contender(name: str, model: str, spec: dict[str, Any], group: Any) -> Training:
    """A training of `model` under "alone", "ddp:MIB" or "OVERLAP:POLICY"."""
    made = start(model, spec["device"], ub.rank())
    kind, _, setting = name.partition(":")
    if kind == "ddp":
        # As fast as it goes: no copy out of the buckets, and no broadcast of buffers, which usbyte
        # does not do either.
        made.net = DistributedDataParallel(
            made.model, bucket_cap_mb=float(setting), gradient_as_bucket_view=True,
            broadcast_buffers=False, process_group=group,
        )  # fmt: skip
    elif kind != "alone":
        tuned = {} if spec["tune_steps"] is None else {"tune_steps": spec["tune_steps"]}
        wrapped = ub.DistributedOptimizer(
            made.optimizer, made.model.named_parameters(), overlap=kind,  # type: ignore[arg-type]
            policy=setting, **(tuned if setting == "auto" else {}),
        )  # fmt: skip
        made.optimizer, made.finish = wrapped, wrapped.synchronize
    return made


def _settle(made: Training, warmup: int, deadline: float) -> int:
    """Trains until nothing is learned or tried any more, or until the deadline.

    Returns:
        The steps this took; 0 if the time was over before.
    """
    steps = 0
    while steps < warmup or not getattr(made.optimizer, "settled", True):
        if steps % _CHECKED == 0 and not _agreed(time.monotonic() < deadline):
            return 0
        made.step()
        steps += 1
    made.wait()
    return steps


def _turn(made: Training, steps: int) -> float:
    """Seconds for a step, over all steps of a turn."""
    made.wait()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        made.step()
    made.wait()
    return (time.perf_counter() - begin) / steps


def _agreed(value: bool) -> bool:
    """What rank 0 says."""
    return bool(ub.broadcast_object(value))


def _same(made: Training) -> bool:
    """Whether all ranks have the same parameters, all of them finite."""
    sums = torch.stack([p.detach().double().sum() for p in made.model.parameters()]).cpu()
    most, least = ub.allreduce(sums, op=ub.Max), ub.allreduce(sums, op=ub.Min)
    return bool(torch.equal(most, least) and most.isfinite().all())


def _decision(made: Training) -> Any:
    """What usbyte has decided; None for others."""
    return getattr(made.optimizer, "decision", None)


def _rows(
    model: str, network: str, times: dict[str, list[float]], trainings: dict[str, Training]
) -> list[dict[str, Any]]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((medians[name] for name in medians if name.startswith("ddp:")), default=None)
    rows = []
    for name, values in times.items():
        decision = _decision(trainings[name])
        rows.append({
            "model": model,
            "network": network,
            "contender": name,
            "median_s": medians[name],
            "least_s": min(values),
            "most_s": max(values),
            "turns": len(values),
            "against_ddp": best / medians[name] if best else None,
            "predicted_s": decision.predicted_s if decision else None,
            "bound_s": decision.bound_s if decision else None,
            "operations": len(decision.plan.ops) if decision else None,
        })  # fmt: skip
    return rows


def _compare(model: str, spec: dict[str, Any], deadline: float, group: Any) -> dict[str, Any]:
    """All contenders on one model: {"rows": ..., "network": ..., "wrong": ...}."""
    trainings: dict[str, Training] = {}
    settling = {}
    for name in spec["contenders"]:
        trainings[name] = _contender(name, model, spec, group)
        settling[name] = _settle(trainings[name], spec["warmup"], deadline)
        if not settling[name]:
            return {"skipped": "the time was over before all contenders were ready"}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    plans = {name: _decision(trainings[name]) for name in names}
    for turn in range(spec["rounds"]):
        for name in names if turn % 2 == 0 else reversed(names):
            longest = max((s for turns in times.values() for s in turns), default=0.0)
            if _agreed(time.monotonic() + longest * spec["steps"] < deadline):
                times[name].append(_turn(trainings[name], spec["steps"]))
    if not all(times.values()):
        return {"skipped": "the time was over before all contenders had a turn"}
    moved = [name for name in names if _decision(trainings[name]) is not plans[name]]
    wrong = [name for name in names if name != "alone" and not _same(trainings[name])]
    rows = _rows(model, spec["network"], times, trainings)
    network = next((json.loads(d.network.to_json()) for d in plans.values() if d), None)
    for made in trainings.values():
        if isinstance(made.optimizer, ub.DistributedOptimizer):
            made.optimizer.close()
    return {
        "rows": rows, "settling_steps": settling, "measured_network": network, "wrong": wrong,
        "planning_anew": moved,
    }  # fmt: skip


def main(spec: dict[str, Any]) -> None:
    """Compares on every model of the spec; see `gpu_training.py`."""
    deadline = spec["deadline"]
    rank = int(os.environ.get("RANK", "0"))
    if spec["device"] == "cuda":
        # Ranks that share a GPU are none of the same host to NCCL.
        os.environ["NCCL_HOSTID"] = f"usbyte-{rank}"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    ub.init()
    group = dist.new_group(backend=spec["backend"])
    found: dict[str, Any] = {}
    for model in spec["models"]:
        if not _agreed(time.monotonic() < deadline):
            found[model] = {"skipped": "the time was over"}
        else:
            found[model] = _compare(model, spec, deadline, group)
        if rank == 0:
            Path(spec["results"]).write_text(json.dumps(found))
        gc.collect()
        if spec["device"] == "cuda":
            torch.cuda.empty_cache()
    ub.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
