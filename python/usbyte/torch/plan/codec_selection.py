# SPDX-License-Identifier: Apache-2.0
"""Plans with codecs: measures codec costs, predicts step times and selects codecs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from usbyte import _core
from usbyte.planning.tuning import Candidate

log = logging.getLogger("usbyte")

_PROBE_S = 0.1  # time budget for measuring one codec
_ROWS_PROBE_S = 0.02  # time budget for measuring the per-row cost of sparse schemes
WORTH_A_LOSS = 0.02  # share of the step time that a lossier codec must save to be chosen


class CodedPlans:
    """Makes plans with codecs and predicts their step times from codec costs measured here.

    Args:
        label: Name of the optimizer, the same on all ranks.
        options: Sizes in bytes for named policies, for example "bucket_bytes" of "ddp". The keys
            are those of the `options` of `usbyte._core.make_plan`.
        overlap: "backward" or "forward": the passes that hide communication.
        sharded: Whether each rank updates its shard and gathers the other shards
            (`shard_optimizer=True`).
        device: CUDA device of the gradients; None if they are in host memory.

    Attributes:
        overlap: The overlap of the plans that are made next. Callers may assign it.
    """

    def __init__(
        self,
        label: str,
        options: Mapping[str, int],
        overlap: str,
        sharded: bool,
        device: _core.Cuda | None,
    ) -> None:
        self._label, self._options = label, dict(options)
        self.overlap, self._sharded, self._device = overlap, sharded, device
        self._costs: dict[str, _core.CodecCost] = {}  # equal on all ranks, from `measure`
        self._own: dict[str, _core.CodecCost] = {}  # timed on this rank only, from `costs_of`
        self._row_s = 0.0

    def measure(
        self, specs: Iterable[str], maximum: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Times the codecs that have no cost yet. Collective.

        All ranks measure at the same time, because ranks that share CPU cores slow each other down
        in training too. The cost of the slowest rank is used on all ranks.

        Args:
            specs: Specs of the codecs, for example "topk:0.01"; the same on all ranks.
            maximum: Called with a name and a CPU float64 tensor; returns the element-wise maximum
                over ranks.
        """
        wanted = sorted(set(specs) - {"none"} - set(self._costs))
        if not wanted:
            return
        measured = [self._measure(spec) for spec in wanted]
        numbers = torch.tensor(
            [_numbers(cost) for cost in measured], dtype=torch.float64, device="cpu"
        )
        slowest = maximum(f"{self._label}.codecs", numbers).tolist()
        for spec, cost, row in zip(wanted, measured, slowest, strict=True):
            encode, decode = _core.AlphaBeta(*row[:3]), _core.AlphaBeta(*row[3:6])
            self._costs[spec] = _core.CodecCost(encode, decode, cost.at_once, row[6])
        row_s = torch.tensor(_core.measure_row_s(_ROWS_PROBE_S), dtype=torch.float64, device="cpu")
        self._row_s = float(maximum(f"{self._label}.row", row_s))

    def costs_of(self, specs: Iterable[str]) -> _core.CodecCosts:
        """Returns the costs of codecs. Times those that `measure` has not seen on this rank only.

        Args:
            specs: Specs of the codecs; "none" is ignored.
        """
        wanted = set(specs) - {"none"}
        for spec in sorted(wanted - set(self._costs) - set(self._own)):
            self._own[spec] = self._measure(spec)
        known = self._own | self._costs
        return _core.CodecCosts({spec: known[spec] for spec in wanted}, self._row_s)

    def dimension_codecs(self, specs: Iterable[str], mesh: _core.Topology | None) -> list[str]:
        """Returns the codecs that ops may use inside single dimensions of the network, sorted.

        Args:
            specs: Codecs of the gradients.
            mesh: The topology; None if there is none, which gives an empty list.

        Returns:
            Specs, without "none". Empty with a sharded optimizer.
        """
        if mesh is None or self._sharded:
            return []
        return sorted({spec for each in set(specs) for spec in _core.dimension_codecs(each, mesh)})

    def routed(
        self,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        overlap: str | None = None,
    ) -> _core.Plan:
        """Returns `plan` with the path of each compressed op that is predicted to be the fastest.

        The messages of an op are gathered on all ranks; or a sparse scheme sums the selected
        elements; or the op goes through two dimensions of the network in turn, with a codec in one
        or both of them.

        Args:
            plan: A plan whose ops have their codecs.
            profile: The job; its tensors are those of the plan.
            network: Costs of the network. Without a topology, no op is split by dimension.
            overlap: "backward" or "forward"; default the attribute `overlap`.
        """
        best = self.with_schemes(plan, network)
        flat = {op.codec for op in plan.ops if op.kind == "all_reduce" and op.dimension < 0}
        along = self.dimension_codecs(flat, network.topology)
        if not along:
            return best
        costs = self.costs_of([*(op.codec for op in plan.ops), *along])
        return _core.with_dimension_paths(best, profile, network, overlap or self.overlap, costs)

    def with_schemes(self, plan: _core.Plan, network: _core.NetworkModel) -> _core.Plan:
        """Returns `plan` with a sparse scheme for each op that is predicted to be faster with one.

        Only ops whose codecs select elements, as top-k does, can have a scheme.

        On CUDA the plan is returned unchanged: the network was measured on a different path from
        the one that schemes use.
        """
        if self._device is not None:
            return plan
        return _core.with_schemes(plan, network, self.costs_of(op.codec for op in plan.ops))

    def make(
        self,
        policy: str,
        profile: _core.Profile,
        network: _core.NetworkModel,
        codecs: Mapping[str, str],
        overlap: str | None = None,
    ) -> _core.Plan:
        """Returns the plan of a policy for compressed gradients, with the fastest paths.

        Args:
            policy: One of `usbyte._core.policies()`.
            profile: The job.
            network: Costs of the network.
            codecs: Codec specs by tensor name. Tensors that are missing are not compressed.
            overlap: "backward" or "forward"; default the attribute `overlap`.
        """
        of = codecs_of(profile, codecs)
        job = (profile, network, self._options, overlap or self.overlap, self._sharded)
        plan = _core.make_plan(policy, *job, of, self.costs_of(of))
        plan = self.routed(plan, profile, network, overlap)
        if policy != "auto" or not of or self._sharded:
            return plan
        # Without these paths "auto" may have left gradients uncompressed.
        other = _core.make_plan("mergecomp", *job, of, self.costs_of(of))
        other = self.routed(other, profile, network, overlap)
        plans = (plan, _core.Plan("auto", other.tensors, other.ops))
        return min(plans, key=lambda each: self.step_s(each, profile, network, overlap))

    def step_s(
        self,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        overlap: str | None = None,
    ) -> float:
        """Returns the predicted seconds of a step.

        `overlap` is "backward" or "forward"; default the attribute `overlap`.
        """
        costs = self.costs_of([op.codec for op in plan.ops])
        args = (profile, network, overlap or self.overlap, self._sharded, costs)
        return _core.simulate(plan, *args).step_s

    def choose(
        self,
        policy: str,
        profile: _core.Profile,
        network: _core.NetworkModel,
        choices: Sequence[Mapping[str, str]],
    ) -> list[Candidate]:
        """Chooses among several lossy compressions and none, by predicted step time.

        A lossier choice wins only if it shortens the best step so far by more than `WORTH_A_LOSS`.
        Each choice is planned by `policy`. Under "auto" it is also planned by "bytecomp", which
        compresses only the tensors for which that pays; not with a sharded optimizer or with codecs
        that factor matrices.

        Args:
            policy: One of `usbyte._core.policies()`.
            profile: The job.
            network: Costs of the network.
            choices: Codec specs by tensor name; the least lossy choice first.

        Returns:
            The chosen plan first. The plans that it beat follow, the most recent winner first. The
            plan without compression is the last.
        """
        plan = self.make(policy, profile, network, {})
        plain_s = best_s = self.step_s(plan, profile, network)
        chosen, told = [Candidate("no compression", plan)], []
        for codecs in choices:
            name = "/".join(sorted(set(codecs.values()) - {"none"})) or "none"
            factors = any(c.factors for c in map(_core.make_codec, codecs.values()) if c)
            some = policy == "auto" and not self._sharded and not factors
            for how in ("bytecomp", policy) if some else (policy,):
                plan = self.make(how, profile, network, codecs)
                step_s = self.step_s(plan, profile, network)
                told.append(f"{name} by {how} {step_s:.4g} s")
                if step_s < best_s * (1 - WORTH_A_LOSS):
                    best_s = step_s
                    chosen.insert(0, Candidate(f"{name} by {how}", plan))
        log.info(
            "%s: compression: %s; predicted without it %.4g s, %s",
            self._label, chosen[0].what if len(chosen) > 1 else "none, as it does not pay here",
            plain_s, ", ".join(told),
        )  # fmt: skip
        return chosen

    def _measure(self, spec: str) -> _core.CodecCost:
        return _core.measure_codec(spec, _PROBE_S, self._device).cost


def codecs_of(profile: _core.Profile, codecs: Mapping[str, str]) -> list[str]:
    """Returns the codec spec of each tensor of `profile`; an empty list if all are "none"."""
    of = [codecs.get(t.name, "none") for t in profile.tensors]
    return [] if set(of) == {"none"} else of


def coded_along(plan: _core.Plan, mesh: _core.Topology) -> str:
    """Returns the codecs that a plan uses in each dimension, as the end of a log message."""
    found: dict[str, set[str]] = {}
    for op in plan.ops:
        if op.dimension >= 0 and op.codec != "none":
            codec = op.codec.removesuffix(",feedback=off")
            found.setdefault(mesh.dimensions[op.dimension].name, set()).add(codec)
    told = [f"in '{name}' by {', '.join(sorted(codecs))}" for name, codecs in sorted(found.items())]
    return f"; coded {' and '.join(told)}" if told else ""


def _numbers(cost: _core.CodecCost) -> list[float]:
    lines = (cost.encode, cost.decode)
    numbers = [x for a in lines for x in (a.alpha_s, a.beta_s_per_byte, a.overlap_s)]
    return [*numbers, cost.further_s_per_byte]
