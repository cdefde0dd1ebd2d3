# SPDX-License-Identifier: Apache-2.0
"""Other reducers of the same gradients are noticed, and so are tensors without memory."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import UsageError


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _wrap(net, **options):
    return ub.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **options
    )


def _message(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    return "no error"


def _train(net, opt, steps=3):
    for _ in range(steps):
        opt.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        opt.step()


def _wrapped_before_and_after(rank, size):
    """What is raised where DDP is around the model, by when that came and what usbyte was given."""
    ub.init()
    found = {}
    for overlap in ("backward", "forward"):
        model = _model()
        net = nn.parallel.DistributedDataParallel(model)
        found[f"before, {overlap}"] = _message(lambda m=model, o=overlap: _wrap(m, overlap=o))
        del net
        opt = _wrap(model, overlap=overlap)  # once it is gone
        net = nn.parallel.DistributedDataParallel(model)
        found[f"after, {overlap}"] = _message(lambda n=net, o=opt: _train(n, o))
        opt.close()
        model = _model()
        opt = _wrap(model, overlap=overlap, model=model)
        net = nn.parallel.DistributedDataParallel(model)
        found[f"model=, {overlap}"] = _message(lambda n=net, o=opt: _train(n, o))
        opt.close()
    model = _model()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    net = nn.parallel.DistributedDataParallel(model, process_group=alone)  # reduces nothing
    _train(net, _wrap(model, overlap="backward"))
    return found


def test_a_ddp_module_around_the_model_is_an_error():
    """Whenever it is made, on each rank, with a parameter's name and what to drop."""
    for found in run_ranks(2, _wrapped_before_and_after, env={"USBYTE_LEARNING_STEPS": "3"}):
        for how, message in found.items():
            assert "'0.weight' is reduced by a DistributedDataParallel" in message, how
            assert "wrapper.module" in message


def _sharded_in_other_ways(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.tensor import Replicate, distribute_tensor

    ub.init()
    found = {}
    for original in (True, False):
        model = FullyShardedDataParallel(
            _model(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=original,
        )
        found[f"FSDP, {original}"] = _message(lambda m=model: _wrap(m))
        del model
        gc.collect()
    mesh = init_device_mesh("cpu", (size,))
    model = _model()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Replicate()]))
    found["DTensor"] = _message(lambda: _wrap(model))
    return found


def test_sharded_models_are_errors():
    """FSDP's modules and DTensors are named, and nothing is read by address."""
    for found in run_ranks(2, _sharded_in_other_ways):
        assert "is reduced by a FullyShardedDataParallel" in found["FSDP, True"]
        assert "is reduced by a FullyShardedDataParallel" in found["FSDP, False"]
        assert "parameter '0.weight' is a DTensor" in found["DTensor"]


class _Twice(torch.Tensor):
    """Shows twice the values of another tensor, and has no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


@pytest.mark.usefixtures("single")
class TestOneRank:
    """A laptop tells what a cluster would."""

    def test_tensors_without_memory(self):
        """Subclasses that compute their values, and storages that were resized to nothing."""
        wrapped = nn.Parameter(_Twice(torch.ones(2)))
        with pytest.raises(UsageError, match=r"'w' is a _Twice whose values are not in"):
            ub.DistributedOptimizer(torch.optim.SGD([wrapped], lr=0.1), [("w", wrapped)])
        freed = nn.Parameter(torch.ones(2))
        freed.untyped_storage().resize_(0)
        with pytest.raises(UsageError, match=r"'w' is a Parameter whose memory has been"):
            ub.DistributedOptimizer(torch.optim.SGD([freed], lr=0.1), [("w", freed)])

    def test_lazy_modules(self):
        """They have no shape before the first batch."""
        lazy = nn.LazyLinear(3)
        with pytest.raises(UsageError, match=r"without a shape, of a lazy module: run one batch"):
            ub.DistributedOptimizer(torch.optim.SGD(lazy.parameters(), lr=0.1))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
    def test_dtypes_that_cannot_be_sent(self, dtype):
        """They are refused with one rank as with two."""
        param = nn.Parameter(torch.ones(2).to(dtype))
        with pytest.raises(UsageError, match=rf"parameter 'w' has dtype {dtype}"):
            ub.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("w", param)])

    def test_hooks_of_other_libraries(self):
        """A hook of a parameter that is defined in a library known to send gradients."""
        model = _model()

        def hook(_param):
            """Stands for one of Horovod's."""

        hook.__module__ = "horovod.torch.optimizer"
        model[0].weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(UsageError, match=r"'0.weight' is reduced by a hook of horovod's"):
            _wrap(model)


def _outside_of_a_process_set(rank, size):
    ub.init()
    model = _model()
    made = _message(lambda: _train(model, _wrap(model, process_set=[0, 1]), steps=12))
    every = ub.allgather_object(made)  # all of them go on
    ub.shutdown()
    return every


def test_ranks_outside_of_a_process_set_are_told_at_once():
    """They get an error; the set's ranks train."""
    for every in run_ranks(3, _outside_of_a_process_set):
        assert every[:2] == ["no error"] * 2
        assert "rank 2 is not in the process set of ranks 0, 1" in every[2]
