# SPDX-License-Identifier: Apache-2.0
"""Gradients that are compressed on their way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import usbyte.torch as ub
from _coded import CODECS, cast_hook
from _models import OPTIMIZERS, Awkward, difference, train
from _ranks import run_ranks
from usbyte import _core
from usbyte.errors import MismatchError, PlanError, UsageError
from usbyte.torch import testing
from usbyte.torch.compression.codecs import Codec, choices_of, codecs_of
from usbyte.torch.compression.state import CodecState


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
    with pytest.raises(UsageError, match=r"topk:0.5 does not work in an eager"):
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
    for rules in (nn.Identity, 5, {"0.*": 5}, ["fp16", 5]):
        with pytest.raises(UsageError, match=r"is no codec: take one of usbyte"):
            choices_of(rules, names, params)
    several = ["fp16", "int8"]
    for rules in (iter(several), set(several), b"fp16", np.array(several), dict(fp16=1).keys()):
        with pytest.raises(UsageError, match="is not a list of codecs; give a list"):
            choices_of(rules, names, params)
    assert choices_of(tuple(several), names, params) == choices_of(several, names, params)
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
        ("reduce_scatter", "fp16", [(3, 13)]),
        ("all_gather", "none", [(20, 39)]),
        ("all_gather", "none", [(0, 3), (13, 20)]),
        ("all_gather", "fp16", [(3, 13)]),
    ]
    assert _core.with_codecs(coded, ["none", "int8", *3 * ["none"]]).ops[1].codec == "fp16"
    voted = _core.with_codecs(_core.Plan("mine", tensors, pair), ["none", "signsgd", *3 * ["none"]])
    assert [(op.kind, op.blocks) for op in voted.ops if op.codec != "none"] == [
        ("all_reduce", [(3, 13)])
    ]
    plan = _core.Plan("mine", tensors, pair)
    mixed = _core.with_codecs(plan, ["none", "int8", *3 * ["none"]], True)
    assert [(op.kind, op.codec, op.blocks) for op in mixed.ops] == [
        ("reduce_scatter", "none", [(0, 3), (13, 20), (20, 39)]),
        ("reduce_scatter", "int8", [(3, 13)]),
        ("all_gather", "none", [(20, 39)]),
        ("all_gather", "none", [(0, 3), (3, 13), (13, 20)]),
    ]
    shards = _core.with_codecs(plan, 5 * ["int8"], True)
    assert [(op.kind, op.codec) for op in shards.ops] == [
        ("reduce_scatter", "int8"), ("all_gather", "none"), ("all_gather", "none")
    ]  # fmt: skip
    with pytest.raises(UsageError, match="signsgd does not support a sharded"):
        _core.with_codecs(plan, 5 * ["signsgd"], True)


def test_matrices_go_as_a_whole():
    tensors = [
        _core.TensorSpec("a", 60, offset=0, rows=6),
        _core.TensorSpec("b", 3, offset=60),
        _core.TensorSpec("c", 48, offset=63, rows=6),
    ]
    codecs = 3 * ["powersgd:1"]
    cut = _core.Plan("mine", tensors, [
        _core.Op("all_reduce", [(50, 111)], 100, True), _core.Op("all_reduce", [(20, 50)], 200),
        _core.Op("all_reduce", [(0, 20)], 300, True),
    ])  # fmt: skip
    coded = _core.with_codecs(cut, codecs)
    assert [(op.kind, op.codec, op.blocks, op.window_bytes, op.fence) for op in coded.ops] == [
        ("all_reduce", "none", [(60, 63)], 100, True),
        ("reduce_scatter", "powersgd:1", [(63, 111)], 100, False),
        ("all_gather", "powersgd:1", [(63, 111)], 100, False),
        ("reduce_scatter", "powersgd:1", [(0, 60)], 300, True),
        ("all_gather", "powersgd:1", [(0, 60)], 300, False),
    ]
    assert [coded.message_bytes(op) for op in coded.ops] == [12, 24, 32, 24, 40]
    assert _core.Plan.from_json(coded.to_json()) == coded
    halves = _core.Plan("mine", tensors, [
        _core.Op("reduce_scatter", [(30, 111)]), _core.Op("all_gather", [(30, 111)]),
        _core.Op("reduce_scatter", [(0, 30)]), _core.Op("all_gather", [(0, 30)]),
    ])  # fmt: skip
    assert [(op.kind, op.blocks) for op in _core.with_codecs(halves, codecs).ops] == [
        ("reduce_scatter", [(60, 63)]), ("reduce_scatter", [(63, 111)]),
        ("all_gather", [(60, 63)]), ("all_gather", [(63, 111)]),
        ("reduce_scatter", [(0, 60)]), ("all_gather", [(0, 60)]),
    ]  # fmt: skip
    for ops, what in (
        ([("reduce_scatter", (0, 111), "powersgd:1")], "needs matrices"),
        ([("reduce_scatter", (0, 60), "powersgd:1"), ("all_gather", (0, 60), "int8")], "by int8"),
        ([("reduce_scatter", (0, 111), "signum")], "can only be that of an all_reduce"),
    ):
        with pytest.raises(PlanError, match=what):
            _core.Plan("mine", tensors, [_core.Op(k, [b], codec=c) for k, b, c in ops])


def casts(rank, size):
    ub.init()

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
                opt, model.named_parameters(), overlap=mode, compression=codec, policy="ddp"
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
        kind = "adam" if codec.spec.startswith(("dgc", "signum")) else "sgd"
        state = train(mode, kind, rank, size, steps=6, mixed=True, compression=codec, policy="ddp")
        flat = torch.cat([v.double().flatten() for v in state.values()])
        assert flat.isfinite().all(), codec
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), codec


def test_ranks_stay_equal_under_every_codec():
    run_ranks(3, every_codec, timeout=200, env={"USBYTE_LEARNING_STEPS": "2"})


def shards(rank, size):
    ub.init()
    options = {"steps": 10, "shard_optimizer": True}
    want = train("forward", "sgd", rank, size, **options)
    for codec in ("fp16", "int8"):
        got = train("forward", "sgd", rank, size, compression=codec, **options)
        assert 0 < difference(got, want) < 0.02, (codec, difference(got, want))
        flat = torch.cat([v.double().flatten() for v in got.values()])
        assert torch.equal(ub.allreduce(flat, op=ub.Max), ub.allreduce(flat, op=ub.Min)), codec


def test_gradients_of_sharded_updates_are_compressed():
    run_ranks(3, shards, env={"USBYTE_LEARNING_STEPS": "2"})


def blocks_of(tensors, width, kind):
    """A plan whose blocks are of `width` elements, whatever the tensors."""
    end = tensors[-1].end
    ops = [_core.Op("all_reduce", [(0, tensors[0].end)])]
    blocks = [(b, min(b + width, end)) for b in range(tensors[0].end, end, width)]
    if kind == "all_reduce":
        return ops + [_core.Op(kind, [block]) for block in blocks]
    return ops + [_core.Op(k, blocks) for k in ("reduce_scatter", "all_gather")]


def feedback(rank, size, spec):
    ub.init()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(40, 40))
    other = nn.Parameter(torch.zeros(30, 30))
    extra = nn.Parameter(torch.zeros(3))
    named = [("weight", weight), ("other", other), ("extra", extra)]
    plans = []

    def policy(profile, network):
        how = [(700, "all_reduce"), (333, "reduce_scatter"), (1000, "all_reduce")][len(plans) % 3]
        plans.append(_core.Plan("mine", profile.tensors, blocks_of(profile.tensors, *how)))
        return plans[-1]

    opt = ub.DistributedOptimizer(
        torch.optim.SGD([weight, other], lr=1.0), named,
        compression=spec, policy=policy,
    )  # fmt: skip
    produced = [torch.zeros_like(p) for p in (weight, other)]
    data = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(18):
        opt.zero_grad()
        grads = [torch.randn(p.shape, generator=data) for p in (weight, other)]
        loss = sum((p * g).sum() for p, g in zip((weight, other), grads, strict=True))
        loss.backward()
        opt.step()
        for total, grad in zip(produced, grads, strict=True):
            total += ub.allreduce(grad)
        if not seen or opt.plan.hash() != seen[-1]:
            seen.append(opt.plan.hash())
        if step in (5, 10) and rank == 0:
            testing.request_plan(opt)
        if step == 14:  # what is remembered is saved, and outlives the engine
            saved = opt.state_dict()
            for part in testing.codec_state(opt).values():
                part.zero_()
            opt.load_state_dict(saved)
            ub.broadcast_optimizer_state(opt, 0)  # leaves each rank its own
            opt.add_param_group({"params": [extra]})
    assert len(seen) >= 5, seen  # learning, then mine, and so on
    kept = testing.codec_state(opt)
    for name, param, total in zip(("weight", "other"), (weight, other), produced, strict=True):
        left = ub.allreduce(kept[name][0], op=ub.Sum).view_as(param)
        # What was applied and what is remembered are all that there was.
        assert torch.allclose(-param.detach() + left, total, atol=1e-4), spec
        assert left.abs().max() > 1e-3
    opt.close()


@pytest.mark.parametrize("spec", ["topk:0.1", "powersgd:2", "dgc:0.1,momentum=0,warmup=9"])
def test_a_new_plan_loses_nothing_that_was_remembered(spec):
    run_ranks(2, feedback, spec, env={"USBYTE_LEARNING_STEPS": "2"})


def seldom_used(rank, size, spec, options):
    ub.init()
    often, seldom = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(20, 25))
    named = {"often": often, "seldom": seldom}
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=1.0), named.items(), compression=spec, **options
    )
    produced = {name: torch.zeros(p.shape) for name, p in named.items()}
    data = torch.Generator().manual_seed(rank)

    def check():
        opt.synchronize()
        for name, param in named.items():
            kept = opt.state_dict()["usbyte_memory"][name]["rows"][0].view_as(param)
            left, total = ub.allreduce(kept, op=ub.Sum), ub.allreduce(produced[name])
            assert torch.allclose(-param.detach() + left, total, atol=1e-4), (spec, options, name)
            assert left.abs().max() > 1e-3

    def steps(first, last):
        for step in range(first, last):
            opt.zero_grad()
            # By all ranks, by nobody, by one rank, by nobody.
            used = step % 4 == 0 or (step % 4 == 2 and rank == 0)
            grads = {name: torch.randn(p.shape, generator=data) for name, p in named.items()}
            names = [name for name in named if used or name == "often"]
            sum((named[name] * grads[name]).sum() for name in names).backward()
            for name in names:
                produced[name] += grads[name]
            opt.step()

    steps(0, 12)
    check()
    steps(12, 14 + 2 * rank)
    ub.join()  # whose last step is one of nobody
    check()
    opt.close()


@pytest.mark.parametrize(
    "options", [{"overlap": "backward"}, {"overlap": "forward"}, {"shard_optimizer": True}]
)
def test_a_sum_that_nobody_uses_takes_nothing_from_what_is_remembered(options):
    for spec in ("topk:0.1", "int8" if "shard_optimizer" in options else "powersgd:2"):
        run_ranks(2, seldom_used, spec, options, env={"USBYTE_LEARNING_STEPS": "2"})


def unsent(rank, size, folder, loads):
    """How large what all ranks have not sent is, together: before a checkpoint, and after."""
    ub.init()
    weight = nn.Parameter(torch.zeros(40, 30))
    opt = ub.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression="topk:0.02"
    )
    if loads:
        opt.load_state_dict(torch.load(f"{folder}/0"))
    for step in range(0 if loads else 10):
        opt.zero_grad()
        # Alike on all ranks, so that one rank's stands for everybody's.
        gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(step))
        (weight * gradient).sum().backward()
        opt.step()
    state = opt.state_dict()
    if not loads and rank == 0:
        torch.save(state, f"{folder}/0")
    together = ub.allreduce(state["usbyte_memory"]["weight"]["rows"], op=ub.Sum)
    opt.close()
    return together.norm().item()


def test_what_is_remembered_weighs_the_same_on_other_numbers_of_ranks(tmp_path):
    before = run_ranks(2, unsent, str(tmp_path), False)[0]
    assert before > 1
    for ranks in (1, 2, 3, 4):
        for after in run_ranks(ranks, unsent, str(tmp_path), True):
            assert after == pytest.approx(before), ranks


def of_other_layout(rank, size):
    """What is remembered of an element is that element's, wherever it lies."""
    ub.init()
    data = torch.Generator().manual_seed(rank)
    saved, unsent = None, torch.zeros(6, 4, 3, 3)
    last, usual = torch.channels_last, torch.contiguous_format
    for layout in (last, usual, last, last):
        weight = nn.Parameter(torch.zeros(6, 4, 3, 3).to(memory_format=layout))
        opt = ub.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression="topk:0.1"
        )
        if saved is not None:
            opt.load_state_dict(saved)
        for _ in range(4):
            opt.zero_grad()
            gradient = torch.randn(weight.shape, generator=data)
            (weight * gradient).sum().backward()
            opt.step()
            unsent += ub.allreduce(gradient)
        unsent += weight.detach()  # less what was sent
        saved = opt.state_dict()
        left = ub.allreduce(saved["usbyte_memory"]["weight"]["rows"][0], op=ub.Sum)
        assert torch.allclose(left.view(unsent.shape), unsent, atol=1e-5)
        opt.close()


def changes_layout(rank, size):
    """Of a parameter that gets another layout while its optimizer lives."""
    ub.init()
    data = torch.Generator().manual_seed(rank)
    conv, unsent = nn.Conv2d(4, 6, 3, bias=False), torch.zeros(6, 4, 3, 3)
    nn.init.zeros_(conv.weight)
    opt = ub.DistributedOptimizer(
        torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters(), compression="topk:0.1"
    )

    def steps(count):
        for _ in range(count):
            opt.zero_grad()
            gradient = torch.randn(conv.weight.shape, generator=data)
            (conv.weight * gradient).sum().backward()
            opt.step()
            unsent.add_(ub.allreduce(gradient))
        kept = opt.state_dict()["usbyte_memory"]["weight"]["rows"][0]
        left = ub.allreduce(kept, op=ub.Sum).view(unsent.shape)
        assert torch.allclose(left, unsent + conv.weight.detach(), atol=1e-5)

    steps(5)
    for layout in (torch.channels_last, torch.contiguous_format):
        conv.to(memory_format=layout)
        steps(0)
        steps(3)  # with the plan of before
        testing.request_plan(opt)
        steps(6)
    opt.close()


def test_what_is_remembered_goes_over_to_another_memory_format():
    run_ranks(2, of_other_layout, env={"USBYTE_LEARNING_STEPS": "2"})
    run_ranks(2, changes_layout, env={"USBYTE_LEARNING_STEPS": "2"})


def overflows(rank, size, kind):
    """By codec: the scales of a GradScaler; every plan has many small blocks of `kind`."""
    ub.init()

    def policy(profile, network):
        return _core.Plan("mine", profile.tensors, blocks_of(profile.tensors, 100, kind))

    scales = {}
    for codec in CODECS:
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        opt = ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            compression=codec, policy=policy,
        )  # fmt: skip
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        data = torch.Generator().manual_seed(rank)
        scales[codec.spec] = []
        for step in range(12):
            opt.zero_grad()
            x = torch.randn(8, 40, generator=data)
            if step == 6 and rank == 0:
                x = x * torch.inf
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            scales[codec.spec].append(scaler.get_scale())
        opt.close()
    return scales


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_one_overflow_is_one_step_that_a_grad_scaler_leaves_out(kind):
    for scales in run_ranks(2, overflows, kind, env={"USBYTE_LEARNING_STEPS": "2"}):
        for spec, found in scales.items():
            assert found == [1024.0] * 6 + [512.0] * 6, spec


def differs(rank, size):
    ub.init()
    model = nn.Linear(3, 2)
    with pytest.raises(MismatchError, match="has compression fp16 on rank 0 but bf16 on rank 1"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), compression=["fp16", "bf16"][rank]
        )
    with pytest.raises(UsageError, match=r"signsgd does not support shard_optimizer=True"):
        ub.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), overlap="forward", shard_optimizer=True,
            compression="signsgd",
        )  # fmt: skip
    for options, what in (
        ({"policy": "tune:dear"}, "policy 'tune:dear' cannot choose"),
        ({"policy": lambda profile, network: None}, "a function cannot choose"),
    ):
        with pytest.raises(UsageError, match=what):
            ub.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), compression="auto", **options
            )
    for spec in ("dgc:0.01", "signum"):
        with pytest.raises(UsageError, match="give the optimizer momentum=0"):
            ub.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), compression=spec
            )


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
    memory = CodecState()
    memory.lay_out(_core.Plan("plain", tensors, [_core.Op("all_reduce", [(0, 10)])]))
    assert memory.address == 0
    coded = [_core.Op("all_reduce", [(0, 10)], codec="int8")]
    memory.lay_out(_core.Plan("mine", tensors, coded))
    memory.parts["a"][:] = torch.arange(4.0)
    memory.parts["b"][:] = torch.arange(4.0, 10.0)
    more = [_core.Op("all_reduce", [(0, 10)], codec="dgc:0.5")]  # remembers two rows
    memory.lay_out(_core.Plan("mine", other, more))
    assert memory.parts["a"].tolist() == [[0, 1, 2, 3], 4 * [0]]
    assert memory.parts["b"].tolist() == [[4, 5, 6, 7, 8, 9], 6 * [0]]
    assert memory.parts["b"].data_ptr() == memory.address
    assert memory.parts["b"].dtype == torch.float32


def test_memory_is_checked_before_it_is_taken():
    memory = CodecState()
    plan = _core.Plan(
        "mine", [_core.TensorSpec("a", 4)], [_core.Op("all_reduce", [(0, 4)], codec="int8")]
    )
    memory.lay_out(plan)
    param = torch.zeros(2, 2)

    def saved(kind, *shape):
        return {"a": {"kind": kind, "rows": torch.ones(*shape)}}

    with pytest.raises(UsageError, match="is of another model"):
        memory.check(saved("unsent", 1, 5), {"a": param}, 2)
    memory.check(saved("unsent", 1, 5), {"frozen since": param}, 2)
    memory.check(saved("unsent, velocity", 2, 4), {"a": param}, 2)
    shard = {"a": saved("unsent", 1, 4)["a"] | {"rank": 1, "size": 2}}
    memory.check(shard, {"a": param}, 2)
    with pytest.raises(UsageError, match=r"saved by 2 ranks.*there are 4 now"):
        memory.check(shard, {"a": param}, 4)
    memory.load(saved("unsent, velocity", 2, 4), 0)
    assert memory.parts["a"].tolist() == [[1, 1, 1, 1]]
    later = CodecState()
    later.load(saved("unsent", 1, 4), 0)  # before there is a plan
    later.lay_out(plan)
    assert later.state()["a"]["rows"].tolist() == [[1, 1, 1, 1]]
    assert later.state()["a"]["kind"] == "unsent"
    memory.load({}, 0)
    assert not memory.parts["a"].any()


def test_codecs_take_over_only_what_means_the_same():
    tensors = [_core.TensorSpec("a", 4)]

    def by(codec):
        return _core.Plan("mine", tensors, [_core.Op("all_reduce", [(0, 4)], codec=codec)])

    memory = CodecState()
    memory.lay_out(by("powersgd:1"))
    memory.parts["a"][:] = torch.tensor([[1.0], [2.0]])
    memory.lay_out(by("dgc:0.5"))
    assert memory.parts["a"].tolist() == [4 * [1], 4 * [0]]
    memory.lay_out(by("none"))  # nobody's for a while
    memory.lay_out(by("int8"))
    assert memory.parts["a"][0].tolist() == 4 * [1]
    memory.lay_out(by("signum"))
    assert not memory.parts["a"].any()


def test_a_codec_has_one_spelling():
    assert ub.Compression.topk(0.1) == Codec("topk:0.1") == Codec("topk:0.10")
    assert ub.Compression.topk(0.1).spec == "topk:0.1"


def test_codecs_are_checked_where_they_are_made():
    with pytest.raises(UsageError, match="qsgd:4"):
        Codec("qsgd:5")
