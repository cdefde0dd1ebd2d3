# SPDX-License-Identifier: Apache-2.0
"""Gradients that were sent, and the tensors that `param.grad` shows for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils import dlpack

from usbyte.errors import Error, UsageError
from usbyte.torch.lazy_tensor import MaterializeFn, make_all_lazy, unwrap_all
from usbyte.torch.torch_private import DisableTorchFunction, storage_use_count


def _two_lists_references() -> int:
    """Returns `sys.getrefcount` in a `map` for a tensor that only two lists refer to."""
    first, second = [torch.empty(0, dtype=torch.float32, device="cpu")], []
    second.append(first[0])
    return next(map(sys.getrefcount, first))


_OWN_REFERENCES = _two_lists_references()


class InFlightGrads:
    """Tracks where each sent gradient is, and whether the script has changed it since.

    `param.grad` is usually a tensor over the flat buffer's memory, which the next backward pass
    overwrites. Scripts rely on two facts of plain torch: after `zero_grad(set_to_none=True)` a new
    tensor is allocated, and otherwise `param.grad` stays the same tensor. These rules provide both:

    - A gradient in memory that the script uses too (a view of the script's flat buffer, a tensor in
      a list) stays `param.grad`. The sum is copied into it.
    - If the script still refers to a gradient in the flat buffer that is not `param.grad` any more,
      this gradient gets memory of its own before the flat buffer is written again.
    - If the script refers to a view of such a gradient, its parameter cannot be determined. Then
      the flat buffer moves to other memory, and from then on the gradients of all parameters in
      question have memory of their own.

    Args:
        names: Names of the parameters, by parameter index.
        params: The parameters.
        sparse: By parameter, whether its gradient is sent as rows.

    Attributes:
        sparse: By parameter, whether its gradient is sent as rows.
        tensors: By parameter, its gradient in the flat buffer; for a sparse one, the gradient sent
            last.
        shown: By parameter, the tensor that `param.grad` was set to when its gradient was sent:
            that of `tensors`, or one with memory of its own.
        shows_others: Whether some tensors of `shown` are not those of `tensors`.
        own: By parameter, whether this rank had a gradient in the last step.
        versions: By parameter, the version of its `shown` tensor when it was sent. A later write is
            detected by it.
        has_private: Whether the gradients of some parameters never use the flat buffer's memory.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], sparse: Sequence[bool]
    ) -> None:
        self._names, self._params, self.sparse = names, params, sparse
        self.tensors = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in params]
        self.shown, self.shows_others = list(self.tensors), False
        self.own = [False] * len(params)
        self.versions = [0] * len(params)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: Sequence[torch.Tensor | None] = []  # by parameter, in the flat buffer
        self._addresses = [0] * len(params)
        self._storage: torch.UntypedStorage | None = None  # shared by all dense `tensors`
        self._storage_uses = 0  # use count without references of the script
        self._private = [False] * len(params)  # by parameter, see `has_private`
        self.has_private = False
        self._exposes_remote = False  # whether `param.grad` shows gradients of other ranks
        self._may_be_lazy = False  # whether tensors of `shown` may be lazy

    def rebind(self, buffer: torch.Tensor, views: Sequence[torch.Tensor | None]) -> None:
        """Switches to another flat buffer. Each `param.grad` keeps its identity and values.

        Args:
            buffer: The flat buffer, 1-d uint8.
            views: By parameter, its gradient in the flat buffer; None if it is sparse.
        """
        self.unwrap()
        # A separate storage object: its use count tells whether the script keeps gradients.
        self._buffer = dlpack.from_dlpack(dlpack.to_dlpack(buffer))
        self._views = views
        self._addresses = [0 if view is None else view.data_ptr() for view in views]
        for i, view in enumerate(views):
            if view is not None:
                self._move(i)
        self._storage = self._buffer.untyped_storage()
        if storage_use_count is not None:
            self._storage_uses = storage_use_count(self._storage._cdata)

    def _move(self, i: int) -> None:
        old, there = self.tensors[i], self._view_in_buffer(i)
        if self._params[i].grad is old and old.dtype == there.dtype:
            old.data = there.copy_(old)
            there = old
        if self.shown[i] is old:
            self.shown[i] = there
        self.tensors[i] = there
        self.record_version(i)

    def _view_in_buffer(self, i: int) -> torch.Tensor:
        """Returns a new tensor over the gradient of parameter `i` in the flat buffer.

        It has a version counter of its own.
        """
        view = self._views[i]
        assert view is not None
        begin = self._addresses[i] - self._buffer.data_ptr()
        flat = self._buffer[begin : begin + view.numel() * view.element_size()].view(view.dtype)
        return flat.as_strided(view.shape, view.stride()).data

    def move_retained(self) -> bool:
        """Gives gradients memory of their own that the script keeps and that are not `param.grad`.

        Returns:
            Whether the flat buffer must move, because the script keeps views of gradients. A view
            does not tell its parameter, so every parameter in question is marked to get gradients
            with memory of their own.
        """
        references = list(map(sys.getrefcount, self.tensors))
        if max(references, default=0) > _OWN_REFERENCES:
            for i, count in enumerate(references):
                if count > _OWN_REFERENCES and self._is_replaced(i):
                    self._move_out(i)
        if storage_use_count is None or self._storage is None:
            return False
        if storage_use_count(self._storage._cdata) <= self._storage_uses:
            return False
        left = [i for i in range(len(self._params)) if self._is_replaced(i)]
        for i in left:
            self._private[i] = self.has_private = True
        return bool(left)

    def _is_replaced(self, i: int) -> bool:
        """Returns whether the flat buffer has a gradient of `i` that is not `param.grad` now."""
        is_there = not (self._private[i] or self.sparse[i])
        return is_there and self._params[i].grad is not self.tensors[i]

    def _move_out(self, i: int) -> None:
        """Moves the script's tensor out of the flat buffer and makes a new one over its memory."""
        retained = self.tensors[i]
        retained.data = retained.clone()
        if self.shown[i] is retained:
            self.shown[i] = self._view_in_buffer(i)
            self.tensors[i] = self.shown[i]
        else:
            self.tensors[i] = self._view_in_buffer(i)
        self.record_version(i)

    def show(self, i: int, grad: torch.Tensor, is_shared: bool) -> torch.Tensor | None:
        """Chooses the tensor that `param.grad` shows for the gradient that is about to be sent.

        Args:
            i: Index of the parameter; not a sparse one.
            grad: Its `param.grad`, or the dense gradient that is sent in its place.
            is_shared: Whether the script refers to `grad` or uses its memory in other ways.

        Returns:
            The tensor that `param.grad` becomes once the gradient is in the flat buffer; None to
            leave `param.grad` as it is.
        """
        there = self.tensors[i]
        if not (is_shared or self._private[i]) or grad is there:
            self.shown[i] = there
            return there
        self.shown[i], self.shows_others = grad, True
        return None

    def copy_sum(self, i: int) -> None:
        """Copies the sum of parameter `i`, which has arrived, to the tensor in `shown`."""
        if self.shown[i] is not self.tensors[i]:
            self.shown[i].data.copy_(self.tensors[i])  # views of one buffer share a version

    def result(self, i: int) -> torch.Tensor:
        """Returns the sum of parameter `i`, which has arrived, for an update.

        The update may keep the tensor, as scripts may keep gradients.
        """
        if self.shows_others:
            self.copy_sum(i)
        if self._private[i] and self.shown[i] is self.tensors[i]:
            return self.tensors[i].clone()
        return self.shown[i]

    def begin(self) -> None:
        """Begins a step: nothing has been sent yet."""
        self.unwrap()
        self._exposes_remote = False
        self.own = [False] * len(self._params)
        self.shows_others = False
        self._rebind_storage()

    def _rebind_storage(self) -> None:
        """Points gradients that were given other memory at the flat buffer again.

        They get it by `param.grad.data = ...`, or when a module is moved or converted with its
        gradients.
        """
        rows = zip(self._params, self.tensors, self._addresses, strict=True)
        for i, (param, grad, address) in enumerate(rows):
            if address and grad.data_ptr() != address:
                if param.grad is grad:
                    param.grad = grad.detach()  # from now on a tensor of the script
                grad.data = self._view_in_buffer(i)

    def record_version(self, i: int) -> None:
        """Records the version of the gradient of parameter `i`, to detect later writes."""
        self.versions[i] = self.shown[i]._version

    def check_all(self) -> None:
        """Raises Error if a gradient was written to while it was in flight."""
        for i, (shown, version) in enumerate(zip(self.shown, self.versions, strict=True)):
            if shown._version != version:
                raise self.modified(i)

    def modified(self, i: int) -> Error:
        """Returns the error that the gradient of parameter `i` was written to while in flight."""
        return Error(
            f"the gradient of '{self._names[i]}' was modified after backward() while its "
            'all-reduce was in flight. Use overlap="backward", or call optimizer.synchronize() '
            "before you change gradients."
        )

    def make_lazy(self, fetch: Sequence[MaterializeFn], expose_remote: bool) -> None:
        """Makes every gradient lazy: its first read waits for its all-reduce. `unwrap` ends this.

        Args:
            fetch: By parameter, the function that materializes its gradient.
            expose_remote: Whether `param.grad` of a parameter without a gradient on this rank shows
                the other ranks' sum. It may turn out that no rank has one.
        """
        self._exposes_remote, self._may_be_lazy = expose_remote, True
        if expose_remote and not all(self.own):
            for i, param in enumerate(self._params):
                if not self.own[i] and not self.sparse[i]:
                    param.grad = self.show_sum(i)
        make_all_lazy(self.shown, fetch)

    def unwrap(self) -> None:
        """Makes every gradient a plain tensor, whose reads wait for nothing."""
        if self._may_be_lazy:
            unwrap_all(self.shown)
            self._may_be_lazy = False

    def show_sum(self, i: int) -> torch.Tensor:
        """Returns the tensor that shows the other ranks' sum where this rank has no gradient."""
        there = self.tensors[i]
        self.shown[i] = there
        if self._private[i]:
            self.shown[i], self.shows_others = torch.empty_like(there), True
        self.record_version(i)
        return self.shown[i]

    def was_reset_by_user(self, i: int) -> bool:
        """Returns whether the script has reset a gradient that showed only the other ranks' sum."""
        return self._params[i].grad is None and self._exposes_remote and not self.sparse[i]

    def untouched(self) -> bool:
        """Returns whether no `param.grad` in flight was replaced or reset.

        Raises:
            Error: A gradient was written to while it was in flight.
        """
        same = True
        with DisableTorchFunction():  # must not materialize lazy gradients
            for i, param in enumerate(self._params):
                if param.grad is not self.shown[i]:
                    absent = not self.own[i] and param.grad is None
                    same = same and absent and not self.was_reset_by_user(i)
                elif self.shown[i]._version != self.versions[i]:
                    raise self.modified(i)
        return same

    def check_unreplaced(self) -> None:
        """Checks that every `param.grad` is the one that was sent, right after all were sent.

        Raises:
            UsageError: A hook has replaced or reset a gradient.
        """
        for i, (param, grad) in enumerate(zip(self._params, self.shown, strict=True)):
            if self.shows_others and grad is not self.tensors[i]:
                # backward() may have written to other views that share the version counter.
                self.record_version(i)
            if param.grad is not grad and self.own[i]:
                what = "reset" if param.grad is None else "replaced"
                raise UsageError(
                    f"the gradient of '{self._names[i]}' was {what} inside backward() after it was "
                    "sent, by a hook of its parameter: register such hooks before the optimizer is "
                    "wrapped, or do not change gradients before step()"
                )

    def dropped(self, renewed: int = -1) -> bool:
        """Returns whether the script has reset all gradients since they were sent.

        Args:
            renewed: Index of a parameter that has a new gradient already, in another tensor; -1
                (default) for none.
        """
        with DisableTorchFunction():  # lazy parameters stay lazy
            return all(
                p.grad is None if i != renewed else p.grad is not grad
                for i, (p, grad) in enumerate(zip(self._params, self.shown, strict=True))
            )
