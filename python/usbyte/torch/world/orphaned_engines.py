# SPDX-License-Identifier: Apache-2.0
"""Engines whose optimizers were garbage-collected before all ranks have closed them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence

from usbyte.errors import Error
from usbyte.torch.lazy_tensor import forget_dead
from usbyte.torch.world.rank_group import OrphanedEngine, RankGroup

log = logging.getLogger("usbyte")


class OrphanedEngines:
    """Owns orphaned engines until all ranks can close them together.

    A communicator must be closed on all ranks at once, but garbage collection frees a model at
    different times on different ranks.
    """

    def __init__(self) -> None:
        self._engines: list[OrphanedEngine] = []

    def __iter__(self) -> Iterator[OrphanedEngine]:
        return iter(list(self._engines))

    def add(self, engine: OrphanedEngine) -> None:
        """Takes ownership of an engine. Garbage collection calls this, in any thread."""
        engine.orphaned = True
        self._engines.append(engine)

    def find(self, rank_group: RankGroup, collect: bool) -> list[str]:
        """Returns the labels of the engines of a rank group that are orphaned on this rank.

        Args:
            rank_group: Only engines of this rank group are found.
            collect: Whether to run the garbage collector first. By itself it runs late, because it
                does not know the size of tensors.
        """
        if collect:
            gc.collect()
        forget_dead()
        return sorted(e.label for e in self._engines if e.rank_group is rank_group)

    def close_common(self, rank_group: RankGroup, labels: Sequence[Sequence[str]]) -> None:
        """Closes the engines that are orphaned on all ranks. Collective.

        Args:
            rank_group: The ranks that take part; only engines of this rank group are closed.
            labels: The results of `find` of all ranks.
        """
        mine = {e.label: e for e in self._engines if e.rank_group is rank_group}
        for label in sorted(set(mine).intersection(*labels)):
            self._engines.remove(mine[label])
            try:
                mine[label].close()
            except Error as error:  # must not fail the optimizer that is being made
                log.warning("%s: %s", label, error)
