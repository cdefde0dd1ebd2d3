# SPDX-License-Identifier: Apache-2.0
"""Plans of one job with codecs in them: what they are predicted to take, and which codecs pay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from usbyte import _core
from usbyte.planning.tuning import Candidate

log = logging.getLogger("usbyte")

_PROBE_S = 0.1  # that a codec is timed for before it is planned with
_ROWS_PROBE_S = 0.02  # likewise, that adding up by a scheme is
WORTH_A_LOSS = 0.02  # part of a step that a codec with more loss must gain


class CodedPlans:
    """Makes and predicts plans by what codecs take here.

    Args:
        label: Name of the optimizer, the same on all ranks.
        options: Sizes in bytes for named policies; see `usbyte._core.make_plan`.
        overlap: What communication may hide behind.
        sharded: Whether each rank updates its shard, and parameters are gathered.
        device: Where gradients are; None for the host.

    Attributes:
        overlap: As given; it may change.
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
        self._costs: dict[str, _core.CodecCost] = {}  # that all ranks know alike
        self._own: dict[str, _core.CodecCost] = {}  # that this rank has timed alone
        self._row_s = 0.0

    def measure(
        self, specs: Iterable[str], maximum: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Times codecs that were not yet, on all ranks at once, as they will run. Collective.

        Ranks that share cores slow each other down; the slowest counts.

        Args:
            specs: Of the codecs.
            maximum: Over the ranks, of a tensor under a name.
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
        """What codecs take; those that `measure` has not seen are timed on this rank alone."""
        wanted = set(specs) - {"none"}
        for spec in sorted(wanted - set(self._costs) - set(self._own)):
            self._own[spec] = self._measure(spec)
        known = self._own | self._costs
        return _core.CodecCosts({spec: known[spec] for spec in wanted}, self._row_s)

    def line_codecs(self, specs: Iterable[str], mesh: _core.Topology | None) -> list[str]:
        """Specs that gradients with these may have on their ways through a network's dimensions."""
        if mesh is None or self._sharded:
            return []
        return sorted({spec for each in set(specs) for spec in _core.line_codecs(each, mesh)})

    def routed(
        self,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        overlap: str | None = None,
    ) -> _core.Plan:
        """The plan, its messages on the ways that are predicted to be the fastest.

        Those of each op are gathered, added up by a scheme, or go through two dimensions one after
        the other, by codecs in one of them or in both.
        """
        best = self.with_schemes(plan, network)
        flat = {op.codec for op in plan.ops if op.kind == "all_reduce" and op.line < 0}
        along = self.line_codecs(flat, network.topology)
        if not along:
            return best
        costs = self.costs_of([*(op.codec for op in plan.ops), *along])
        return _core.with_lines(best, profile, network, overlap or self.overlap, costs)

    def with_schemes(self, plan: _core.Plan, network: _core.NetworkModel) -> _core.Plan:
        """The plan; what is picked is added up by a scheme where that is faster.

        Not on a device, where the network was measured on another path than schemes take.
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
        """A policy's plan for tensors that travel by `codecs`, by their names."""
        of = codecs_of(profile, codecs)
        args = (policy, profile, network, self._options, overlap or self.overlap, self._sharded)
        plan = _core.make_plan(*args, of, self.costs_of(of))
        return self.routed(plan, profile, network, overlap)

    def step_s(
        self,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        overlap: str | None = None,
    ) -> float:
        """Predicted seconds of a step."""
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
        """First the plan with the least lossy codecs among those that are about the fastest.

        Behind it, if it compresses, come the ones it was preferred to, that without codecs last.
        All tensors by a list's codecs, as the policy sends them; under "auto" also only those for
        which it pays, as bytecomp has them.
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
    """By tensor of the profile; empty if nothing is compressed."""
    of = [codecs.get(t.name, "none") for t in profile.tensors]
    return [] if set(of) == {"none"} else of


def coded_along(plan: _core.Plan, mesh: _core.Topology) -> str:
    """Which codecs work in which of the network's dimensions, for the end of a log line."""
    found: dict[str, set[str]] = {}
    for op in plan.ops:
        if op.line >= 0 and op.codec != "none":
            codec = op.codec.removesuffix(",feedback=off")
            found.setdefault(mesh.dimensions[op.line].name, set()).add(codec)
    told = [f"in '{name}' by {', '.join(sorted(codecs))}" for name, codecs in sorted(found.items())]
    return f"; coded {' and '.join(told)}" if told else ""


def _numbers(cost: _core.CodecCost) -> list[float]:
    lines = (cost.encode, cost.decode)
    numbers = [x for a in lines for x in (a.alpha_s, a.beta_s_per_byte, a.overlap_s)]
    return [*numbers, cost.further_s_per_byte]
