# SPDX-License-Identifier: Apache-2.0
"""How ranks meet: proofs of membership, names of missing ranks, and ranks of one host."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from usbyte.cluster_env import JOB_KEY, Cluster
from usbyte.errors import EnvError, UsageError
from usbyte.torch.runtime import rendezvous, rendezvous_store
from usbyte.torch.runtime.credential import Credential
from usbyte.torch.runtime.placement import Place, local_ranks, place_here
from usbyte.torch.runtime.rendezvous import Join, Met, Rendezvous
from usbyte.torch.runtime.rendezvous_store import open_store

TOKEN = "0123456789abcdef" * 2
LONG_S = 120.0  # never reached: every test that waits so long is ended by an answer


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def credential(token: str = "", job_id: str = "") -> Credential:
    return Credential(Cluster(0, 2, 0, 2, "127.0.0.1", 1, "torchrun", True, job_id), token)


def come(
    server: dist.TCPStore,
    rank: int,
    size: int = 2,
    *,
    token: str = TOKEN,
    job_id: str = "",
    limit_s: float = LONG_S,
    prepare: Callable[[], None] = lambda: None,
) -> Met:
    known = credential(token, job_id)
    place = place_here(rank, size)
    meeting = Rendezvous(client(server), 1, rank, size, place, known, False, prepare)
    return meeting.meet(limit_s)


def together(*calls: Callable[[], Met]) -> list[Future[Met]]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [threads.submit(call) for call in calls]


def test_ranks_that_know_the_token_meet(server: dist.TCPStore) -> None:
    found = together(*(lambda rank=rank: come(server, rank, 3) for rank in (2, 0, 1)))
    for rank, meeting in zip((2, 0, 1), found, strict=True):
        meeting.result().store.set(f"address/{rank}", str(rank))
    for meeting in found:
        assert [meeting.result().store.get(f"address/{r}") for r in range(3)] == [b"0", b"1", b"2"]
        assert [place.local_rank for place in meeting.result().places] == [0, 1, 2]


def test_each_start_has_keys_of_its_own(server: dist.TCPStore) -> None:
    """A store that a launcher keeps still has entries of ranks that have died."""
    died = Join(1, 2, "of a rank that died before it was answered", 7, place_here(1, 2))
    keys = dist.PrefixStore("usbyte/rendezvous/1", server)
    keys.set(f"log/{keys.add('log', 1) - 1}", f"join {credential(TOKEN).sign(died, 'join')}")
    keys.add("log", 1)  # of one that died between the two
    for _ in range(3):
        found = together(lambda: come(server, 1), lambda: come(server, 0))
        assert not found[1].result().store.check(["fault"])
        found[0].result().store.set("fault", "of this start")
        assert found[1].result().store.get("fault") == b"of this start"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("token", ["", "f" * 32], ids=["none", "wrong"])
def test_a_process_without_the_token_is_refused(
    server: dist.TCPStore, rank: int, token: str
) -> None:
    server.set(JOB_KEY, credential(TOKEN).mark)
    with pytest.raises(UsageError, match=r"not part of the job at .*TOKEN"):
        come(server, rank, token=token)
    assert all(meeting.result() for meeting in together(*(
        lambda rank=rank: come(server, rank) for rank in (0, 1)
    )))  # fmt: skip
    with pytest.raises(UsageError, match="not part of the job"):
        come(server, rank, token=token)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_another_job_takes_no_rank_where_the_store_has_no_mark(
    server: dist.TCPStore, rank: int
) -> None:
    """As at torchrun's store, where the run id is all that ranks know."""
    own = {"token": "", "job_id": "run 7"}
    stranger_waits, stranger = threading.Event(), {"token": "", "job_id": "run 8"}

    def intrude() -> Met:
        stranger_waits.set()
        return come(server, rank, limit_s=3.0, **stranger)  # type: ignore[arg-type]

    def wait_and_come(rank: int) -> Met:
        stranger_waits.wait()
        return come(server, rank, **own)  # type: ignore[arg-type]

    found = together(intrude, lambda: wait_and_come(1), lambda: wait_and_come(0))
    assert isinstance(found[0].exception(), UsageError)
    assert "of 2 did not connect to" in str(found[0].exception())
    assert found[1].result().places == found[2].result().places


def test_what_others_write_is_not_believed(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of no key, of another purpose, and replayed ones of an earlier start."""
    assert together(lambda: come(server, 1), lambda: come(server, 0))
    keys = dist.PrefixStore("usbyte/rendezvous/1", server)
    known, other = credential(TOKEN), credential("f" * 32)
    fake = Join(1, 2, "a" * 32, 7, place_here(1, 2))
    old = [keys.get(f"log/{n}") for n in range(keys.add("log", 0))]
    new = [
        f"join {other.sign(fake, 'join')}",
        f"join {known.sign(fake, 'proof', 'a')}",
        f"proof {other.sign('a' * 32, 'proof', 'b')}",
        "join",
        "",
        "\0",
    ]
    for text in [*old, *new]:
        keys.set(f"log/{keys.add('log', 1) - 1}", text)
    # A rank 0 that knows no token answers every process that comes.
    nonces = iter(["c" * 32, "d" * 32])
    monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda _: next(nonces))
    for nonce in ("c" * 32, "d" * 32):
        keys.set(f"answer/{nonce}", other.sign("b" * 32, "answer", nonce))
    found = together(lambda: come(server, 1), lambda: come(server, 0))
    assert found[0].result().places == found[1].result().places


def test_the_token_is_nowhere_readable(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = dist.PrefixStore

    class Recording(real):  # type: ignore[misc, valid-type]
        def __init__(self, prefix: str, store: dist.Store) -> None:
            super().__init__(prefix, store)
            written.append(prefix)

        def set(self, key: str, value: str) -> None:
            written.extend([key, value])
            super().set(key, value)

        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            written.extend([key, value])
            return bytes(super().compare_set(key, expected, value))

    monkeypatch.setattr(dist, "PrefixStore", Recording)
    assert together(lambda: come(server, 1), lambda: come(server, 0))[0].result()
    assert any(text.startswith("proof ") for text in written)
    assert any('"met"' in text for text in written)
    assert not any(TOKEN in text for text in written)
    starts = [text for text in written if text.startswith("usbyte/")]
    assert len(set(starts)) == 2  # the rendezvous, and what only those of the job can name


def test_a_rank_that_comes_twice_ends_the_start_on_all(server: dist.TCPStore) -> None:
    """As when an agent starts its ranks anew while another's still wait."""
    found = together(*(lambda rank=rank: come(server, rank, 3) for rank in (2, 2, 0)))
    for meeting in found:
        with pytest.raises(UsageError, match=r"are rank 2 of this job: pid .* and pid "):
            meeting.result()


def test_two_processes_that_are_rank_0_end_the_start(server: dist.TCPStore) -> None:
    def after_rank_1() -> Met:
        log = dist.PrefixStore("usbyte/rendezvous/1", client(server))
        log.wait(["log/0"])  # else it may come when both have ended, and wait for a rank 0 in vain
        return come(server, 0, 3)

    for meeting in together(lambda: come(server, 1, 3), after_rank_1, after_rank_1):
        with pytest.raises(UsageError, match=r"are rank 0 of this job|rank 0 .* ended before"):
            meeting.result()


def test_who_comes_when_all_have_met_is_one_too_many(server: dist.TCPStore) -> None:
    server.set(JOB_KEY, credential(TOKEN).mark)  # of usbyterun, which keeps no store
    assert together(lambda: come(server, 1), lambda: come(server, 0))[0].result()
    for rank in (0, 1):
        with pytest.raises(UsageError, match=f"started already, and this process .rank {rank}."):
            come(server, rank)


def test_ranks_that_were_started_with_different_sizes_are_told(server: dist.TCPStore) -> None:
    for meeting in together(lambda: come(server, 1, 3), lambda: come(server, 0, 2)):
        with pytest.raises(
            UsageError, match=r"rank 1 \(pid .*\) was started with WORLD_SIZE=3, rank 0 with .*=2"
        ):
            meeting.result()


def test_a_rank_that_fails_meanwhile_is_told_to_all(server: dist.TCPStore) -> None:
    def fails() -> None:
        raise UsageError("rank 1 has no network")

    found = together(lambda: come(server, 1, prepare=fails), lambda: come(server, 0))
    assert str(found[0].exception()) == "rank 1 has no network"
    with pytest.raises(UsageError, match=r"rank 1 .* ended before all ranks had met: .* network"):
        found[1].result()


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "ranks 1, 2, 3 of 4"), (2, "ranks 0, 1, 3 of 4")]
)
def test_who_is_missing_is_told_meanwhile_and_in_the_end(
    server: dist.TCPStore,
    rank: int,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rendezvous, "_NOTICE_S", 0.05)
    where = f"127.0.0.1, port {server.port}"
    with (
        caplog.at_level(logging.WARNING, logger="usbyte"),
        pytest.raises(
            UsageError, match=f"{missing} did not connect to {where} within 0.5 s.*LIMIT_S"
        ),
    ):
        come(server, rank, 4, limit_s=0.5)
    assert f"rank {rank}: waiting for {missing} at {where}" in caplog.text


def opened(rank: int, port: int, limit_s: float = LONG_S) -> dist.TCPStore:
    cluster = Cluster(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
    return open_store(cluster, Credential(cluster, ""), limit_s, timedelta(seconds=LONG_S))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_on_which_another_program_listens(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "_CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a web server is at first
        port = silent.getsockname()[1]
        told = f"rank {rank} of 2: what listens at 127.0.0.1, port {port} is no store .*no answer"
        with pytest.raises(UsageError, match=f"{told}.* choose another MASTER_PORT"):
            opened(rank, port, limit_s=1.0)


def test_a_port_on_which_another_job_meets(server: dist.TCPStore) -> None:
    told = f"port {server.port}: another program uses this port.* choose another MASTER_PORT"
    with pytest.raises(UsageError, match=told):
        opened(0, server.port)
    server.set(JOB_KEY, credential(TOKEN).mark)
    with pytest.raises(UsageError, match=f"{server.port}: .*TOKEN.* choose another MASTER_PORT"):
        opened(0, server.port)


def test_a_rank_waits_aloud_for_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_store, "_NOTICE_S", 0.05)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        with pytest.raises(UsageError, match=r"could not connect to rank 0 at 127\.0\.0\.1"):
            opened(1, port, limit_s=0.5)
    assert f"rank 1: waiting for rank 0 of 2 at 127.0.0.1, port {port}" in caplog.text


def test_strangers_are_mentioned(server: dist.TCPStore) -> None:
    keys = dist.PrefixStore("usbyte/rendezvous/1", server)
    keys.set(f"log/{keys.add('log', 1) - 1}", "join of another job")
    with pytest.raises(UsageError, match=r"\(1 processes of other jobs connected"):
        come(server, 0, limit_s=0.2)


def test_a_store_that_is_lost_is_the_cause_that_is_told(server: dist.TCPStore) -> None:
    class Lost(dist.HashStore):
        def check(self, keys: Any) -> bool:
            raise RuntimeError("Connection reset by peer")

    meeting = Rendezvous(Lost(), 1, 1, 2, place_here(1, 2), credential(TOKEN), False, lambda: None)
    with pytest.raises(UsageError, match=r"store there does not answer \(Connection reset"):
        meeting.meet(LONG_S)


@settings(max_examples=50, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
))  # fmt: skip
def test_no_content_of_a_message_crashes_its_reader(content: Any) -> None:
    known = credential(TOKEN)
    back = known.verify(known.sign(content, "join").encode(), "join")
    assert Join.read(back) is None or isinstance(Join.read(back), Join)


@settings(max_examples=50, deadline=None)
@given(st.binary())
def test_no_bytes_crash_the_reader_of_messages(noise: bytes) -> None:
    assert credential(TOKEN).verify(noise, "join") is None
    deep = b"[" * 100_000
    assert credential(TOKEN).verify(noise + b" " + deep, "join") is None


def test_signed_nesting_is_refused() -> None:
    known = credential("")
    body = "[" * 100_000 + "]" * 100_000
    assert known.verify(f"{known.mac('join', body)} {body}".encode(), "join") is None


def test_messages_are_of_one_purpose_and_key() -> None:
    known = credential(TOKEN)
    message = known.sign(["a"], "answer", "nonce").encode()
    assert known.verify(message, "answer", "nonce") == ["a"]
    assert known.verify(message, "answer", "another") is None
    assert known.verify(message, "proof", "nonce") is None
    assert credential().verify(message, "answer", "nonce") is None
    assert credential(job_id="run").mark != credential().mark != known.mark


def places(*told: tuple[str, int | None, int | None]) -> list[Place]:
    return [Place(f"host {machine}", machine, rank, size) for machine, rank, size in told]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        # Nothing is told: counted by host.
        (
            [("a", None, None), ("b", None, None), ("a", None, None)],
            [(0, 2), (0, 1), (1, 2)],
        ),
        # A local rank and no size, as some launchers do; the order is theirs.
        ([("a", 1, None), ("a", 0, None)], [(1, 2), (0, 2)]),
        # A size and no rank.
        ([("a", None, 2), ("a", None, 2)], [(0, 2), (1, 2)]),
        # One machine that stands for two hosts.
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 1)], [(0, 2), (1, 2), (0, 1)]),
        # Containers that do not look like one machine.
        ([("a", 0, 2), ("b", 1, 2)], [(0, 2), (1, 2)]),
    ],
)
def test_local_ranks_are_told_or_counted(told: Any, found: Any) -> None:
    assert local_ranks(places(*told)) == found


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([("a", 0, 2), ("a", 0, 2)], "ranks 0, 1 on host 'host a' all have local rank 0 of 2"),
        ([("b", 0, None), ("a", 0, None), ("a", 0, None)], "ranks 1, 2 on host 'host a'"),
        ([("a", 0, None), ("a", None, None), ("a", 1, None)], "ranks 1, 2 on host 'host a'"),
        ([("a", 2, None), ("a", 0, None)], "rank 0 has local rank 2, but host 'host a' has 2"),
    ],
)
def test_local_ranks_that_cannot_be_are_refused(told: Any, words: str) -> None:
    with pytest.raises(EnvError, match=f"{words}.*LOCAL_RANK"):
        local_ranks(places(*told))


def test_a_place_survives_the_wire() -> None:
    join = Join(1, 2, "n", 7, place_here(None, None))
    assert Join.read(json.loads(json.dumps(join))) == join
