# SPDX-License-Identifier: Apache-2.0
"""Searches for the plan with the shortest step: given plans, then Bayesian optimization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from usbyte import _core
from usbyte.errors import UsageError

#: Coordinates from 0 to 1, so that one length scale fits all axes of the Gaussian process.
Point = tuple[float, ...]

_NOISE = 1e-2  # Variance of a measurement, relative to the variance between points.
_REPEATS = 6  # The search ends after so many suggestions in a row of plans already measured.


@dataclass(frozen=True)
class Candidate:
    """A plan to try.

    Attributes:
        what: Description for the log.
        plan: The plan.
        point: Its coordinates in the search space; None for a plan that is not from the space.
        overlap: "backward" or "forward"; None for the overlap of the job.
    """

    what: str
    plan: _core.Plan
    point: Point | None = None
    overlap: str | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        """Key under which measurements are stored; equal for candidates with equal steps."""
        return self.plan.hash(), self.overlap


@dataclass(frozen=True)
class Space:
    """The search space of Bayesian optimization.

    Attributes:
        axes: Names of the coordinates.
        at: Returns the candidate at a point.
        trials: The most plans to measure, the starts of the search included.
        xi: Expected improvement counts only above best speed + xi, where 1 is the speed of the
            first candidate. A larger value explores more.
    """

    axes: Sequence[str]
    at: Callable[[Point], Candidate]
    trials: int
    xi: float


@dataclass(frozen=True)
class Search:
    """The candidates of a tuner, and the length of its trials.

    Attributes:
        starts: Candidates that are tried first.
        steps: Steps of a trial in a training job.
        space: Where further candidates come from; None for no more.
        halve: Whether to measure the faster half again, then the faster half of that, until one is
            left. The winner has at least two measurements; a plan counts with the mean of its
            measurements. This is the sequential halving of Karnin, Koren and Somekh, "Almost
            Optimal Exploration in Multi-Armed Bandits", 2013, but with one more measurement in each
            round instead of twice as many. Cannot be combined with a space.
        worth: A start is preferred to a later one only if its step is shorter by more than this
            share.
        guide: Returns the next candidate after the starts, None at the end of the search. Its
            argument returns the seconds of a candidate's step, None if it was not measured. Cannot
            be combined with a space.
    """

    starts: Sequence[Candidate]
    steps: int
    space: Space | None = None
    halve: bool = False
    worth: float = 0.0
    guide: Callable[[Callable[[Candidate], float | None]], Candidate | None] | None = None


@dataclass
class Trial:
    """A candidate with its measured step times, in seconds."""

    candidate: Candidate
    times_s: list[float]

    @property
    def step_s(self) -> float:
        """Mean of the measured step times."""
        return fmean(self.times_s)


@dataclass
class Tuner:
    """Chooses the fastest candidate of a search from measured step times.

    Call `ask` for a candidate, measure its step, report it with `tell`, and repeat until `ask`
    returns None. Then `best` is the result. The tuner is deterministic: equal times lead to equal
    candidates.

    Bayesian optimization maximizes the speed relative to the first candidate. A plan that was
    measured already is not measured again, except by `Search.halve`, and does not count as a trial.

    Args:
        search: The candidates.
        seed: Seed of the random numbers of bayesian-optimization.

    Attributes:
        trials: The measured candidates, in order of their first measurement.

    Raises:
        UsageError: The search has a space, and bayesian-optimization is not installed.
    """

    search: Search
    seed: int = 0
    trials: list[Trial] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        space = self.search.space
        self._sampler = _Sampler(space, self.seed) if space else None
        self._starts = list(self.search.starts)
        self._known: dict[tuple[int, str | None], Trial] = {}  # By `Candidate.key`.
        self._asked: Candidate | None = None
        self._rivals = self.trials  # Trials that halving has not excluded.
        self._round: list[Trial] = []  # Rivals that this round of halving has still to measure.

    def ask(self) -> Candidate | None:
        """Returns the next candidate to measure, the same until `tell`; None at the end."""
        if self._asked is None:
            self._asked = self._next() or self._next_again()
        return self._asked

    def tell(self, step_s: float) -> None:
        """Reports the measured step time of the candidate that `ask` returned.

        Args:
            step_s: Seconds of a step, above 0 and finite.

        Raises:
            UsageError: The time is out of range, or there is no candidate to measure.
        """
        asked = self._asked
        if asked is None:
            raise UsageError("tell() without a candidate to measure; call ask() first")
        if not 0 < step_s < math.inf:
            raise UsageError(
                f"a step of the plan '{asked.what}' was measured to take {step_s} s, which cannot "
                "be compared; return a finite time above 0"
            )
        self._asked = None
        known = self._known.get(asked.key)
        if known is not None:
            known.times_s.append(step_s)
            return
        trial = Trial(asked, [step_s])
        self.trials.append(trial)
        self._known[asked.key] = trial
        self._register(asked, step_s)

    def best(self) -> Candidate:
        """Returns the fastest candidate so far; UsageError if none was measured."""
        return self._fastest().candidate

    def summary(self) -> str:
        """Returns one line of text about the trials and their result."""
        fastest, first = self._fastest(), self.trials[0]
        return (
            f"{len(self.trials)} plans tried; '{fastest.candidate.what}' is the fastest: "
            f"{fastest.step_s:.4g} s a step in {len(fastest.times_s)} trials, against "
            f"{first.step_s:.4g} s of '{first.candidate.what}' in {len(first.times_s)}"
        )

    @property
    def measurements(self) -> int:
        """Number of measurements so far."""
        return sum(len(trial.times_s) for trial in self.trials)

    def _fastest(self) -> Trial:
        if not self.trials:
            raise UsageError("there is no best plan yet; measure at least one: ask(), then tell()")
        if self.search.worth == 0:
            return min(self._rivals, key=lambda trial: trial.step_s)
        fastest = self.trials[-1]
        for trial in reversed(self.trials):
            if trial.step_s < fastest.step_s * (1 - self.search.worth):
                fastest = trial
        return fastest

    def _next(self) -> Candidate | None:
        for _ in range(_REPEATS + len(self._starts)):
            if self._starts:
                candidate = self._starts.pop(0)
            elif self._sampler is not None and len(self.trials) < self._sampler.space.trials:
                candidate = self._sampler.suggest()
            elif self.search.guide is not None:
                return self.search.guide(self._time_of)
            else:
                break
            known = self._known.get(candidate.key)
            if known is None:
                return candidate
            self._register(candidate, known.step_s)
        return None

    def _time_of(self, candidate: Candidate) -> float | None:
        known = self._known.get(candidate.key)
        return known.step_s if known else None

    def _next_again(self) -> Candidate | None:
        if self.search.halve and not self._round and len(self._rivals) > 1:
            by_time = sorted(self._rivals, key=lambda trial: trial.step_s)
            fewest = 2 if len(by_time[0].times_s) == 1 else 1
            self._rivals = by_time[: max((len(by_time) + 1) // 2, fewest)]
            if len(self._rivals) > 1:
                self._round = list(self._rivals)
        return self._round.pop(0).candidate if self._round else None

    def _register(self, candidate: Candidate, step_s: float) -> None:
        if self._sampler is not None and candidate.point is not None:
            self._sampler.register(candidate.point, self.trials[0].step_s / step_s)


def check_installed() -> None:
    """Raises UsageError if bayesian-optimization is not installed."""
    if find_spec("bayes_opt") is None:  # An import would take a second on every rank.
        raise UsageError(
            "tuned policies need bayesian-optimization, which is not installed; install it with: "
            "pip install 'usbyte[tune]'"
        )


class _Sampler:
    """Suggests points by expected improvement over a Gaussian process (bayesian-optimization)."""

    def __init__(self, space: Space, seed: int) -> None:
        check_installed()
        from bayes_opt import BayesianOptimization, acquisition

        self.space = space
        self._points: set[Point] = set()
        self._optimizer = BayesianOptimization(
            f=None,
            pbounds={axis: (0.0, 1.0) for axis in space.axes},
            acquisition_function=acquisition.ExpectedImprovement(xi=space.xi),
            random_state=seed,
            verbose=0,
        )
        self._optimizer.set_gp_params(alpha=_NOISE)

    def suggest(self) -> Candidate:
        point = self._point(self._optimizer.suggest())
        if point in self._points:  # No point has an expected improvement any more.
            point = self._point(self._optimizer.random_sample()[0])
        return self.space.at(point)

    def register(self, point: Point, speed: float) -> None:
        if point not in self._points:
            self._points.add(point)
            self._optimizer.register(dict(zip(self.space.axes, point, strict=True)), speed)

    def _point(self, params: Mapping[str, Any]) -> Point:
        return tuple(float(params[axis]) for axis in self.space.axes)
