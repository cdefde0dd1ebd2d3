"""Compression and sparse sums for models that `DistributedDataParallel` has wrapped."""

# Annotations are what they say, not text, since DDP looks at those of its hooks.

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.planning.layout import tensor_specs
from usbyte.torch.comm.sparse_exchange import TorchExchange, host_group
from usbyte.torch.compression.codecs import Codec, Rules, codecs_of
from usbyte.torch.compression.state import CodecState
from usbyte.torch.layout import rows_of
from usbyte.torch.plan.sparse import Rows
from usbyte.torch.runtime.device import device_of

__all__ = ["ddp_comm_hook"]

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]

# Another name of the same since torch 2.13, where the old one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ddp_comm_hook(
    compression: Rules,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Hook:
    """A communication hook: `model.register_comm_hook(None, ub.ddp_comm_hook("int8"))`.

    Buckets stay DDP's; what each parameter travels by is as with `DistributedOptimizer`. What
    codecs did not send is remembered by parameter, here and not in any checkpoint. Sparse gradients
    travel as the rows that they have, before the hook returns.

    Args:
        compression: A codec of `Compression`, or codecs by patterns of parameters' names.
        named_parameters: For patterns: `model.named_parameters()`.
        process_group: DDP's, if it is not the default one.

    Raises:
        UsageError: There is no such codec, a pattern comes without names or fits none, or (when
            backward runs) gradients that are not sparse are not on the CPU.
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
                "ddp_comm_hook does not choose between codecs: name one, or codecs by patterns"
            )
        self._group = group
        self._rules = compression
        self._of: dict[torch.Tensor, str] | None = None  # by parameter: its codec's spec
        self._names: dict[torch.Tensor, str] = {}
        if named is not None:
            names, params = zip(*named, strict=True)
            self._of = dict(zip(params, codecs_of(compression, names, params), strict=True))
        elif isinstance(compression, Mapping):
            raise UsageError(
                "ddp_comm_hook: patterns need named_parameters=model.named_parameters()"
            )
        else:
            codecs_of(compression, [], [])
        self._exchange: TorchExchange | None = None  # once there is a sparse gradient
        self._memories: dict[str, CodecState] = {}  # by parameter's name
        self._buckets: dict[int, _Bucket] = {}
        self._steps: dict[int, int] = {}

    def hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer, params = bucket.index(), bucket.buffer(), bucket.parameters()
        if buffer.layout != torch.strided:
            return self._sum_of_rows(bucket)
        if buffer.device.type != "cpu":
            raise UsageError("ddp_comm_hook: compression works on the CPU only so far")
        step = self._steps[index] = self._steps.get(index, 0) + 1
        known = self._buckets.get(index)
        if known is None or not known.fits(buffer, params, step):
            names = [self._names.setdefault(p, str(len(self._names))) for p in params]
            memory = CodecState()
            memory.load(self._remembered(names), dist.get_rank())
            self._memories |= dict.fromkeys(names, memory)
            specs = self._specs(params)
            known = _Bucket(index, buffer, params, names, specs, step, memory, self._group)
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
        # Who waits for it does so on the device, too.
        devices: list[int | str | torch.device] = [param.device] if param.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(rows.average(self._exchange.core, param))
        return future

    def _remembered(self, names: Sequence[str]) -> dict[str, Any]:
        """Of parameters that come from other buckets, as DDP makes new ones after a step."""
        states = {id(m): m.state() for m in map(self._memories.get, names) if m is not None}
        found = (
            (name, states[id(self._memories[name])]) for name in names if name in self._memories
        )
        return {name: state[name] for name, state in found if name in state}

    def _specs(self, params: Sequence[torch.Tensor]) -> list[str]:
        if self._of is None:
            return codecs_of(self._rules, [""] * len(params), params)  # type: ignore[arg-type]
        return [self._of.get(p, "none") for p in params]


class _Bucket:
    """One of DDP's buckets, as long as it is of the same parameters, memory and codecs."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        specs: Sequence[str],
        step: int,
        memory: CodecState,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._params = list(params)  # so that nobody else gets their ids
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
        memory.lay_out(self._plan)
        self._buffer, self._memory = buffer, memory
        self._ops = _core.CodedOps(
            self._plan, buffer.data_ptr(), memory.address, self._rank, self._size, 2 * index
        )
        self._messages = [
            None if op.codec == "none" else _view(self._ops, i)
            for i, op in enumerate(self._plan.ops)
        ]

    def fits(self, buffer: torch.Tensor, params: Sequence[torch.Tensor], step: int) -> bool:
        """Whether it still is what DDP hands over, and codes as it should in this step."""
        if self._key != (buffer.data_ptr(), list(map(id, params))):
            return False
        return all(c.at_step(step - 1) == now for c, now in self._stages.items())

    def send(self, step: int) -> torch.futures.Future[torch.Tensor]:
        """The averaged bucket, in its own buffer."""
        self._buffer.div_(self._size)
        works: list[dist.Work] = []
        plain: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for i, op in enumerate(self._plan.ops):
            message = self._messages[i]
            if message is None:
                views = [self._buffer[begin:end] for begin, end in op.blocks]
                plain.append((views, torch.cat(views)))
                works.append(self._launch("all_reduce", plain[-1][1]))
                continue
            self._ops.encode(i, step)
            works.append(self._launch(self._ops.request(i)[0], message))
            if op.kind == "reduce_scatter":  # a first round, and the second is made of it
                works[-1].wait()
                self._ops.decode(i, step)
        futures = [work.get_future() for work in works]

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            for future in done.value():
                future.value()  # raises what went wrong
            for i, op in enumerate(self._plan.ops):
                if self._messages[i] is not None and op.kind != "reduce_scatter":
                    self._ops.decode(i, step)
            for views, message in plain:
                parts = message.split([view.numel() for view in views])
                for view, part in zip(views, parts, strict=True):
                    view.copy_(part)
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
    if any(int(other) != int(own) for other in of_all):
        raise MismatchError(
            "ddp_comm_hook: ranks compress a bucket in different ways; give all ranks the same "
            "compression and the same model"
        )


def _view(ops: _core.CodedOps, op: int) -> torch.Tensor:
    """What travels for an op, in memory that lives as long as anybody uses it."""
    _, dtype, address, count = ops.request(op)
    kind: torch.dtype = getattr(torch, dtype)
    memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(address)
    memory.owner = ops  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=kind)
