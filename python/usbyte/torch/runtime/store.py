# SPDX-License-Identifier: Apache-2.0
"""Connections to torch.distributed's key-value store, with key prefixes of their own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from usbyte.errors import UsageError

_ABSENT = b"\0absent"  # differs from all written values, which are text without a NUL


class _PrivateStore(dist.PrefixStore):
    """A prefixed TCPStore that remembers its arguments, so that it can be cloned on older torch."""

    def __init__(self, prefix: str, server: dist.TCPStore) -> None:
        super().__init__(prefix, _connect(server))
        self.prefix = prefix
        self.server = server


def private_store(store: dist.Store, name: str) -> dist.Store:
    """Returns a store with its own connection and key prefix.

    `clone_store` can clone it on any version of torch. Ranks that call this with the same store
    prefix and `name` share the keys.

    Args:
        store: Store of the rendezvous, possibly a PrefixStore.
        name: Prefix of the new store's keys.

    Raises:
        UsageError: The store is not served over TCP.
    """
    clone = _own_clone(store)
    if clone is not None:
        return dist.PrefixStore(name, clone)
    server = _server_of(store)
    # Before torch 2.8 the prefixes of `store` cannot be read and the store cannot be cloned. So the
    # first rank chooses a new unique prefix of the server's keys and shares it through `store`.
    namespace = store.compare_set(f"{name}/namespace", "", uuid.uuid4().hex)
    return _PrivateStore(f"{namespace.decode()}/{name}", server)


def clone_store(store: dist.Store) -> dist.Store:
    """Returns a second connection to the same keys.

    A TCP connection to the store serves one thread at a time.

    Args:
        store: Any store on torch 2.8 and later; before that a TCPStore or a `private_store`.

    Raises:
        UsageError: This torch cannot clone this kind of store.
    """
    clone = _own_clone(store)
    if clone is not None:
        return clone
    if isinstance(store, _PrivateStore):
        return _PrivateStore(store.prefix, store.server)
    if isinstance(store, dist.TCPStore):
        return _connect(store)
    raise UsageError(
        f"this torch cannot clone a {type(store).__name__}: make it with "
        "usbyte.torch.runtime.store.private_store(), or use torch 2.8 or later"
    )


def read_now(store: dist.Store, key: str) -> bytes | None:
    """Returns the value of `key`, or None if it is absent. Unlike `get`, it does not block."""
    # No key has the expected value, so compare_set changes nothing. It returns the current value,
    # or the expected one for a missing key.
    value = store.compare_set(key, _ABSENT.decode(), _ABSENT.decode())
    return None if value == _ABSENT else value


def without_prefixes(store: dist.Store) -> dist.Store:
    """Returns the store below all PrefixStores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def address_of(store: dist.Store) -> str:
    """Returns host and port of a store without prefixes, for messages."""
    if isinstance(store, dist.TCPStore):
        return f"{store.host}, port {store.port}"
    return f"a {type(store).__name__}"


def _own_clone(store: dist.Store) -> dist.Store | None:
    """Returns torch's clone of the store; None before torch 2.8, which has none."""
    clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
    return clone() if clone else None


def _server_of(store: dist.Store) -> dist.TCPStore:
    inner = without_prefixes(store)
    if not isinstance(inner, dist.TCPStore):
        raise UsageError(
            f"usbyte needs a store that is served over TCP, not a {type(inner).__name__}: "
            'start the job with usbyterun or torchrun, or with init_method="env://" or "tcp://..."'
        )
    return inner


def _connect(server: Any) -> dist.TCPStore:
    timeout: timedelta = server.timeout
    return dist.TCPStore(
        server.host, server.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
