# SPDX-License-Identifier: Apache-2.0
"""A rank that trains otherwise than the others is an error on all, which names rank and thing."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import Error, MismatchError, UsageError
from usbyte.torch.eager.queue import EagerQueue
from usbyte.torch.optimizer.gradients.step_checksum import options_of
from usbyte.torch.world.consistency import raise_problem, verify_same

_EVERY = 4
_ENV = {"USBYTE_LEARNING_STEPS": "3", "USBYTE_CHECK_STEPS": str(_EVERY)}
_BEGINS = 9  # the step from which a rank does otherwise
_STEPS = _BEGINS + 2 * _EVERY + 1


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class _Script:
    """A training loop in which one rank may do otherwise."""

    def __init__(self, rank, overlap, **options):
        self.model = _model()
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.opt = ub.DistributedOptimizer(
            inner, self.model.named_parameters(), overlap=overlap, **options
        )
        self.generator = torch.Generator().manual_seed(rank)
        self.before, self.after = lambda: None, lambda: None

    def step(self):
        """One step, with what is done before and after it."""
        self.opt.zero_grad()
        x = torch.randn(5, 6, generator=self.generator)
        self.model(x).pow(2).mean().backward()
        self.before()
        self.opt.step()
        self.after()


def _schedule(script):
    script.opt.param_groups[0]["lr"] *= 0.5


def _zero_gradients(script):
    def zero():
        for param in script.model.parameters():
            param.grad.zero_()

    script.before = zero


def _scale_gradients(script):
    def scale():
        for param in script.model.parameters():
            param.grad.mul_(0.5)

    script.before = scale


def _load_model(script):
    state = copy.deepcopy(script.model.state_dict())
    for value in state.values():
        value.add_(0.001)
    script.model.load_state_dict(state)


def _load_optimizer(script):
    state = copy.deepcopy(script.opt.state_dict())
    for each in state["state"].values():
        each["exp_avg"].mul_(0.5)
    script.opt.load_state_dict(state)


def _change_one_bit(script):
    with torch.no_grad():
        weight = script.model[4].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))


_DOINGS = {
    "lr of parameter group 0 is": _schedule,
    "gradients zeroed": _zero_gradients,
    "gradients scaled": _scale_gradients,
    "model loaded": _load_model,
    "optimizer loaded": _load_optimizer,
    "one bit": _change_one_bit,
}


def _errors(rank, size, overlap):
    """By what the last rank does: the message, and how many steps of comparison it took."""
    ub.init()
    found = {}
    for name, do in _DOINGS.items():
        script = _Script(rank, overlap)
        message, k = "no error", 0
        try:
            for k in range(_STEPS):
                if k == _BEGINS and rank == size - 1:
                    do(script)
                script.step()
            script.opt.synchronize()
        except MismatchError as error:
            message = str(error)
        with contextlib.suppress(Error):
            script.opt.state_dict()
            message += ", but the state can be saved"
        found[name] = message, k
        with contextlib.suppress(Error):
            script.opt.close()
    return found


@pytest.mark.parametrize(("size", "overlap"), [(2, "backward"), (3, "forward")])
def test_a_rank_that_does_otherwise(size, overlap):
    """Within as many steps as lie between comparisons, and none of its state is saved."""
    everyone = run_ranks(size, _errors, overlap, env=_ENV, timeout=90)
    assert all(found == everyone[0] for found in everyone)
    for name, (message, k) in everyone[0].items():
        assert "restart the job from its last checkpoint" in message, name
        assert "can be saved" not in message
        assert _BEGINS < k <= _BEGINS + _EVERY + 1, name
        if name.startswith("lr"):
            alike = "rank 0" if size == 2 else "ranks 0, 1"
            assert f'{name} "0.01" on {alike} but "0.005" on rank {size - 1}' in message
        else:
            assert f"' has other values on rank {size - 1} than on the other ranks" in message, name


def _train_alike(rank, size):
    """Training that is alike on all ranks, in many ways; returns the messages of errors."""
    ub.init()
    found = []
    for options in (
        {"overlap": "backward"},
        {"overlap": "forward"},
        {"overlap": "forward", "compression": "bf16"},
        {"overlap": "forward", "compression": "topk:0.5"},
        {"overlap": "forward", "shard_optimizer": True},
        {"overlap": "auto", "backward_passes_per_step": 2},
    ):
        script = _Script(rank, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(script.opt, 3, 0.7)
        try:
            for k in range(3 * _EVERY + rank):  # some have more data than others
                if k < 3 * _EVERY or not options.get("backward_passes_per_step"):
                    script.step()
                    scheduler.step()
            ub.join()
            for _ in range(2 * _EVERY):
                script.step()
        except Error as error:
            found.append(f"{options}: {error}")
            break
        script.opt.close()
    return found


def test_ranks_that_do_alike():
    """Nothing is found, under any overlap, codec and shards, and where ranks have joined."""
    assert run_ranks(2, _train_alike, env=_ENV, timeout=90) == [[], []]


def _train_with_other_threads(rank, size):
    """Ranks that round differently: with other numbers of threads."""
    torch.set_num_threads(1 + rank)
    ub.init()
    script = _Script(rank, "backward")
    for k in range(_STEPS):
        if k == _BEGINS and rank == 1:
            _change_one_bit(script)
        script.step()
    message = "no error"
    try:
        for k in range(2 * _EVERY):
            if k == 0 and rank == 1:
                _load_model(script)
                with torch.no_grad():
                    script.model[0].weight.mul_(1.1)
            script.step()
    except MismatchError as error:
        message = str(error)
    return message


def test_ranks_that_round_differently():
    """Last bits are no error; other values are."""
    for message in run_ranks(2, _train_with_other_threads, env=_ENV):
        assert "has other values on rank" in message


class _Bare(torch.optim.Optimizer):
    """An optimizer of a script's own, which skips Optimizer.__init__ and so has no defaults."""

    def __init__(self, params):
        self.param_groups, self.state = [{"params": list(params), "lr": 0.01, "rank": None}], {}

    def zero_grad(self, set_to_none=True):
        """Resets gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def step(self, closure=None):
        """SGD."""
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad, alpha=float(group["lr"]))


def _same_in_other_ways(rank, size, how):
    """Ranks that differ in what changes nothing."""
    ub.init()
    model = _model()
    if how == "bare":
        inner = _Bare(model.parameters())
        inner.param_groups[0]["rank"] = rank
    elif how == "own defaults":
        kind = type("Own", (torch.optim.SGD,), {})
        inner = kind(model.parameters(), lr=0.01)
        inner.defaults["rank"] = inner.param_groups[0]["rank"] = rank
    else:
        lr = np.float64(0.01) if how == "NumPy's numbers" and rank else 0.01
        inner = torch.optim.SGD(model.parameters(), lr=lr, foreach=how == "foreach" and rank == 1)
    if how == "whole numbers":
        inner.param_groups[0]["weight_decay"] = 0 if rank else 0.0
    if how == "patched on a rank" and rank:
        original = inner.step
        inner.step = lambda closure=None: original(closure)
    opt = ub.DistributedOptimizer(inner, model.named_parameters())
    generator = torch.Generator().manual_seed(rank)
    for k in range(_STEPS):
        opt.zero_grad()
        loss = model(torch.randn(5, 6, generator=generator)).pow(2).mean()
        (loss * (float("inf") if how == "infinite" and k > 4 else 1)).backward()
        opt.step()
    return "trained"


@pytest.mark.parametrize(
    "how",
    ["bare", "own defaults", "NumPy's numbers", "whole numbers", "foreach", "patched on a rank"],
)
def test_what_changes_nothing_may_differ(how):
    """Types of numbers, ways to the same results, keys of a script's own, a wrapped step."""
    assert run_ranks(2, _same_in_other_ways, how, env=_ENV) == ["trained"] * 2


def _infinite(rank, size):
    """Parameters that are not finite any more, where ranks round differently."""
    torch.set_num_threads(1 + rank)
    return _same_in_other_ways(rank, size, "infinite")


def test_parameters_that_are_not_finite():
    """They are compared as others are."""
    assert run_ranks(2, _infinite, env=_ENV) == ["trained"] * 2


def _train_without_comparisons(rank, size):
    ub.init()
    script = _Script(rank, "backward")
    for k in range(_STEPS):
        if k == _BEGINS and rank:
            _schedule(script)
        script.step()
    return "no error"


def test_comparisons_can_be_left_out():
    """As by USBYTE_CHECK_STEPS=0."""
    env = _ENV | {"USBYTE_CHECK_STEPS": "0"}
    assert run_ranks(2, _train_without_comparisons, env=env) == ["no error"] * 2


def test_hyper_parameters_that_are_compared():
    """Those of the optimizer, not what scripts have put beside them, nor objects."""
    param = nn.Parameter(torch.ones(1))
    group = {"params": [param], "name": "mine", "initial_lr": 3.0, "betas": (0.5, 0.75)}
    found = options_of(torch.optim.AdamW([group], lr=torch.tensor(0.5)))
    assert found["the optimizer"] == "AdamW"
    assert found["lr of parameter group 0"] == "0.5"
    assert "foreach of parameter group 0" not in found
    assert found["betas of parameter group 0"] == ["0.5", "0.75"]
    assert not any("name" in key or "initial_lr" in key for key in found)


def _train_in_other_order(rank, size, how):
    ub.init()
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])
    if how != "unnamed, not broadcast":
        ub.broadcast_parameters(model.state_dict())
    named = list(model.named_parameters())
    shuffled = named if rank == 0 else named[::-1]
    params = [p for _, p in shuffled]
    groups = params if how != "groups" else [{"params": [p]} for p in params]
    try:
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(groups, lr=0.1, momentum=0.9),
            {"named": named, "shuffled": shuffled, "groups": named}.get(how),
        )
        generator = torch.Generator().manual_seed(rank)
        for k in range(_STEPS):
            if k == _BEGINS:
                if rank:
                    opt.state.clear()
                ub.broadcast_optimizer_state(opt)
            opt.zero_grad()
            model(torch.randn(5, 6, generator=generator)).pow(2).mean().backward()
            opt.step()
    except MismatchError as error:
        return str(error)
    return [float(p.double().sum()) for _, p in named]


@pytest.mark.parametrize("how", ["named", "shuffled"])
def test_named_parameters_in_another_order(how):
    """Ranks match them by name, in whichever order names and optimizers have them."""
    first, second = run_ranks(2, _train_in_other_order, how, env=_ENV)
    assert isinstance(first, list)
    assert first == second


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("unnamed", "same parameters in another order on rank 1 than on rank 0"),
        ("unnamed, not broadcast", "' has other values on rank"),
        ("groups", "has group 0 on rank 0 but 2 on rank 1"),
    ],
)
def test_parameters_that_cannot_be_matched(how, text):
    """Without names, or in other groups: an error on all ranks."""
    for message in run_ranks(2, _train_in_other_order, how, env=_ENV):
        assert text in message


def test_values_that_differ_are_named_with_their_ranks():
    ranks = [0, 2, 4]
    row = {"op": "Sum", "topology": [1, 2]}
    verify_same(ranks, "opt", [row] * 3, "Do.")
    text = r"opt: topology is \[1, 2\] on ranks 0, 4 but None on rank 2\. Do\.(?m:$)"
    with pytest.raises(MismatchError, match=text):
        verify_same(ranks, "opt", [row, {"op": "Sum"}, row], "Do.")
    with pytest.raises(MismatchError, match="opt: new is None on ranks 0, 4 but 1 on rank 2"):
        verify_same(ranks, "opt", [row, row | {"new": 1}, row], "Do.")
    many = [{"n": n} for n in range(20)]
    with pytest.raises(MismatchError, match="but 7 on rank 7 but 12 other values elsewhere"):
        verify_same(range(20), "opt", many, "Do.")


def test_a_problem_is_told_with_its_ranks_unless_all_have_it():
    raise_problem([0, 1], "call", ["", ""])
    with pytest.raises(UsageError, match=r"^call on rank 3: bad(?m:$)"):
        raise_problem([0, 3], "call", ["", "bad"])
    with pytest.raises(UsageError, match=r"^call: bad(?m:$)"):
        raise_problem([0, 3], "call", ["bad", "bad"])


def _count_round_trips(rank, size, named, topology):
    ub.init()
    model = _model()
    ub.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    labels, submit = [], EagerQueue.submit

    def record(queue, request):
        labels.append(request.name.label)
        return submit(queue, request)

    EagerQueue.submit = record
    opt = ub.DistributedOptimizer(
        inner, model.named_parameters() if named else None, topology=topology
    )
    EagerQueue.submit = submit
    opt.close()
    return labels


@pytest.mark.parametrize(("named", "topology"), [(True, "hosts"), (False, [2, 2])])
def test_an_optimizer_is_compared_in_one_round_trip(named, topology):
    counted = run_ranks(4, _count_round_trips, named, topology)
    assert counted == [["optimizer.1.facts"]] * 4
