"""Gradients that have been sent, as parameters show them until they are sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from usbyte.errors import Error, UsageError
from usbyte.torch.awaited import Fetch, hold, release


class SentGradients:
    """Where each gradient is on its way, and whether anybody has touched it since it was sent.

    Args:
        names: Of the parameters.
        params: Those.
        sparse: By parameter, whether only rows of its gradient travel.

    Attributes:
        tensors: By parameter, its gradient in the arena; if sparse, the last one that was sent.
        own: By parameter, whether this rank had a gradient for it in the last step.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], sparse: Sequence[bool]
    ) -> None:
        self._names, self._params, self._sparse = names, params, sparse
        self.tensors = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(params)
        self.own = [False] * len(params)
        self._versions = [0] * len(params)
        self._memory: list[torch.Tensor | None] = []  # by parameter, what `tensors` lies in
        self._addresses = [0] * len(params)
        self._lent = False  # all parameters have gradients, until they are final
        self._held = False  # some may be

    def move(self, views: Sequence[torch.Tensor | None]) -> None:
        """The arena is another one; gradients that parameters have keep their values.

        Args:
            views: By parameter, of its gradient in the arena; None if sparse.
        """
        self.release()
        old = self.tensors
        self.tensors = [o if view is None else view for o, view in zip(old, views, strict=True)]
        for i, (param, grad) in enumerate(zip(self._params, self.tensors, strict=True)):
            if param.grad is old[i] and not self._sparse[i] and old[i].dtype == grad.dtype:
                param.grad = grad.copy_(old[i])
            self.seal(i)
        self._memory = [None if view is None else view.detach() for view in views]
        self._addresses = [0 if view is None else view.data_ptr() for view in views]

    def begin(self) -> None:
        """A step begins, for which nothing has been sent yet."""
        self.release()
        self._lent = False
        self.own = [False] * len(self._params)
        self._take_back()

    def _take_back(self) -> None:
        """What was given other memory, as by `param.grad.data = ...`, lies in the arena again.

        So do modules that are moved, or made of another dtype, with the gradients that they have.
        """
        rows = zip(self._params, self.tensors, self._memory, self._addresses, strict=True)
        for param, grad, memory, address in rows:
            if memory is not None and grad.data_ptr() != address:
                if param.grad is grad:
                    param.grad = grad.detach()  # the user's own from now on
                grad.data = memory

    def seal(self, i: int) -> None:
        """Parameter i's is sent: who changes it from now on is noticed."""
        self._versions[i] = self.tensors[i]._version

    def check(self, i: int) -> None:
        """Raises Error if parameter i's was changed on its way."""
        if self.tensors[i]._version != self._versions[i]:
            raise Error(
                f"the gradient of '{self._names[i]}' was modified after backward() while it was on "
                'its way to the other ranks. Use overlap="backward", or call '
                "optimizer.synchronize() before you touch gradients."
            )

    def hold(self, fetch: Sequence[Fetch], lend: bool) -> None:
        """Who reads a gradient has it fetched first, until it was waited for or released.

        Args:
            fetch: By parameter, what to call.
            lend: Parameters that have none show the other ranks', which may turn out to be none.
        """
        self._lent, self._held = lend, True
        for i, (grad, each) in enumerate(zip(self.tensors, fetch, strict=True)):
            hold(grad, each)
            if lend and not self.own[i] and not self._sparse[i]:
                self._params[i].grad = grad

    def release(self) -> None:
        """Who reads a gradient gets it as it is."""
        if self._held:
            for grad in self.tensors:
                release(grad)
            self._held = False

    def is_gone(self, i: int) -> bool:
        """Whether the user has reset what parameter i showed without a gradient of its own."""
        return self._params[i].grad is None and self._lent and not self._sparse[i]

    def untouched(self) -> bool:
        """Whether parameters still have the gradients in flight, not others or none.

        Raises:
            Error: One of those was changed since backward.
        """
        same = True
        with torch._C.DisableTorchFunctionSubclass():  # gradients are held
            for i, param in enumerate(self._params):
                if param.grad is not self.tensors[i]:
                    same = same and not self.own[i] and param.grad is None and not self.is_gone(i)
                else:
                    self.check(i)
        return same

    def check_kept(self) -> None:
        """Raises UsageError if parameters have others, or none, right after all were sent."""
        for i, (param, grad) in enumerate(zip(self._params, self.tensors, strict=True)):
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
        with torch._C.DisableTorchFunctionSubclass():  # parameters are held
            return all(
                p.grad is None if i != renewed else p.grad is not grad
                for i, (p, grad) in enumerate(zip(self._params, self.tensors, strict=True))
            )
