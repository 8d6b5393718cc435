"""Conversations of clients that nobody plays episodes with: those of a model that is served."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from vlmrl.agents.gateway.episode import GatewayEpisode
from vlmrl.agents.gateway.serving import Serving
from vlmrl.types import Prompt, Sampling

MAX_RESPONSES = 4096
MAX_BYTES = 2**30
"""Responses that are kept, and their memory, over all sessions; the sessions that were used last stay."""


class Sessions:
    """An episode for each key that clients send. Belongs to one event loop.

    With a token, keys are the token and all that begin with it and a slash: `TOKEN/anything`. Without one, any key is.
    """

    def __init__(self, serving: Serving, sampling: Sampling, *, token: str | None) -> None:
        """A session begins anew when it takes half of what all may keep; one that is never idle, when it takes all."""
        self._serving, self._sampling, self._token = serving, sampling, token
        self._sessions: OrderedDict[bytes, GatewayEpisode] = OrderedDict()
        """Digest of the key -> session."""
        self._num_opened = 0

    def find(self, key: str) -> GatewayEpisode | None:
        """Return the session of a key; None if the key is not allowed."""
        if self._token is not None and not hmac.compare_digest(key.partition("/")[0].encode(), self._token.encode()):
            return None
        digest = hashlib.sha256(key.encode()).digest()
        session = self._sessions.pop(digest, None)
        if session is None or _is_over(session):
            empty = np.zeros(0, dtype=np.int64)
            nobody = Prompt(0, "serve", "", empty, empty, None)
            session = GatewayEpisode(self._serving, nobody, self._sampling, number=self._num_opened)
            self._num_opened += 1
        self._sessions[digest] = session
        self._forget()
        return session

    @property
    def sessions(self) -> Iterable[GatewayEpisode]:
        return list(self._sessions.values())

    def _forget(self) -> None:
        """Forget the sessions that were used longest ago, and of which no request is in progress."""
        num_kept = num_bytes = 0
        for digest, session in reversed(list(self._sessions.items())):
            num_kept += 1 + len(session.tree.nodes)
            num_bytes += session.num_bytes
            if (num_kept > MAX_RESPONSES or num_bytes > MAX_BYTES) and not session.num_running:
                del self._sessions[digest]


def _is_over(session: GatewayEpisode) -> bool:
    """Whether a session is too long to go on. Its requests in progress end in it."""
    share = max(len(session.tree.nodes) / MAX_RESPONSES, session.num_bytes / MAX_BYTES)
    return share >= (1.0 if session.num_running else 0.5)
