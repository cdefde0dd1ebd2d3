# SPDX-License-Identifier: Apache-2.0
"""A DDP communication hook that compresses buckets and sums sparse gradients as rows."""

# No `from __future__ import annotations`: DDP checks the annotations of its hooks, as objects.

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.pack_buffers import PackBufferPool, PackedMessage
from usbyte.torch.comm.sparse_exchange import TorchExchange, host_group
from usbyte.torch.compression.codecs import Codec, Rules, codecs_of
from usbyte.torch.compression.state import CodecState
from usbyte.torch.layout import rows_of
from usbyte.torch.plan.sparse import Rows
from usbyte.torch.runtime.device import device_of
from usbyte.torch.world.consistency import verify_same

__all__ = ["ddp_comm_hook"]

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# torch 2.13 renamed the function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ddp_comm_hook(
    compression: Rules,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Hook:
    """Returns a communication hook for `DistributedDataParallel`.

    Register it with `model.register_comm_hook(None, ub.ddp_comm_hook("int8"))`. The buckets stay
    those of DDP. The codec of each parameter is chosen by the same rules as in
    `DistributedOptimizer`. The codec state is stored by parameter in the hook, and in no
    checkpoint. Of sparse gradients only the rows that are present are sent, before the hook
    returns.

    Args:
        compression: A codec of `Compression` or its spec, or a dict from patterns of parameter
            names to codecs. "auto" and lists to choose from are refused.
        named_parameters: `model.named_parameters()`; required with patterns.
        process_group: The process group of DDP, if it is not the default group.

    Returns:
        A function for `register_comm_hook`.

    Raises:
        UsageError: The codec does not exist, a pattern comes without names or matches none; or, in
            backward, dense gradients are not on the CPU.
        MismatchError: In backward: the ranks compress a bucket differently; raised on every rank.
    """
    return _CompressedBuckets(compression, named_parameters, process_group).hook


class _CompressedBuckets:
    def __init__(
        self,
        compression: Rules,
        named: Iterable[tuple[str, nn.Parameter]] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        if not isinstance(compression, (Codec, str, Mapping)) or compression == "auto":
            raise UsageError(
                "ddp_comm_hook does not choose between codecs: pass one codec, or a dict from "
                "patterns of parameter names to codecs"
            )
        self._group = group
        self._rules = compression
        self._spec_of: dict[torch.Tensor, str] | None = None  # only with named parameters
        self._names: dict[torch.Tensor, str] = {}
        if named is not None:
            names, params = zip(*named, strict=True)
            self._spec_of = dict(zip(params, codecs_of(compression, names, params), strict=True))
        elif isinstance(compression, Mapping):
            raise UsageError(
                "ddp_comm_hook: patterns need named_parameters=model.named_parameters()"
            )
        else:
            codecs_of(compression, [], [])
        self._exchange: TorchExchange | None = None  # made for the first sparse gradient
        self._states: dict[str, CodecState] = {}  # by parameter name
        self._buckets: dict[int, _Bucket] = {}
        self._steps: dict[int, int] = {}

    def hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer, params = bucket.index(), bucket.buffer(), bucket.parameters()
        if buffer.layout != torch.strided:
            return self._sum_of_rows(bucket)
        if buffer.device.type != "cpu":
            raise UsageError(
                f"ddp_comm_hook: gradients are on {buffer.device}, and it compresses on the CPU "
                "only so far: use ub.DistributedOptimizer(..., compression=...) in place of DDP"
            )
        step = self._steps[index] = self._steps.get(index, 0) + 1
        known = self._buckets.get(index)
        if known is None or not known.fits(buffer, params, step):
            names = [self._names.setdefault(p, str(len(self._names))) for p in params]
            state = CodecState()
            state.load(self._previous_state(names), dist.get_rank())
            self._states |= dict.fromkeys(names, state)
            specs = self._specs(params)
            known = _Bucket(index, buffer, params, names, specs, step, state, self._group)
            self._buckets[index] = known
        return known.send(step)

    def _sum_of_rows(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._exchange is None:
            group = self._group or dist.group.WORLD
            assert group is not None
            self._exchange = TorchExchange(host_group(group))
        (param,) = bucket.parameters()
        name = f"bucket {bucket.index()}"
        rows = Rows(name, bucket.buffer(), param, device_of([name], [param]))
        # The devices make `future.wait()` synchronize with their streams.
        devices: list[int | str | torch.device] = [param.device] if param.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(rows.average(self._exchange.core, param))
        return future

    def _previous_state(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the codec state of parameters from other buckets: DDP rebuilds its buckets."""
        states = {id(s): s.state() for s in map(self._states.get, names) if s is not None}
        found = ((name, states[id(self._states[name])]) for name in names if name in self._states)
        return {name: state[name] for name, state in found if name in state}

    def _specs(self, params: Sequence[torch.Tensor]) -> list[str]:
        if self._spec_of is None:
            return codecs_of(self._rules, [""] * len(params), params)  # type: ignore[arg-type]
        return [self._spec_of.get(p, "none") for p in params]


class _Bucket:
    """One of DDP's buckets, with its buffer, parameters, codecs and codec state.

    It is replaced when one of these changes.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        specs: Sequence[str],
        step: int,
        state: CodecState,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._params = list(params)  # keeps them alive, so that their ids stay theirs
        self._key = (buffer.data_ptr(), list(map(id, params)))
        stages = {spec: _core.make_codec(spec) for spec in specs}
        self._stages = {c: c.at_step(step - 1) for c in stages.values() if c is not None}
        dtype = str(buffer.dtype).removeprefix("torch.")
        tensors = tensor_specs(
            [(name, p.numel(), dtype) for name, p in zip(names, params, strict=True)],
            {name: rows_of(p) for name, p in zip(names, params, strict=True)},
        )
        whole = _core.Plan("ddp", tensors, [_core.Op("all_reduce", [(0, buffer.numel())])])
        now = [stages[spec] for spec in specs]
        self._plan = _core.with_codecs(
            whole, ["none" if c is None else self._stages[c] for c in now]
        )
        _check_alike(self._plan, group)
        state.lay_out(self._plan)
        self._buffer, self._state = buffer, state
        self._packing = PackBufferPool()
        self._ops = _core.CodedOps(
            self._plan, buffer.data_ptr(), state.address, self._rank, self._size, 2 * index
        )
        self._messages = [
            None if op.codec == "none" else _view(self._ops, i)
            for i, op in enumerate(self._plan.ops)
        ]

    def fits(self, buffer: torch.Tensor, params: Sequence[torch.Tensor], step: int) -> bool:
        """Returns whether DDP still passes this bucket, and its codecs are those of this step."""
        if self._key != (buffer.data_ptr(), list(map(id, params))):
            return False
        return all(c.at_step(step - 1) == now for c, now in self._stages.items())

    def send(self, step: int) -> torch.futures.Future[torch.Tensor]:
        """Returns a future of the averaged bucket, which is in DDP's own buffer."""
        self._buffer.div_(self._size)
        works: list[dist.Work] = []
        plain: list[PackedMessage] = []
        for i, op in enumerate(self._plan.ops):
            message = self._messages[i]
            if message is None:
                views = [self._buffer[begin:end] for begin, end in op.blocks]
                plain.append(self._packing.pack(views))
                works.append(self._launch("all_reduce", plain[-1].message))
                continue
            self._ops.encode(i, step)
            works.append(self._launch(self._ops.request(i)[0], message))
            if op.kind == "reduce_scatter":  # the all_gather after it encodes its result
                works[-1].wait()
                self._ops.decode(i, step)
        futures = [work.get_future() for work in works]

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            for future in done.value():
                future.value()  # raises the error of a failed operation
            for i, op in enumerate(self._plan.ops):
                if self._messages[i] is not None and op.kind != "reduce_scatter":
                    self._ops.decode(i, step)
            for packed in plain:
                self._packing.unpack(packed)
            return self._buffer

        return torch.futures.collect_all(futures).then(finish)

    def _launch(self, kind: str, message: torch.Tensor) -> dist.Work:
        work: dist.Work
        if kind == "all_reduce":
            work = dist.all_reduce(message, group=self._group, async_op=True)
        else:
            chunk = message.numel() // self._size
            own = message[self._rank * chunk : (self._rank + 1) * chunk].clone()
            work = _all_gather(message, own, group=self._group, async_op=True)
        return work


def _check_alike(plan: _core.Plan, group: dist.ProcessGroup | None) -> None:
    own = torch.tensor([plan.hash() & ((1 << 62) - 1)], dtype=torch.int64, device="cpu")
    of_all = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, own, group=group)
    ranks = range(len(of_all)) if group is None else dist.get_process_group_ranks(group)
    verify_same(
        ranks,
        "ddp_comm_hook",
        [{"the hash of a bucket's plan": f"{int(each):x}"} for each in of_all],
        "Give all ranks the same compression and the same model.",
    )


def _view(ops: _core.CodedOps, op: int) -> torch.Tensor:
    """Returns the message buffer of an op as a tensor; the memory lives as long as the tensor."""
    _, dtype, address, count = ops.request(op)
    kind: torch.dtype = getattr(torch, dtype)
    message = (ctypes.c_byte * (count * kind.itemsize)).from_address(address)
    message.owner = ops  # type: ignore[attr-defined]
    return torch.frombuffer(message, dtype=kind)
