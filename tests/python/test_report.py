# SPDX-License-Identifier: Apache-2.0
"""`usbyte report`: the page, in a real browser where there is one, and the picture."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess

import click.testing
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte import _core
from usbyte.cli import main
from usbyte.planning import profiles
from usbyte.planning.layout import tensor_specs
from usbyte.planning.whatif import best_ddp
from usbyte.report import trace
from usbyte.report.html import render
from usbyte.report.scene import Scene

RING = ["--ring", "2,1ms,1gbit"]
BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)


def invoke(*arguments):
    return click.testing.CliRunner().invoke(main, ["report", *map(str, arguments)])


def train(rank, size):
    ub.init()
    torch.manual_seed(0)
    words = nn.Embedding(50, 64, sparse=True)
    model = nn.Sequential(words, *(nn.Linear(64, 64) for _ in range(3)))
    optimizer = ub.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), overlap="forward",
        policy="bytescheduler", partition_bytes=10_000,
    )  # fmt: skip
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 2], [3, 4, 40 + rank]])).sum().mul(1e-6).backward()
        optimizer.step()
    optimizer.synchronize()
    plan = optimizer.plan.to_json()
    ub.shutdown()
    return plan


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run: its plan, a profile with made-up times, and rank 0's trace."""
    folder = tmp_path_factory.mktemp("report")
    env = {"USBYTE_TIMELINE": f"{folder}/trace.%r.json", "USBYTE_LEARNING_STEPS": "3"}
    plan, _ = run_ranks(2, train, env=env, timeout=60)
    (folder / "plan.json").write_text(plan)
    tensors = [t for t in _core.Plan.from_json(plan).tensors if t.name != "usbyte.used"]
    # In another order than the plan's, and without the flags.
    dense, (words,) = [t for t in tensors if not t.sparse], [t for t in tensors if t.sparse]
    specs = tensor_specs((t.name, t.numel, t.dtype) for t in reversed(dense))
    end = specs[-1].end
    specs.append(_core.TensorSpec(words.name, 0, words.dtype, end, words.rows, words.width))
    n = len(specs)
    need = [1e-3 * (n - 1 - i) for i in range(n)]
    ready = [1e-3 * (n + 1 + i) for i in range(n)]
    job = _core.Profile(specs, need, ready, model="<three> layers & more")
    (folder / "profile.json").write_text(job.to_json())
    return folder


class Page(html.parser.HTMLParser):
    """Elements by tag, with their attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **{k: v or "" for k, v in attrs}}
        self.elements.append(element)
        if tag not in ("meta", "link"):
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def select(self, tag, **attributes):
        return [
            e for e in self.elements
            if e["tag"] == tag
            and all(set(v.split()) <= set(e.get(k, "").split()) for k, v in attributes.items())
        ]  # fmt: skip

    def value(self, key):
        [element] = self.select("dd", id=key)
        return element["text"]


def in_browser(path):
    """The page after its scripts have run."""
    if BROWSER is None:
        pytest.skip("needs a browser: chromium or google-chrome")
    folder = path.parent / "browser"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", "--dump-dom", path.as_uri()]
    env = {**os.environ, "HOME": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return Page(done.stdout)


def test_prediction_alone(run, tmp_path):
    page = tmp_path / "report.html"
    done = invoke(run / "plan.json", run / "profile.json", *RING, "-o", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    plan = _core.Plan.from_json((run / "plan.json").read_text())
    job = profiles.matched(profiles.load_whole(str(run / "profile.json")), plan)
    network = _core.NetworkModel.ring(2, 1e-3, 125e6)
    shown = Page(text)
    predicted = _core.simulate(plan, job, network)
    assert shown.value("step") == f"{predicted.step_s * 1e3:.2f} ms"
    assert shown.value("bound") == f"{_core.bound_s(job, network) * 1e3:.2f} ms"
    assert shown.value("bytes-bound") == f"{_core.bytes_bound_s(job, network) * 1e3:.2f} ms"
    assert not shown.select("dd", id="measured")
    assert shown.select("h1")[0]["text"] == "<three> layers & more: bytescheduler"
    bars = shown.select("rect", **{"class": "bar op"})
    assert sorted(int(bar["data-op"]) for bar in bars) == list(range(len(plan.ops)))
    assert len(shown.select("tr")) == 1 + len(plan.ops)
    # Nothing is fetched from elsewhere.
    assert not re.search(r"(?:src|href|url)\s*[=(]|@import|https?://", text)


def test_a_timeline_alone_is_enough(run, tmp_path):
    output = tmp_path / "report.html"
    done = invoke(run / "trace.0.json", "-o", output)
    assert done.exit_code == 0, done.output
    alone = Page(output.read_text())
    decision, *_ = trace.read_descriptions(run / "trace.0.json")
    assert decision.plan.to_json() == (run / "plan.json").read_text()
    assert (decision.overlap, decision.sharded) == ("forward", False)
    scene = Scene.predicted(
        decision.plan, decision.profile, decision.network, decision.overlap, decision.sharded
    )
    assert alone.value("step") == f"{scene.prediction.step_s * 1e3:.2f} ms"
    assert alone.value("measured")


def passes(page):
    """The measured passes of a page, as kind and text."""
    _, _, after = page.partition('class="lane compute measured"')
    bars = Page(after.partition("</g>")[0]).select("rect")
    assert all(0 <= float(bar["x"].removesuffix("%")) <= 100 for bar in bars)
    return [(bar["class"].split()[1], bar["text"]) for bar in bars]


def test_measured_passes(run, tmp_path):
    output = tmp_path / "report.html"
    events = json.loads((run / "trace.0.json").read_text())

    def page(trace, step):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(trace))
        done = invoke(path, "--step", step, "-o", output)
        assert done.exit_code == 0, done.output
        return output.read_text()

    shown = passes(page(events, 6))
    assert [kind for kind, _ in shown] == ["forward", "backward", "forward"]  # that of step 7, too
    lengths = [
        e["dur"] * 1e-3 for e in events if e.get("cat") == "compute" and e["args"]["step"] in (6, 7)
    ]
    found = [float(re.search(r"\((\S+) ms\)", text)[1]) for _, text in shown]
    assert found == pytest.approx(lengths[:3], abs=2e-3)
    [forward, *_] = [e for e in events if e.get("cat") == "compute" and e["args"]["step"] == 6]
    earlier = [e | {"ts": e["ts"] - 1e6} if e is forward else e for e in events]
    assert passes(page(earlier, 6))[0][1].startswith("forward\n-")  # a second before, on the axis
    old = [e for e in events if e.get("cat") not in ("compute", "step")]
    assert passes(page(old, 6)) == []


def test_a_timeline_alone_takes_no_other_sources(run, tmp_path):
    done = invoke(run / "trace.0.json", *RING, "--trace", run / "trace.0.json")
    assert done.exit_code == 2
    assert "leave out --ring, --trace, or give PLAN and PROFILE" in " ".join(done.output.split())


def test_a_timeline_whose_last_plan_no_recorded_step_follows(run, tmp_path):
    events = json.loads((run / "trace.0.json").read_text())
    job = profiles.load("vgg16-half")
    network = _core.NetworkModel.ring(2, 1e-3, 1.25e8)
    plan = _core.make_plan("ddp", job, network, {}, "backward")
    decision = {
        "hash": plan.hash(), "plan": plan.to_json(), "profile": job.to_json(),
        "network": network.to_json(), "overlap": "backward",
    }  # fmt: skip
    [told] = [e for e in events if e["name"] == "usbyte_decision"][-1:]
    later = {"optimizer": told["args"]["optimizer"], "sharded": False, "decision": decision}
    path = tmp_path / "switched.json"
    path.write_text(json.dumps([*events, {**told, "args": later}]))
    assert len(trace.read_descriptions(path)) == 2
    described, measured = trace.described_step(path, None)
    assert described.plan.to_json() == (run / "plan.json").read_text()
    assert trace.described_step(path, measured.step)[1].step == measured.step
    done = invoke(path, "--step", "1", "-o", tmp_path / "report.html")
    assert done.exit_code == 1
    assert "has no step 1 under any plan that it tells of" in done.output


@pytest.mark.parametrize("args", [{}, {"args": {}}, {"args": {"optimizer": "x", "decision": 1}}])
def test_a_damaged_description(tmp_path, args):
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps([{"name": "usbyte_decision", "ph": "M", **args}]))
    done = invoke(path)
    assert done.exit_code == 1
    assert "cannot read the trace" in done.output
    assert "give PROFILE, too" in done.output


def test_a_timeline_without_a_plan(run, tmp_path):
    events = json.loads((run / "trace.0.json").read_text())
    path = tmp_path / "early.json"
    path.write_text(json.dumps([e for e in events if e["name"] != "usbyte_decision"]))
    done = invoke(path)
    assert done.exit_code == 1
    assert "does not tell of a plan" in done.output


def test_a_sharded_plan(run, tmp_path):
    page, plan = tmp_path / "report.html", tmp_path / "plan.json"
    job = profiles.load(str(run / "profile.json"))
    network = _core.NetworkModel.ring(2, 1e-3, 125e6)
    made = _core.make_plan("dear", job, network, {}, "forward", True)
    plan.write_text(made.to_json())
    done = invoke(plan, run / "profile.json", *RING, "--shard-optimizer", "-o", page)
    assert done.exit_code == 0, done.output
    shown = Page(page.read_text())
    predicted = _core.simulate(made, job, network, "forward", True)
    assert shown.value("step") == f"{predicted.step_s * 1e3:.2f} ms"
    bound_s = _core.bound_s(job, network, "forward", True)
    assert shown.value("bound") == f"{bound_s * 1e3:.2f} ms"
    assert shown.value("sharded") == "sharded"


def test_prediction_and_measurement_in_a_browser(run):
    page = run / "report.html"
    trace = run / "trace.0.json"
    done = invoke(run / "plan.json", run / "profile.json", *RING, "--trace", trace, "-o", page)
    assert done.exit_code == 0, done.output
    shown = in_browser(page)
    plan = _core.Plan.from_json((run / "plan.json").read_text())
    for side in ("predicted", "measured"):
        assert shown.select("g", **{"class": f"lane in-flight {side}"})
        assert shown.select("g", **{"class": f"lane updates {side}"})
    bars = shown.select("rect", **{"class": "bar op"})
    assert len(bars) == 2 * len(plan.ops)
    # The script has taken the tips over from the <title> elements.
    tips = [bar["data-tip"] for bar in bars if bar["data-op"] == "0"]
    assert len(tips) == 2
    for tip in tips:
        assert "op 0: all_reduce" in tip
        assert f"{plan.bytes(plan.ops[0]):,} bytes" in tip
        assert plan.tensors[plan.tensors_of(plan.ops[0])[0]].name in tip
    assert float(shown.value("measured").removesuffix(" ms")) > 0
    (at,) = [i for i, op in enumerate(plan.ops) if op.sparse]
    (table,) = shown.select("table", id="sparse")
    cells = [e["text"] for e in shown.elements[shown.elements.index(table) :] if e["tag"] == "td"]
    # Five rows of fifty, one of them this rank's alone, and all in the first half but that one.
    scheme = plan.ops[at].sparse.scheme
    assert cells[:7] == [str(at), scheme, "50", "10", "12", "1.20", "1.60"]
    assert cells[-1] == "0.weight"
    for bar in shown.select("rect", **{"class": "bar"}):
        assert 0 <= float(bar["x"].removesuffix("%")) <= 100
        assert 0 < float(bar["width"].removesuffix("%")) <= 100


def test_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "report.png"
    done = invoke(
        run / "plan.json", run / "profile.json", *RING, "--trace", run / "trace.0.json",
        "--step", 6, "-o", tmp_path / "report.html", "--png", picture,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "The measured step is step 6" in (tmp_path / "report.html").read_text()


def test_backward_overlap(run, tmp_path):
    page = tmp_path / "report.html"
    done = invoke(
        run / "plan.json", run / "profile.json", "--ring", "2,1ms,1mbit", "--overlap", "backward",
        "-o", page,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shown = Page(page.read_text())
    assert shown.value("overlap") == "backward"
    # The thread waits once, for all gradients.
    [wait] = [bar for bar in shown.select("rect") if "backward waits for" in bar["text"]]
    assert "3.bias, 3.weight" in wait["text"]


def test_ddps_step_is_beside_that_of_the_plan():
    specs = tensor_specs((f"layer{i}.weight", 300_000, "float32") for i in range(6))
    job = _core.Profile(
        specs, [1e-3 * i for i in range(6)], [0.02 - 1e-3 * i for i in range(6)], model="six layers"
    )
    network = _core.NetworkModel.ring(4, 1e-4, 125e6)
    plan = _core.make_plan("auto", job, network, {}, "forward")
    shown = Page(render(Scene.predicted(plan, job, network, "forward")))
    ddp, ddp_s = best_ddp(job, network)
    assert shown.value("ddp") == f"{ddp_s * 1e3:.2f} ms"
    ops = shown.select("rect", **{"class": "bar ddp"})
    predicted = _core.simulate(ddp, job, network, "backward")
    ends = [f"to {1e3 * done_s:.3f} ms" for done_s in predicted.done_s]
    assert all(end in bar["text"] for bar, end in zip(ops, ends, strict=True))
    assert all("data-op" not in bar for bar in ops)
    [wait] = [bar for bar in shown.select("rect") if "backward waits for" in bar["text"]]
    assert max(predicted.done_s) == pytest.approx(ddp_s)
    assert ends[-1] in wait["text"]


def _no_traces(folder):
    """Files that are nearly traces of usbyte's."""
    event = {
        "ph": "X",
        "pid": 0,
        "name": "a",
        "cat": "wait",
        "ts": 1,
        "dur": 1,
        "args": {"step": 1},
    }
    texts = [json.dumps([{**event, name: value}]) for name, value in [
        ("args", {}), ("args", 3), ("args", {"step": "x"}), ("ts", "soon"), ("dur", None),
    ]]  # fmt: skip
    texts += [json.dumps([{k: v for k, v in event.items() if k != "cat"}]), "[1]", '["X"]']
    texts += [json.dumps([event]).replace('"ts": 1', f'"ts": {odd}') for odd in ("NaN", "1e999")]
    texts.append("[" * 200_000)
    for i, text in enumerate(texts):
        path = folder / f"odd{i}.json"
        path.write_text(text)
        yield path
    path.write_bytes(b"\xff\xfe[]")
    yield path


def test_the_options_of_plan(tmp_path):
    """What `usbyte plan` has predicted, with any of the options that both have."""
    costs = _core.CodecCost(_core.AlphaBeta(5e-3, 1e-9, 5e-3), _core.AlphaBeta(0, 1e-10))
    (tmp_path / "costs.json").write_text(_core.CodecCosts({"topk:0.01": costs}).to_json())
    common = ["vgg16-half", *RING, "--scale-time", "0.1", "--scale-bytes", "0.3"]
    common += ["--codec-costs", str(tmp_path / "costs.json")]
    plan, page = str(tmp_path / "plan.json"), tmp_path / "report.html"
    for planned, both in [
        (["--codec", "topk:0.01", "--policy", "ddp"], ["--overlap", "backward"]),
        (["--policy", "dear"], ["--shard-optimizer"]),
    ]:
        done = click.testing.CliRunner().invoke(
            main, ["plan", *common, *planned, *both, "-o", plan]
        )
        assert done.exit_code == 0, done.output
        step_s = float(re.search(r"step ([0-9.]+) s", done.output)[1])
        done = invoke(plan, *common, *both, "-o", page)
        assert done.exit_code == 0, done.output
        shown = Page(page.read_text())
        assert shown.value("step") == f"{step_s * 1e3:.2f} ms"
        assert ("all_reduce by topk:0.01" in page.read_text()) == ("--codec" in planned)


def test_errors_name_the_culprit(run, tmp_path):
    plan, profile = run / "plan.json", run / "profile.json"
    trace = run / "trace.0.json"
    other = tmp_path / "other.json"
    job = profiles.load(str(profile))
    other.write_text(_core.make_plan("wfbp", job, _core.NetworkModel.ring(2, 0, 1e9)).to_json())
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 1}')
    (tmp_path / "empty.json").write_text(json.dumps([]))
    for arguments, words in [
        ((tmp_path / "none.json", profile), "cannot read the plan"),
        ((plan, "vgg16-half"), "is not in the profile"),
        ((plan, profile, "--step", "3"), "--trace"),
        ((plan, profile, "--trace", tmp_path / "none.json"), "USBYTE_TIMELINE"),
        ((plan, profile, "--trace", bad), "USBYTE_TIMELINE"),
        ((plan, profile, "--trace", tmp_path / "empty.json"), "no step"),
        *(((plan, profile, "--trace", path), "USBYTE_TIMELINE") for path in _no_traces(tmp_path)),
        ((plan, profile, "-o", "/no/such/page.html"), "cannot write"),
        ((other, profile, "--trace", trace), "optimizer.plan.to_json()"),
        # Learning steps follow another plan.
        ((plan, profile, "--trace", trace, "--step", "1"), "those that do are 4, 5"),
    ]:
        output = [] if "-o" in arguments else ["-o", tmp_path / "report.html"]
        done = invoke(*arguments, *RING, *output)
        assert done.exit_code in (1, 2), arguments
        assert words in " ".join(done.output.split()), done.output
