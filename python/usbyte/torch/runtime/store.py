"""Connections to the key-value store that torch.distributed's rendezvous left behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from usbyte.errors import UsageError

_ABSENT = b"\0absent"  # differs from every value that is written, all of which are text


class _PrivateStore(dist.PrefixStore):
    """A prefixed TCPStore that remembers how it was made, so that older torch can clone it."""

    def __init__(self, prefix: str, server: dist.TCPStore) -> None:
        super().__init__(prefix, _connect(server))
        self.prefix = prefix
        self.server = server


def private_store(store: dist.Store, name: str) -> dist.Store:
    """A store with a connection and keys of its own, which `clone_store` can clone on any torch.

    All ranks that call this with equal `store` keys and `name` share the new keys.

    Args:
        store: Store of the rendezvous, possibly prefixed.
        name: Prefix of the new store's keys.

    Raises:
        UsageError: The store is not served over TCP.
    """
    clone = _own_clone(store)
    if clone is not None:
        return dist.PrefixStore(name, clone)
    server = _server_of(store)
    # Before torch 2.8 neither the prefixes of `store` can be read nor the store be cloned, so the
    # ranks agree through it on a fresh prefix of the server's own keys.
    namespace = store.compare_set(f"{name}/namespace", "", uuid.uuid4().hex)
    return _PrivateStore(f"{namespace.decode()}/{name}", server)


def clone_store(store: dist.Store) -> dist.Store:
    """A second connection to the same keys; a TCP connection serves one thread at a time.

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
    """The value of `key`, or None where it is absent; never waits, unlike `get`."""
    # With an expected value that no key has, compare_set only reads, and echoes it for a missing
    # key.
    value = store.compare_set(key, _ABSENT.decode(), _ABSENT.decode())
    return None if value == _ABSENT else value


def without_prefixes(store: dist.Store) -> dist.Store:
    """The store that prefixes were put on."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def address_of(store: dist.Store) -> str:
    """For messages: where a store without prefixes is served."""
    if isinstance(store, dist.TCPStore):
        return f"{store.host}, port {store.port}"
    return f"a {type(store).__name__}"


def _own_clone(store: dist.Store) -> dist.Store | None:
    """What torch 2.8 and later make of it; None before."""
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
