# SPDX-License-Identifier: Apache-2.0
"""Signatures by which processes prove to each other that they belong to the same job."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import torch.distributed as dist

from usbyte.cluster_env import JOB_KEY, Cluster, job_mark
from usbyte.errors import UsageError


class Credential:
    """Signs and verifies messages with HMAC-SHA256 under a key of the job.

    The key is the job token. If the launcher gives none, the key is the launcher's job id. That is
    no secret and only keeps out processes that connect by accident. Without both, the key is empty.

    Args:
        cluster: Rank, size, addresses and job id of this process, as the launcher gave them.
        token: The job token that the launcher gave to this process; may be empty.

    Attributes:
        mark: Text that is equal for the processes of one job and does not reveal the token.
    """

    def __init__(self, cluster: Cluster, token: str) -> None:
        self._token, self._job_id = token, cluster.job_id
        self._key = (token or cluster.job_id).encode()
        self.mark = job_mark(token or cluster.job_id)

    def mac(self, *words: str) -> str:
        """Returns the HMAC-SHA256 of the words, in hexadecimal."""
        return hmac.new(self._key, json.dumps(words).encode(), hashlib.sha256).hexdigest()

    def sign(self, content: Any, *purpose: str) -> str:
        """Signs a message.

        Args:
            content: A value of types that JSON has.
            purpose: Words that bind the signature to one use: `verify` needs the same.

        Returns:
            The message.
        """
        body = json.dumps(content)
        return f"{self.mac(*purpose, body)} {body}"

    def verify(self, message: bytes, *purpose: str) -> Any:
        """Returns the content of a message that `sign` made for this purpose under the same key.

        Returns:
            The content; None for any other bytes.
        """
        mac, _, body = message.partition(b" ")
        try:
            expected = self.mac(*purpose, body.decode()).encode()
            return json.loads(body) if hmac.compare_digest(mac, expected) else None
        except (ValueError, RecursionError):
            return None

    def check_mark(self, store: dist.Store, where: str) -> bool:
        """Checks that the store is served by a process of this job, if its job mark is set.

        Args:
            store: Store of the rendezvous, without a prefix.
            where: Address of the store, for messages.

        Returns:
            Whether the store has a job mark.

        Raises:
            UsageError: The mark is that of another job.
        """
        if not store.check([JOB_KEY]):
            return False
        if hmac.compare_digest(store.get(JOB_KEY), self.mark.encode()):
            return True
        if self._token:
            problem = "this process has the USBYTE_JOB_TOKEN of another job"
        else:
            known = f", only the job id '{self._job_id}'" if self._job_id else ""
            problem = f"this process has no USBYTE_JOB_TOKEN or job id of that job{known}"
        raise UsageError(
            f"not part of the job at {where}: {problem}. Start it with the launcher that started "
            "the others, and see that nothing keeps RANK, MASTER_ADDR or MASTER_PORT from an "
            "earlier job; if two jobs use this port, choose another MASTER_PORT"
        )
