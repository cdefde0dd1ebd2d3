# SPDX-License-Identifier: Apache-2.0
"""Host files, and the text of -H."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from usbyte.launch import hosts

SEEDS = [
    b"a slots=2\nb:3 # rack\n\nuser@c.example max-slots=8 slots=4\n",
    b"\xef\xbb\xbflocalhost slots=65536\na slots=65535\na slots=1",
    b"[fe80::1%eth0]:2,127.0.0.1:4, b",
    "a slots=\u0663\u2028b".encode(),
]

_FILE = Path(tempfile.mkdtemp(prefix="usbyte-fuzz-")) / "hosts"
# How messages begin; another ValueError is one that the parser did not expect.
_MESSAGES = ("-H: ", f"{_FILE}, line ", f"{_FILE}: host ", "cannot read the host", "the host file")


def one_input(data: bytes) -> None:
    """Reads the bytes as a host file and as the text of -H."""
    _FILE.write_bytes(data)
    _read(lambda: hosts.parse_hostfile(_FILE))
    _read(lambda: hosts.parse_hosts(data.decode(errors="surrogateescape")))


def _read(parse: Callable[[], list[hosts.Host]]) -> None:
    try:
        found = parse()
    except ValueError as error:
        if not str(error).startswith(_MESSAGES) or len(str(error)) > 1000:
            raise
        return
    assert all(1 <= host.slots <= hosts.MOST_RANKS for host in found)
    assert not any(host.name.startswith("-") for host in found)  # an option of ssh's
    ranks = sum(host.slots for host in found)
    assert sum(placement.count for placement in hosts.place(found, ranks)) == ranks
