# SPDX-License-Identifier: Apache-2.0
"""`usbyte plan` and `usbyte simulate`."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import click.testing
import pytest

import usbyte
from usbyte import _core
from usbyte._util import files
from usbyte.cli import main
from usbyte.planning import profiles, tuning, whatif
from usbyte.planning.layout import tensor_specs
from usbyte.report import picture
from usbyte.report.scene import Scene

RING = ["--ring", "4,1ms,1gbit"]
SHARDED = ["--shard-optimizer"]


def invoke(*arguments):
    return click.testing.CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    job = profiles.scaled(profiles.vgg16_half(), size=0.1)
    path.write_text(job.to_json())
    return path


def test_a_plan_is_shown_and_written(profile, tmp_path):
    output = tmp_path / "plan.json"
    policy = ["--policy", "bytescheduler", "--partition", "1M", "--credit", "4M"]
    done = invoke("plan", str(profile), *RING, *policy, "-o", str(output))
    assert done.exit_code == 0, done.output
    plan = _core.Plan.from_json(output.read_text())
    job = _core.Profile.from_json(profile.read_text())
    network = _core.NetworkModel.ring(4, 1e-3, 125e6)
    options = {"partition_bytes": 1 << 20, "credit_bytes": 4 << 20}
    assert plan.hash() == _core.make_plan("bytescheduler", job, network, options).hash()
    predicted = _core.simulate(plan, job, network)
    assert f"bytescheduler: {len(plan.ops)} ops" in done.output
    assert f"step {predicted.step_s:.6f} s" in done.output
    bounds = _core.bound_s(job, network), _core.bytes_bound_s(job, network)
    assert "bound {:.6f} s, of bytes {:.6f} s".format(*bounds) in done.output
    assert f"{predicted.done_s[-1]:.6f}" in done.output
    assert "fc1.weight" in done.output


def test_a_plan_beside_ddp(profile, tmp_path):
    picture = tmp_path / "step.svg"
    done = invoke("plan", str(profile), *RING, "--plot", str(picture))
    assert done.exit_code == 0, done.output
    job = _core.Profile.from_json(profile.read_text())
    network = _core.NetworkModel.ring(4, 1e-3, 125e6)
    _, ddp_s = whatif.best_ddp(job, network)
    step_s = _core.simulate(_core.make_plan("auto", job, network), job, network).step_s
    words = f"{ddp_s / step_s:.2f} times as fast as DDP with its best bucket size, {ddp_s:.6f} s"
    assert words in " ".join(done.output.split())
    assert "<svg" in picture.read_text()


def test_the_picture_of_a_step():
    # One tensor, ready after 2 s and sent in 1 s: DDP waits, then the next forward pass begins.
    specs = [_core.TensorSpec("a", 1, "float32", 0)]
    job = _core.Profile(specs, [0.0], [2.0])
    network = _core.NetworkModel(2, [_core.AlphaBeta(1.0, 0.0)])
    plan = _core.make_plan("ddp", job, network, {}, "backward")
    scene = Scene.predicted(plan, job, network, "backward")
    figure = picture.comparison(scene, scene, "title")
    panel = figure.axes[0]
    assert panel.get_title(loc="left") == "PyTorch DDP: 3s a step"
    spans = [
        (path.vertices[:, 0].min(), path.vertices[:, 0].max())
        for bars in panel.collections
        for path in bars.get_paths()
    ]
    assert (2000.0, 3000.0) in spans  # the wait, and the operation
    assert max(end for _, end in spans) > 3000  # the next forward pass


@pytest.mark.parametrize("command", ["plan", "simulate", "whatif"])
def test_a_recorded_profile_is_said_to_be_of_a_cpu(command):
    network = RING if command == "plan" else ["--bandwidth", "10gbit"]
    few = ["--policies", "ddp", "--workers", "4"] if command == "simulate" else []
    done = invoke(command, "vgg16", *network, *few)
    assert "vgg16 was recorded on a CPU, where a step takes 3 s" in done.output
    assert "add --scale-time T/3;" in done.output
    done = invoke(command, "vgg16", *network, *few, "--scale-time", "0.04")
    assert "recorded on a CPU" not in done.output


def test_a_measured_network(profile, tmp_path):
    path = tmp_path / "network.json"
    path.write_text(_core.NetworkModel(4, [_core.AlphaBeta(1e-3, 1e-8)]).to_json())
    done = invoke("plan", str(profile), "--network", str(path), "--overlap", "backward")
    assert done.exit_code == 0, done.output
    assert "overlap backward" in done.output


def test_a_plan_for_a_sharded_optimizer(profile, tmp_path):
    output = tmp_path / "plan.json"
    sharded, slow = ["--policy", "dear", *SHARDED], ["--ring", "4,1ms,50mbit"]
    done = invoke("plan", str(profile), *slow, *sharded, "-o", str(output))
    assert done.exit_code == 0, done.output
    job = _core.Profile.from_json(profile.read_text())
    network = _core.NetworkModel.ring(4, 1e-3, 6.25e6)
    plan = _core.Plan.from_json(output.read_text())
    assert {op.kind for op in plan.ops} == {"reduce_scatter", "all_gather"}
    step_s = _core.simulate(plan, job, network, "forward", True).step_s
    bound_s = _core.bytes_bound_s(job, network, "forward", True)
    assert bound_s > _core.bytes_bound_s(job, network)  # gathers wait for all scatters
    assert f"step {step_s:.6f} s, bound " in done.output
    assert f", of bytes {bound_s:.6f} s" in done.output
    assert "overlap forward, sharded optimizer" in done.output


def test_serial_startups(profile):
    policy = ["--policy", "bytescheduler", "--partition", "64k", "--credit", "1M"]
    done = invoke("plan", str(profile), "--ring", "4,1ms,1gbit,serial", *policy)
    assert done.exit_code == 0, done.output
    job = _core.Profile.from_json(profile.read_text())
    options = {"partition_bytes": 64 << 10, "credit_bytes": 1 << 20}
    network = _core.NetworkModel.ring(4, 1e-3, 125e6, True)
    plan = _core.make_plan("bytescheduler", job, network, options)
    step_s = _core.simulate(plan, job, network).step_s
    assert f"step {step_s:.6f} s" in done.output
    overlapping = _core.NetworkModel.ring(4, 1e-3, 125e6)
    assert step_s > _core.simulate(plan, job, overlapping).step_s


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "none.json", *RING], "cannot read the profile 'none.json'"),
        (["plan", "vgg16-half"], "a network is missing: add --ring RANKS,LATENCY,BANDWIDTH, such"),
        (["plan", "vgg16-half", *RING, "--network", "x.json"], "leave out one of them"),
        (["simulate", "vgg16-half", "--bandwidth", ""], "as --workers 8 --bandwidth 10gbit"),
        (["plan", "vgg16-half", "--network", "none.json"], "cannot read the network 'none.json'"),
        (["plan", "vgg16-half", "--ring", "4,1ms"], "RANKS,LATENCY,BANDWIDTH"),
        (["plan", "vgg16-half", "--ring", "4,1ms,fast"], "'fast' is no rate"),
        (["plan", "vgg16-half", "--ring", "4,1ms,1gbit,fast"], "with ,serial behind it"),
        (["plan", "vgg16-half", *RING, *SHARDED, "--policy", "p3"], "needs one of auto, dear"),
        (["plan", "vgg16-half", *RING, *SHARDED, "--policy", "pipedap"], "needs one of auto, dear"),
        (["plan", "vgg16-half", *RING, *SHARDED, "--overlap", "backward"], "needs overlap forward"),
        (
            ["simulate", "vgg16-half", *SHARDED, "--policies", "ddp"],
            "ddp does not support",
        ),
        (["simulate", "vgg16-half", *SHARDED, "--policies", "backward:dear"], "overlap forward"),
        (
            ["simulate", "vgg16-half", "--policies", "sharded:wfbp"],
            "wfbp does not support",
        ),
        (["plan", "vgg16-half", *RING, "--policy", "magic"], "tune:dear"),
        (["plan", "vgg16-half", "--ring", "5000000000,1ms,1gbit"], "1 to 65536 ranks"),
        (["plan", "vgg16-half", "--ring", "4,1e-99999999999999999999s,1gbit"], "is no time"),
        (["plan", "vgg16-half", *RING, "--scale-bytes", "1e300"], "1e+09 at most"),
        (["plan", "gpt2", *RING, "--scale-bytes", "1e9"], "cannot be planned"),
        (["plan", "vgg16-half", *RING, "--scale-time", "nan"], "above 0"),
        (["plan", "vgg16-half", *RING, "--scale-time", "inf"], "above 0"),
        (["simulate", "vgg16-half", "--csv", "/no/such/steps.csv"], "cannot write"),
        (["plan", "vgg16-half", *RING, "--bucket", "1.5M"], "8MiB"),
        (["plan", "vgg16-half", *RING, "-o", "/no/such/plan.json"], "cannot write"),
        (["simulate", "vgg16-half", "--workers", "1"], "2 to 4096"),
        (["simulate", "vgg16-half", "--policies", "magic"], "unknown policy 'magic'"),
        (["simulate", "vgg16-half", "--policies", "up:ddp"], "unknown overlap 'up'"),
        (["simulate", "none.json"], "cannot read the profile"),
    ],
)
def test_errors_name_the_culprit(arguments, words):
    done = invoke(*arguments)
    assert done.exit_code in (1, 2)
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_broken_profile_is_told_in_one_line(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"format": "usbyte-profile-1"}')
    done = invoke("plan", str(path), *RING)
    assert done.exit_code == 1
    assert f"Error: '{path}': profile: malformed JSON" in done.output


@pytest.mark.parametrize("command", ["plan", "simulate", "whatif"])
def test_names_are_no_markup(command, tmp_path):
    job = profiles.vgg16_half()
    tensors = [(f"[/]{t.name}[bold]", t.numel, t.dtype) for t in job.tensors]
    odd = _core.Profile(tensor_specs(tensors), job.need_s, job.ready_s, model="[/x] $1 [red]$")
    path = tmp_path / "profile.json"
    path.write_text(odd.to_json())
    options = {
        "plan": RING,
        "simulate": ["--workers", "4", "--policies", "ddp", "--plot", str(tmp_path / "x.png")],
        "whatif": ["--ranks", "4", "--bandwidth", "1gbit", "--plot", str(tmp_path / "x.png")],
    }
    if command != "plan":
        pytest.importorskip("matplotlib")
    done = invoke(command, str(path), *options[command])
    assert done.exit_code == 0, done.output
    assert "[/x] $1 [red]$" in done.output
    if command == "plan":
        assert "[/]fc3.weight[bold]" in done.output


@pytest.mark.parametrize("name", ["network", "codec-costs"])
def test_what_is_wrong_in_a_file_is_told_with_its_name(name, tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"a": 1}')
    ring = [] if name == "network" else RING
    done = invoke("plan", "vgg16-half", *ring, f"--{name}", str(path))
    assert done.exit_code == 1
    assert f"Error: '{path}': " in done.output


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("whatif {} --json {}", "job"),
        ("whatif job --network {} --plot {}", "network.svg"),
        ("plan {} --ring 4,1ms,1gbit -o {}", "job"),
        ("simulate {} --csv {}", "job"),
        ("simulate job --codec-costs {} --csv {}", "costs"),
        ("report {} job --ring 4,1ms,1gbit -o {}", "plan"),
        ("profile -o {} {}", "train.py"),
    ],
)
def test_what_is_read_is_not_overwritten(command, read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, link = Path(read), Path("link" + Path(read).suffix)
    path.write_text("as it was")
    link.symlink_to(path)
    for first, second in ((path, path), (path, link), (path.absolute(), path)):
        done = invoke(*command.format(first, second).split())
        assert done.exit_code == 2, done.output
        assert "is an input and would be overwritten" in " ".join(done.output.split())
        assert path.read_text() == "as it was"


def test_a_file_of_a_named_profiles_name_is_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = invoke("plan", "vgg16-half", *RING, "--policy", "ddp", "-o", "vgg16-half")
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "field", ["ready_s", "need_s", "step_s", "update_s", "need_spread_s", "ready_spread_s"]
)
def test_a_profile_of_absurd_times(field, tmp_path):
    root = json.loads(profiles.vgg16_half().to_json())
    if field in root:
        root[field] = 1e308
    else:
        for row in root["tensors"]:
            row[field] = 1e308
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(root))
    done = invoke("plan", str(path), *RING)
    assert done.exit_code == 1
    assert "a time of 1e+308 s is too long" in " ".join(done.output.split())


def test_a_profile_without_gradients(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(_core.Profile([], [], []).to_json())
    done = invoke("plan", str(path), *RING)
    assert done.exit_code == 1
    assert "no dense gradients" in done.output


def test_a_matrix_stays_one_when_it_is_scaled(tmp_path):
    matrices = tensor_specs([("a", 4000, "float32"), ("b", 30, "float32")], {"a": 40, "b": 30})
    job = _core.Profile(matrices, [0.0, 1e-3], [5e-3, 4e-3])
    half = profiles.scaled(job, size=0.5)
    assert [(t.numel, t.rows) for t in half.tensors] == [(2000, 40), (15, 1)]
    assert profiles.scaled(job).tensors == matrices
    # Rows of three elements cannot lose half of one.
    narrow = profiles.scaled(
        _core.Profile(tensor_specs([("a", 9000, "float32")], {"a": 3000}), [0.0], [1.0]), size=0.5
    )
    assert [(t.numel, t.rows) for t in narrow.tensors] == [(4500, 1)]
    path = tmp_path / "profile.json"
    path.write_text(job.to_json())
    done = invoke("plan", str(path), *RING, "--policy", "ddp", "--codec", "powersgd:2")
    assert done.exit_code == 0, done.output
    assert "by powersgd:2" in done.output


def test_the_table_of_a_long_plan_is_cut(tmp_path):
    n = 1200
    specs = tensor_specs((f"layer{i}", 1000, "float32") for i in range(n))
    job = _core.Profile(specs, [1e-5 * i for i in range(n)], [1e-5 * (3 * n - i) for i in range(n)])
    path, output = tmp_path / "profile.json", tmp_path / "plan.json"
    path.write_text(job.to_json())
    done = invoke("plan", str(path), *RING, "--policy", "wfbp", "-o", str(output))
    assert done.exit_code == 0, done.output
    assert len(_core.Plan.from_json(output.read_text()).ops) == n
    assert f"wfbp: {n} ops" in done.output
    assert f"{n - 500} more" in done.output
    assert "layer1199" in done.output
    assert "layer600" not in done.output


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("usbyte.cli", ["plan", "vgg16-half", *RING]),
        ("usbyte.cli", ["--help"]),
        ("usbyte.cli", ["--version"]),
        ("usbyte.launch", ["--help"]),
        ("usbyte.launch", ["--version"]),
    ],
)
@pytest.mark.parametrize(
    ("path", "mode", "why"),
    [("/dev/full", "w", "No space left on device"), ("/dev/null", "r", "Bad file descriptor")],
)
def test_a_standard_output_that_cannot_be_written_is_told(module, arguments, path, mode, why):
    with Path(path).open(mode) as out:
        done = subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()", *arguments],
            stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"Error: cannot write to standard output: {why}\n"


@contextmanager
def full_disk():
    """No file may become longer than some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_was_there_before_stays_where_the_disk_is_full(profile, tmp_path):
    output = tmp_path / "plan.json"
    output.write_text("of before")
    with full_disk():
        done = invoke("plan", str(profile), *RING, "--policy", "ddp", "-o", str(output))
    assert done.exit_code == 1
    assert f"cannot write '{output}': File too large" in done.output
    assert output.read_text() == "of before"
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "profile.json"}


def test_what_is_replaced_keeps_its_place(tmp_path):
    real, linked = tmp_path / "real.json", tmp_path / "linked.json"
    real.write_text("of before")
    real.chmod(0o640)
    linked.symlink_to(real)
    files.write_bytes(linked, b"new")
    assert linked.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640
    linked.unlink()
    linked.hardlink_to(real)
    files.write_bytes(linked, b"newer")
    assert real.read_text() == "newer"
    reader, writer = os.pipe()
    files.write_bytes(Path(f"/dev/fd/{writer}"), b"piped")
    assert os.read(reader, 10) == b"piped"
    os.close(reader)
    os.close(writer)
    with tempfile.TemporaryFile(dir=tmp_path) as file:  # which has no name
        files.write_bytes(Path(f"/dev/fd/{file.fileno()}"), b"read")
        assert file.read() == b"read"
    assert {path.name for path in tmp_path.iterdir()} == {"real.json", "linked.json"}


def test_a_named_profile_on_a_faster_machine():
    done = invoke("plan", "resnet50", *RING, "--scale-time", "0.01", "--scale-bytes", "0.5")
    assert done.exit_code == 0, done.output
    job = profiles.load("resnet50")
    assert f"resnet50: {job.bytes / 2e6:.1f} MB in 161 tensors" in done.output
    assert f"without communication {job.iteration_s / 100:.6f} s" in done.output
    assert "both must be above 0" in invoke("simulate", "gpt2", "--scale-time", "0").output


def test_simulation_of_all_policies(profile, tmp_path):
    output = tmp_path / "steps.csv"
    done = invoke(
        "simulate", str(profile), "vgg16-half", "--workers", "2,4096", "--bandwidth",
        "1gbit,10gbit", "--latency", "10us", "--csv", str(output),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(output.open()))
    policies = _core.policies()
    assert len(rows) == 2 * 2 * 2 * (len(policies) + 1)
    for row in rows:
        assert float(row["step_s"]) >= float(row["bound_s"]) - 1e-12
        assert float(row["bound_s"]) >= float(row["bytes_bound_s"]) - 1e-12
        assert float(row["bytes_bound_s"]) >= float(row["compute_s"]) - 1e-12
        assert float(row["latency_s"]) == 10e-6
    [row] = [
        row for row in rows
        if (row["workers"], row["bandwidth_bytes_per_s"], row["overlap"], row["policy"])
        == ("4096", "125000000.0", "forward", "wfbp") and int(row["ops"]) == 32
    ][:1]  # fmt: skip
    network = _core.NetworkModel.ring(4096, 10e-6, 125e6)
    job = _core.Profile.from_json(profile.read_text())
    plan = _core.make_plan("wfbp", job, network)
    assert float(row["step_s"]) == _core.simulate(plan, job, network).step_s
    assert "backward:ddp" in done.output
    assert "10gbit" in done.output


def test_the_former_name_of_a_policy_is_accepted_and_never_shown(profile, tmp_path):
    files = [tmp_path / "usbyte.json", tmp_path / "us-byte.json"]
    for path in files:
        done = invoke("plan", str(profile), *RING, "--policy", path.stem, "-o", str(path))
        assert done.exit_code == 0, done.output
        assert "us-byte: " in done.output
    assert files[0].read_text() == files[1].read_text()
    old = files[1].read_text().replace('"policy":"us-byte"', '"policy":"usbyte"')
    files[0].write_text(old)
    page = tmp_path / "report.html"
    done = invoke("report", str(files[0]), str(profile), *RING, "-o", str(page))
    assert done.exit_code == 0, done.output
    assert ": us-byte" in page.read_text()
    output = tmp_path / "steps.csv"
    for mode in ("", "backward:"):
        arguments = ["--workers", "4", "--policies", f"{mode}usbyte", "--csv", str(output)]
        done = invoke("simulate", str(profile), *arguments)
        assert done.exit_code == 0, done.output
        assert f"{mode}us-byte" in done.output
        assert {row["policy"] for row in csv.DictReader(output.open())} == {"us-byte"}
    assert "usbyte" not in [*_core.policies(), *tuning.policies()]


def test_a_simulation_fits_80_columns(profile):
    runner = click.testing.CliRunner()
    done = runner.invoke(main, ["simulate", str(profile)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    job = _core.Profile.from_json(profile.read_text())
    steps = []
    for ranks in (4, 16, 64, 256):
        network = _core.NetworkModel.ring(ranks, 25e-6, 1.25e9)
        steps.append(_core.simulate(_core.make_plan("wfbp", job, network), job, network).step_s)
    [row] = [line for line in done.output.splitlines() if " wfbp " in line]
    assert row.strip("│ ").replace("│", " ").split() == ["wfbp", *(f"{s * 1e3:.1f}" for s in steps)]


@pytest.fixture
def codec_costs(tmp_path):
    """Encoding is dear, decoding is not."""
    encode, decode = _core.AlphaBeta(5e-3, 1e-9, 5e-3), _core.AlphaBeta(0, 1e-10)
    costs = _core.CodecCosts({"topk:0.01": _core.CodecCost(encode, decode)})
    path = tmp_path / "codecs.json"
    path.write_text(costs.to_json())
    return path


def test_plans_with_codecs(profile, codec_costs, tmp_path):
    output = tmp_path / "plan.json"
    job = _core.Profile.from_json(profile.read_text())
    network = _core.NetworkModel.ring(4, 1e-3, 125e6)
    costs = _core.CodecCosts.from_json(codec_costs.read_text())
    steps = {}
    for policy in ("wfbp", "mergecomp", "mergecomp_online"):
        coded = ["--policy", policy, "--codec", "topk:1e-2", "-o", str(output)]
        done = invoke("plan", str(profile), *RING, *coded, "--codec-costs", str(codec_costs))
        assert done.exit_code == 0, done.output
        assert "by topk:0.01" in done.output
        plan = _core.Plan.from_json(output.read_text())
        assert {op.codec for op in plan.ops} == {"topk:0.01"}
        steps[policy] = _core.simulate(plan, job, network, codec_costs=costs).step_s
        assert f"step {steps[policy]:.6f} s" in done.output
        assert steps[policy] > _core.simulate(plan, job, network).step_s
    assert steps["mergecomp"] < steps["wfbp"]
    assert steps["mergecomp"] <= steps["mergecomp_online"] + 1e-12
    # "auto" may send gradients as they are.
    coded = ["--policy", "auto", "--codec", "topk:1e-2", "-o", str(output)]
    done = invoke("plan", str(profile), *RING, *coded, "--codec-costs", str(codec_costs))
    plan = _core.Plan.from_json(output.read_text())
    step_s = _core.simulate(plan, job, network, codec_costs=costs).step_s
    assert f"step {step_s:.6f} s" in done.output
    assert step_s <= steps["mergecomp"] + 1e-12
    unknown = ["--codec", "fp16", "--codec-costs", str(codec_costs)]
    done = invoke("plan", str(profile), *RING, *unknown)
    assert done.exit_code == 1
    assert "usbyte probe --codecs fp16,topk:0.01" in done.output
    done = invoke("plan", str(profile), *RING, "--codec", "fp16", *SHARDED)
    assert done.exit_code == 0, done.output
    assert "reduce_scatter by fp16" in done.output
    done = invoke("plan", str(profile), *RING, "--codec", "signsgd", *SHARDED)
    assert "does not support a sharded optimizer" in done.output


def test_simulation_with_codecs(profile, codec_costs, tmp_path):
    output = tmp_path / "steps.csv"
    options = ["--workers", "4", "--bandwidth", "1gbit", "--csv", str(output)]
    options += ["--policies", "ddp,mergecomp", "--codec", "topk:0.01"]
    done = invoke("simulate", str(profile), *options, "--codec-costs", str(codec_costs))
    assert done.exit_code == 0, done.output
    assert "by topk:0.01" in done.output
    dear = list(csv.DictReader(output.open()))
    assert {row["codec"] for row in dear} == {"topk:0.01"}
    assert invoke("simulate", str(profile), *options).exit_code == 0
    free = list(csv.DictReader(output.open()))
    for costly, cheap in zip(dear, free, strict=True):
        assert float(costly["step_s"]) > float(cheap["step_s"])


def test_simulation_of_sharded_optimizers(profile, tmp_path):
    output = tmp_path / "steps.csv"
    options = ["--workers", "4", "--bandwidth", "1gbit", "--latency", "1ms", "--csv", str(output)]
    done = invoke("simulate", str(profile), *SHARDED, *options)
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(output.open()))
    assert [row["policy"] for row in rows] == _core.sharding_policies()
    assert {row["shard_optimizer"] for row in rows} == {"True"}
    named = ["--policies", "auto,sharded:auto", "--serial-startups"]
    done = invoke("simulate", str(profile), *named, *options)
    assert done.exit_code == 0, done.output
    job = _core.Profile.from_json(profile.read_text())
    network = _core.NetworkModel.ring(4, 1e-3, 125e6, True)
    rows = list(csv.DictReader(output.open()))
    for row, sharded in zip(rows, (False, True), strict=True):
        plan = _core.make_plan("auto", job, network, {}, "forward", sharded)
        step_s = _core.simulate(plan, job, network, "forward", sharded).step_s
        assert float(row["step_s"]) == step_s
        assert row["serial_startups"] == "True"
    assert "sharded:auto" in done.output


def test_a_plot(profile, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "steps.png"
    options = ["--policies", "ddp,backward:wfbp", "--workers", "2,8", "--plot", str(picture)]
    done = invoke("simulate", str(profile), *options)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    named = tmp_path / "steps"
    assert invoke("simulate", str(profile), *options[:-1], str(named)).exit_code == 0
    assert named.read_bytes().startswith(b"\x89PNG")
    refused = invoke("simulate", str(profile), *options[:-1], str(tmp_path / "steps.xyz"))
    assert refused.exit_code == 1
    assert "unknown picture format" in refused.output
    assert ".html" in refused.output
    assert "┃" not in refused.output  # nothing was computed
    refused = invoke("simulate", str(profile), *options[:-1], "/no/such/picture.png")
    assert refused.exit_code == 1
    assert "cannot write '/no/such/picture.png'" in refused.output


def test_without_matplotlib_the_extra_is_named(profile, monkeypatch):
    monkeypatch.delitem(sys.modules, "usbyte.cli._figures", raising=False)
    monkeypatch.delattr("usbyte.cli._figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = invoke("simulate", str(profile), "--plot", "x.png")
    assert done.exit_code == 1
    assert "pip install 'usbyte[plot]'" in done.output


def test_as_a_program(profile):
    path = os.pathsep.join(
        filter(None, [str(Path(usbyte.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    code = """
import sys
from usbyte.cli import main
assert "usbyte._core" not in sys.modules
try:
    main()
finally:
    print([name for name in ("torch", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(profile), *RING],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_has_help():
    listed = invoke("--help").output
    for command in ("doctor", "profile", "probe", "plan", "simulate", "whatif", "report", "lab"):
        assert command in listed
        assert invoke(command, "--help").exit_code == 0
    assert invoke("nonsense").exit_code == 2


def test_a_trace_that_is_json_of_something_else(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"columns": ["a"]}))
    done = invoke("simulate", str(path))
    assert done.exit_code == 1
    assert "columns tensor, elements, backward_gap_us" in done.output


@pytest.mark.parametrize(
    "command", [["-m", "usbyte"], ["-c", "from usbyte.cli import main; main()"]]
)
def test_help_is_a_command(command):
    done = subprocess.run(
        [sys.executable, *command, "help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout
    assert "demo" in done.stdout
