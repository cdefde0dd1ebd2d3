"""What a process proves to the others before they believe that it is of their job."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import torch.distributed as dist

from usbyte.cluster_env import JOB_KEY, Cluster, job_mark
from usbyte.errors import UsageError


class Credential:
    """Signs messages with what the processes of one job know, and others do not.

    That is the job's token. Where the launcher gives none it is the launcher's id of the job, which
    is no secret: it keeps out processes that come by accident. Without either, the key is empty.

    Args:
        cluster: This process's place.
        token: The job's, as the launcher gave it to this process; may be empty.

    Attributes:
        mark: Tells processes of the same job from others, and nothing of the token.
    """

    def __init__(self, cluster: Cluster, token: str) -> None:
        self._token, self._job_id = token, cluster.job_id
        self._key = (token or cluster.job_id).encode()
        self.mark = job_mark(token or cluster.job_id)

    def mac(self, *words: str) -> str:
        """The HMAC-SHA256 of the words."""
        return hmac.new(self._key, json.dumps(words).encode(), hashlib.sha256).hexdigest()

    def sign(self, content: Any, *purpose: str) -> str:
        """A message of this content, which `verify` accepts for the same purpose only."""
        body = json.dumps(content)
        return f"{self.mac(*purpose, body)} {body}"

    def verify(self, message: bytes, *purpose: str) -> Any:
        """The content of a message of this job; None for any other bytes."""
        mac, _, body = message.partition(b" ")
        try:
            expected = self.mac(*purpose, body.decode()).encode()
            return json.loads(body) if hmac.compare_digest(mac, expected) else None
        except (ValueError, RecursionError):
            return None

    def check_mark(self, store: dist.Store, where: str) -> bool:
        """Looks for the mark of the process that serves the store.

        Args:
            store: That of the rendezvous, without a prefix.
            where: Its address, for messages.

        Returns:
            Whether there is one.

        Raises:
            UsageError: It is that of another job.
        """
        if not store.check([JOB_KEY]):
            return False
        if hmac.compare_digest(store.get(JOB_KEY), self.mark.encode()):
            return True
        if self._token:
            problem = "its USBYTE_JOB_TOKEN is of another job"
        else:
            known = f", only the job id '{self._job_id}'" if self._job_id else ""
            problem = f"this process has no USBYTE_JOB_TOKEN or job id of that job{known}"
        raise UsageError(
            f"not part of the job at {where}: {problem}. Start it with the launcher that started "
            "the others, and see that nothing keeps RANK, MASTER_ADDR or MASTER_PORT from an "
            "earlier job"
        )
