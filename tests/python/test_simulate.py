# SPDX-License-Identifier: Apache-2.0
"""The table of `usbyte simulate`; more is in test_tools.py, and its picture in test_figures.py."""

from __future__ import annotations

import click.testing

from usbyte import _core
from usbyte.cli import main
from usbyte.planning import profiles
from usbyte.planning.layout import tensor_specs


def simulate(tmp_path, job, *options):
    path = tmp_path / "profile.json"
    path.write_text(job.to_json())
    runner = click.testing.CliRunner()
    done = runner.invoke(main, ["simulate", str(path), *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_best_policies_have_a_star(tmp_path):
    job = profiles.scaled(profiles.vgg16_half(), size=0.1)
    policies = ["auto", "wfbp", "ddp", "backward:ddp"]
    options = ["--workers", "4,64", "--bandwidth", "1gbit", "--policies", ",".join(policies)]
    output = simulate(tmp_path, job, *options)
    assert "; * marks the best" in output  # also in pipes and logs, which have no colours
    rows = [line.strip("│ ").split("│") for line in output.splitlines() if line[0] == "│"]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    for column, ranks in enumerate((4, 64)):
        network, shown = _core.NetworkModel.ring(ranks, 25e-6, 125e6), {}
        for name in policies:
            overlap, _, policy = name.rpartition(":")
            plan = _core.make_plan(policy, job, network, {}, overlap or "forward")
            step_s = _core.simulate(plan, job, network, overlap or "forward").step_s
            shown[name] = f"{step_s * 1e3:.1f}"
        best = min(shown.values(), key=float)
        assert 1 <= list(shown.values()).count(best) < len(policies)
        for name, step in shown.items():
            assert cells[name][column] == (f"* {step}" if step == best else step)


def test_steps_that_read_the_same_are_marked_the_same(tmp_path):
    # The startup of a second op differs by nanoseconds, which no digit shows.
    rows = [("a", 100, "float32"), ("b", 100, "float32")]
    job = _core.Profile(tensor_specs(rows), [0.0, 0.05], [0.1, 0.1])
    network = _core.NetworkModel.ring(2, 1e-9, 1.25e9, 1)
    steps_s = [
        _core.simulate(_core.make_plan(policy, job, network), job, network).step_s
        for policy in ("ddp", "wfbp")
    ]
    assert steps_s[0] != steps_s[1]
    options = ["--workers", "2", "--latency", "1ns", "--serial-startups"]
    output = simulate(tmp_path, job, *options, "--policies", "ddp,wfbp")
    assert output.count("* 100.0") == 2


def test_help_says_what_the_star_means():
    shown = click.testing.CliRunner().invoke(main, ["simulate", "--help"]).output
    assert "A star (*) marks the shortest step of each column." in " ".join(shown.split())
