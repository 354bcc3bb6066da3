"""HTTP errors in OpenAI's form: a status and a JSON body."""

from __future__ import annotations

import msgspec

from inferscope.engine.server.wire import Refused


class ClientDisconnected(Exception):
    """Error: the client disconnected before its response was complete."""


class ApiError(Exception):
    """Error response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Create the error response.

        Args:
            status: HTTP status.
            message: what failed, the value, and what to do next; never a prompt's text.
            param: name of the invalid field.
            code: error code for programs.
            headers: additional response headers.
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
    """Return the error response for an invalid field value."""
    return ApiError(400, message, param=param, code="invalid_value")


def refusal(refused: Refused) -> ApiError:
    """Return the error response for a request that the engine rejected."""
    if refused.kind == "queue_full":
        return ApiError(
            429, refused.message, code="queue_full", headers={"retry-after": _RETRY_AFTER_S}
        )
    if refused.kind in ("stopped", "lost"):
        return ApiError(503, refused.message, code="engine_stopped")
    if refused.kind == "no_kv":
        return ApiError(503, refused.message, code="kv_transfer_failed")
    if refused.kind == "failed":
        return ended_early("error")
    return ApiError(400, refused.message, param="prompt", code="invalid_prompt")


def ended_early(finish: str) -> ApiError:
    """Return the error response for a request that the server ended early."""
    if finish == "server_abort":
        return ApiError(503, "the server is stopping. Try again.", code="server_abort")
    return ApiError(500, f"the request ended as {finish!r}. See the server's log.", code=finish)


_RETRY_AFTER_S = "1"
"""Seconds until a client should retry; a queue moves within a second under normal load."""
