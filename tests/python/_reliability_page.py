# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md from what was observed."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from datetime import date

import torch

from _fault_cases import Case
from _faults import CULPRIT, LIMIT_S

_HEAD = """# Reliability

What happens when something goes wrong: what every rank reports, within which time, and what is left
of the parameters. `make reliability` made this page by running each fault in three real processes
(`tests/python/test_reliability.py`, which every run of the tests repeats): torch {torch}, Python
{python}, {date}. Rank {culprit} is the one with which something is wrong, the stall limit was
{limit:g} s (`USBYTE_STALL_LIMIT_S`, 300 s unless set), and "seen" is the time that the slowest rank
took to report. In messages, hosts and process ids are left out.

"step 8" means that the parameters and the optimizer are those after step 8, the last one that every
surviving rank has completed, and can be read and saved. Elsewhere, whoever reads or saves the
parameters gets the error that is told: they have a part of an update, or one that other ranks do
not have, until a checkpoint is loaded into them.

Before the ranks have met, those that are missing are named every 5 s, and `init()` ends on all
ranks after `USBYTE_START_LIMIT_S` (60 s unless set), with an error that names them. A rank that
fails meanwhile, or that finds no network, ends it at once.

Codecs may have sent a part of what they remembered in a step that was not completed. It is left out
of `optimizer.state_dict()` then, and a warning tells so.

Of a model that is cut over several process sets (`process_set=`) each set is judged by itself, and
one may be left a step ahead of another. On GPUs, updates run behind operations that need not have
ended: where the device was not seen to be through with them, the parameters are dirty.

| fault | bound | seen | what the ranks report | state afterwards |
|---|---|---|---|---|
"""

# Of usbyterun: the fault, what it says and does, and the test that holds it to that.
LAUNCHER = [
    (
        "a rank fails, the others ignore SIGTERM",
        "names rank, host and code; ends all, also in sessions of their own; the rank's code",
        "test_run_local.py test_the_first_failure_ends_all_that_others_started",
    ),
    (
        "a rank fails because another was killed",
        "names the one that was killed, and its signal",
        "test_run_local.py test_a_rank_that_fails_because_another_did_is_not_blamed",
    ),
    (
        "Ctrl-C, SIGTERM",
        "ends all; code 130, 143; a second one cuts the grace short",
        "test_run_local.py test_signals_end_the_job",
    ),
    (
        "the launcher is killed",
        "nothing outlives it, on no host",
        "test_run_ssh.py test_nothing_outlives_a_launcher_that_is_killed",
    ),
    (
        "a host's agent is killed",
        "`lost host`, and which; nothing outlives it",
        "test_run_ssh.py test_nothing_outlives_a_remote_agent_that_is_killed",
    ),
    (
        "the connection to a host ends",
        "`lost host`, and which; nothing outlives it",
        "test_run_ssh.py test_nothing_outlives_a_connection_that_is_killed",
    ),
    (
        "a host refuses connections",
        "`cannot reach host`, which, and what ssh said",
        "test_run_ssh.py test_a_host_that_refuses",
    ),
    (
        "a host does not answer",
        "names it after `--start-timeout`",
        "test_run_ssh.py test_a_host_that_never_answers",
    ),
    (
        "a host's Python has no usbyte",
        "names the host and what is missing there",
        "test_run_ssh.py test_a_python_without_usbyte",
    ),
    (
        "who reads the output stops reading",
        "ends all; code 141",
        "test_run_local.py test_a_reader_that_stops_reading_ends_the_job",
    ),
    (
        "who reads the output pauses, and a rank fails",
        "ends all, and tells that output is lost; a job that has succeeded waits",
        "test_run_local.py test_a_job_that_fails_does_not_wait_for_its_reader_and_says_so",
    ),
    (
        "a rank fails, with `--max-restarts`",
        "starts all ranks anew, so many times at most; then the rank's code",
        "test_elastic.py test_restarts_come_to_an_end",
    ),
    (
        "a host is lost, with `--nnodes MIN:MAX`",
        "starts anew without it, and takes it again later",
        "test_run_ssh.py test_a_host_that_is_lost_is_left_out_of_the_next_start",
    ),
    (
        "a host is lost, and there is a spare one",
        "starts anew on that",
        "test_run_ssh.py test_a_spare_host_takes_the_place_of_one_that_is_lost",
    ),
    (
        "ranks of `examples/digits.py --resume` are killed at random",
        "training ends with the parameters of an unbroken run, bit for bit",
        "test_elastic.py test_killed_training_ends_as_training_that_was_not",
    ),
]

_LAUNCHER_HEAD = """
## The launcher

What `usbyterun` makes of faults, as the tests named have it, with real processes and a real sshd:

| fault | what it says and does | test |
|---|---|---|
"""


@dataclass
class Row:
    """What was observed of a case, by rank."""

    case: Case
    told: dict[int, str]
    left: dict[int, str]
    seconds: float

    def text(self) -> str:
        """As a row of the table."""
        cells = [
            self.case.what,
            self.case.bound,
            f"{self.seconds:.1f} s",
            _by_rank({rank: _brief(text) for rank, text in self.told.items()}),
            _by_rank({rank: _state(text) for rank, text in self.left.items()}),
        ]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(rows: list[Row]) -> str:
    """The page."""
    head = _HEAD.format(
        torch=torch.__version__.partition("+")[0],
        python=platform.python_version(),
        date=date.today(),
        culprit=CULPRIT,
        limit=LIMIT_S,
    )
    return head + "\n".join(row.text() for row in rows) + "\n" + launcher()


def launcher() -> str:
    """The page's second table."""
    rows = [f"| {fault} | {told} | `{test}` |" for fault, told, test in LAUNCHER]
    return _LAUNCHER_HEAD + "\n".join(rows) + "\n"


def _by_rank(texts: dict[int, str]) -> str:
    """One text if all ranks have the same, else that of the culprit and that of the others."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    if len(groups) == 1:
        return next(iter(groups))
    return "<br>".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    )


def _brief(told: str) -> str:
    told = re.sub(r"\(host \S+, pid \d+\) ?", "", told)
    told = re.sub(r"/\S*/(?=\w+(-\d)?\.json)", "", told)
    told = re.sub(r" ?\[[\d.]+\]:\d+", "", told)
    told = re.sub(r"\d+\.\d+ s\b", "... s", told)
    told = told.replace(" Restart the job from its last checkpoint.", "")
    return " ".join(told.split())


def _state(left: str) -> str:
    return _brief(left.partition(": load the last checkpoint")[0])
