"""A search for the plan with the shortest step: given plans, then Bayesian optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from usbyte import _core
from usbyte.errors import UsageError

#: Coordinates between 0 and 1: one length scale serves all axes of the Gaussian process.
Point = tuple[float, ...]

_NOISE = 1e-2  # variance of a measurement, relative to that between points
_REPEATS = 6  # suggestions in a row whose plans are known: the search is over


@dataclass(frozen=True)
class Candidate:
    """A plan to try.

    Attributes:
        what: In words, for the log.
        plan: What is measured.
        point: Where it lies in the space that is searched; None for a plan from elsewhere.
        overlap: What communication may hide behind under it; None: what the job says.
    """

    what: str
    plan: _core.Plan
    point: Point | None = None
    overlap: str | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        """The same for what takes the same time."""
        return self.plan.hash(), self.overlap


@dataclass(frozen=True)
class Space:
    """Where Bayesian optimisation looks for plans.

    Attributes:
        axes: Names of the coordinates.
        at: The candidate at a point.
        trials: Plans that are measured, those tried before included.
        xi: Expected improvement counts from this much above the best speed, where 1 is the speed
            of the first candidate; more explores more.
    """

    axes: Sequence[str]
    at: Callable[[Point], Candidate]
    trials: int
    xi: float


@dataclass(frozen=True)
class Search:
    """What a tuner may choose, and how long it may take.

    Attributes:
        starts: Tried first.
        steps: Of each measurement, in a running job.
        space: What is tried then; None for nothing more.
        halve: The faster half is measured again, then the faster half of that, until one is left,
            and none is by a single measurement; a plan counts with the mean of its measurements.
            After the sequential halving of Karnin, Koren and Somekh, "Almost Optimal Exploration in
            Multi-Armed Bandits", 2013, with one more measurement in each round instead of twice as
            many. Not together with a space.
        worth: A start counts as faster than those behind it only by more than this part of a step.
        guide: What to measure after the starts, given what is known of the seconds of a candidate's
            step (None: nothing); None once the search is over. Not together with a space.
    """

    starts: Sequence[Candidate]
    steps: int
    space: Space | None = None
    halve: bool = False
    worth: float = 0.0
    guide: Callable[[Callable[[Candidate], float | None]], Candidate | None] | None = None


@dataclass
class Trial:
    """A candidate and the seconds that its step was measured to take, each time."""

    candidate: Candidate
    times_s: list[float]

    @property
    def step_s(self) -> float:
        """Their mean."""
        return fmean(self.times_s)


@dataclass
class Tuner:
    """Asks for one measurement after the other, then knows the best plan.

    What Bayesian optimisation sees is the speed relative to the first candidate's. A plan that was
    measured before is not tried again, but to halve, and does not count as a trial. Equal
    measurements lead to equal questions.

    Args:
        search: What to choose from.
        seed: Of the library's random numbers.

    Attributes:
        trials: The plans that were measured so far.

    Raises:
        UsageError: There is a space to search, and bayesian-optimization is not installed.
    """

    search: Search
    seed: int = 0
    trials: list[Trial] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        space = self.search.space
        self._sampler = _Sampler(space, self.seed) if space else None
        self._starts = list(self.search.starts)
        self._known: dict[tuple[int, str | None], Trial] = {}  # by the candidate's key
        self._asked: Candidate | None = None
        self._rivals = self.trials  # that are left
        self._round: list[Trial] = []  # of them, those to measure again

    def ask(self) -> Candidate | None:
        """What to measure next, the same until it is told; None once `best` is certain."""
        if self._asked is None:
            self._asked = self._next() or self._next_again()
        return self._asked

    def tell(self, step_s: float) -> None:
        """Takes what a step of the plan that `ask` has returned takes, in seconds.

        Raises:
            UsageError: It is no positive time, or nothing was asked.
        """
        asked = self._asked
        if asked is None:
            raise UsageError("a tuner was told a time that it had not asked for; call ask() first")
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
        """The fastest candidate of those that are left."""
        return self._fastest().candidate

    def summary(self) -> str:
        """What was tried and found, in a line."""
        fastest, first = self._fastest(), self.trials[0]
        return (
            f"{len(self.trials)} plans tried, '{fastest.candidate.what}' stays with "
            f"{fastest.step_s:.4g} s a step in {len(fastest.times_s)} trials against "
            f"{first.step_s:.4g} s of '{first.candidate.what}' in {len(first.times_s)}"
        )

    @property
    def measurements(self) -> int:
        """How many times it was told."""
        return sum(len(trial.times_s) for trial in self.trials)

    def _fastest(self) -> Trial:
        if not self.trials:
            raise UsageError("a tuner has no best plan before it was told a time")
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
    """Raises UsageError unless the library that searches is there."""
    if find_spec("bayes_opt") is None:  # importing it would take a second, on every rank
        raise UsageError(
            "tuned policies need bayesian-optimization, which is not installed; install it with: "
            "pip install 'usbyte[tune]'"
        )


class _Sampler:
    """Points by expected improvement over a Gaussian process, both bayesian-optimization's."""

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
        if point in self._points:  # nothing more is to be expected anywhere
            point = self._point(self._optimizer.random_sample()[0])
        return self.space.at(point)

    def register(self, point: Point, speed: float) -> None:
        if point not in self._points:
            self._points.add(point)
            self._optimizer.register(dict(zip(self.space.axes, point, strict=True)), speed)

    def _point(self, params: Mapping[str, Any]) -> Point:
        return tuple(float(params[axis]) for axis in self.space.axes)
