# SPDX-License-Identifier: Apache-2.0
"""Faults, and what is promised of each: the rows of docs/reliability.md.

Every case is a training by three real processes; rank 1 is the one with which something is wrong.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _faults as faults
from _faults import CULPRIT, LIMIT_S, RANKS, STEPS
from _ranks import run_ranks

LIMITS = {"USBYTE_STALL_WARNING_S": "1", "USBYTE_STALL_LIMIT_S": f"{LIMIT_S:g}"}
PATIENT = {"USBYTE_STALL_WARNING_S": "30", "USBYTE_STALL_LIMIT_S": "60"}  # where nothing stalls
AT_ONCE, SOON, STALL = "at once", "10 s", "stall limit + 10 s"
BOUNDS_S = {AT_ONCE: 5.0, SOON: 10.0, STALL: LIMIT_S + 10}  # at once: no wait of usbyte's


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        what: The fault, in words.
        work: Called in each rank; returns what `observed` does.
        bound: Within which every rank reports.
        told: What ranks but the culprit report; a regular expression.
        culprit: What that one reports; None if it is gone.
        state: What is left on ranks but the culprit: "step N", or a regular expression of the error
            that who reads parameters gets.
        culprit_state: What is left there.
        args: For `work`.
        env: More variables.
        dies: Ranks that end without a result; the culprit if it reports nothing.
    """

    what: str
    work: Callable[..., Any]
    bound: str
    told: str
    culprit: str | None
    state: str
    culprit_state: str = ""
    args: tuple[Any, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    dies: tuple[int, ...] = ()

    def run(self, folder: Path) -> list[dict[str, Any] | None]:
        """What was observed on each rank; None of those that are gone."""
        env = {name: text.format(folder=folder) for name, text in self.env.items()}
        env = (PATIENT if self.bound == AT_ONCE else LIMITS) | env
        args = [text.format(folder=folder) if isinstance(text, str) else text for text in self.args]
        return run_ranks(RANKS, self.work, *args, env=env, dies=self.gone, timeout=90)

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks that end without a result."""
        return self.dies or ((CULPRIT,) if self.culprit is None else ())


@functools.lru_cache
def steps_of(kind: str) -> dict[str, int]:
    """By digest of the parameters, after how many steps they are so without a fault."""
    digests: list[str] = run_ranks(RANKS, faults.unbroken, kind)[0]
    return {digest: step for step, digest in enumerate(digests)}


class LabCase(Case):
    """One whose ranks are on hosts of an emulated cluster."""

    def run(self, folder: Path) -> list[dict[str, Any] | None]:
        lab = f"f{os.getpid() % 10_000_000}"
        usbyte = [sys.executable, "-c", "from usbyte.cli import main; main(prog_name='usbyte')"]
        call = f"import _faults; _faults.on_lab_host({self.work.__name__!r}, {str(folder)!r}, "
        rank = [sys.executable, "-c", call + f"{json.dumps(self.args)!r})"]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **LIMITS}
        run = [*usbyte, "lab", "run", "--name", lab, "--", *rank]
        down = [*usbyte, "lab", "down", "--name", lab, "--kill"]
        up = [*usbyte, "lab", "up", "--name", lab, "--hosts", str(RANKS)]
        subprocess.run(up, env=env, check=True, capture_output=True, timeout=180)
        try:
            # As long as `run_ranks` waits for ranks on a loaded machine.
            done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=270)
        finally:
            subprocess.run(down, env=env, check=True, capture_output=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(Path(folder, f"answer-{r}.json").read_text()) for r in range(RANKS)]


GONE = rf"FaultError: rank {CULPRIT} \(host \S+, pid \d+\) is gone or frozen: it does not answer"
BEHIND = rf"FaultError: rank {CULPRIT} has not begun backward of step {STEPS + 1}"
UNREACHED = "FaultError: rank 0 or the launcher, which holds the store of this job, has ended or"
UNKNOWN = "the progress of the other ranks is unknown"
# On a busy machine any rank may have waited for another, and have said so.
NOTHING = "^nothing$|^logged: .*(a rank may be slow, stuck or lost|has waited)"

CASES = [
    Case(
        "a rank is killed inside backward",
        faults.killed,
        SOON,
        GONE,
        None,
        f"step {STEPS}",
        args=("backward",),
    ),
    Case(
        'the same, with overlap="forward"',
        faults.killed,
        SOON,
        GONE,
        None,
        f"step {STEPS}",
        args=("forward",),
    ),
    Case(
        "the same, with shard_optimizer=True",
        faults.killed,
        SOON,
        GONE,
        None,
        f"step {STEPS}",
        args=("sharded",),
    ),
    Case(
        "a rank is killed when a part of its gradients has been applied by others",
        faults.killed_after_a_part,
        SOON,
        GONE,
        None,
        f"step {STEPS + 1} was applied to some of the parameters, not to all",
    ),
    Case(
        "a rank is killed, and the others are in an eager operation",
        faults.killed_in_eager,
        STALL,
        GONE,
        None,
        f"step {STEPS}",
    ),
    Case(
        "a rank exits with code 0 without shutdown()",
        faults.exits,
        SOON,
        GONE,
        None,
        f"step {STEPS}",
    ),
    Case(
        "a rank leaves the training before the others",
        faults.leaves,
        STALL,
        rf"FaultError: rank {CULPRIT} \(.*\) has shut down while the others go on",
        NOTHING,
        f"step {STEPS}",
        f"step {STEPS}",
    ),
    Case(
        "the rank that serves the store is killed",
        faults.store_lost,
        STALL,
        UNREACHED,
        UNREACHED,
        UNKNOWN,
        UNKNOWN,
        dies=(0,),
    ),
    Case(
        "a rank freezes (SIGSTOP), and goes on when the others have given it up",
        faults.freezes,
        STALL,
        GONE,
        # It is told by the network, or where it uses parameters, whichever it comes to first.
        rf"FaultError: [^\n]*rank {CULPRIT} .* is gone or frozen",
        f"step {STEPS}",
        "the other ranks have continued without this rank",
        args=("{folder}",),
    ),
    LabCase(
        "a rank's link is cut",
        faults.link_cut,
        STALL,
        GONE,
        UNREACHED,
        f"step {STEPS}",
        UNKNOWN,
        args=(False,),
    ),
    LabCase(
        "a rank's link is cut, and all are in an eager operation",
        faults.link_cut,
        STALL,
        GONE,
        UNREACHED,
        f"step {STEPS}",
        UNKNOWN,
        args=(True,),
    ),
    Case(
        "a rank sleeps for longer than the stall limit",
        faults.sleeps,
        STALL,
        BEHIND,
        BEHIND,
        f"step {STEPS}",
        f"step {STEPS}",
        args=(LIMIT_S + 3,),
    ),
    Case(
        "a rank sleeps for less; the run goes on",
        faults.sleeps,
        STALL,
        "logged: .*a rank may be slow, stuck or lost",
        NOTHING,
        f"step {STEPS + 3}",
        f"step {STEPS + 3}",
        args=(2.0,),
        env={"USBYTE_STALL_LIMIT_S": "20"},
    ),
    Case(
        "a rank sleeps between backward() and step(), the others have applied it",
        faults.sleeps_before_step,
        STALL,
        rf"FaultError: rank {CULPRIT} has not begun backward of step {STEPS + 2}",
        rf"FaultError: rank {CULPRIT} has not begun backward of step {STEPS + 2}",
        rf"step {STEPS + 1} was applied here, but not on rank {CULPRIT}",
        f"step {STEPS}",
    ),
    Case(
        "a rank does not come to an eager operation",
        faults.does_not_submit,
        STALL,
        rf"FaultError: .*'loss' has waited .* for rank {CULPRIT}, which did not submit it",
        rf"FaultError: .*'loss' has waited .* for rank {CULPRIT}, which did not submit it",
        f"step {STEPS}",
        f"step {STEPS}",
    ),
    Case(
        "an exception that nobody catches",
        faults.raises,
        SOON,
        rf"FaultError: rank {CULPRIT} ended with KeyError: 'loss'",
        rf"FaultError: rank {CULPRIT} ended with KeyError: 'loss'",
        f"step {STEPS}",
        f"step {STEPS}",
    ),
    Case(
        "an exception inside backward() that is caught",
        faults.raises_in_backward,
        STALL,
        rf"FaultError: rank {CULPRIT} is still in backward of step {STEPS + 1}",
        rf"FaultError: rank {CULPRIT} is still in backward of step {STEPS + 1}",
        f"step {STEPS}",
        f"step {STEPS}",
    ),
    Case(
        "a parameter has another shape on a rank",
        faults.wraps,
        AT_ONCE,
        rf"MismatchError: .*'1.weight' has shape .* on rank 0 but .* on rank {CULPRIT}",
        rf"MismatchError: .*'1.weight' has shape .* on rank 0 but .* on rank {CULPRIT}",
        "as it was",
        "as it was",
        args=("shape",),
    ),
    Case(
        "parameters have another dtype on a rank",
        faults.wraps,
        AT_ONCE,
        rf"MismatchError: .*float64 on rank 0 but float32 on rank {CULPRIT}",
        rf"MismatchError: .*float64 on rank 0 but float32 on rank {CULPRIT}",
        "as it was",
        "as it was",
        args=("dtype",),
    ),
    Case(
        "parameters have other names on a rank",
        faults.wraps,
        AT_ONCE,
        rf"MismatchError: .*rank 0 has parameter '0.weight' where rank {CULPRIT} has 'x0.weight'",
        rf"MismatchError: .*rank 0 has parameter '0.weight' where rank {CULPRIT} has 'x0.weight'",
        "as it was",
        "as it was",
        args=("name",),
    ),
    Case(
        "an argument differs on a rank",
        faults.wraps,
        AT_ONCE,
        rf"MismatchError: .*op is Average on ranks 0, 2 but Sum on rank {CULPRIT}",
        rf"MismatchError: .*op is Average on ranks 0, 2 but Sum on rank {CULPRIT}",
        "as it was",
        "as it was",
        args=("op",),
    ),
    Case(
        "an eager operation has another shape on a rank; the run goes on",
        faults.submits_other_shapes,
        AT_ONCE,
        r"MismatchError: .*'loss'.*shape",
        r"MismatchError: .*'loss'.*shape",
        f"step {STEPS + 1}",
        f"step {STEPS + 1}",
    ),
    Case(
        "a name of an eager operation is used twice on a rank; the run goes on",
        faults.names_twice,
        AT_ONCE,
        "nothing",
        f"UsageError: .*'loss'.* still in flight on rank {CULPRIT}",
        f"step {STEPS + 1}",
        f"step {STEPS + 1}",
    ),
    Case(
        "the disk is full where the timeline goes; the run goes on",
        faults.fills_the_disk,
        SOON,
        "logged: .*timeline stopped: .*File too large",
        "logged: .*timeline stopped",
        f"step {STEPS + 3}",
        f"step {STEPS + 3}",
        env={"USBYTE_TIMELINE": "{folder}/timeline-%r.json", "USBYTE_STALL_WARNING_S": "60"},
    ),
    Case(
        "a policy returns a plan for another model",
        faults.plans_for_another_model,
        SOON,
        "UsageError: .*plan",
        "UsageError: .*plan",
        "step 5",
        "step 5",
    ),
    Case(
        "a file of a topology is corrupt, with numbers and nesting out of bounds",
        faults.reads_a_corrupt_topology,
        AT_ONCE,
        "UsageError: topology .*topology.json",
        "UsageError: topology .*topology.json",
        "as it was",
        "as it was",
        args=("{folder}",),
    ),
    Case(
        "a checkpoint has the codec state of other parameters",
        faults.loads_another_sizes_memory,
        AT_ONCE,
        "UsageError: .*codec state",
        "UsageError: .*codec state",
        "as it was",
        "as it was",
    ),
]


def kind_of(case: Case) -> str:
    return str(case.args[0]) if case.work is faults.killed else "backward"


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.DOTALL) is not None
