"""From what each rank measured to one plan for all."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import nn

from usbyte import _core
from usbyte.errors import MismatchError
from usbyte.torch.arena import dtype_name, line
from usbyte.torch.context import Context
from usbyte.torch.ops import Max, allreduce

log = logging.getLogger("usbyte")

#: Profile x NetworkModel -> Plan
Policy = Callable[[_core.Profile, _core.NetworkModel], _core.Plan]

# Before anything is measured; only the order of ops depends on it. Gloo over 1 Gbit/s.
_UNMEASURED = _core.AlphaBeta(1e-3, 1e-8)


class Planner:
    """Collects measurements of the learning steps and makes the plan that all ranks follow.

    Args:
        context: The ranks.
        label: Name of the optimizer, the same on all ranks.
        names: Of the parameters.
        params: The parameters.
        policy: A policy's name or a callable of the same signature.
        options: Sizes in bytes for named policies; see `usbyte._core.make_plan`.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        policy: str | Policy,
        options: Mapping[str, int],
    ) -> None:
        self._context, self._label = context, label
        self._names, self._params = names, params
        self._dtypes = [dtype_name(n, p) for n, p in zip(names, params, strict=True)]
        self._options = dict(options)
        self._policy = policy if callable(policy) else self._named(policy)
        self.learning_steps = context.env.learning_steps
        self._need: list[list[float]] = []
        self._ready: list[list[float]] = []
        self._samples: list[tuple[int, float]] = []
        self._check_alike()

    def _named(self, policy: str) -> Policy:
        return lambda profile, network: _core.make_plan(policy, profile, network, self._options)

    def first_plan(self) -> _core.Plan:
        """DDP's buckets in order of registration, one at a time: each op's time is its own."""
        n = len(self._names)
        need = [float(i) for i in range(n)]
        ready = [float(2 * n - i) for i in range(n)]
        network = _core.NetworkModel(self._context.size, [_UNMEASURED])
        buckets = {k: v for k, v in self._options.items() if k.endswith("bucket_bytes")}
        plan = _core.make_plan("ddp", self._profile(need, ready), network, buckets)
        ops = [_core.Op(op.kind, op.blocks, op.window_bytes, fence=True) for op in plan.ops]
        return _core.Plan("learning", plan.tensors, ops)

    def learn(
        self,
        need_s: Sequence[float],
        ready_s: Sequence[float],
        samples: Sequence[tuple[int, float]],
    ) -> None:
        """Takes the times of one iteration, steady clock seconds; inf where nothing was needed."""
        known = [t for t in need_s if t != float("inf")]
        start = min(known, default=min(ready_s))
        # What the forward pass was not seen to use has no gate: it is needed at once.
        self._need.append([t - start if t != float("inf") else 0.0 for t in need_s])
        self._ready.append([max(t - start, 0.0) for t in ready_s])
        self._samples.extend(samples)

    def measured_plan(self) -> _core.Plan:
        """Combines the ranks' measurements (max), plans on rank 0, gives every rank the plan."""
        # The first step pays for allocations and warm-up.
        rows = [(_medians(t[1:] or t)) for t in (self._need, self._ready)]
        times = torch.tensor(rows, dtype=torch.float64)
        times = allreduce(times, name=f"{self._label}.times", op=Max)
        payload = b""
        if self._context.rank == 0:
            need, ready = times.tolist()
            network = _core.NetworkModel(
                self._context.size, [_core.fit_alpha_beta(self._samples or [(1, 1e-8)])]
            )
            plan = self._policy(self._profile(need, ready), network)
            log.info(
                "%s: policy %s, %d ops for %d gradients, network %s",
                self._label, plan.policy, len(plan.ops), len(self._names), network.all_reduce[0],
            )  # fmt: skip
            payload = json.dumps({"hash": plan.hash(), "plan": plan.to_json()}).encode()
        message = json.loads(self._context.eager.broadcast_bytes(f"{self._label}.plan", payload, 0))
        plan = _core.Plan.from_json(message["plan"])
        if plan.hash() != message["hash"]:
            raise MismatchError(
                f"{self._label}: rank {self._context.rank} reads another plan than rank 0 made; "
                "install the same version of usbyte on all hosts"
            )
        return plan

    def _profile(self, need: Sequence[float], ready: Sequence[float]) -> _core.Profile:
        # One run of each dtype, the largest first, so that blocks can span many tensors.
        volume: dict[str, int] = {}
        for dtype, param in zip(self._dtypes, self._params, strict=True):
            volume[dtype] = volume.get(dtype, 0) + param.numel()
        order = sorted(
            range(len(self._names)),
            key=lambda i: (-volume[self._dtypes[i]], self._dtypes[i], need[i]),
        )
        tensors = line([self._names[i] for i in order], [self._params[i] for i in order])
        # The flags are complete when backward is, and the first update may need them.
        return _core.Profile(
            tensors, [0.0, *(need[i] for i in order)], [max(ready), *(ready[i] for i in order)]
        )

    def _check_alike(self) -> None:
        """Raises the same MismatchError on every rank if parameters differ."""
        spec = [
            [name, list(p.shape), list(p.stride()), dtype]
            for name, p, dtype in zip(self._names, self._params, self._dtypes, strict=True)
        ]
        text = json.dumps(spec).encode()
        eager, label = self._context.eager, f"{self._label}.parameters"
        digests = eager.allgather_bytes(f"{label}.hash", hashlib.sha256(text).digest())
        if len(set(digests)) == 1:
            return
        specs = [json.loads(s) for s in eager.allgather_bytes(label, text)]
        raise MismatchError(
            f"{self._label}: {_difference(specs)}. Build the same model on all ranks."
        )


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def _difference(specs: Sequence[Sequence[list[object]]]) -> str:
    first = specs[0]
    for rank, spec in enumerate(specs):
        for a, b in zip(first, spec, strict=False):
            if a[0] != b[0]:
                return f"rank 0 has parameter '{a[0]}' where rank {rank} has '{b[0]}'"
            for what, x, y in zip(("shape", "strides", "dtype"), a[1:], b[1:], strict=True):
                if x != y:
                    return f"parameter '{a[0]}' has {what} {x} on rank 0 but {y} on rank {rank}"
        if len(first) != len(spec):
            more, extra = (
                (0, first[len(spec)]) if len(first) > len(spec) else (rank, spec[len(first)])
            )
            return (
                f"rank 0 has {len(first)} parameters and rank {rank} has {len(spec)}; "
                f"only rank {more} has '{extra[0]}'"
            )
    return "parameters differ"
