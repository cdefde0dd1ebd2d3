# SPDX-License-Identifier: Apache-2.0
"""What scripts do to an optimizer through its wrapper, and past it, while updates wait."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import usbyte.torch as ub
from _models import difference
from _ranks import run_ranks
from usbyte.errors import Error, UsageError
from usbyte.torch.optimizer.compat import known_optimizers
from usbyte.torch.optimizer.fused import FusedUpdate
from usbyte.torch.optimizer.hyperparam_snapshot import hyper_parameters, is_same

FORWARD = {"overlap": "forward", "policy": "wfbp"}
STEPS = 8
ACTS_IN = 5  # after step(), so that under FORWARD its updates wait


class Scaled(torch.optim.SGD):
    """Reads attributes of its own in each step."""

    scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.scale * getattr(self, "factor", 1.0))
        return super().step(closure)


def train(make, act, wrap):
    """The parameters and what `act` has returned."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    inner = make(model.parameters())
    opt = wrap(inner, model)
    seen = None
    for step in range(STEPS):
        opt.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        opt.step()
        if step == ACTS_IN:
            seen = act(opt, inner)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return values, seen, opt, inner


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def adam_of_lists(params):
    opt = torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False)
    opt.param_groups[0]["betas"] = [0.9, 0.99]
    return opt


def sets_two(opt, inner):
    opt.scale = 0.1
    opt.factor = 0.5
    assert (inner.scale, inner.factor) == (0.1, 0.5)


def deletes(opt, inner):
    opt.scale = 0.1
    del opt.scale
    assert opt.scale == inner.scale == 1.0


def sets_groups(opt, inner):
    opt.param_groups = [{**group, "lr": 0.02} for group in opt.param_groups]
    assert inner.param_groups[0]["lr"] == 0.02


def sets_state(opt, inner):
    opt.state = collections.defaultdict(dict)


def unpickles(opt, inner):
    opt.__setstate__({"state": collections.defaultdict(dict)})


def sets_defaults(opt, inner):
    opt.defaults = {**opt.defaults, "lr": 0.5}
    assert inner.defaults["lr"] == 0.5


def changes_in_place(opt, inner):
    opt.param_groups[0]["betas"][0] = 0.1
    opt.param_groups[0]["lr"].mul_(0.1)


def patches(opt, inner):
    original, params = inner.step, inner.param_groups[0]["params"]

    def step(closure=None):
        nn.utils.clip_grad_norm_(params, 0.05)
        return original(closure)

    inner.step = step


def patches_class(opt, inner):
    kind = type("SGD", (torch.optim.SGD,), {"__module__": "torch.optim.sgd"})
    inner.__class__ = kind
    original = kind.step

    @functools.wraps(original)
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        return original(self, closure)

    kind.step = step


def saves(opt, inner):
    saved = inner.state_dict()["state"]
    return {f"{i}.{key}": saved[i][key].clone() for i in saved for key in saved[i]}


def loads(opt, inner):
    saved = copy.deepcopy(inner.state_dict())
    for state in saved["state"].values():
        state["momentum_buffer"].mul_(0.5)
    inner.load_state_dict(saved)


ACTS = {
    "attributes": (Scaled, sets_two),
    "deleted": (Scaled, deletes),
    "groups": (sgd, sets_groups),
    "state": (adam, sets_state),
    "setstate": (adam, unpickles),
    "defaults": (sgd, sets_defaults),
    "in place": (adam_of_lists, changes_in_place),
    "patched": (sgd, patches),
    "patched class": (sgd, patches_class),
    "saved": (adam, saves),
    "loaded": (sgd, loads),
}


def acts(rank, size):
    ub.init()
    for name, (make, act) in ACTS.items():
        make = functools.partial(make, lr=0.1) if make is Scaled else make
        expected, told, _, _ = train(make, act, lambda inner, model: inner)

        def wrap(inner, model):
            return ub.DistributedOptimizer(inner, model.named_parameters(), **FORWARD)

        values, seen, opt, inner = train(make, act, wrap)
        assert difference(values, expected) == 0, name
        assert told is None or difference(seen, told) == 0, name
        own = {key for key in vars(inner) if key not in vars(make([nn.Parameter(torch.ones(1))]))}
        assert own <= {"scale", "factor", "step", "_opt_called"}, name
        opt.close()
        assert not inner._optimizer_state_dict_pre_hooks
        assert not inner._optimizer_load_state_dict_pre_hooks
        assert not inner._optimizer_load_state_dict_post_hooks


def test_what_is_written_while_updates_wait_is_for_later_steps():
    run_ranks(2, acts, timeout=90, env={"USBYTE_LEARNING_STEPS": "2"})


def hooks_late(rank, size):
    """How many parameters hooks see in each step, which come past the wrapper."""
    ub.init()
    seen = collections.defaultdict(list)

    def hook(name, opt, *_):
        seen[name].append(len(opt.param_groups[0]["params"]))

    def act(opt, inner):
        call = functools.partial
        inner.register_step_post_hook(call(hook, "inner"))
        torch_optimizer.register_optimizer_step_pre_hook(call(hook, "pre"))
        torch_optimizer.register_optimizer_step_post_hook(call(hook, "post"))
        opt.register_step_pre_hook(call(hook, "wrapper"))

    train(sgd, act, lambda inner, model: ub.DistributedOptimizer(inner, **FORWARD))
    return seen


def test_hooks_do_not_see_steps_taken_before_them():
    expected = {name: [8] * (STEPS - ACTS_IN - 1) for name in ("wrapper", "inner", "pre", "post")}
    assert run_ranks(2, hooks_late, env={"USBYTE_LEARNING_STEPS": "2"}) == [expected] * 2


def shards(rank, size):
    ub.init()
    for name in ("state", "setstate", "groups", "loaded"):
        make, act = ACTS[name]
        if name == "loaded":  # into the wrapped one, as the wrapper saves it

            def act(opt, inner):
                saved = opt.state_dict()
                for state in saved["state"].values():
                    state["momentum_buffer"] = 0.5 * state["momentum_buffer"]
                inner.load_state_dict(saved)

        expected, *_ = train(make, act, lambda inner, model: inner)

        def wrap(inner, model):
            return ub.DistributedOptimizer(inner, shard_optimizer=True)

        values, _, opt, inner = train(make, act, wrap)
        assert difference(values, expected) == 0, name
        with pytest.raises(UsageError, match=r"call state_dict\(\) of the DistributedOptimizer"):
            inner.state_dict()
        opt.state_dict()
        step = inner.step
        inner.step = functools.partial(step)
        with pytest.raises(UsageError, match=r"that of this \w+ was replaced by another function"):
            opt.step()
        inner.step = step
        opt.close()
        inner.state_dict()


def test_shards_take_what_is_written():
    run_ranks(2, shards, env={"USBYTE_LEARNING_STEPS": "2"})


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer and does not call Optimizer.__init__."""

    def __init__(self, base):
        self.base = base if isinstance(base, torch.optim.Optimizer) else None
        self.call = base.step if self.base is not None else base
        self.param_groups = getattr(base, "param_groups", None)

    def step(self, closure=None):
        return self.call()

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


def wraps_others(rank, size):
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    base = sgd(model.parameters())
    with pytest.raises(UsageError, match=r'Lookahead\.base has an opt.*use overlap="backward"'):
        ub.DistributedOptimizer(Lookahead(base), **FORWARD)
    several = Lookahead(base)
    several.base, several.others = None, [base]
    with pytest.raises(UsageError, match=r"Lookahead\.others has an optimizer"):
        ub.DistributedOptimizer(several, **FORWARD)

    hidden = Lookahead(lambda: base.step())  # nobody can see what it holds
    hidden.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
    hidden.defaults, hidden.state = {}, collections.defaultdict(dict)
    hidden.zero_grad = lambda set_to_none=True: None  # so that gradients of others are there
    opt = ub.DistributedOptimizer(hidden, **FORWARD)

    def steps():
        for _ in range(6):
            model(torch.ones(1, 4)).sum().backward()
            opt.step()

    with pytest.raises(Error, match=r'step\(\) has changed .* use overlap="backward"'):
        steps()
    with pytest.raises(Error, match="half-way"):
        opt.step()


def skips_init(rank, size):
    ub.init()

    def make(params):
        return Lookahead(sgd(params))

    def act(opt, inner):
        return None

    expected, *_ = train(make, act, lambda inner, model: inner)
    for options in ({}, {"overlap": "backward"}, {"policy": "wfbp"}):
        values, _, opt, _ = train(
            make, act, lambda inner, model, o=options: ub.DistributedOptimizer(inner, **o)
        )
        assert difference(values, expected) == 0, options
        opt.close()


def test_optimizers_that_hold_others():
    run_ranks(2, skips_init, env={"USBYTE_LEARNING_STEPS": "2"})
    run_ranks(2, wraps_others, env={"USBYTE_LEARNING_STEPS": "2"})


def waits(rank, size):
    """Parameters made of others that wait."""
    ub.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    wrapped = ub.DistributedOptimizer(sgd(model.parameters()), **FORWARD)
    for net, opt in ((plain, sgd(plain.parameters())), (model, wrapped)):
        for _ in range(6):
            opt.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            opt.step()
    weight, bias, other = model[0].weight, model[0].bias, model[1].weight
    assert type(weight) is not nn.Parameter  # that is to say, it waits
    made = nn.Parameter(weight, requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    assert torch.equal(made, plain[0].weight)
    assert made.data_ptr() == weight.data_ptr()
    same = type(bias)(torch.zeros(3))
    assert type(same) is nn.Parameter
    assert torch.equal(same, torch.zeros(3))
    assert type(other.detach()) is torch.Tensor
    assert torch.equal(other, plain[1].weight)


def test_parameters_are_made_of_those_that_wait():
    run_ranks(2, waits, env={"USBYTE_LEARNING_STEPS": "2"})


def new_layers(rank, size):
    ub.init()
    names = []
    for of_model in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        named = model.named_parameters() if of_model else list(model.named_parameters())
        opt = ub.DistributedOptimizer(sgd(model.parameters()), named, **FORWARD)

        def step(model=model, opt=opt):
            opt.zero_grad()
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
            opt.step()

        for _ in range(4):
            step()
        model.append(nn.Linear(4, 4))
        opt.add_param_group({"params": list(model[-1].parameters())})
        for _ in range(4):
            step()
        names.append([name for name, _ in opt._session.named()][-2:])
        sums = [float(p.double().sum()) for p in model.parameters()]
        assert ub.broadcast_object(sums, 0) == sums
        opt.close()
    return names


def test_a_layer_that_is_made_later_gets_names():
    expected = [["2.weight", "2.bias"], ["group1.param0", "group1.param1"]]
    assert run_ranks(2, new_layers, env={"USBYTE_LEARNING_STEPS": "2"}) == [expected] * 2


def test_it_is_one_of_the_wrapped_class_and_a_wrapper(single):
    params = [nn.Parameter(torch.ones(3))]
    opt = ub.DistributedOptimizer(torch.optim.Adam(params))
    assert isinstance(opt, torch.optim.Adam)
    assert isinstance(opt, ub.DistributedOptimizer)
    assert not isinstance(opt, torch.optim.SGD)
    assert type(opt) is ub.DistributedOptimizer
    assert opt.__class__.__name__ == "DistributedOptimizer"
    assert opt.__class__.step is ub.DistributedOptimizer.step
    assert repr(opt).startswith("DistributedOptimizer(Adam (")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be pickled or copied"):
            copied(opt)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    params[0].sum().backward()
    torch.compile(lambda: opt.step(), backend="eager")()
    opt.close()


NAMES = frozenset(
    [
        "close",
        "decision",
        "drain",
        "flush_accumulated",
        "no_sync",
        "plan",
        "settled",
        "skip_synchronize",
        "synchronize",
    ]
)
DASO_NAMES = NAMES | {"end_epoch", "exchange_every", "exchange_wait", "phase", "synchronize_nodes"}


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def test_the_names_that_users_see(single):
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    of_torch = public(torch.optim.Optimizer) | public(plain)
    assert public(ub.DistributedOptimizer) - of_torch == NAMES
    assert public(ub.DasoOptimizer) - of_torch == DASO_NAMES
    optimizer = ub.DistributedOptimizer(plain)
    assert public(optimizer) - of_torch == NAMES
    assert of_torch <= public(optimizer)
    optimizer.close()
    daso = ub.DasoOptimizer(plain, total_epochs=10)
    assert public(daso) - of_torch == DASO_NAMES
    assert not issubclass(ub.DasoOptimizer, ub.DistributedOptimizer)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"a DasoOptimizer .* cannot be pickled or copied"):
            copied(daso)
    daso.close()


def test_daso_passes_on_what_is_not_its_own(single):
    params = [nn.Parameter(torch.ones(3))]
    inner = Scaled(params, lr=0.125)
    opt = ub.DasoOptimizer(inner, total_epochs=10)
    before = set(vars(inner))
    params[0].sum().backward()
    opt.scale = 8.0
    opt.step()
    opt.end_epoch(1.0)
    opt.load_state_dict(opt.state_dict())
    opt.close()
    assert set(vars(inner)) == before | {"scale"}
    assert torch.equal(params[0], torch.zeros(3))
    assert isinstance(opt, Scaled)


STEP = torch.optim.SGD.step


def wrapped_by_hand(opt):
    @functools.wraps(STEP)
    def step(*args):
        return STEP(opt, *args)

    return step


REPLACED = {
    "nothing": (lambda opt: None, False),
    "scheduler": (lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1) and None, False),
    "itself": (lambda opt: opt.step, False),
    "compiled": (lambda opt: torch.compile(opt.step, backend="eager"), False),
    "another's": (lambda opt: torch.optim.SGD([nn.Parameter(torch.ones(1))]).step, True),
    "function": (lambda opt: lambda closure=None: None, True),
    "decorated": (wrapped_by_hand, True),
    "under torch's": (lambda opt: torch.no_grad()(lambda closure=None: None), True),
    "partial": (lambda opt: functools.partial(opt.step, None), True),
    "mock": (lambda opt: mock.Mock(wraps=opt.step), True),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_would_run_is_whether_a_step_is_replaced(name):
    make, is_replaced = REPLACED[name]
    for kind in (torch.optim.SGD, Scaled):
        opt = kind([nn.Parameter(torch.ones(3))], lr=0.1)
        if (step := make(opt)) is not None:
            opt.step = step
        assert known_optimizers.step_is_replaced(opt) == is_replaced
        assert known_optimizers.is_known(opt) == (kind is torch.optim.SGD and not is_replaced)
        assert known_optimizers.calls_closure_first(opt) == known_optimizers.is_known(opt)


def test_a_replaced_step_is_not_sharded_or_fused(single):
    opt = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    opt.step = mock.Mock()
    with pytest.raises(UsageError, match=r"that of this SGD was replaced by another function"):
        ub.DistributedOptimizer(opt, shard_optimizer=True)
    with pytest.raises(
        UsageError, match=r"step\(\) of this optimizer was replaced by another function"
    ):
        FusedUpdate(opt, ["p"], opt.param_groups[0]["params"])


Pair = collections.namedtuple("Pair", "a b")


def test_snapshots_do_not_change_with_what_they_are_of():
    generator = torch.Generator()
    group = {
        "params": [],
        "lr": torch.tensor(0.1),
        "betas": (0.9, 0.99),
        "list": [0.1, [torch.ones(2)]],
        "dict": collections.OrderedDict(a=[1]),
        "array": np.ones(3),
        "pair": Pair([1], np.zeros(2)),
        "generator": generator,
    }
    snapshot = hyper_parameters(group)
    assert "params" not in snapshot
    assert snapshot["betas"] is group["betas"]
    assert snapshot["generator"] is generator
    assert all(is_same(group[key], value) for key, value in snapshot.items())
    group["lr"].mul_(2)
    group["list"][1][0].mul_(2)
    group["dict"]["a"].append(2)
    group["array"][0] = 5
    group["pair"].a.append(2)
    changed = [key for key, value in snapshot.items() if not is_same(group[key], value)]
    assert changed == ["lr", "list", "dict", "array", "pair"]
    assert type(snapshot["dict"]) is collections.OrderedDict
    assert type(snapshot["pair"]) is Pair
