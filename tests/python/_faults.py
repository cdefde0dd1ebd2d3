# SPDX-License-Identifier: Apache-2.0
"""What ranks do when something is wrong with one of them; see `_fault_cases`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import usbyte.torch as ub
from usbyte import _core
from usbyte.errors import FaultError

RANKS, CULPRIT = 3, 1
STEPS = 8  # before the fault; more than are learned
LIMIT_S = 4.0  # the stall limit here


def prepared(kind: str = "backward", **options: Any) -> tuple[nn.Module, ub.DistributedOptimizer]:
    ub.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double()
    if kind == "sharded":
        options |= {"shard_optimizer": True, "policy": "dear"}
    else:
        options = {"overlap": kind, "policy": "wfbp"} | options
    optimizer = ub.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), **options
    )
    return model, optimizer


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * ub.rank() + step)
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator).double()).square().mean().backward()
        optimizer.step()


def trained(kind: str = "backward", **options: Any) -> tuple[nn.Module, ub.DistributedOptimizer]:
    """After STEPS steps that every rank has completed: none is still waiting for another.

    Rank 0, which serves the store, comes out of this when all others need it no longer.
    """
    model, optimizer = prepared(kind, **options)
    train(model, optimizer, 0, STEPS)
    optimizer.synchronize()
    store = torch.distributed.distributed_c10d._get_default_store()
    for place in ("trained", "met"):
        store.set(f"tests/{place}/{ub.rank()}", "")
        if place == "trained" or ub.rank() == 0:
            store.wait([f"tests/{place}/{rank}" for rank in range(ub.size())])
    return model, optimizer


def digest(model: nn.Module) -> str:
    state = model.state_dict()
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()


def unbroken(rank: int, size: int, kind: str) -> list[str]:
    model, optimizer = prepared(kind)
    digests = [digest(model)]
    for step in range(STEPS + 4):
        train(model, optimizer, step, step + 1)
        digests.append(digest(model))
    ub.shutdown()
    return digests


def observed(model: nn.Module, optimizer: Any, act: Callable[[], Any]) -> dict[str, Any]:
    """What `act` raises or logs, after how long, and what is left then: a digest or an error."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("usbyte").addHandler(handler)
    start = time.monotonic()
    try:
        act()
        told = f"logged: {lines[-1]}" if lines else "nothing"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    try:
        left = digest(model)
        if optimizer is not None and not optimizer._session.settings.shard_optimizer:
            optimizer.state_dict()
    except FaultError as error:
        left = str(error)
    return {"seconds": seconds, "told": told, "left": left}


def goes_on(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    return lambda: train(model, optimizer, STEPS, STEPS + 3)


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, size: int, kind: str) -> Any:
    """In the middle of backward."""
    model, optimizer = trained(kind)
    if rank == CULPRIT:
        model[1].weight.register_hook(kill)
    return observed(model, optimizer, goes_on(model, optimizer))


def killed_after_a_part(rank: int, size: int) -> Any:
    """When the last layer's gradients have left it; the others read that layer's parameters."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == CULPRIT:
        others = [f"tests/read/{other}" for other in range(size) if other != CULPRIT]
        model[0].weight.register_hook(lambda grad: (store.wait(others), kill()))
        model[0].bias.register_hook(lambda grad: (store.wait(others), kill()))
    train(model, optimizer, STEPS, STEPS + 1)
    assert model[1].weight.isfinite().all()
    store.set(f"tests/read/{rank}", "")
    return observed(model, optimizer, goes_on(model, optimizer))


def killed_in_eager(rank: int, size: int) -> Any:
    model, optimizer = trained()
    if rank == CULPRIT:
        kill()
    return observed(model, optimizer, lambda: ub.allreduce(torch.ones(3), name="loss"))


def exits(rank: int, size: int) -> Any:
    """With code 0, and without a word."""
    model, optimizer = trained("forward")
    if rank == CULPRIT:
        os._exit(0)
    return observed(model, optimizer, goes_on(model, optimizer))


def leaves(rank: int, size: int) -> Any:
    """In good order, and before the others."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    if rank == CULPRIT:
        return observed(model, optimizer, ub.shutdown)
    return observed(model, optimizer, goes_on(model, optimizer))


def store_lost(rank: int, size: int) -> Any:
    """Rank 0 serves the store and is killed."""
    model, optimizer = trained()
    if rank == 0:
        kill()
    return observed(model, optimizer, goes_on(model, optimizer))


def freezes(rank: int, size: int, folder: str) -> Any:
    """Stopped by a signal, and let go on when the others have given it up."""
    model, optimizer = trained()
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    ub.barrier()
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = observed(model, optimizer, goes_on(model, optimizer))
    if rank == 0:
        os.kill(int(Path(folder, f"{CULPRIT}.pid").read_text()), signal.SIGCONT)
    return found


def sleeps(rank: int, size: int, seconds: float) -> Any:
    """In its own code, between two steps."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    if rank == CULPRIT:
        time.sleep(seconds)
    return observed(model, optimizer, goes_on(model, optimizer))


def sleeps_before_step(rank: int, size: int) -> Any:
    """Between backward and its update, which the other ranks have applied."""
    model, optimizer = prepared()
    train(model, optimizer, 0, STEPS)
    if rank == CULPRIT:
        optimizer.step, step = lambda: (time.sleep(LIMIT_S + 3), step()), optimizer.step
    return observed(model, optimizer, goes_on(model, optimizer))


def does_not_submit(rank: int, size: int) -> Any:
    model, optimizer = prepared()
    train(model, optimizer, 0, STEPS)
    if rank == CULPRIT:
        time.sleep(LIMIT_S + 2)
    return observed(model, optimizer, lambda: ub.allreduce(torch.ones(3), name="loss"))


def raises(rank: int, size: int) -> Any:
    """Something that nobody catches."""
    model, optimizer = trained("forward")
    if rank == CULPRIT:
        try:
            raise KeyError("loss")
        except KeyError:
            sys.excepthook(*sys.exc_info())  # what the interpreter does then
    return observed(model, optimizer, goes_on(model, optimizer))


def raises_in_backward(rank: int, size: int) -> Any:
    """In a hook, and it is caught."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    act = goes_on(model, optimizer)
    if rank == CULPRIT:

        def fail(grad: torch.Tensor) -> None:
            raise KeyError("loss")

        hook = model[0].weight.register_hook(fail)

        def act() -> None:
            try:
                train(model, optimizer, STEPS, STEPS + 1)
            except KeyError:
                hook.remove()
                time.sleep(LIMIT_S + 3)
            train(model, optimizer, STEPS + 1, STEPS + 3)

    return observed(model, optimizer, act)


def wraps(rank: int, size: int, what: str) -> Any:
    """An optimizer that is not like the others'."""
    odd = rank == CULPRIT
    ub.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1 + (odd and what == "shape"))).double()
    if odd and what == "dtype":
        model = model.float()
    named = [(f"x{n}" if odd and what == "name" else n, p) for n, p in model.named_parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"op": ub.Sum} if odd and what == "op" else {}
    return observed(model, None, lambda: ub.DistributedOptimizer(inner, named, **options)) | {
        "left": "as it was"
    }


def submits_other_shapes(rank: int, size: int) -> Any:
    """To an eager operation; the run goes on after that."""
    model, optimizer = prepared()
    train(model, optimizer, 0, STEPS)
    shape = 4 if rank == CULPRIT else 3
    found = observed(model, optimizer, lambda: ub.allreduce(torch.ones(shape), name="loss"))
    train(model, optimizer, STEPS, STEPS + 1)
    return found | {"left": digest(model)}


def names_twice(rank: int, size: int) -> Any:
    model, optimizer = prepared()
    train(model, optimizer, 0, STEPS)
    handle = None
    if rank == CULPRIT:
        handle = ub.allreduce_async(torch.ones(3), name="loss")
    found = observed(model, optimizer, lambda: ub.allreduce(torch.ones(3), name="loss"))
    if handle is not None:
        assert ub.synchronize(handle).tolist() == [1, 1, 1]
    train(model, optimizer, STEPS, STEPS + 1)
    return found | {"left": digest(model)}


def fills_the_disk(rank: int, size: int) -> Any:
    """Where the timeline goes, in the middle of the training."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    written = Path(os.environ["USBYTE_TIMELINE"].replace("%r", str(rank))).stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 100, resource.RLIM_INFINITY))
    return observed(model, optimizer, goes_on(model, optimizer))


def plans_for_another_model(rank: int, size: int) -> Any:
    def foreign(profile: _core.Profile, network: _core.NetworkModel) -> _core.Plan:
        tensors = [_core.TensorSpec("somebody.else", 5, "float64")]
        return _core.Plan("foreign", tensors, [_core.Op("all_reduce", [(0, 5)])])

    model, optimizer = prepared("forward", policy=foreign)
    return observed(model, optimizer, lambda: train(model, optimizer, 0, STEPS))


def reads_a_corrupt_topology(rank: int, size: int, folder: str) -> Any:
    path = Path(folder, "topology.json")
    ub.init()
    if rank == 0:
        path.write_text('{"format": "usbyte-topology-1", "dimensions": [1e999, ' + "[" * 5000)
    ub.barrier()
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    act = lambda: ub.DistributedOptimizer(inner, topology=str(path))  # noqa: E731
    return observed(model, None, act) | {"left": "as it was"}


def loads_another_sizes_memory(rank: int, size: int) -> Any:
    """Of codecs, saved by a job of more parameters."""
    ub.init()

    def make(width: int) -> tuple[nn.Module, ub.DistributedOptimizer]:
        model = nn.Linear(6, width).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, ub.DistributedOptimizer(
            inner, model.named_parameters(), compression=ub.Compression.topk(0.5), policy="wfbp"
        )

    model, optimizer = make(5)
    model(torch.ones(2, 6).double()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    model, optimizer = make(4)
    return observed(model, None, lambda: optimizer.load_state_dict(state)) | {"left": "as it was"}


def link_cut(rank: int, size: int, eager: bool) -> Any:
    """With `ip link set down` on a host of an emulated cluster."""
    model, optimizer = prepared("forward")
    train(model, optimizer, 0, STEPS)
    optimizer.synchronize()
    ub.barrier()
    if rank == CULPRIT:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    if eager:
        return observed(model, optimizer, lambda: ub.allreduce(torch.ones(3), name="loss"))
    return observed(model, optimizer, goes_on(model, optimizer))


def on_lab_host(work: str, folder: str, args: str) -> None:
    """What a rank of a case in the lab does."""
    rank = int(os.environ["RANK"])
    found = globals()[work](rank, RANKS, *json.loads(args))
    answers = [Path(folder, f"answer-{r}.json") for r in range(RANKS)]
    part = answers[rank].with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(answers[rank])
    # The launcher ends all when one has failed; and none is to end before all have answered.
    while not all(path.exists() for path in answers):
        time.sleep(0.1)
    os._exit(0)
