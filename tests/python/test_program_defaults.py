# SPDX-License-Identifier: Apache-2.0
"""Defaults of the program (device, dtype, modes) do not reach what usbyte makes for itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.torch import torch_private
from usbyte.torch.torch_private import broken

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tools" / "check_factory_calls.py"
STEPS = 7


class Watching(TorchFunctionMode):
    """Sees every call and changes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_tensor_type(kind):
    torch.set_default_tensor_type(kind)
    try:
        yield
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)


# By name: around everything behind the model, and around step() and zero_grad() alone.
DEFAULTS = {
    "nothing": (nullcontext, nullcontext),
    "default device": (lambda: default_device("meta"), nullcontext),
    "device context": (nullcontext, lambda: torch.device("meta")),
    "float64": (lambda: default_dtype(torch.float64), nullcontext),
    "bfloat16": (lambda: default_dtype(torch.bfloat16), nullcontext),
    "tensor type": (lambda: default_tensor_type(torch.HalfTensor), nullcontext),
    "inference mode": (nullcontext, torch.inference_mode),
    "function mode": (Watching, nullcontext),
    "function mode in step": (nullcontext, Watching),
}
WAYS = [
    {"overlap": "auto"},
    {"overlap": "backward"},
    {"overlap": "forward"},
    {"shard_optimizer": True},
    {"overlap": "forward", "policy": "wfbp", "compression": "topk:0.5"},
    {"shard_optimizer": True, "max_grad_norm": 0.5},
]


def make_optimizer(kind: str, params) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return torch.optim.Adam(params, lr=0.01)


def parameters_after(rank, around, inside, kind, way) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]
    with around():
        inner = make_optimizer(kind, model.parameters())
        with inside():
            optimizer = ub.DistributedOptimizer(inner, model.named_parameters(), **way)
        for number, x in enumerate(data):
            with inside():
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            model(x).square().mean().backward()
            # Also the other way round: state made inside is used outside, and vice versa.
            with inside() if number != STEPS // 2 else nullcontext():
                optimizer.step()
            if number == STEPS - 3:
                with inside():
                    model(x)
        with inside():
            optimizer.synchronize()
        optimizer.state_dict()
        found = [param.tolist() for param in model.parameters()]
        with inside():
            optimizer.close()
    return found


def train(rank: int, size: int, kind: str, names: list[str]) -> dict[str, list[object]]:
    found = {}
    for name in names:
        around, inside = DEFAULTS[name]
        with around():
            ub.init()
        found[name] = [parameters_after(rank, around, inside, kind, way) for way in WAYS]
        found[name].append(eager_results(around))
        with around():
            ub.shutdown()
    return found


def eager_results(around: Callable[[], AbstractContextManager]) -> list[object]:
    numbers = torch.arange(4, dtype=torch.float32, device="cpu")
    rows = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), device="cpu", dtype=torch.float32)
    with around():
        ub.barrier()
        parts, counts = ub.alltoall(numbers, torch.tensor([1, 3], device="cpu"))
        summed = ub.sparse_allreduce_async(rows, name="rows", op=ub.Sum).synchronize()
        sent = ub.broadcast_object({"a": numbers, "b": rows, "c": numbers.numpy()}, 0)
        gathered = ub.allgather_object({"a": numbers, "b": 1.5})
        ub.join()
        return [
            parts.tolist(), counts.tolist(), str(summed.to_dense().tolist()), sent["a"].tolist(),
            sent["b"].to_dense().tolist(), sent["c"].tolist(), gathered[1]["a"].tolist(),
        ]  # fmt: skip


# An Adam makes the counts of its steps where the program's default device is.
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("sgd", list(DEFAULTS)),
        ("adam", ["nothing", "float64", "inference mode"]),
    ],
)
def test_results_are_those_without(kind: str, names: list[str]) -> None:
    env = {"USBYTE_LEARNING_STEPS": "2"}
    for found in run_ranks(2, train, kind, names, timeout=240, env=env):
        for name, results in found.items():
            for number, (result, expected) in enumerate(
                zip(results, found["nothing"], strict=True)
            ):
                assert result == expected, (name, [*WAYS, "eager"][number])


def check(path: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, CHECK, path], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_call_in_the_package_states_device_and_dtype() -> None:
    done = check(ROOT / "python" / "usbyte")
    assert done.returncode == 0, done.stdout


def test_a_file_with_a_bad_call_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torch\ntorch.zeros(3)\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path}/bad.py:2: torch.zeros() does not state device= and" in done.stdout


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("f(torch.empty(3, dtype=torch.uint8))", "torch.empty() does not state device="),
        ("torch.full((1,), 0.0, device='cpu')", "torch.full() does not state dtype="),
        ("torch.ones(3, device=None, dtype=torch.int64)", "torch.ones() does not state device="),
        ("torch.ones(3, **place)", "torch.ones() does not state device= and dtype="),
        ("torch.sparse_coo_tensor(i, v)", "torch.sparse_coo_tensor() does not state device="),
        ("nn.Linear(2, 2)", "nn.Linear() does not state device= and dtype="),
        ("torch.nn.Linear(2, 2)", "nn.Linear() does not state device= and dtype="),
        ("torch.FloatTensor(3)", "follows the program's defaults"),
        ("torch.get_default_dtype()", "follows the program's defaults"),
        ("from torch import zeros", "call torch.zeros"),
        ("import torch as t", "under another name"),
    ],
)
def test_a_call_that_leaves_them_out_is_found(source: str, complaint: str) -> None:
    (found,) = load_check().problems(f"\n{source}\n", "bad.py")
    assert found.startswith("bad.py:2: ")
    assert complaint in found


def test_calls_that_state_them_are_in_order() -> None:
    source = (
        "import torch\nfrom torch import nn\n"
        "torch.zeros(3, dtype=torch.uint8, device=place)\ntorch.randperm(3, device='cpu')\n"
        "torch.zeros_like(x)\nx.new_empty(3)\nnn.Parameter(x)\ntorch.nn.ReLU()\n"
    )
    assert not list(load_check().problems(source, "good.py"))


def test_the_check_knows_all_that_follows_the_default_device() -> None:
    names = {f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f}
    assert names <= load_check().FACTORIES


def load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_factory_calls", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGES_NOTHING = """
import sys, threading, torch
from torch.nn.modules import module

def state():
    hooks = [module._global_forward_pre_hooks, module._global_forward_hooks]
    return [
        torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_,
        torch.Tensor.__torch_function__, torch.optim.Optimizer.__init__, torch.nn.Module.__call__,
        threading.excepthook, *[dict(each) for each in hooks],
        # torch.distributed puts one of its own there.
        sys.excepthook.__module__.startswith("usbyte"),
    ]

before = state()
import usbyte.torch as ub
assert state() == before
ub.init()
optimizer = ub.DistributedOptimizer(
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
)
assert state() != before
ub.shutdown()
assert state() == before
ub.init()  # and once more
ub.shutdown()
assert state() == before
"""


def test_importing_changes_nothing_and_shutdown_undoes_what_init_did():
    done = subprocess.run([sys.executable, "-c", CHANGES_NOTHING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_has_the_private_symbols_that_are_used():
    assert broken() == []


def test_a_changed_private_symbol_is_named(monkeypatch):
    monkeypatch.setattr(torch_private, "backward_id", lambda: -1)
    assert [what.partition(":")[0] for what in broken()] == ["backward passes"]
