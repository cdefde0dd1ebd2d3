# SPDX-License-Identifier: Apache-2.0
"""Combines the measurements of the ranks and makes one plan for all of them."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from usbyte import _core
from usbyte.planning.cost_fit import Measured, fit
from usbyte.planning.layout import dense
from usbyte.torch.compression.codecs import Choices
from usbyte.torch.layout import dtype_name
from usbyte.torch.plan.codec_selection import CodedPlans
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import ParamTable, Settings
from usbyte.torch.plan.measurement import JobTimes, job_profile, max_over_ranks
from usbyte.torch.plan.plan_chooser import PlanChooser, coded
from usbyte.torch.plan.sparse import (
    Counts,
    SchemeChoice,
    choose_scheme,
    potential_gain_s,
    with_sparse,
)
from usbyte.torch.reduce_op import Average, Max, ReduceOp
from usbyte.torch.runtime.device import Device
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")


class Planner:
    """Makes the plans that all ranks follow.

    Before the first plan, the ranks must have verified that `settings` and `specs` are equal.

    Args:
        rank_group: The ranks that take part.
        label: Name of the optimizer, the same on all ranks.
        settings: The optimizer's arguments. With overlap "auto", plans use "backward" until
            `choose_overlap`.
        param_table: The parameters.
        device: Device of the parameters.
        codecs: Codecs that each parameter may use.
        sparse: Names of the parameters whose gradients are sent as sparse rows.
        steps: Number of steps completed before, for codecs whose parameters depend on the step.

    Attributes:
        label: Name of the optimizer.
        sparse: Names of the parameters whose gradients are sent as sparse rows.
        decision: The decision for the plan in force; None until a plan is made from measurements.
        seed: Seed of the random numbers of codecs, the same on all ranks.
        settings: Settings that must be equal on all ranks, by the names that users know.
        specs: Facts of each parameter that must be equal on all ranks, for `verify_same_params`.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        label: str,
        settings: Settings,
        param_table: ParamTable,
        device: Device,
        codecs: Choices,
        sparse: Collection[str],
        steps: int,
    ) -> None:
        self._rank_group, self.label = rank_group, label
        names, params, overlap = param_table.names, param_table.params, settings.overlap
        self._names, self._params, self.sparse = names, params, sparse
        self._groups = param_table.groups
        self._sparse_params = {n: p for n, p in zip(names, params, strict=True) if n in sparse}
        self._ways: Mapping[str, SchemeChoice] = {}  # schemes of sparse gradients, once chosen
        self._rows: Mapping[str, Counts] = {}  # the counts that these schemes were chosen for
        self._ready: dict[str, float] = {}  # ready times in seconds; assumed ones before learning
        self._dtypes = [dtype_name(n, p) for n, p in zip(names, params, strict=True)]
        self._options, self._sharded = dict(settings.options), settings.shard_optimizer
        self._chooses_overlap = overlap == "auto"
        lists = [dict(zip(names, specs, strict=True)) for specs in codecs.lists]
        self._codecs = {} if codecs.optional else lists[0]
        self._choices = lists if codecs.optional else []
        self._plans = CodedPlans(
            label,
            self._options,
            "backward" if overlap == "auto" else overlap,
            self._sharded,
            device.core,
        )
        self._chooser = PlanChooser(
            label, settings, self._plans, self._codecs, self._choices, self._sparse_params
        )
        self._steps = steps
        # The plan in force, with its codecs as they are after their warm-up.
        self._base: _core.Plan | None = None
        self._stages: list[_core.Codec] = []  # the codecs of `_base`
        self.decision: Decision | None = None
        self.seed = zlib.crc32(label.encode())
        self.settings: dict[str, object] = {
            # Before "overlap", which depends on it: the message names the first difference.
            "shard_optimizer": self._sharded,
            "overlap": overlap,
            "bucket_bytes": self._options["bucket_bytes"],
            "USBYTE_LEARNING_STEPS": rank_group.env.learning_steps,
            "USBYTE_CHECK_STEPS": rank_group.env.check_steps,
            "op": str(settings.op),
            "policy": settings.policy if isinstance(settings.policy, str) else "a function",
            "max_grad_norm": settings.max_grad_norm,
            "backward_passes_per_step": settings.passes_per_step,
        }
        self.specs = self._specs()

    @property
    def overlap(self) -> str:
        """The overlap of the plans that are made next: "backward" or "forward"."""
        return self._plans.overlap

    def choose_overlap(self, reason: str) -> None:
        """Chooses the overlap of later plans, for `overlap="auto"`.

        Args:
            reason: Why "forward" is not possible, the same on all ranks; empty to use "forward".
        """
        assert self._chooses_overlap
        self._plans.overlap = "backward" if reason else "forward"
        if reason:
            log.info(
                "%s: updates are not deferred to the next forward pass: %s", self.label, reason
            )

    def learning_plan(self) -> _core.Plan:
        """Returns DDP's buckets, in order of registration, and makes it the plan in force."""
        n = len(self._names)
        need = [float(i) for i in range(n)]
        ready = [float(2 * n - i) for i in range(n)]
        times = JobTimes(need, ready, [], [], 0.0, 0.0)
        self._ready = dict(zip(self._names, ready, strict=True))
        network = _core.NetworkModel(self._rank_group.size, [_core.AlphaBeta()])
        buckets = {k: v for k, v in self._options.items() if k.endswith("bucket_bytes")}
        plan = _core.make_plan("ddp", dense(self._profile(times)), network, buckets)
        return self._in_force(
            coded(_core.Plan("learning", plan.tensors, plan.ops), self._codecs, self._sharded)
        )

    def recodes_at(self, steps: int) -> bool:
        """Returns True if a codec changes its parameters after `steps` completed steps.

        The result is the same on all ranks.
        """
        return any(c.at_step(steps) != c.at_step(self._steps) for c in self._stages)

    def recoded(self, steps: int) -> _core.Plan:
        """Returns the plan in force with its codecs as they are after `steps` completed steps."""
        assert self._base is not None
        self._steps = steps
        return self._in_force(self._base)

    def decide(
        self,
        times: JobTimes,
        measured: Sequence[Measured],
        topology: _core.Topology | None,
        rows: Mapping[str, Counts],
    ) -> Decision:
        """Combines the ranks' times (maximum), plans on rank 0, and broadcasts the decision.

        Collective. If plans are tried, the decision is the first candidate.

        Args:
            times: Times of this rank.
            measured: Measurements of the network; rank 0's are used.
            topology: Dimensions of the network if ops may be routed through them, else None.
            rows: Counts of rows of sparse gradients, by parameter name. `Counts.own` is averaged
                over ranks.
        """
        label = self.label
        times = max_over_ranks(times, lambda t: self._reduced(f"{label}.times", t, Max))
        self._ready = dict(zip(self._names, times.ready_s, strict=True))
        if self.sparse:
            known = sorted(self.sparse)
            counts = [rows[name].own if name in rows else 0.0 for name in known]
            own = torch.tensor(counts, dtype=torch.float32, device="cpu")
            means = self._reduced(f"{label}.rows", own, Average).tolist()
            self._rows = {
                name: Counts(mean, max(mean, rows[name].all))
                for name, mean in zip(known, means, strict=True)
                if name in rows
            }
        lists = self._choices or [self._codecs]
        specs = [spec for codecs in lists for spec in codecs.values()]
        if along := self._plans.dimension_codecs(specs, topology):
            # Rank 0's list, because ranks may have measured different speeds.
            name = f"{label}.codecs_along"
            specs += self._rank_group.eager.broadcast_json(name, along, 0, list[str])
        self._plans.measure(specs, lambda name, numbers: self._reduced(name, numbers, Max))

        def decide() -> Decision:
            network = fit(self._rank_group.size, measured).with_topology(topology)
            named = dict(zip(self._names, self._params, strict=True))
            schemes = {n: choose_scheme(n, named[n], c, network) for n, c in self._rows.items()}
            return self._chooser.choose(self._profile(times), network, schemes)

        return self._agree(decide)

    def next_trial(self, step_s: float) -> Decision:
        """Returns the next candidate or, after the last, the best one. Collective.

        Args:
            step_s: Seconds of a step under the candidate on trial. Rank 0's value is used, because
                the collectives keep all ranks at the pace of the slowest.
        """
        last = self.decision
        assert last is not None
        return self._agree(lambda: self._chooser.next_trial(last, step_s))

    def describe(self, plan: _core.Plan) -> str:
        """Returns a plan and what it was made from, as JSON for a timeline and `usbyte report`.

        Args:
            plan: The plan in force. Codecs that change over time change it without a decision.

        Returns:
            The JSON object; empty before the first decision.
        """
        if self.decision is None:
            return ""
        decision = json.loads(replace(self.decision, plan=plan).to_json())
        return json.dumps({"optimizer": self.label, "sharded": self._sharded, "decision": decision})

    def is_outdated(self, rows: Mapping[str, Counts]) -> bool:
        """Returns True if other schemes would be clearly faster for the present sparse gradients.

        All ranks get the same result, because only the rows of the sums are used.

        Args:
            rows: Mean counts of rows over some recent steps, by parameter name.
        """
        decision = self.decision
        if decision is None:
            return False
        named = dict(zip(self._names, self._params, strict=True))
        won_s = sum(
            potential_gain_s(
                name,
                named[name],
                self._ways[name],
                self._rows[name].grown_to(counts.all),
                decision.network,
            )
            for name, counts in rows.items()
            if name in self._rows
        )
        return won_s > _WORTH_LEARNING * decision.predicted_s

    def _reduced(self, name: str, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Returns a copy of `tensor` reduced over the rank group, which may be a subgroup."""
        result = tensor.clone()
        self._rank_group.eager.allreduce(name, result, op)
        return result

    def _agree(self, make: Callable[[], Decision]) -> Decision:
        """Makes a decision on rank 0, broadcasts it, and puts its plan in force. Collective.

        If `make` raises on rank 0, the error is raised there, and a UsageError on other ranks.
        """
        payload, problem = b"", None
        if self._rank_group.rank == 0:
            try:
                payload = make().to_json().encode()
            except Exception as error:
                problem = error
                payload = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        message = self._rank_group.eager.broadcast_bytes(f"{self.label}.plan", payload, 0).decode()
        if problem is not None:
            raise problem
        decision = Decision.from_json(message)
        self._ways = decision.sparse
        self.decision = replace(decision, plan=self._in_force(decision.plan))
        return self.decision

    def _in_force(self, plan: _core.Plan) -> _core.Plan:
        """Stores `plan` as the plan in force, and returns it as this step executes it.

        The result has the codecs as they are in this step, and the ops of sparse gradients.
        """
        self._base = plan
        made = map(_core.make_codec, sorted({op.codec for op in plan.ops}))
        self._stages = [codec for codec in made if codec is not None]
        now = {c.spec: c.at_step(self._steps) for c in self._stages}
        if not all(now.get(op.codec, op.codec) == op.codec for op in plan.ops):
            ops = [
                _core.Op(
                    op.kind,
                    op.blocks,
                    op.window_bytes,
                    op.fence,
                    now.get(op.codec, op.codec),
                    scheme=op.scheme,
                    route=op.route,
                    dimension=op.dimension,
                )
                for op in plan.ops
            ]
            plan = _core.Plan(plan.policy, plan.tensors, ops)
        return with_sparse(plan, self._sparse_params, self._ready, self._ways)

    def _told(self, name: str) -> str:
        """Returns the requested compression of a parameter, in words."""
        if self._choices:
            return " or ".join(["none", *(choice[name] for choice in self._choices)])
        return self._codecs[name]

    def _profile(self, times: JobTimes) -> _core.Profile:
        return job_profile(self._names, self._params, times, flags=True, sparse=self.sparse)

    def _specs(self) -> list[list[object]]:
        """Returns the facts of each parameter, in the order of `verify_same_params`."""
        return [
            [
                name,
                list(p.shape),
                list(p.stride()),
                dtype,
                self._told(name),
                "sparse" if name in self.sparse else "dense",
                group,
            ]
            for name, p, dtype, group in zip(
                self._names, self._params, self._dtypes, self._groups, strict=True
            )
        ]


#: Share of the step time that other sparse schemes must be predicted to save for a new plan.
_WORTH_LEARNING = 0.01
