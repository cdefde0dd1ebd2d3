# SPDX-License-Identifier: Apache-2.0
"""Gradients on CUDA devices over NCCL."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from usbyte import _core
from usbyte.errors import MismatchError, UsageError
from usbyte.torch.comm.base import MeshLike
from usbyte.torch.runtime.device import CudaDevice
from usbyte.torch.runtime.messages import unreadable
from usbyte.torch.world.rank_group import EagerCollectives, RankGroup

log = logging.getLogger("usbyte")

_ORDERS_STARTS = (12, 3)  # first CUDA driver that can
_PHASES_IN_HAND = 2  # of a line, each on a communicator of its own
_RANKS_SHARE_A_GPU = (2, 30)  # first NCCL that can, with NCCL_MULTI_RANK_GPU_ENABLE=1


@dataclass(frozen=True)
class _Offer:
    """What one rank can use.

    Attributes:
        version: Of NCCL; empty where it cannot be used.
        why: It cannot.
        host: As NCCL tells hosts apart.
        gpu: Identifies the device.
        shares: NCCL lets ranks share a GPU here.
    """

    version: str
    why: str
    host: str
    gpu: str
    shares: bool


def find(env: _core.Env, several: bool) -> _core.Nccl:
    """Opens the library that this process is to use, for several communicators or one.

    Raises:
        UsageError: There is none that can be used.
    """
    if several:
        _ask_for_launch_order()
    nccl = _core.load_nccl(env.nccl_library, wheels())
    log.info("NCCL %s from %s", nccl.version, nccl.path)
    copies = _core.mapped_nccl_copies()
    if len(copies) > 1:
        log.warning(
            "this process holds %d copies of NCCL (%s); unset USBYTE_NCCL_LIB to share torch's",
            len(copies), ", ".join(copies),
        )  # fmt: skip
    return nccl


def _ask_for_launch_order() -> None:
    """Lets NCCL (2.26 or newer) see to it that communicators start in the order of their launches.

    Those that run side by side must start in one order on every rank. Ours wait for one another's
    start as far as events go; this is the rest. With drivers that cannot order starts alone, NCCL
    would order whole operations, and where another thread launches too (torch's process groups, a
    second optimizer) in an order that may differ by rank. Nor is it an error where that happens.
    """
    driver = tuple(int(part) for part in _core.cuda_info().driver_version.split(".") if part)
    if driver >= _ORDERS_STARTS:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        os.environ.setdefault("NCCL_LAUNCH_RACE_FATAL", "0")


def wheels() -> list[str]:
    """NCCL in the packages of this environment."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    candidates = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return [str(path) for path in candidates if path.exists()]


def all_ranks_can(
    eager: EagerCollectives,
    env: _core.Env,
    rank: int,
    device: CudaDevice,
    backend: str,
    dimensions: bool = False,
) -> _core.Nccl | None:
    """Whether all ranks can use NCCL. Collective.

    Args:
        eager: The ranks.
        env: The knobs.
        rank: This one.
        device: This rank's.
        backend: "nccl", or empty where it need not be.
        dimensions: There will be communicators along those of a network, too.

    Returns:
        The library; None, on every rank, if one of them cannot use it.

    Raises:
        UsageError: NCCL is a must and cannot be used; on every rank.
        MismatchError: The ranks have different settings.
    """
    nccl, why = None, ""
    try:
        nccl = find(env, several=dimensions or env.nccl_communicators > 1)
    except UsageError as error:
        why = str(error)
    version = nccl.version if nccl is not None else ""
    can_share = version and tuple(map(int, version.split(".")[:2])) >= _RANKS_SHARE_A_GPU
    mine = _Offer(
        version,
        why,
        os.environ.get("NCCL_HOSTID") or socket.gethostname(),
        device.identity(),
        bool(can_share) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    )
    settings = [env.nccl_communicators, env.nccl_max_ctas, env.nccl_register]
    rows = eager.allgather_json("usbyte.nccl", [asdict(mine), settings], tuple[_Offer, list[int]])
    offers = [offer for offer, _ in rows]
    for other, (_, theirs) in enumerate(rows):
        if theirs != rows[0][1]:
            raise MismatchError(
                f"USBYTE_NCCL_COMMUNICATORS, _MAX_CTAS and _REGISTER are {rows[0][1]} on "
                f"rank 0 but {theirs} on rank {other}. Give all ranks the same "
                "environment."
            )
    problem = _problem(offers)
    if not problem:
        return nccl
    if backend == "nccl":
        raise UsageError(f"USBYTE_BACKEND=nccl, but {problem}; unset it to go over the CPU instead")
    if rank == 0:
        log.warning("gradients go over the CPU's network, not NCCL: %s", problem)
    return None


def _problem(offers: Sequence[_Offer]) -> str:
    """Why these ranks cannot use NCCL; empty if they can."""
    seen: dict[tuple[str, str], int] = {}
    for rank, offer in enumerate(offers):
        if not offer.version:
            return f"rank {rank} cannot use it: {offer.why}"
        if offer.version != offers[0].version:
            return (
                f"its version is {offers[0].version} on rank 0 but {offer.version} on rank {rank}"
            )
        other = seen.setdefault((offer.host, offer.gpu), rank)
        if other != rank and not offer.shares:
            return (
                f"ranks {other} and {rank} share a GPU; give each its own with "
                "torch.cuda.set_device(ub.local_rank()), or set NCCL_MULTI_RANK_GPU_ENABLE=1 with "
                "NCCL 2.30 or later"
            )
    return ""


class NcclCommunicator:
    """The engine's communicator where each rank has a GPU of its own. Collective to make.

    Args:
        env: The knobs.
        nccl: The library.
        rank: This rank, among those of the communicator.
        size: Their number.
        ids: The same on all of them, and of no others.
        device: This rank's.

    Attributes:
        core: For the engine.
        most_one_shot_bytes: 0; NCCL has its own way with small operations.
        device: As given.
    """

    direct_allreduce_max_bytes = 0

    def __init__(
        self,
        env: _core.Env,
        nccl: _core.Nccl,
        rank: int,
        size: int,
        ids: Sequence[bytes],
        device: CudaDevice,
    ) -> None:
        assert device.core is not None
        self.device, self._registers = device, bool(env.nccl_register)
        self._registered = 0  # address
        self.core: _core.NcclCommunicator = _core.NcclCommunicator(
            nccl,
            device.core,
            rank,
            size,
            ids,
            init_timeout_s=env.stall_limit_s,
            launch_timeout_s=env.stall_limit_s,
            max_ctas=env.nccl_max_ctas,
        )

    @classmethod
    def of_all(
        cls, rank_group: RankGroup, nccl: _core.Nccl, device: CudaDevice
    ) -> NcclCommunicator:
        """Between all ranks."""
        env, rank = rank_group.env, rank_group.rank
        mine = _ids(nccl, env.nccl_communicators) if rank == 0 else []
        sent = rank_group.eager.broadcast_json("usbyte.nccl.ids", mine, 0, list[str])
        return cls(env, nccl, rank, rank_group.size, _from_text(sent), device)

    @classmethod
    def along_axes(
        cls, rank_group: RankGroup, nccl: _core.Nccl, topology: _core.Topology, device: CudaDevice
    ) -> list[NcclCommunicator | None]:
        """By dimension between the ranks of this rank's line; None where it is alone."""
        env, rank = rank_group.env, rank_group.rank
        lines = [topology.line(rank, d) for d in range(len(topology.dimensions))]
        mine = [
            _ids(nccl, _PHASES_IN_HAND) if len(line) > 1 and line[0] == rank else []
            for line in lines
        ]
        ids = rank_group.eager.allgather_json("usbyte.nccl.lines", mine, list[list[str]])
        return [
            cls(env, nccl, line.index(rank), len(line), _from_text(ids[line[0]][d]), device)
            if len(line) > 1
            else None
            for d, line in enumerate(lines)
        ]

    @property
    def mesh(self) -> MeshLike | None:
        """None: operations go between all ranks at once."""
        return None

    def allocate(self, size: int) -> torch.Tensor:
        """Memory of so many bytes for an arena, 1-d uint8, zeros. Collective."""
        if not self._registers:
            return torch.zeros(size, dtype=torch.uint8, device=self.device.torch_device)
        self._deregister()
        memory = _Memory(self.core, size, self.device.torch_device)
        self.core.register_buffer(memory.address, size)
        self._registered = memory.address
        return torch.as_tensor(memory, dtype=torch.uint8, device=self.device.torch_device).zero_()

    def register(self, arena: torch.Tensor) -> None:
        """Any memory of the device will do."""

    def close(self) -> None:
        """Ends NCCL's communicators. Collective, unless something has failed."""
        self._registered = 0  # ends with them
        self.core.close()

    def _deregister(self) -> None:
        if self._registered:
            self.core.deregister_buffer(self._registered)
            self._registered = 0


def _ids(nccl: _core.Nccl, count: int) -> list[str]:
    """Of a new communicator with so many slots, as text."""
    return [nccl.unique_id().hex() for _ in range(count)]


def _from_text(ids: Sequence[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(text) for text in ids]
    except ValueError as error:
        raise unreadable("another rank's name of an NCCL communicator", error) from error


class _Memory:
    """Device memory that NCCL has allocated; what is made of it keeps this."""

    def __init__(self, core: _core.NcclCommunicator, size: int, device: torch.device) -> None:
        self._core, self._device = core, device
        self.address = core.allocate(size)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }

    def __del__(self) -> None:
        if not self._core.failure():
            torch.cuda.synchronize(self._device)  # kernels may still use it
        self._core.free(self.address)
