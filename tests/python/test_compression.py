"""Gradients that are compressed on their way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _models import OPTIMIZERS, Awkward, difference, short_probes, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.compression import Codec, Memory, codecs_of

CODECS = [
    ub.Compression.fp16, ub.Compression.bf16, ub.Compression.fp8, ub.Compression.int8,
    ub.Compression.topk(0.1), ub.Compression.randk(0.2), ub.Compression.qsgd(8),
    ub.Compression.terngrad, ub.Compression.signsgd, ub.Compression.efsignsgd,
    ub.Compression.onebit,
]  # fmt: skip


def test_names_are_those_of_the_core():
    made = {codec.spec.partition(":")[0] for codec in CODECS}
    assert made == set(_core.codec_names())
    assert all(hasattr(ub.Compression, name) for name in ["none", *made])


def test_single_collectives_know_casts():
    x = torch.tensor([1.0, 1e-3, 70000.0])
    for codec, dtype in ((ub.Compression.fp16, torch.float16), (ub.Compression.none, x.dtype)):
        packed, ctx = codec.compress(x)
        assert packed.dtype == dtype
        assert torch.equal(codec.decompress(packed, ctx), x.to(dtype).to(x.dtype))
    whole = torch.tensor([3])
    assert ub.Compression.fp16.compress(whole)[0] is whole
    with pytest.raises(UsageError, match=r"topk:0.5 cannot be added up"):
        ub.Compression.topk(0.5).compress(x)


def test_rules_say_which_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    names, params = zip(*model.named_parameters(), strict=True)
    assert names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert codecs_of(ub.Compression.int8, names, params) == ["int8", "none", "none", "none"]
    assert codecs_of("bf16", names, params) == ["bf16"] * 4
    rules = {"*.weight": "fp16", "0.*": ub.Compression.topk(0.25)}
    assert codecs_of(rules, names, params) == ["fp16", "topk:0.25", "fp16", "none"]
    with pytest.raises(UsageError, match=r"'2\.\*' fits no parameter"):
        codecs_of({"2.*": "fp16"}, names, params)
    with pytest.raises(UsageError, match="'zip' is unknown; there are none, fp16"):
        codecs_of("zip", names, params)
    with pytest.raises(UsageError, match="above 0"):
        ub.Compression.topk(0)


def test_plans_are_split_by_codec():
    tensors = []
    for i, numel in enumerate((3, 10, 2, 20, 4)):
        tensors.append(_core.TensorSpec(str(i), numel, offset=sum((3, 10, 2, 20, 4)[:i])))
    ops = [_core.Op("all_reduce", [(5, 39)], 100, True), _core.Op("all_reduce", [(0, 5)])]
    plan = _core.Plan("mine", tensors, ops)
    coded = _core.with_codecs(plan, ["none", "int8", "none", "int8", "int8"])
    told = [(op.codec, op.blocks, op.window_bytes, op.fence) for op in coded.ops]
    assert told[:2] == [
        ("int8", [(5, 13), (15, 39)], 100, True), ("none", [(13, 15)], 100, False)
    ]  # fmt: skip
    assert [t[:2] for t in told[2:]] == [("none", [(0, 3)]), ("int8", [(3, 5)])]
    assert _core.Plan.from_json(coded.to_json()) == coded
    assert coded.message_bytes(coded.ops[0]) == 4 + 8 + 4 + 24
    assert "by int8" in coded.describe(0)
    pair = [_core.Op("reduce_scatter", [(0, 20), (20, 39)]),
            _core.Op("all_gather", [(20, 39)]), _core.Op("all_gather", [(0, 20)])]  # fmt: skip
    coded = _core.with_codecs(_core.Plan("mine", tensors, pair), ["none", "fp16", *3 * ["none"]])
    assert [(op.kind, op.codec, op.blocks) for op in coded.ops] == [
        ("reduce_scatter", "none", [(0, 3), (13, 20), (20, 39)]),
        ("all_reduce", "fp16", [(3, 13)]),
        ("all_gather", "none", [(20, 39)]),
        ("all_gather", "none", [(0, 3), (13, 20)]),
    ]


def cast_hook(dtype):
    """DDP's hook for casts, which averages before it casts."""

    def hook(_state, bucket):
        buffer = bucket.buffer()
        message = (buffer / dist.get_world_size()).to(dtype)
        work = dist.all_reduce(message, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].to(buffer.dtype))

    return hook


def casts(rank, size):
    ub.init()
    short_probes()

    def trained(mode, hook=None, codec=None):
        torch.manual_seed(3)
        model = Awkward()
        opt = OPTIMIZERS["sgd"](model.parameters())
        net = model
        if hook is not None:
            net = DistributedDataParallel(model, find_unused_parameters=True)
            net.register_comm_hook(None, hook)
        else:
            opt = ub.DistributedOptimizer(
                opt, model.named_parameters(), overlap=mode, compression=codec
            )
        data = torch.Generator().manual_seed(rank)
        for _ in range(12):
            opt.zero_grad()
            tokens = torch.randint(0, 40, (4, 6), generator=data)
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            opt.step()
        state = {k: v.clone() for k, v in model.state_dict().items()}
        if hook is None:
            opt.close()
        return state

    for codec, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        want = trained("ddp", cast_hook(dtype))
        for mode in ("backward", "forward"):
            assert difference(trained(mode, codec=codec), want) == 0, (codec, mode)
    # DDP's own casts first, which rounds subnormals otherwise.
    theirs = trained("ddp", default_hooks.fp16_compress_hook)
    assert difference(trained("forward", codec="fp16"), theirs) < 1e-3


def test_casts_equal_ddps_hooks():
    run_ranks(2, casts, env={"USBYTE_LEARNING_STEPS": "2"})


def every_codec(rank, size):
    ub.init()
    for i, codec in enumerate(CODECS):
        mode = ("backward", "forward")[i % 2]
        state = train(mode, "sgd", rank, size, steps=8, mixed=True, compression=codec, tune_steps=0)
        flat = torch.cat([v.double().flatten() for v in state.values()])
        assert flat.isfinite().all(), codec
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), codec


def test_ranks_stay_equal_under_every_codec():
    run_ranks(3, every_codec, timeout=200, env={"USBYTE_LEARNING_STEPS": "2"})


def feedback(rank, size):
    ub.init()
    short_probes()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(40, 40))
    other = nn.Parameter(torch.zeros(30, 30))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD([weight, other], lr=1.0), [("weight", weight), ("other", other)],
        compression=ub.Compression.topk(0.1), tune_steps=0,
    )  # fmt: skip
    plans = set()
    produced = [torch.zeros_like(p) for p in (weight, other)]
    data = torch.Generator().manual_seed(rank)
    for step in range(14):
        opt.zero_grad()
        grads = [torch.randn(p.shape, generator=data) for p in (weight, other)]
        loss = sum((p * g).sum() for p, g in zip((weight, other), grads, strict=True))
        loss.backward()
        opt.step()
        for total, grad in zip(produced, grads, strict=True):
            total += ub.allreduce(grad)
        plans.add(opt.plan.hash())
        if step == 6:
            opt._reducer._drift.wanted = True
    assert len(plans) > 1
    kept = opt._reducer._memory.parts
    for name, param, total in zip(("weight", "other"), (weight, other), produced, strict=True):
        left = ub.allreduce(kept[name], op=ub.Sum).view_as(param)
        # What was applied and what is remembered are all that there was.
        assert torch.allclose(-param.detach() + left, total, atol=1e-4)
        assert left.abs().max() > 0.1
    opt.close()


def test_a_new_plan_loses_nothing_that_was_remembered():
    run_ranks(2, feedback, env={"USBYTE_LEARNING_STEPS": "2"})


def differs(rank, size):
    ub.init()
    model = nn.Linear(3, 2)
    with pytest.raises(MismatchError, match="has compression fp16 on rank 0 but bf16 on rank 1"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), compression=["fp16", "bf16"][rank]
        )
    with pytest.raises(UsageError, match="shard_optimizer"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), overlap="forward", shard_optimizer=True,
            compression="fp16",
        )  # fmt: skip


def test_what_cannot_be_is_an_error():
    run_ranks(2, differs)


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("doubles")
def test_memory_goes_over_to_another_order():
    tensors = [_core.TensorSpec("a", 4, offset=0), _core.TensorSpec("b", 6, offset=4)]
    other = [_core.TensorSpec("b", 6, offset=0), _core.TensorSpec("a", 4, offset=6)]
    memory = Memory()
    memory.lay_out(_core.Plan("plain", tensors, [_core.Op("all_reduce", [(0, 10)])]))
    assert memory.address == 0
    coded = [_core.Op("all_reduce", [(0, 10)], codec="int8")]
    memory.lay_out(_core.Plan("mine", tensors, coded))
    memory.parts["a"][:] = torch.arange(4.0)
    memory.parts["b"][:] = torch.arange(4.0, 10.0)
    memory.lay_out(_core.Plan("mine", other, coded))
    assert memory.parts["a"].tolist() == [0, 1, 2, 3]
    assert memory.parts["b"].tolist() == [4, 5, 6, 7, 8, 9]
    assert memory.parts["b"].data_ptr() == memory.address
    assert memory.parts["b"].dtype == torch.float32


def test_a_codec_has_one_spelling():
    assert ub.Compression.topk(0.1) == Codec("topk:0.1") == Codec("topk:0.10")
    assert ub.Compression.topk(0.1).spec == "topk:0.1"


def test_codecs_are_checked_where_they_are_made():
    with pytest.raises(UsageError, match="qsgd:4"):
        Codec("qsgd:5")
