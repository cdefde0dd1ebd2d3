# SPDX-License-Identifier: Apache-2.0
"""Rank 0's choice of a plan: from a policy, or by trials in the running job."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from usbyte import _core
from usbyte._util.units import format_cost
from usbyte.errors import UsageError
from usbyte.planning import tuning
from usbyte.planning.layout import dense
from usbyte.torch.plan.codec_selection import WORTH_A_LOSS, CodedPlans, codecs_of, coded_along
from usbyte.torch.plan.decision import Decision
from usbyte.torch.plan.job import Settings
from usbyte.torch.plan.sparse import SchemeChoice, with_sparse

log = logging.getLogger("usbyte")

#: Share of the step time that overlap "forward" must be predicted to save over "backward".
_WORTH_FORWARD = 0.01
#: Steps of each trial when codecs are chosen. The trials of policy "auto" have the same length.
_CHOICE_STEPS = 7


class PlanChooser:
    """Chooses a plan from measurements. Rank 0 alone uses it; the planner broadcasts the decision.

    Args:
        label: Name of the optimizer.
        settings: The optimizer's arguments.
        plans: Makes plans with codecs and predicts their step times.
        codecs: The codec of each parameter, by name; empty if there are `choices`.
        choices: Alternatives for `codecs`, of which the fastest, or none, is used.
        sparse: The parameters whose gradients are sent as sparse rows, by name.
    """

    def __init__(
        self,
        label: str,
        settings: Settings,
        plans: CodedPlans,
        codecs: Mapping[str, str],
        choices: Sequence[Mapping[str, str]],
        sparse: Mapping[str, nn.Parameter],
    ) -> None:
        self._label, self._plans, self._sparse = label, plans, sparse
        self._codecs, self._choices = codecs, choices
        self._policy, self._tune_steps = settings.policy, settings.tune_steps
        self._options, self._sharded = dict(settings.options), settings.shard_optimizer
        self._chooses_overlap = settings.overlap == "auto"
        self._tuner: tuning.Tuner | None = None  # from the first trial on

    def choose(
        self,
        whole: _core.Profile,
        network: _core.NetworkModel,
        schemes: Mapping[str, SchemeChoice],
    ) -> Decision:
        """Returns the decision for the policy's plan or, if plans are tried, for the first one.

        Args:
            whole: The profile, sparse gradients included.
            network: Costs of the network.
            schemes: Schemes of sparse gradients, by parameter name.
        """
        profile = dense(whole)
        trial_steps, overlap = 0, self._plans.overlap
        if callable(self._policy):
            plan = self._policy(profile, network)
            plan = coded(_for_tensors(plan, profile), self._codecs, self._sharded)
        elif self._choices:
            found = self._plans.choose(self._policy, profile, network, self._choices)
            tries = self._policy == "auto" and self._tune_steps != 0 and not self._sharded
            if tries and len(found) > 1 and not self._warms_up():
                usual = self._plans.make("ddp", profile, network, {})
                usual = _core.Plan("auto", usual.tensors, usual.ops)
                found.append(tuning.Candidate("no compression, DDP's buckets", usual))
                search = tuning.Search(found, _CHOICE_STEPS, halve=True, worth=WORTH_A_LOSS)
                plan, trial_steps, overlap = self._begin_trials(search)
            else:
                plan = found[0].plan
        elif self._policy in tuning.TRIED and self._tune_steps != 0 and not self._warms_up():
            search = self._search(self._policy, profile, network)
            plan, trial_steps, overlap = self._begin_trials(search)
        else:
            plan = self._plans.make(self._policy, profile, network, self._codecs)
        decision = self._decided(plan, whole, network, schemes, trial_steps, overlap)
        if self._chooses_overlap and not trial_steps and self._policy == "auto":
            decision = self._worth_forward(decision)
        self._log(decision)
        return decision

    def next_trial(self, last: Decision, step_s: float) -> Decision:
        """Returns the decision for the next candidate or, after the last, for the best one.

        Args:
            last: The decision for the candidate on trial.
            step_s: Seconds of a step under it.
        """
        tuner = self._tuner
        assert tuner is not None
        tried = tuner.ask()
        assert tried is not None
        tuner.tell(step_s)
        log.info(
            "%s: trial %d: %s: %.4g s a step",
            self._label, tuner.measurements, tried.what, step_s,
        )  # fmt: skip
        following = tuner.ask()
        candidate = following or tuner.best()
        decision = self._decided(
            candidate.plan, last.profile, last.network, last.sparse,
            last.trial_steps if following is not None else 0,
            candidate.overlap or self._plans.overlap,
        )  # fmt: skip
        if following is None:
            log.info(
                "%s: %s; overlap %s, predicted %.4g s, bound %.4g s", self._label, tuner.summary(),
                decision.overlap, decision.predicted_s, decision.bound_s,
            )  # fmt: skip
        return decision

    def _search(
        self, policy: str, profile: _core.Profile, network: _core.NetworkModel
    ) -> tuning.Search:
        """Returns the candidates that a policy tries."""
        codecs = codecs_of(profile, self._codecs)
        costs = self._plans.costs_of(codecs)
        return tuning.TRIED[policy](
            tuning.TuningTask(
                profile, network, self._options, self._plans.overlap, self._sharded, codecs, costs,
                may_end_in_backward=self._chooses_overlap,
            )
        )  # fmt: skip

    def _begin_trials(self, search: tuning.Search) -> tuple[_core.Plan, int, str]:
        """Returns the first candidate's plan, the steps of its trial, and its overlap.

        The number of steps is 0 if there is only one candidate.
        """
        steps = self._tune_steps or search.steps
        if search.space is None and len(search.starts) == 1:
            return search.starts[0].plan, 0, self._plans.overlap
        self._tuner = tuning.Tuner(search)
        first = self._tuner.ask()
        assert first is not None
        return first.plan, steps, first.overlap or self._plans.overlap

    def _worth_forward(self, decision: Decision) -> Decision:
        """Returns `decision`, or the one for "backward" if "forward" saves less than 1 %."""
        profile, network = decision.profile, decision.network
        plan = self._plans.make("auto", dense(profile), network, self._codecs, "backward")
        usual = self._decided(plan, profile, network, decision.sparse, 0, "backward")
        worth = decision.predicted_s < usual.predicted_s * (1 - _WORTH_FORWARD)
        return decision if worth else usual

    def _decided(
        self,
        plan: _core.Plan,
        profile: _core.Profile,
        network: _core.NetworkModel,
        schemes: Mapping[str, SchemeChoice],
        trial_steps: int,
        overlap: str,
    ) -> Decision:
        """Returns the decision for a plan, with its prediction and bound.

        Raises:
            UsageError: The optimizer is sharded and the plan has all_reduces.
        """
        if self._sharded:
            if any(op.kind == "all_reduce" for op in plan.ops):
                raise UsageError(
                    f"policy '{plan.policy}' plans all_reduces; shard_optimizer=True needs "
                    "reduce_scatters and all_gathers, as of "
                    f"{', '.join(_core.sharding_policies())}"
                )
            plan = flags_apart(plan)
        plan = self._plans.routed(plan, dense(profile), network, overlap)
        # With overlap "backward", the predicted step ends with its backward pass.
        all_ops = self._with_rows(plan, profile, schemes)
        predicted = self._plans.step_s(all_ops, profile, network, overlap)
        bound_s = _core.bound_s(profile, network, self._plans.overlap, self._sharded)
        return Decision(plan, profile, network, predicted, bound_s, trial_steps, schemes, overlap)

    def _with_rows(
        self, plan: _core.Plan, profile: _core.Profile, schemes: Mapping[str, SchemeChoice]
    ) -> _core.Plan:
        """Returns `plan` with the ops of the sparse gradients added."""
        # The first tensor is the control tensor, which is no gradient.
        gradients = zip(profile.tensors[1:], profile.ready_s[1:], strict=True)
        ready = {tensor.name: ready_s for tensor, ready_s in gradients}
        return with_sparse(plan, self._sparse, ready, schemes)

    def _warms_up(self) -> bool:
        """Returns True if any codec changes its parameters during training.

        The step time then changes too, so plans on trial cannot be compared.
        """
        lists = self._choices or [self._codecs]
        made = map(_core.make_codec, {spec for codecs in lists for spec in codecs.values()})
        return any(c.at_step(0) != c.at_step(1 << 60) for c in made if c is not None)

    def _log(self, decision: Decision) -> None:
        plan, profile, network = decision.plan, decision.profile, decision.network
        for scheme in sorted({op.scheme for op in plan.ops} - {""}):
            ops = [op for op in plan.ops if op.scheme == scheme]
            log.info(
                "%s: the elements that %s selects are summed by scheme %s in %d of %d ops",
                self._label, "/".join(sorted({op.codec for op in ops})), scheme, len(ops),
                len(plan.ops),
            )  # fmt: skip
        if self._codecs and plan.policy == "auto":
            coded_names = {name for name, spec in self._codecs.items() if spec != "none"}
            tensors = plan.tensors
            left = sum(
                op.codec == "none" and op.kind != "all_gather"
                and any(tensors[t].name in coded_names for t in plan.tensors_of(op))
                for op in plan.ops
            )  # fmt: skip
            if left:
                log.info(
                    "%s: %d of %d ops are not compressed, which is predicted to be faster; a "
                    'policy such as "ddp" always compresses', self._label, left, len(plan.ops),
                )  # fmt: skip
        if network.topology is not None:
            routed = sum(op.route is not None for op in plan.ops)
            log.info(
                "%s: %d of %d ops go through the network's dimensions in chunks%s",
                self._label, routed, len(plan.ops), coded_along(plan, network.topology),
            )  # fmt: skip
        ddp = _core.make_plan("ddp", dense(profile), network, self._options, self._plans.overlap)
        reason = ""
        if plan.policy == "auto" and plan.ops == ddp.ops:
            reason = ", DDP's buckets: no other plan is predicted to be clearly faster"
        all_ops = self._with_rows(ddp, profile, decision.sparse)
        one = network.all_reduce[0]
        log.info(
            "%s: policy %s, overlap %s: %d ops for %d gradients%s; a step takes %.4g s without "
            "communication, predicted %.4g s, bound %.4g s, DDP's buckets %.4g s; all_reduce costs "
            "%s",
            self._label, plan.policy, decision.overlap, len(plan.ops),
            len(profile.tensors) - 1,  # without the control tensor
            reason, profile.iteration_s, decision.predicted_s, decision.bound_s,
            _core.simulate(all_ops, profile, network, "backward").step_s,
            format_cost(one.alpha_s, one.beta_s_per_byte, one.overlap_s),
        )  # fmt: skip


def coded(plan: _core.Plan, codecs: Mapping[str, str], sharded: bool) -> _core.Plan:
    """Returns `plan`, which has no codecs, with the codec of each tensor.

    Args:
        plan: The plan.
        codecs: Specs by parameter name; "none" for parameters that are missing.
        sharded: Whether all_gathers carry parameters, which get no codec.
    """
    specs = [codecs.get(t.name, "none") for t in plan.tensors]
    return plan if set(specs) == {"none"} else _core.with_codecs(plan, specs, sharded)


def _for_tensors(plan: _core.Plan, profile: _core.Profile) -> _core.Plan:
    """Returns the plan of a callable policy for the profile's tensors.

    Raises:
        UsageError: `plan` is not a Plan, or its tensors are not those of the profile.
    """
    if not isinstance(plan, _core.Plan):
        raise UsageError(f"the policy gave a {type(plan).__name__} instead of a Plan")

    def kinds(tensors: Sequence[_core.TensorSpec]) -> list[tuple[str, int, str]]:
        return [(t.name, t.numel, t.dtype) for t in tensors]

    if kinds(plan.tensors) != kinds(profile.tensors):
        raise UsageError(
            "the policy's plan is not for the profile's tensors: names, sizes, dtypes and "
            "order must be the same"
        )
    return _core.Plan(plan.policy, profile.tensors, plan.ops)


def flags_apart(plan: _core.Plan) -> _core.Plan:
    """Returns `plan` with a separate all_reduce of the control tensor before the first all_gather.

    For sharded optimizers: every rank must know which parameters are updated before it updates and
    gathers a shard.
    """
    end = plan.tensors[0].numel

    def without_flags(op: _core.Op) -> _core.Op | None:
        blocks = [(max(b, end), e) for b, e in op.blocks if e > end]
        return _core.Op(op.kind, blocks, op.window_bytes, op.fence, op.codec) if blocks else None

    scatters = [without_flags(op) for op in plan.ops if op.kind != "all_gather"]
    gathers = [without_flags(op) for op in plan.ops if op.kind == "all_gather"]
    ops = [*scatters, _core.Op("all_reduce", [(0, end)]), *gathers]
    return _core.Plan(plan.policy, plan.tensors, [op for op in ops if op is not None])
