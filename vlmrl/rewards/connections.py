"""HTTP connections of the reward server, which are closed when the headers of a request do not come in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


def protocol(headers_timeout_s: float) -> type[asyncio.Protocol]:
    """Make uvicorn's protocol with a deadline for headers, which uvicorn has no setting for.

    A connection is closed `headers_timeout_s` after it was made, or after the first byte of a further request, if the
    request's headers are not complete by then.
    """

    class Protocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(headers_timeout_s, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cycle: RequestResponseCycle | None = self.cycle  # which uvicorn declares without None
            if cycle is not None and not cycle.response_complete:
                self._end_deadline()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(headers_timeout_s, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Protocol
