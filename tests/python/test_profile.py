# SPDX-License-Identifier: Apache-2.0
"""`ub.profile` and `usbyte profile`: what they record of jobs, and what they say of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import usbyte.torch as ub
from _models import Awkward
from _ranks import run_ranks
from usbyte import _core
from usbyte.cli.profile import _unsteady
from usbyte.errors import UsageError
from usbyte.planning import profiles
from usbyte.planning.layout import tensor_specs

FORWARD, BACKWARD, UPDATE = 0.02, 0.03, 0.01  # s, of a `Slow` layer or of the optimizer


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD)
        return grad


class Slow(nn.Linear):
    def forward(self, x):
        return _Sleep.apply(super().forward(x))


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(UPDATE)
        return loss


def slow_model():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # hooks SGD.step too, which SlowSGD.step calls
    return nn.Sequential(Slow(8, 8), Slow(8, 8), Slow(8, 4))


def train(model, optimizers, steps, micro_batches=1):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(micro_batches):
            model(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def rows(job):
    return {t.name: (job.need_s[i], job.ready_s[i]) for i, t in enumerate(job.tensors)}


def check_slow(job, micro_batches=1):
    """Lower limits are exact, since sleep is never too short; upper ones only have an order."""
    found = rows(job)
    assert list(found) == [f"{k}.{what}" for k in range(3) for what in ("weight", "bias")]
    before = (micro_batches - 1) * 3 * (FORWARD + BACKWARD)
    for k in range(3):
        need, ready = found[f"{k}.weight"]
        assert need >= k * FORWARD
        assert ready >= before + 3 * FORWARD + (3 - k) * BACKWARD
    assert found["0.weight"][0] == 0
    assert found["2.weight"][1] + BACKWARD <= found["1.weight"][1]
    assert job.update_s >= UPDATE
    assert job.step_s >= max(job.ready_s) + job.update_s
    assert len(job.need_spread_s) == len(job.ready_spread_s) == 6


def test_an_ordinary_loop(tmp_path):
    model = slow_model()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    path = tmp_path / "job.json"
    with ub.profile(model, optimizer, steps=2, skip=1, path=path, name="slow") as recording:
        assert not recording.done
        with pytest.raises(UsageError, match="saw 0 of 3"):
            recording.result()
        train(model, [optimizer], 3)
        assert recording.done
        assert len(model._forward_pre_hooks) == 0
        train(model, [optimizer], 1)  # not recorded
    assert len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) == 0
    check_slow(recording.result())
    written = profiles.load(str(path))
    assert written.model == "slow"
    assert written.ready_s == pytest.approx(recording.result().ready_s, abs=1e-9)
    head = json.loads(path.read_text())["recorded"]
    assert head["torch"] == torch.__version__
    assert len(path.read_text().splitlines()) == 6 + 3  # a line for each tensor


def test_several_optimizers_of_one_model_end_an_iteration_together():
    model = slow_model()
    optimizers = [SlowSGD([p], lr=0.1) for p in model.parameters()]
    with ub.profile(model, steps=1, skip=1) as recording:
        train(model, optimizers, 2)
    check_slow(recording.result())
    assert recording.result().update_s >= 6 * UPDATE


def test_gradients_of_micro_batches_are_ready_with_the_last():
    model = slow_model()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    with ub.profile(model, steps=1, skip=1) as recording:
        train(model, [optimizer], 2, micro_batches=2)
    check_slow(recording.result(), micro_batches=2)


def test_a_closure_and_an_evaluation_between():
    model = slow_model()
    optimizer = SlowSGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    with ub.profile(model, optimizer, steps=5, skip=1) as recording:
        for _ in range(6):
            optimizer.step(closure)
            with torch.no_grad():
                model.eval()(torch.ones(2, 8))
                model.train()
    job = recording.result()
    check_slow(job)
    # The pass under no_grad is no use of the next step; the closure's backward is no update.
    assert job.step_s >= job.ready_s[0] + UPDATE + 3 * FORWARD
    assert job.update_s < 3 * (FORWARD + BACKWARD)


def test_tied_functional_unused_and_mixed_parameters():
    torch.manual_seed(0)
    model = Awkward(mixed=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with ub.profile(model, optimizer, steps=2, skip=1) as recording:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(0, 40, (4, 6))).sum().backward()
            optimizer.step()
    job = recording.result()
    found = rows(job)
    assert set(found) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "head.weight" not in found  # tied to embed.weight
    # float32 first, then float64, each by need.
    dtypes = [t.dtype for t in job.tensors]
    assert dtypes == sorted(dtypes)
    assert found["scale"][0] == 0  # the outermost module's own
    assert 0 < found["embed.weight"][0] < found["attention.out_proj.weight"][0]
    assert found["attention.out_proj.weight"][0] < found["sometimes.weight"][0]
    # The never used ones are known to have no gradient when backward ends.
    assert found["never.weight"][1] == max(job.ready_s) >= found["embed.weight"][1]
    plan = _core.make_plan("auto", job, _core.NetworkModel.ring(4, 1e-4, 1e8))
    assert [t.name for t in plan.tensors] == [t.name for t in job.tensors]


def test_hooks_of_others_come_to_no_harm():
    model = slow_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with ub.profile(model, steps=1, skip=1) as recording:
        other = register_optimizer_step_post_hook(lambda *_: seen.append(1))
        with ub.profile(model, steps=2, skip=1) as longer:
            train(model, [optimizer], 4)
    other.remove()
    assert recording.done
    assert longer.done
    assert len(seen) == 4


class Wrapper(torch.optim.Optimizer):
    """Like those that never call the base class's constructor."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups


def test_a_refused_optimizer_leaves_no_hook():
    model = slow_model()
    recording = ub.profile(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(UsageError, match="give the optimizer that it wraps"), recording:
        pass
    assert len(model._forward_pre_hooks) == 0
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_where_the_profile_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        ub.profile(slow_model(), path=tmp_path / "none" / "job.json")


def test_bad_arguments_and_short_loops():
    model = slow_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"must be a torch\.nn\.Module"):
        ub.profile([model])
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer"):
        ub.profile(model, model)
    with pytest.raises(UsageError, match=r"at least 1 .*, not steps=0"):
        ub.profile(model, steps=0)
    with pytest.raises(UsageError, match="nothing was recorded"):
        ub.profile(model).result()
    with pytest.raises(UsageError, match="saw 1 of 13"), ub.profile(model):
        train(model, [optimizer], 1)
    with pytest.raises(ZeroDivisionError), ub.profile(model, optimizer):
        1 / 0  # noqa: B018
    with pytest.raises(UsageError, match="no parameter"), ub.profile(nn.ReLU()):
        pass
    some = torch.optim.SGD(model[2].parameters(), lr=0.1)
    unused = pytest.raises(UsageError, match="4 parameters have gradients that no step")
    with unused, ub.profile(model, steps=1, skip=1):
        train(model, [some], 2)
    with ub.profile(model, some, steps=1, skip=1) as recording:
        train(model, [some], 2)
    assert len(recording.result().tensors) == 2


def on_ranks(rank, size, path):
    """Rank 1 is slower; then a DistributedOptimizer knows, and DDP is refused."""
    global BACKWARD
    ub.init()
    if rank == 1:
        BACKWARD *= 3
    model = slow_model()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    with ub.profile(model, optimizer, steps=1, skip=1, path=path) as recording:
        train(model, [optimizer], 2)
    texts = [recording.result().to_json()]

    wrapped = ub.DistributedOptimizer(optimizer, model.named_parameters(), overlap="forward")
    with pytest.raises(UsageError, match="USBYTE_LEARNING_STEPS"), ub.profile(model, wrapped):
        train(model, [wrapped], 1)
    with ub.profile(model, wrapped, name="wrapped") as recording:
        train(model, [wrapped], 2)
        assert recording.done
        texts.append(recording.result().to_json())
    job, learned = recording.result(), wrapped.decision.profile
    assert job.model == "wrapped"
    assert job.need_s == learned.need_s[1:]
    assert job.ready_spread_s == learned.ready_spread_s[1:]
    wrapped.close()

    replica = DistributedDataParallel(model)
    refused = pytest.raises(UsageError, match="through DistributedDataParallel")
    with refused, ub.profile(model, optimizer):
        train(replica, [optimizer], 1)
    return texts


def test_on_several_ranks(tmp_path):
    path = tmp_path / "job.json"
    answers = run_ranks(2, on_ranks, str(path), env={"USBYTE_LEARNING_STEPS": "3"})
    assert answers[0] == answers[1]
    job = _core.Profile.from_json(answers[0][0])
    assert max(job.ready_s) >= 3 * FORWARD + 3 * 3 * BACKWARD
    assert profiles.load(str(path)).ready_s == pytest.approx(job.ready_s, abs=1e-9)
    assert json.loads(path.read_text())["recorded"]["ranks"] == 2


SCRIPT = """
import sys
import torch
from torch import nn
import helper_of_script

steps, kind = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
if kind != "plain":
    import usbyte.torch as ub
    ub.init()
if kind in ("forward", "sharded"):
    optimizer = ub.DistributedOptimizer(
        optimizer, model.named_parameters(), overlap="forward", shard_optimizer=kind == "sharded"
    )
for step in range(steps):
    try:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        if kind == "two":
            other.step()
    except Exception:  # as scripts do that are to survive a bad batch
        raise SystemExit("an exception came through the script")
assert __name__ == "__main__"
print("the end of", kind)
sys.exit(3 if kind == "fails" else None)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_of_script.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def usbyte_profile(tmp_path, *arguments, ranks=0):
    command = [sys.executable, "-c", "from usbyte.cli import main; main()", "profile"]
    if ranks:
        command = [sys.executable, "-m", "usbyte.launch", "-np", str(ranks), *command]
    return subprocess.run(
        [*command, "-o", str(tmp_path / "job.json"), *map(str, arguments)], cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["path", "module", "continue"])
def test_a_script(script, tmp_path, way):
    options = {"path": [script], "module": ["-m", "train"], "continue": ["--continue", "train.py"]}
    sizes = ["--steps", "3", "--skip", "2"]
    done = usbyte_profile(tmp_path, *sizes, *options[way], "9", "plain")
    assert done.returncode == 0, done.stderr
    job = profiles.load(str(tmp_path / "job.json"))
    assert job.model == "Sequential"
    assert [t.name for t in job.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert f"{job.bytes / 1e6:.1f} MB of gradients in 4 tensors" in done.stdout
    assert ("the end of plain" in done.stdout) == (way == "continue")
    assert ("stopped" in done.stdout) == (way != "continue")


UNSTEADY = """
import sys, time
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "learned":
    import usbyte.torch as ub
    ub.init()
    optimizer = ub.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(15):
    loss = model(torch.ones(2, 4)).sum()
    time.sleep(0.1 * (step % 2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("kind", "ranks", "remedy"),
    [("plain", 0, "--steps 50 --skip 10"), ("learned", 2, "USBYTE_LEARNING_STEPS=50")],
)
def test_unsteady_times_are_told_with_a_remedy(tmp_path, kind, ranks, remedy):
    (tmp_path / "train.py").write_text(UNSTEADY)
    steps = ["--steps", "4", "--skip", "1"]
    done = usbyte_profile(tmp_path, *steps, "train.py", kind, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: ready times vary by") == 1
    assert "plans for this profile would follow noise" in done.stderr
    assert done.stderr.rstrip().endswith(f"over more steps: {remedy}")


@pytest.mark.parametrize(
    ("spread_s", "is_told"),
    [([], False), ([0.01, 0.02, 0.9], False), ([0.0, 0.25, 0.3], False), ([0.0, 0.26, 0.3], True)],
)
def test_only_large_spreads_are_told(spread_s, is_told):
    specs = tensor_specs((name, 4, "float32") for name in "abc")
    needs, readies = [0.0, 0.1, 0.2], [0.9, 0.8, 0.7]
    job = _core.Profile(specs, needs, readies, 1.0, 0.1, "job", [0.0] * len(spread_s), spread_s)
    assert bool(_unsteady(job, False)) == is_told
    for name in profiles.RECORDED:
        assert _unsteady(profiles.load(name), False) == ""


@pytest.mark.parametrize("kind", ["init", "forward", "sharded"])
def test_a_script_of_several_ranks(script, tmp_path, kind):
    done = usbyte_profile(tmp_path, "--name", "it", script, "30", kind, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    assert "the end" not in done.stdout
    job = profiles.load(str(tmp_path / "job.json"))
    assert job.model == "it"
    assert [t.numel for t in job.tensors] == [64 * 64, 64, 64 * 4, 4]
    assert json.loads((tmp_path / "job.json").read_text())["recorded"]["ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no script 'nowhere.py'"),
        (["train.py", "4", "plain"], "no profile of 'train.py': saw 4 of 13 optimizer steps"),
        (["train.py", "0", "plain"], "no profile of 'train.py': no step of a torch optimizer"),
        (["train.py", "20", "two"], "several optimizers"),
        (["--skip", "0", "train.py", "20", "plain"], "--skip"),
        (["-o", "/no/such/job.json", "train.py", "20", "plain"], "cannot write"),
    ],
)
def test_what_a_script_is_told(script, tmp_path, arguments, words):
    done = usbyte_profile(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "job.json").exists()


def test_a_script_keeps_its_exit_code(script, tmp_path):
    assert usbyte_profile(tmp_path, script, "2", "fails").returncode == 3
    broken = tmp_path / "broken.py"
    broken.write_text("raise LookupError('broken')")
    done = usbyte_profile(tmp_path, broken)
    assert done.returncode == 1
    assert "LookupError: broken" in done.stderr


PARAMETERS = {
    "vgg16": (32, 138_357_544),
    "resnet50": (161, 25_557_032),
    "bert-base": (202, 109_514_298),
    "gpt2": (148, 124_439_808),
}


@pytest.mark.parametrize("name", profiles.RECORDED)
def test_the_recorded_profiles(name):
    job = profiles.load(name)
    assert (len(job.tensors), sum(t.numel for t in job.tensors)) == PARAMETERS[name]
    assert job.bytes == 4 * PARAMETERS[name][1]
    assert job.model == name
    assert job.need_s == sorted(job.need_s)
    assert 0 == job.need_s[0] < max(job.need_s) < min(job.ready_s) < max(job.ready_s)
    assert max(job.ready_s) + job.update_s <= job.step_s
    assert len(job.ready_spread_s) == len(job.tensors)
    # Backward goes the other way, but for tied weights, which are ready last and needed first.
    assert job.ready_s[0] > job.ready_s[-1]
    head = json.loads((Path(profiles.__file__).parent / "recorded" / f"{name}.json").read_text())
    assert {"date", "torch", "machine", "batch"} <= head["recorded"].keys()


def test_the_models_that_were_recorded():
    code = """
import json, torch
from _models import JOBS
with torch.device("meta"):
    models = {name: job.model() for name, job in JOBS.items()}
print(json.dumps({n: [[k, p.numel()] for k, p in m.named_parameters()] for n, m in models.items()}))
"""
    folder = Path(__file__).parents[2] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    for name, parameters in json.loads(done.stdout).items():
        recorded = [[t.name, t.numel] for t in profiles.load(name).tensors]
        assert sorted(recorded) == sorted(parameters)
