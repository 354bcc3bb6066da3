"""Errors as OpenAI's clients know them: a status, and a body of one shape."""

from __future__ import annotations

import msgspec

from inferscope.engine.server.wire import Refused


class Left(Exception):
    """Nobody waits for an answer any more, before it is complete."""


class ApiError(Exception):
    """A request that gets no answer but this."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Say what happened.

        Args:
            status: of HTTP.
            message: what, with which value, and what to do next; never any prompt's text.
            param: the field that it is about.
            code: a word for programs.
            headers: of the answer.
        """
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = msgspec.json.encode(
            {
                "error": {
                    "message": message,
                    "type": _TYPES.get(status, "invalid_request_error"),
                    "param": param,
                    "code": code,
                }
            }
        )


_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def bad_field(param: str, message: str) -> ApiError:
    """Return the error of a field whose value cannot be used."""
    return ApiError(400, message, param=param, code="invalid_value")


def refusal(refused: Refused) -> ApiError:
    """Return the engine's no as the client gets it."""
    if refused.kind == "queue_full":
        return ApiError(
            429, refused.message, code="queue_full", headers={"retry-after": _RETRY_AFTER_S}
        )
    if refused.kind in ("stopped", "lost"):
        return ApiError(503, refused.message, code="engine_stopped")
    if refused.kind == "failed":
        return ended_early("error")
    return ApiError(400, refused.message, param="prompt", code="invalid_prompt")


def ended_early(finish: str) -> ApiError:
    """Return the error of a request that the server ended before its time."""
    if finish == "server_abort":
        return ApiError(503, "the server is stopping. Try again.", code="server_abort")
    return ApiError(500, f"the request ended as {finish!r}. See the server's log.", code=finish)


_RETRY_AFTER_S = "1"
"""A queue moves within a second or is better asked about by somebody who waits longer himself."""
