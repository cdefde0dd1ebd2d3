# SPDX-License-Identifier: Apache-2.0
"""What training scripts do, under overlap="auto" and "forward": DDP's numbers, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import re

import pytest
import torch
from torch import nn

import _scripts
import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import Error, UsageError

READS = "gradients are read between backward() and step(), for example that of '0.weight'"
REPEATED = "several backward passes sent gradients before one step()"
SHARED = "a thread other than the training thread uses parameters, for example '0.weight'"
UNSEEN = "was not observed, as in compiled code"

#: What "auto" decides for each script, and why not to overlap with the next forward pass.
EXPECTED = {
    "plain": "",
    "clips": READS,
    "scales": READS,
    "scales_and_unscales": READS,
    "logs": READS,
    "logs_seldom": "",
    "averages": "parameters are read between step() and the forward pass, for example '0.weight'",
    "snapshots": SHARED,
    "ties": "",
    "reads_elsewhere": "",
    "penalises": "",
    "penalises_gradients": "",
    "lbfgs": "LBFGS may call the closure of its step() several times",
    "closures": "",
    "gan": REPEATED,
    "two_optimizers": "",
    "freezes": "",
    "adds_a_group": "",
    "branches": "",
    "checkpoints": "",
    "checkpoints_reentrant": REPEATED,
    "evaluates": "",
    "parametrizes": "",
    "channels_last": "",
    "odd_shapes": "",
    "mixes_dtypes": "",
    "half": "",
    "autocasts": "",
    "scales_by_hooks": "",
    # What they keep has graphs, which have views of parameters.
    "transforms": "keeps tensors that share memory with",
    "traces": "keeps tensors that share memory with",
    "scripts_a_block": UNSEEN,
    "accumulates": "",
    "compiles_blocks": "",
    "compiles_in_place": "",
    "compiles_whole": "",
    "compiles_a_function": UNSEEN,
    "compiles_anew": UNSEEN,
    "compiles_around": "",
    "compiles_the_update": "",
    "compiles_the_step": UNSEEN,
}

#: Where overlap="forward" is an error.
REFUSED = {
    "lbfgs": 'several times, and needs the gradients at once: leave out overlap="forward"',
    "checkpoints_reentrant": "",  # whichever of several sees it first
}


class Reasons(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.found, self.warnings = [], []

    def emit(self, record):
        text = record.getMessage()
        if record.levelno == logging.WARNING:
            self.warnings.append(text)
        _, _, reason = text.partition("updates are not deferred to the next forward pass: ")
        if reason:
            self.found.append(reason)


def flat(value):
    """All tensors of a script's result."""
    if isinstance(value, nn.Module):
        return [v.clone() for v in value.state_dict().values()]
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    return [t for item in value for t in flat(item)]


def under_ddp(model, optimizer):
    unused = not isinstance(model, _scripts.Checkpointed)  # which it cannot have, if reentrant
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused), optimizer


def train(name, overlap, rank):
    """The tensors of a script, and the overlaps that its optimizers ended with."""
    made = []

    def wrap(model, optimizer):
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = model.named_parameters() if len(known) == len(list(model.parameters())) else None
        made.append(ub.DistributedOptimizer(optimizer, names, overlap=overlap, policy="wfbp"))
        return model, made[-1]

    torch.manual_seed(0)
    try:
        result = flat(getattr(_scripts, name)(wrap, rank))
        decided = [optimizer.decision.overlap for optimizer in made]
    except Error:
        for optimizer in made:
            with contextlib.suppress(Error):
                optimizer.close()
        raise
    for optimizer in made:
        optimizer.close()
    return result, decided


def equal_ddp(rank, size, names):
    ub.init()
    log, reasons = logging.getLogger("usbyte"), Reasons()
    log.setLevel(logging.INFO)
    log.addHandler(reasons)
    for name in names:
        torch.manual_seed(0)
        want = flat(getattr(_scripts, name)(under_ddp, rank))
        assert all(t.isfinite().all() for t in want), name
        for overlap in ("auto", "forward"):
            reasons.found.clear()
            reasons.warnings.clear()
            if overlap == "forward" and name in REFUSED:
                with pytest.raises(Error, match=re.escape(REFUSED[name])):
                    train(name, overlap, rank)
                continue
            got, decided = train(name, overlap, rank)
            assert len(got) == len(want), name
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (name, overlap, a, b)
            expected = EXPECTED[name] if overlap == "auto" else ""
            overlaps = ["backward" if expected else "forward"] * len(decided)
            if name == "gan":  # only the critic has several backward passes a step
                overlaps[0] = "forward"
            assert decided == overlaps, (name, decided)
            assert all(expected in found for found in reasons.found), (name, reasons.found)
            assert bool(reasons.found) == bool(expected), (name, reasons.found)
            threads = [text for text in reasons.warnings if "a thread other than" in text]
            assert len(threads) == ((name, overlap) == ("snapshots", "forward")), threads
            waits = [text for text in reasons.warnings if "backward() waits for all" in text]
            assert waits == [], (name, overlap)


def test_every_script_is_expected():
    taken = {
        name for name, f in vars(_scripts).items() if "wrap" in getattr(f, "__annotations__", {})
    }
    assert taken == set(EXPECTED)


LEARNING = {"USBYTE_LEARNING_STEPS": "4"}
COMPILED = [name for name in EXPECTED if name.startswith("compiles")]
QUICK = [name for name in EXPECTED if name not in COMPILED]


@pytest.mark.parametrize("names", [QUICK[::2], QUICK[1::2], COMPILED], ids=["a", "b", "compiled"])
def test_scripts_equal_ddp_bit_for_bit(names):
    run_ranks(2, equal_ddp, names, timeout=240, env=LEARNING)


def refused(rank, size):
    ub.init()
    x = torch.ones(1, 6)
    # Parameters on several devices.
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"))
    with pytest.raises(UsageError, match=r"'1\.weight' is a Parameter on the meta device"):
        ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters())
    # Unfrozen after the optimizer was wrapped: nothing is updated with gradients of one rank.
    model = _scripts.mlp()
    model[2].requires_grad_(False)
    opt = ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters())
    model(x).sum().backward()
    opt.step()
    model[2].requires_grad_(True)
    before = [p.detach().clone() for p in model.parameters()]
    model(x).sum().backward()
    with pytest.raises(UsageError, match="was frozen when the optimizer was wrapped"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    opt.close()
    # TorchScript would compile the hooks too, of the model and of its copies.
    model = _scripts.mlp()
    opt = ub.DistributedOptimizer(_scripts.sgd(model), model.named_parameters())
    model(x).sum().backward()
    opt.step()
    for hooked in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(AttributeError, match=r"script a new model that has loaded"):
            torch.jit.script(hooked)
    fresh = _scripts.mlp()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(torch.jit.script(fresh)(x), model(x))
    opt.close()
    # An optimizer that nobody knows is left alone, unless the user knows it.
    for overlap, decided in [("auto", "backward"), ("forward", "forward")]:
        model = _scripts.mlp()
        inner = Own(model.parameters(), lr=0.1)
        opt = ub.DistributedOptimizer(inner, overlap=overlap, policy="wfbp")
        for x in _scripts.batches(rank):
            opt.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
        assert opt.decision.overlap == decided
        opt.close()


class Own(torch.optim.SGD):
    """Might do anything."""


def test_what_cannot_be_right_is_refused():
    run_ranks(2, refused, timeout=90, env=LEARNING)
