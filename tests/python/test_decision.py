# SPDX-License-Identifier: Apache-2.0
"""What a user sees of a decision: numbers for a log, a line, a table."""

import pytest

from usbyte import _core
from usbyte.planning import profiles, whatif
from usbyte.torch.plan.decision import Decision


@pytest.fixture(scope="module")
def decision():
    job = profiles.load("vgg16-half")
    network = _core.NetworkModel.ring(8, 25e-6, 1.25e9)
    plan = _core.make_plan("auto", job, network, {}, "forward")
    predicted_s = _core.simulate(plan, job, network, "forward").step_s
    bound_s = _core.bound_s(job, network, "forward", False)
    return Decision(plan, job, network, predicted_s, bound_s)


def test_summary(decision):
    told = decision.summary()
    _, ddp_s = whatif.best_ddp(decision.profile, decision.network)
    assert told == {
        "policy": "auto",
        "overlap": "forward",
        "ranks": 8,
        "gradients": 32,
        "ops": len(decision.plan.ops),
        "megabytes": pytest.approx(decision.profile.bytes / 1e6),
        "compute_s": decision.profile.iteration_s,
        "predicted_s": decision.predicted_s,
        "bound_s": decision.bound_s,
        "ddp_s": ddp_s,
        "gain": pytest.approx(ddp_s / decision.predicted_s),
        "final": 1,
    }
    assert told["bound_s"] <= told["predicted_s"] <= told["ddp_s"]


def test_a_sparse_job_has_no_prediction_of_ddp():
    specs = [_core.TensorSpec("dense", 1000, "float32", 0)]
    specs.append(_core.TensorSpec("words", 0, "float32", specs[0].end, 500, 8))
    job = _core.Profile(specs, [0.0, 1e-3], [4e-3, 3e-3])
    network = _core.NetworkModel.ring(2, 25e-6, 1.25e9)
    dense = _core.Profile(specs[:1], [0.0], [4e-3])
    plan = _core.make_plan("ddp", dense, network, {}, "backward")
    told = Decision(plan, job, network, 5e-3, 4e-3).summary()
    assert told["predicted_s"] == 5e-3
    assert not told.keys() & {"ddp_s", "gain"}


def test_repr_is_one_line_of_numbers(decision):
    text = repr(decision)
    assert f"predicted step {decision.predicted_s * 1e3:.1f} ms" in text
    assert f"{len(decision.plan.ops)} ops" in text
    assert "\n" not in text
    assert "trial" not in text


def test_repr_tells_of_a_trial(decision):
    text = repr(Decision(decision.plan, decision.profile, decision.network, 1.0, 1.0, 7))
    assert text.endswith("on trial for 7 steps>")


def test_notebooks_show_a_table(decision):
    page = decision._repr_html_()
    assert page.startswith("<table><tr><th>policy</th><td>auto</td></tr>")
    assert page.count("<tr>") == len(decision.summary())
