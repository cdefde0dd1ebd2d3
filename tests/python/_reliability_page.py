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

Of a model that is cut over several process sets (`process_set=`) each set is judged by itself, and
one may be left a step ahead of another. On GPUs, updates run behind operations that need not have
ended: where the device was not seen to be through with them, the parameters are dirty.

| fault | bound | seen | what the ranks report | state afterwards |
|---|---|---|---|---|
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
    return head + "\n".join(row.text() for row in rows) + "\n"


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
