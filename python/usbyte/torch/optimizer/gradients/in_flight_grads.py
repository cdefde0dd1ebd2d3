# SPDX-License-Identifier: Apache-2.0
"""Gradients that have been sent, and the tensors by which parameters show them."""

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
    """What `map(sys.getrefcount, ...)` counts for a tensor that two lists alone refer to."""
    first, second = [torch.empty(0, dtype=torch.float32, device="cpu")], []
    second.append(first[0])
    return next(map(sys.getrefcount, first))


_OWN_REFERENCES = _two_lists_references()


class InFlightGrads:
    """Where each gradient is on its way, and whether anybody has touched it since it was sent.

    `param.grad` usually is a tensor over the arena's memory, which the next backward pass writes
    again. torch allocates new gradients after `zero_grad(set_to_none=True)`, and keeps the tensor
    that `param.grad` is otherwise, so scripts rely on both. Two rules give them that:

    - A gradient that has memory of the script's own (a view of a flat buffer, a tensor in a list)
      stays `param.grad`. Its sum is copied into it.
    - When a script still refers to a gradient in the arena although `param.grad` is another tensor
      or None, that gradient gets memory of its own before the arena is written again.
    - When it refers to a view of one, which no gradient can be told from, the arena moves, and from
      then on those parameters have gradients of their own memory.

    Args:
        names: Of the parameters.
        params: The parameters.
        sparse: By parameter, whether only rows of its gradient travel.

    Attributes:
        tensors: By parameter, its gradient in the arena; if sparse, the last one that was sent.
        shown: By parameter, what `param.grad` was set to when its gradient was sent: the tensor
            above, or one that has memory of its own.
        shows_others: Some of those are not the tensors in the arena.
        own: By parameter, whether this rank had a gradient for it in the last step.
        versions: By parameter, the version of `shown` when it was sent; a write since then is
            found by it.
        has_private: Some `shown` are never the flat buffer's memory.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], sparse: Sequence[bool]
    ) -> None:
        self._names, self._params, self._sparse = names, params, sparse
        self.tensors = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in params]
        self.shown, self.shows_others = list(self.tensors), False
        self.own = [False] * len(params)
        self.versions = [0] * len(params)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: Sequence[torch.Tensor | None] = []  # by parameter, its part of the arena
        self._addresses = [0] * len(params)
        self._storage: torch.UntypedStorage | None = None  # of all `tensors` that are not sparse
        self._storage_uses = 0  # of that storage, when the script refers to none of it
        self._private = [False] * len(params)  # by parameter, `shown` is never the arena's memory
        self.has_private = False
        self._lent = False  # all parameters have gradients, until they are final
        self._held = False  # some may be

    def rebind(self, buffer: torch.Tensor, views: Sequence[torch.Tensor | None]) -> None:
        """Goes over to another arena. `param.grad` stays the tensor that it is, with its values.

        Args:
            buffer: All of the arena, 1-d uint8.
            views: By parameter, its gradient in the arena; None if it is sparse.
        """
        self.unwrap()
        # A storage of its own tells who else uses the memory that scripts get to see.
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
        old, there = self.tensors[i], self._in_arena(i)
        if self._params[i].grad is old and old.dtype == there.dtype:
            old.data = there.copy_(old)
            there = old
        if self.shown[i] is old:
            self.shown[i] = there
        self.tensors[i] = there
        self.record_version(i)

    def _in_arena(self, i: int) -> torch.Tensor:
        """A new tensor, with a version counter of its own, over parameter i's part of the arena."""
        view = self._views[i]
        assert view is not None
        begin = self._addresses[i] - self._buffer.data_ptr()
        flat = self._buffer[begin : begin + view.numel() * view.element_size()].view(view.dtype)
        return flat.as_strided(view.shape, view.stride()).data

    def leave_kept(self) -> bool:
        """Lets scripts keep the last gradients, which are not `param.grad` any more.

        Returns:
            Whether the arena has to move, as views of gradients are kept: they do not tell of which
            parameters. All that may be meant are not shown in the arena from now on.
        """
        references = list(map(sys.getrefcount, self.tensors))
        if max(references, default=0) > _OWN_REFERENCES:
            for i, count in enumerate(references):
                if count > _OWN_REFERENCES and self._is_left(i):
                    self._leave(i)
        if storage_use_count is None or self._storage is None:
            return False
        if storage_use_count(self._storage._cdata) <= self._storage_uses:
            return False
        left = [i for i in range(len(self._params)) if self._is_left(i)]
        for i in left:
            self._private[i] = self.has_private = True
        return bool(left)

    def _is_left(self, i: int) -> bool:
        """Whether parameter i's last gradient lies in the arena and is not its gradient now."""
        is_there = not (self._private[i] or self._sparse[i])
        return is_there and self._params[i].grad is not self.tensors[i]

    def _leave(self, i: int) -> None:
        """Gives the script's tensor memory of its own, and makes another one over the arena."""
        kept = self.tensors[i]
        kept.data = kept.clone()
        if self.shown[i] is kept:
            self.shown[i] = self._in_arena(i)
            self.tensors[i] = self.shown[i]
        else:
            self.tensors[i] = self._in_arena(i)
        self.record_version(i)

    def show(self, i: int, grad: torch.Tensor, is_shared: bool) -> torch.Tensor | None:
        """Notes by which tensor parameter i shows the gradient that is about to be sent.

        Args:
            i: The parameter, not a sparse one.
            grad: Its `param.grad`, or what is sent in its place.
            is_shared: The script refers to `grad`, or uses its memory in other ways.

        Returns:
            What `param.grad` is to be once the arena has the gradient; None leaves it as it is.
        """
        there = self.tensors[i]
        if not (is_shared or self._private[i]) or grad is there:
            self.shown[i] = there
            return there
        self.shown[i], self.shows_others = grad, True
        return None

    def bring(self, i: int) -> None:
        """Parameter i's sum is in the arena: copies it to where the parameter shows it."""
        if self.shown[i] is not self.tensors[i]:
            self.shown[i].data.copy_(self.tensors[i])  # views of one buffer share their version

    def result(self, i: int) -> torch.Tensor:
        """Parameter i's sum, which is in the arena, for an update.

        The update may keep it, as scripts may keep gradients.
        """
        if self.shows_others:
            self.bring(i)
        if self._private[i] and self.shown[i] is self.tensors[i]:
            return self.tensors[i].clone()
        return self.shown[i]

    def begin(self) -> None:
        """A step begins, for which nothing has been sent yet."""
        self.unwrap()
        self._lent = False
        self.own = [False] * len(self._params)
        self.shows_others = False
        self._rebind_storage()

    def _rebind_storage(self) -> None:
        """What was given other memory, as by `param.grad.data = ...`, lies in the arena again.

        So do modules that are moved, or made of another dtype, with the gradients that they have.
        """
        rows = zip(self._params, self.tensors, self._addresses, strict=True)
        for i, (param, grad, address) in enumerate(rows):
            if address and grad.data_ptr() != address:
                if param.grad is grad:
                    param.grad = grad.detach()  # the user's own from now on
                grad.data = self._in_arena(i)

    def record_version(self, i: int) -> None:
        """Parameter i's is sent: who changes it from now on is noticed."""
        self.versions[i] = self.shown[i]._version

    def check_all(self) -> None:
        """Raises Error if a gradient was written to on its way."""
        for i, (shown, version) in enumerate(zip(self.shown, self.versions, strict=True)):
            if shown._version != version:
                raise self.modified(i)

    def modified(self, i: int) -> Error:
        """Returns the error that says so of parameter i's gradient."""
        return Error(
            f"the gradient of '{self._names[i]}' was modified after backward() while it was on its "
            'way to the other ranks. Use overlap="backward", or call optimizer.synchronize() '
            "before you touch gradients."
        )

    def make_lazy(self, fetch: Sequence[MaterializeFn], expose_remote: bool) -> None:
        """Who reads a gradient has it fetched first, until it was waited for or released.

        Args:
            fetch: By parameter, what to call.
            expose_remote: Parameters without a gradient here show the other ranks'; these may
                turn out to have none either.
        """
        self._lent, self._held = expose_remote, True
        if expose_remote and not all(self.own):
            for i, param in enumerate(self._params):
                if not self.own[i] and not self._sparse[i]:
                    param.grad = self.show_sum(i)
        make_all_lazy(self.shown, fetch)

    def unwrap(self) -> None:
        """Who reads a gradient gets it as it is."""
        if self._held:
            unwrap_all(self.shown)
            self._held = False

    def show_sum(self, i: int) -> torch.Tensor:
        """The tensor by which parameter i shows the other ranks' gradient, having none itself."""
        there = self.tensors[i]
        self.shown[i] = there
        if self._private[i]:
            self.shown[i], self.shows_others = torch.empty_like(there), True
        self.record_version(i)
        return self.shown[i]

    def was_reset_by_user(self, i: int) -> bool:
        """Whether the user has reset what parameter i showed without a gradient of its own."""
        return self._params[i].grad is None and self._lent and not self._sparse[i]

    def untouched(self) -> bool:
        """Whether parameters still have the gradients in flight, not others or none.

        Raises:
            Error: One of those was changed since backward.
        """
        same = True
        with DisableTorchFunction():  # gradients are held
            for i, param in enumerate(self._params):
                if param.grad is not self.shown[i]:
                    absent = not self.own[i] and param.grad is None
                    same = same and absent and not self.was_reset_by_user(i)
                elif self.shown[i]._version != self.versions[i]:
                    raise self.modified(i)
        return same

    def check_kept(self) -> None:
        """Raises UsageError if parameters have others, or none, right after all were sent."""
        for i, (param, grad) in enumerate(zip(self._params, self.shown, strict=True)):
            if self.shows_others and grad is not self.tensors[i]:
                # backward() has written to views of the same buffer since.
                self.record_version(i)
            if param.grad is not grad and self.own[i]:
                what = "reset" if param.grad is None else "replaced"
                raise UsageError(
                    f"the gradient of '{self._names[i]}' was {what} inside backward() after it was "
                    "sent, by a hook of its parameter: register such hooks before the optimizer is "
                    "wrapped, or leave gradients to it until step()"
                )

    def dropped(self, renewed: int = -1) -> bool:
        """Whether the user has reset all gradients since.

        Args:
            renewed: The parameter that has got one again, which is another tensor then.
        """
        with DisableTorchFunction():  # parameters are held
            return all(
                p.grad is None if i != renewed else p.grad is not grad
                for i, (p, grad) in enumerate(zip(self._params, self.shown, strict=True))
            )
