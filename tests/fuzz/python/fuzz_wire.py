# SPDX-License-Identifier: Apache-2.0
"""Objects of other ranks: any bytes are read, or refused with an error of usbyte's."""

from __future__ import annotations

from usbyte.errors import Error
from usbyte.torch.eager.serialization import from_bytes, open_message


def one_input(data: bytes) -> None:
    """Gives the bytes to the reader, as a rank's message and as its payload.

    Args:
        data: What another rank could have sent.
    """
    for read in (from_bytes, lambda message: from_bytes(open_message(message, "a call", 1))):
        try:
            obj = read(data)
        except Error:
            continue
        repr(obj)  # reads every tensor that was taken
