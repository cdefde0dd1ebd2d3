# SPDX-License-Identifier: Apache-2.0
"""Tests of what runs on a GPU; `--device cpu` runs those of them that make sense there.

Tests leave what they find out about the machine with `record_property`; `--record FILE` takes it,
and the verdicts, as they come: one line of JSON for each test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "python"))

# In this order, should time run out: order of streams is what nothing but a GPU can show.
_FIRST = ("test_one_rank.py", "test_streams.py", "test_host.py", "test_ranks_equal_ddp.py")
_VERDICTS = {"passed": "passed", "failed": "failed", "skipped": "skipped"}


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"])
    parser.addoption("--record", type=Path, metavar="FILE", help="takes a line for each test")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: has no meaning on a CPU")


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    items.sort(key=lambda item: (*_FIRST, item.path.name).index(item.path.name))
    on_gpu = config.getoption("--device") == "cuda"
    for item in here:
        if on_gpu and not torch.cuda.is_available():
            reason = f"torch {torch.__version__} sees no GPU; --device cpu runs what can do without"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not on_gpu and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="has no meaning on a CPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = item.config.getoption("--record")
    # The call's verdict, or the one of what came before where there was no call.
    if path is not None and (report.when == "call" or not report.passed):
        reason = ""
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            reason = str(call.excinfo.value).strip()[-2000:]
        line = {
            "test": item.nodeid.removeprefix("tests/gpu/"),
            "verdict": _VERDICTS[report.outcome],
            "seconds": report.duration,
            "reason": reason,
            "found": list(report.user_properties),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


@pytest.fixture(scope="session")
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def transports(device):
    """By name, ways by which several ranks can talk here; see `_transport`."""
    from _transport import find

    return find(device)
