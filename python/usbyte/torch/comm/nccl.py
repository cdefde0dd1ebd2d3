# SPDX-License-Identifier: Apache-2.0
"""The engine's communicator for CUDA gradients over NCCL, and the choice of the NCCL library."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from usbyte import _core
from usbyte.errors import UsageError
from usbyte.torch.comm.base import MeshLike
from usbyte.torch.runtime.device import CudaDevice
from usbyte.torch.runtime.messages import unreadable
from usbyte.torch.world.rank_group import RankGroup

log = logging.getLogger("usbyte")

_ORDERS_STARTS = (12, 3)  # first CUDA driver that can order the starts of kernels
_PHASES_IN_HAND = 2  # concurrent phases in a mesh axis group, each on its own NCCL communicator
_RANKS_SHARE_A_GPU = (2, 30)  # first NCCL that supports NCCL_MULTI_RANK_GPU_ENABLE


@dataclass(frozen=True)
class NcclOffer:
    """Whether one rank can use NCCL, and on which GPU.

    Attributes:
        version: Version of NCCL; empty if it cannot be used.
        why: Why it cannot be used; empty if it can.
        host: Identity of the host for NCCL: NCCL_HOSTID, or else the host name.
        gpu: Identity of the device on that host.
        shares: Whether NCCL allows ranks to share a GPU here.
    """

    version: str
    why: str
    host: str
    gpu: str
    shares: bool


def find(env: _core.Env, several: bool) -> _core.Nccl:
    """Loads the NCCL library of this process and logs its version and path.

    Args:
        env: The USBYTE_* settings; `nccl_library` overrides the search.
        several: Whether several NCCL communicators will run at the same time. NCCL is then asked to
            start them in launch order.

    Raises:
        UsageError: No usable library was found.
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
    """Sets NCCL_LAUNCH_ORDER_IMPLICIT (NCCL 2.26 or later), unless the user has set it.

    Concurrent communicators must start in the same order on every rank. Our CUDA events ensure that
    only in part; with this setting NCCL starts its kernels in the order of their launches.

    It is not set with older drivers. There NCCL would order whole operations instead of starts. If
    another thread also launches (torch's process groups, a second optimizer), that order may differ
    by rank. NCCL_LAUNCH_RACE_FATAL=0 makes such concurrent launches no error.
    """
    driver = tuple(int(part) for part in _core.cuda_info().driver_version.split(".") if part)
    if driver >= _ORDERS_STARTS:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        os.environ.setdefault("NCCL_LAUNCH_RACE_FATAL", "0")


def wheels() -> list[str]:
    """Returns the paths of NCCL libraries from pip packages of this Python environment."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    candidates = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return [str(path) for path in candidates if path.exists()]


def offer_nccl(
    env: _core.Env, device: CudaDevice, dimensions: bool
) -> tuple[_core.Nccl | None, NcclOffer]:
    """Loads NCCL and returns it with what the other ranks must know about it. Not collective.

    Args:
        env: The USBYTE_* settings.
        device: CUDA device of this rank.
        dimensions: Whether there will also be communicators of mesh axis groups.

    Returns:
        The library, None if it cannot be used, and the offer, for `can_use_nccl`.
    """
    nccl, why = None, ""
    try:
        nccl = find(env, several=dimensions or env.nccl_communicators > 1)
    except UsageError as error:
        why = str(error)
    version = nccl.version if nccl is not None else ""
    can_share = version and tuple(map(int, version.split(".")[:2])) >= _RANKS_SHARE_A_GPU
    return nccl, NcclOffer(
        version,
        why,
        os.environ.get("NCCL_HOSTID") or socket.gethostname(),
        device.identity(),
        bool(can_share) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    )


def can_use_nccl(offers: Sequence[NcclOffer], rank_group: RankGroup, is_required: bool) -> bool:
    """Returns whether ranks can use NCCL together. If not, rank 0 logs why.

    Args:
        offers: The offers of all ranks, in rank order; empty if none tries to use NCCL.
        rank_group: The ranks.
        is_required: Whether the user has asked for NCCL.

    Raises:
        UsageError: NCCL is required and cannot be used.
    """
    if not offers:
        return False
    problem = _problem(offers)
    if problem and is_required:
        raise UsageError(f"USBYTE_BACKEND=nccl, but {problem}; unset it to go over the CPU instead")
    if problem and rank_group.rank == 0:
        log.warning("gradients go over the CPU's network, not NCCL: %s", problem)
    return not problem


def _problem(offers: Sequence[NcclOffer]) -> str:
    """Returns why these ranks cannot use NCCL together; empty if they can."""
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
    """The engine's communicator over NCCL. The constructor is collective among its ranks.

    Args:
        env: The USBYTE_* settings.
        nccl: The library.
        rank: Position of this rank in the communicator, 0 <= rank < size.
        size: Number of ranks in the communicator.
        ids: Unique ids of NCCL, one per concurrent op; the same on all ranks of the communicator.
        device: CUDA device of this rank.

    Attributes:
        core: The C++ communicator that the engine calls.
        direct_allreduce_max_bytes: 0: NCCL chooses its own algorithm for small all_reduces.
        device: CUDA device of this rank.
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
        self._registered = 0  # address of the registered flat buffer; 0 if there is none
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
    def make(
        cls,
        rank_group: RankGroup,
        nccl: _core.Nccl,
        device: CudaDevice,
        mesh: _core.Topology | None,
    ) -> tuple[NcclCommunicator, list[NcclCommunicator | None]]:
        """Makes the communicators that a rank group needs. Collective.

        Args:
            rank_group: The ranks that take part, at least 2.
            nccl: The library.
            device: CUDA device of this rank.
            mesh: Topology whose mesh axis groups get communicators, too; None for none.

        Returns:
            The communicator between all ranks; and that of this rank's mesh axis group in each
            dimension, None for a dimension of size 1.
        """
        env, rank = rank_group.env, rank_group.rank
        dimensions = range(len(mesh.dimensions)) if mesh is not None else ()
        by_axis = [mesh.axis_group(rank, d) for d in dimensions] if mesh is not None else []
        groups = [list(range(rank_group.size)), *by_axis]
        counts = [env.nccl_communicators, *(_PHASES_IN_HAND for _ in dimensions)]
        mine = [
            _ids(nccl, count) if len(group) > 1 and group[0] == rank else []
            for group, count in zip(groups, counts, strict=True)
        ]
        ids = rank_group.eager.allgather_json("usbyte.nccl.ids", mine, list[list[str]])
        flat, *along_axes = (
            cls(env, nccl, group.index(rank), len(group), _from_text(ids[group[0]][i]), device)
            if len(group) > 1
            else None
            for i, group in enumerate(groups)
        )
        assert flat is not None
        return flat, along_axes

    @property
    def mesh(self) -> MeshLike | None:
        """None: every op runs between all ranks of this communicator."""
        return None

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates a flat buffer of `size` bytes: shape [size], uint8, zeros. Collective.

        With USBYTE_NCCL_REGISTER, NCCL allocates and registers the memory, and the previous flat
        buffer is deregistered.
        """
        if not self._registers:
            return torch.zeros(size, dtype=torch.uint8, device=self.device.torch_device)
        self._deregister()
        memory = _Memory(self.core, size, self.device.torch_device)
        self.core.register_buffer(memory.address, size)
        self._registered = memory.address
        return torch.as_tensor(memory, dtype=torch.uint8, device=self.device.torch_device).zero_()

    def register(self, flat_buffer: torch.Tensor) -> None:
        """Does nothing: NCCL sends from any memory of the device."""

    def close(self) -> None:
        """Destroys the NCCL communicators. Collective, unless an op has failed."""
        self._registered = 0  # the registration ends with the communicators
        self.core.close()

    def _deregister(self) -> None:
        if self._registered:
            self.core.deregister_buffer(self._registered)
            self._registered = 0


def _ids(nccl: _core.Nccl, count: int) -> list[str]:
    """Returns `count` new unique ids of NCCL, as hexadecimal text."""
    return [nccl.unique_id().hex() for _ in range(count)]


def _from_text(ids: Sequence[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(text) for text in ids]
    except ValueError as error:
        raise unreadable("another rank's name of an NCCL communicator", error) from error


class _Memory:
    """Device memory that NCCL has allocated. Tensors made from it keep a reference to this."""

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
