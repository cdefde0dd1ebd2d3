# SPDX-License-Identifier: Apache-2.0
"""What a fault leaves: parameters of one step on all ranks, or an error for who reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

import usbyte.torch as ub
from _ranks import run_ranks
from usbyte.errors import FaultError
from usbyte.torch.compression.state import CODEC_STATE_KEY
from usbyte.torch.fault.decision import RankProgress, RecoveryDecision, decide_recovery
from usbyte.torch.fault.recovery import ParamRecovery, has_partial_step
from usbyte.torch.lazy_tensor import make_lazy, unwrap
from usbyte.torch.optimizer.session import OptimizerSession
from usbyte.torch.world import world
from usbyte.torch.world.world import current

STEPS = 9  # before the fault; more than are learned
LIMITS = {"USBYTE_STALL_WARNING_S": "1", "USBYTE_STALL_LIMIT_S": "4"}


def prepared(rank, overlap, **options):
    ub.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).double()
    optimizer = ub.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        model.named_parameters(),
        overlap=overlap,
        policy="wfbp",
        **options,
    )
    return model, optimizer


def inputs(rank, step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * rank + step)).double()


def begin(model, optimizer, rank, step):
    optimizer.zero_grad()
    model(inputs(rank, step)).square().mean().backward()


def train(model, optimizer, rank, steps=STEPS, first=0):
    for step in range(first, steps):
        begin(model, optimizer, rank, step)
        optimizer.step()


def digest(model):
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[k].numpy().tobytes() for k in sorted(state))).hexdigest()


def can_be_read(model):
    try:
        digest(model)
        return True
    except FaultError:
        return False


def found(model, optimizer):
    """What a rank can save, or why it cannot."""
    try:
        optimizer.state_dict()
        return digest(model)
    except FaultError as error:
        assert not can_be_read(model)
        return str(error)


def after(rank, size, steps, overlap, kind):
    model, optimizer = prepared(rank, overlap, **kind)
    train(model, optimizer, rank, steps)
    optimizer.synchronize()
    answer = digest(model)
    ub.shutdown()
    return answer


def dies_in_backward(rank, size, overlap, kind):
    model, optimizer = prepared(rank, overlap, **kind)
    train(model, optimizer, rank)
    if rank == 1:
        model[1].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(FaultError, match="does not answer"):
        train(model, optimizer, rank, STEPS + 2, STEPS)
    answer = found(model, optimizer)
    optimizer.close()
    assert can_be_read(model) == (len(answer) == 64)
    ub.shutdown()
    return answer


def leaves_slowly(rank, size):
    """A rank shuts down, and the others notice before its optimizer has closed."""
    model, optimizer = prepared(rank, "forward")
    train(model, optimizer, rank)
    if rank == 1:
        run, close = current(), OptimizerSession.close

        def close_late(session, whole_state):
            while run._faults.verdict is None:
                time.sleep(0.05)
            close(session, whole_state)

        OptimizerSession.close = close_late
        with contextlib.suppress(FaultError):
            ub.shutdown()
    else:
        told = r"rank 1 .* has shut down while the others go on; if .* call ub\.join\(\)"
        with pytest.raises(FaultError, match=told):
            train(model, optimizer, rank, STEPS + 2, STEPS)
    return found(model, optimizer)


def test_a_rank_that_was_shutting_down_before_the_fault_has_its_last_step():
    whole = run_ranks(2, after, STEPS, "forward", {})
    assert run_ranks(2, leaves_slowly, env=LIMITS) == whole


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_survivors_of_a_step_that_did_not_complete_can_save_the_one_before(overlap):
    answers = run_ranks(3, dies_in_backward, overlap, {}, env=LIMITS, dies=[1])
    expected = run_ranks(3, after, STEPS, overlap, {})
    assert answers == [expected[0], None, expected[2]]


def goes_on(model, optimizer, rank, steps):
    train(model, optimizer, rank, STEPS + steps, STEPS)
    ub.barrier()


def remembered(rank, size, overlap, kills, hooked):
    """Whether what codecs remember can be saved, where rank 1 is lost in backward or before it."""
    model, optimizer = prepared(rank, overlap, compression=ub.Compression.topk(0.5))
    train(model, optimizer, rank, STEPS - 1)
    if hooked:  # so that its closure runs inside of the wrapped optimizer
        optimizer.register_step_post_hook(lambda *_: None)
        optimizer.step(lambda: begin(model, optimizer, rank, STEPS - 1))
    else:
        train(model, optimizer, rank, STEPS, STEPS - 1)
    optimizer.synchronize()
    before = optimizer.state_dict()[CODEC_STATE_KEY]
    ub.barrier()
    if rank == 1 and kills:
        model[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    elif rank == 1:
        sys.excepthook(KeyError, KeyError("x"), None)
    steps = 2 if kills else 0
    with pytest.raises(FaultError):
        goes_on(model, optimizer, rank, steps)
    after = optimizer.state_dict().get(CODEC_STATE_KEY)
    if after is not None:
        assert all(torch.equal(after[name]["rows"], before[name]["rows"]) for name in before)
    ub.shutdown()
    return after is not None


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_what_codecs_had_sent_of_a_step_that_did_not_complete_is_not_saved(overlap):
    assert run_ranks(2, remembered, overlap, True, False, env=LIMITS, dies=[1]) == [False, None]


@pytest.mark.parametrize(("overlap", "hooked"), [("backward", True), ("forward", False)])
def test_what_codecs_remember_is_saved_where_no_step_had_begun(overlap, hooked):
    assert run_ranks(2, remembered, overlap, False, hooked, env=LIMITS) == [True, True]


def cannot_start_a_thread(rank, size):
    """Rank 1, in init()."""

    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "usbyte-eager":  # when all have met
            raise RuntimeError("can't start new thread")
        start(thread)

    if rank == 1:
        threading.Thread.start = refuse
        with pytest.raises(RuntimeError, match="start new thread"):
            ub.init()
        os._exit(0)
    ub.init()
    with pytest.raises(FaultError) as raised:
        ub.allreduce(torch.ones(1), name="loss")
    ub.shutdown()
    return str(raised.value)


def test_a_rank_whose_init_has_failed_is_named():
    told = run_ranks(2, cannot_start_a_thread, env={"USBYTE_STALL_LIMIT_S": "1"}, dies=[1])[0]
    assert told.startswith("rank 1 (host and pid not known) is gone or frozen: it does not answer")


def ends_while_others_begin(rank, size):
    """Rank 0, which serves the store, in init(); all have met."""

    def late(store, *args):
        store.set(f"tests/late/{rank}", "")
        if rank == 0:
            store.wait(["tests/late/1"])
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(RuntimeError):
            while not store.check(["until its server is gone"]):
                time.sleep(0.05)
        store.set_timeout(timedelta(seconds=0.5))  # to connect again
        return board(store, *args)

    board, world.FaultCoordinator = world.FaultCoordinator, late
    with pytest.raises(FaultError) as raised:
        ub.init()
    assert not ub.is_initialized()
    return str(raised.value)


def test_a_rank_that_ends_in_init_is_a_fault_of_those_that_have_met_it():
    told = run_ranks(2, ends_while_others_begin, dies=[0])[1]
    assert told.startswith("init() on rank 1 of 2 has failed: ")


def ends_before_others_connect(rank, size):
    """Rank 0, which serves the store; rank 1 has met it, and begins to connect afterwards."""

    def late(*args, **options):
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"tests/late/{rank}", "")
        if rank == 0:
            store.wait(["tests/late/1"])
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(RuntimeError):
            while not store.check(["until its server is gone"]):
                time.sleep(0.05)
        return new_group(*args, **options)

    new_group, torch.distributed.new_group = torch.distributed.new_group, late
    with pytest.raises(FaultError) as raised:
        ub.init()
    return str(raised.value)


def test_a_rank_that_ends_before_others_connect_is_a_fault_within_the_start_limit():
    limit = {"USBYTE_START_LIMIT_S": "15"}
    told = run_ranks(2, ends_before_others_connect, dies=[0], env=limit)[1]
    assert told.startswith("init() on rank 1 of 2 has failed: ")


def cannot_make_a_group(rank, size):
    """Rank 1, as where no more threads can be started."""

    def refuse(*args, **options):
        raise RuntimeError("Resource temporarily unavailable")

    ub.init()
    current().timeout = timedelta(seconds=5)  # rank 1 is to notice first
    if rank == 1:
        torch.distributed.new_group = refuse
    with pytest.raises(FaultError) as raised:
        prepared(rank, "backward")
    ub.shutdown()
    return str(raised.value)


def test_a_group_that_a_rank_cannot_make_is_told_on_all():
    for told in run_ranks(2, cannot_make_a_group):
        assert "rank 1 noticed: a process group could not be made: " in told


def applies_a_part(rank, size):
    model, optimizer = prepared(rank, "forward")
    train(model, optimizer, rank)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    begin_at = STEPS
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:  # after the gradients of the last layer have left it

        def die(grad):
            store.wait(["tests/read/0", "tests/read/2"])
            os.kill(os.getpid(), signal.SIGKILL)

        model[0].bias.register_hook(die)
        model[0].weight.register_hook(die)
    begin(model, optimizer, rank, begin_at)
    optimizer.step()
    assert not torch.equal(model[1].weight, kept["1.weight"])  # it has arrived, and is applied
    store.set(f"tests/read/{rank}", "")
    with pytest.raises(FaultError):
        begin(model, optimizer, rank, begin_at + 1)
    answer = found(model, optimizer)
    assert not can_be_read(model[1])  # though it is whole: the first layer is not
    model.load_state_dict(kept)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    ub.shutdown()
    return answer


def test_a_step_that_was_applied_in_part_cannot_be_saved_until_a_checkpoint_is_loaded():
    first, _, third = run_ranks(3, applies_a_part, env=LIMITS, dies=[1])
    for answer in (first, third):
        assert f"step {STEPS + 1} was applied to some of the parameters" in answer
        assert "load the last checkpoint" in answer
        assert "rank 1 (host " in answer


def is_ahead(rank, size):
    model, optimizer = prepared(rank, "backward")
    train(model, optimizer, rank)
    begin(model, optimizer, rank, STEPS)
    if rank == 1:
        executor = optimizer._session.controller.executor
        while executor.status().get("step") and not executor.failed:
            time.sleep(0.05)
        answer = found(model, optimizer)
    else:
        optimizer.step()
        with pytest.raises(FaultError, match="rank 1 has not begun backward"):
            begin(model, optimizer, rank, STEPS + 1)
        answer = found(model, optimizer)
    ub.shutdown()
    return answer


def test_ranks_that_are_ahead_cannot_save():
    answers = run_ranks(3, is_ahead, env=LIMITS)
    expected = run_ranks(3, after, STEPS, "backward", {})
    assert answers[1] == expected[1]
    for answer in (answers[0], answers[2]):
        assert f"step {STEPS + 1} was applied here, but not on rank 1" in answer


def dies_between_evaluations(rank, size):
    """Of a closure, when LBFGS has moved parameters to try others."""
    ub.init()
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    optimizer = ub.DistributedOptimizer(inner, model.named_parameters())
    calls, fatal = 0, -1

    def evaluate():
        nonlocal calls
        calls += 1
        if rank == 1 and calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(inputs(rank, 0).float()).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)
    fatal = calls + 3
    with pytest.raises(FaultError):
        optimizer.step(evaluate)
    for read in (lambda: model.state_dict()["weight"].norm(), optimizer.state_dict):
        with pytest.raises(FaultError, match="step 4 was applied to some of the parameters"):
            read()


def test_a_step_that_a_fault_has_ended_between_evaluations_cannot_be_saved():
    run_ranks(2, dies_between_evaluations, env=LIMITS, dies=[1])


def left(completed, partial=False, completable=False):
    return RankProgress(completed, partial, completable)


def test_judgements_name_what_is_wrong():
    assert decide_recovery(0, {0: left(3), 2: left(3)}) == RecoveryDecision("")
    assert decide_recovery(0, {0: left(3), 2: left(3, partial=True)}) == RecoveryDecision("")
    assert "is unknown" in decide_recovery(0, None).reason
    assert "without this rank" in decide_recovery(1, {0: left(3)}).reason
    # One that was shutting down is judged by itself.
    assert decide_recovery(1, {0: left(4)}, left(3)) == RecoveryDecision("")
    assert "step 4 was applied to some" in decide_recovery(1, {0: left(4)}, left(3, True)).reason
    assert "is unknown" in decide_recovery(1, None, left(3)).reason
    assert "not on rank 2" in decide_recovery(0, {0: left(4), 2: left(3, partial=True)}).reason
    assert decide_recovery(2, {0: left(4), 2: left(3)}) == RecoveryDecision("")
    assert "step 4 was applied to some" in decide_recovery(2, {2: left(3, partial=True)}).reason


def test_updates_are_completed_where_all_ranks_come_to_the_same():
    part = left(3, partial=True, completable=True)
    assert decide_recovery(0, {0: part, 1: left(4)}) == RecoveryDecision("", completes=True)
    assert decide_recovery(1, {0: part, 1: left(4)}) == RecoveryDecision("")
    whole = left(3, completable=True)
    assert decide_recovery(0, {0: whole, 1: left(3)}) == RecoveryDecision(
        ""
    )  # the step before, for all
    assert decide_recovery(0, {0: whole, 1: whole}) == RecoveryDecision("", completes=True)
    assert "step 4 was applied to some" in decide_recovery(0, {0: part, 1: left(3)}).reason


def test_an_update_that_is_going_on_ends_before_anything_is_decided():
    param = nn.Parameter(torch.ones(3))
    inside = [True]
    salvage = ParamRecovery([param], lambda: inside[0], lambda completes: None)
    with torch.no_grad():
        param.add_(1)
    inside[0] = False
    salvage.block_reads()
    reader = threading.Thread(target=lambda: seen.append(param.sum().item()))
    seen = []
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    salvage.apply_decision("lost", RecoveryDecision(""))
    reader.join(10)
    assert seen == [6.0]
    assert type(param) is nn.Parameter


def test_unusable_params_stay_blocked_if_others_unwrap_them():
    """Forward pre-hooks and updates unwrap parameters, too."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    recovery = ParamRecovery(params, lambda: False, lambda completes: None)
    recovery.apply_decision("lost", RecoveryDecision("step 3 was applied in part"))
    for param in params:
        unwrap(param)
        make_lazy(param, unwrap)
        with pytest.raises(FaultError, match="step 3 was applied in part"):
            param.sum()
    with torch.no_grad():
        params[0].copy_(torch.zeros(3))
    recovery.block_reads()  # an update has ended late
    assert params[0].sum() == 0
    with pytest.raises(FaultError):
        params[1].sum()


def test_a_clean_up_that_fails_leaves_dirty_parameters():
    param = nn.Parameter(torch.ones(3))
    inside = [False]

    def clean_up(completes):
        inside[0] = True
        with torch.no_grad():
            param.add_(1)
        inside[0] = False
        raise KeyboardInterrupt

    salvage = ParamRecovery([param], lambda: inside[0], clean_up)
    salvage.apply_decision("lost", RecoveryDecision("", completes=True))
    with pytest.raises(KeyboardInterrupt):
        param.sum()
    for _ in range(2):
        with pytest.raises(FaultError, match="their last updates ended with KeyboardInterrupt"):
            param.sum()


def test_a_tensor_that_takes_the_place_of_one_that_was_dirty_is_nobodys():
    class Owner:
        pass

    for _ in range(50):  # ids are soon used again
        make_lazy(torch.zeros(1), unwrap, owner=Owner())
        tensor = torch.zeros(1)
        make_lazy(tensor, unwrap)
        assert tensor.sum() == 0
        assert type(tensor) is torch.Tensor


def test_sums_that_have_not_passed_a_device_are_torn_where_updates_used_them():
    assert not has_partial_step({"step": 5, "open_step": 0}, applied=True)
    assert has_partial_step({"step": 5, "open_step": 5}, applied=True)
    assert not has_partial_step({"step": 5, "open_step": 5}, applied=False)
    assert has_partial_step({"step": 5, "open_step": 4}, applied=False)


def faults_while_learning(rank, size):
    """The last step before the fault is applied on rank 0 alone."""
    model, optimizer = prepared(rank, "auto")
    train(model, optimizer, rank, 2)
    begin(model, optimizer, rank, 2)
    if rank == 1:
        while not optimizer._session.controller.executor.failed:
            time.sleep(0.05)
    else:
        optimizer.step()
        with pytest.raises(FaultError, match="rank 1 has not begun backward"):
            begin(model, optimizer, rank, 3)
    optimizer.close()
    first = can_be_read(model)
    model.train()
    with contextlib.suppress(FaultError):
        model(inputs(rank, 3))
    readable = first, can_be_read(model)
    ub.shutdown()
    return readable


def test_dirty_parameters_stay_so_while_uses_are_learned():
    assert run_ranks(2, faults_while_learning, env=LIMITS) == [[False, False], [True, True]]


def test_who_writes_to_a_whole_tensor_need_not_fetch_it():
    tensor, read = torch.zeros(3), []
    make_lazy(tensor, read.append, overwritten=unwrap)
    tensor.copy_(torch.ones(3))
    assert not read
    assert tensor.tolist() == [1, 1, 1]
    make_lazy(tensor, lambda held: (read.append(1), unwrap(held)), overwritten=unwrap)
    tensor.add_(1)
    assert read == [1]


def records_its_flight(rank, size, folder):
    model, optimizer = prepared(rank, "backward")
    train(model, optimizer, rank)
    if rank == 1:
        time.sleep(8)
    with pytest.raises(FaultError) as caught:
        train(model, optimizer, rank, STEPS + 2, STEPS)
    for _ in range(100):
        if os.path.exists(f"{folder}/flight-{rank}.json"):
            break
        time.sleep(0.1)
    ub.shutdown()
    return str(caught.value)


def test_the_last_operations_are_recorded(tmp_path):
    env = {**LIMITS, "USBYTE_FLIGHT": f"{tmp_path}/flight-%r.json"}
    told = run_ranks(3, records_its_flight, str(tmp_path), env=env)
    for rank in range(3):
        record = json.loads((tmp_path / f"flight-{rank}.json").read_text())
        assert record["rank"] == rank
        assert record["verdict"] == told[rank]
        (status,) = record["optimizers"].values()
        last = status["last"][-1]
        if rank == 1:
            assert status["step"] == last["step"] == STEPS
            assert last["took_s"] >= 0
        else:
            assert status["step"] == last["step"] == STEPS + 1
            assert last["took_s"] is None
            assert "1.bias" in last["op"] or "1.weight" in last["op"]
