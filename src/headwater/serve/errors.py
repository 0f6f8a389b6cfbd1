"""Every error as the OpenAI API words it: an HTTP status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.responses import Response

from headwater.errors import BadRequest, EngineDead, HeadwaterError, NeverFits, NoChatTemplate

ERROR_TYPES = {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.CONFLICT: "conflict_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}
"""The ``type`` of an error by its status; every other status is an invalid_request_error."""

STATUS_OF_KIND = {
    "bad_request": HTTPStatus.BAD_REQUEST,
    "never_fits": HTTPStatus.BAD_REQUEST,
    "overloaded": HTTPStatus.SERVICE_UNAVAILABLE,
}
"""The status for each ``Delta.error_kind`` that is not the engine's own fault."""


class ApiError(HeadwaterError):
    """An error with the HTTP status it is answered with."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **details: int
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.details = details
        """Further members of the error object, such as the number of busy blocks."""


def request_failed(message: str, kind: str | None) -> ApiError:
    """The error for a request that the engine refused or that failed in it."""
    status = STATUS_OF_KIND.get(kind or "internal", HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(status, message, code=kind)


def as_api_error(error: Exception) -> ApiError:
    """How ``error`` is answered. What nobody foresaw is told without its details; they are for the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        code = {NeverFits: "context_length_exceeded", NoChatTemplate: "no_chat_template"}.get(type(error))
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.field, code=code)
    if isinstance(error, EngineDead):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine is not running: {error}", code="engine_dead")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log has the details")


def envelope(error: ApiError) -> bytes:
    """The JSON body for ``error``."""
    kind = ERROR_TYPES.get(HTTPStatus(error.status), "invalid_request_error")
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code, **error.details}
    return msgspec.json.encode({"error": body})


def error_response(error: Exception) -> Response:
    """The whole HTTP answer for ``error``."""
    known = as_api_error(error)
    headers = {"Retry-After": "1"} if known.status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return Response(envelope(known), known.status, headers, "application/json")
