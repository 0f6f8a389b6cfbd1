"""The web application: which path is answered by what, and how errors look."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headwater.errors import HeadwaterError
from headwater.serve.admin import routes as admin
from headwater.serve.errors import ApiError, error_response
from headwater.serve.front import Front
from headwater.serve.limits import HeaderLimit
from headwater.serve.openai.chat import create_chat_completion
from headwater.serve.openai.completions import create_completion
from headwater.serve.openai.models import get_model, list_models
from headwater.serve.openai.protocol import ChatRequest, CompletionRequest
from headwater.serve.stream import ClientLeft

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client left; nobody reads it."""


def create_app(front: Front) -> FastAPI:
    """The application that serves ``front``."""
    app = FastAPI(title="Headwater", version=version("headwater"))
    _add_openai_routes(app, front)
    _add_admin_routes(app, front)
    _add_error_handlers(app)
    app.add_middleware(HeaderLimit)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _add_openai_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=_body("CompletionRequest"))
    async def completions(request: Request) -> Response:
        return await create_completion(front, request)

    @app.post("/v1/chat/completions", openapi_extra=_body("ChatRequest"))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(front, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return list_models(front)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return get_model(front, name)


class ResetQuery(BaseModel):
    """The query of a reset; another name in it is refused."""

    model_config = ConfigDict(extra="forbid")

    force: bool = False


def _add_admin_routes(app: FastAPI, front: Front) -> None:
    @app.get("/health")
    async def health() -> Response:
        return admin.health(front)

    @app.get("/metrics")
    async def metrics() -> Response:
        return admin.metrics(front)

    @app.get("/version")
    async def show_version() -> Response:
        return admin.show_version()

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(query: Annotated[ResetQuery, Query()]) -> Response:
        return await admin.reset_prefix_cache(front, force=query.force)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HeadwaterError)
    async def known(request: Request, error: HeadwaterError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientLeft)
    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path[:200]}"
        response = error_response(ApiError(error.status_code, f"{error.detail}: {what}"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(ApiError(400, f"{name}: {first['msg']}", param=name))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return error_response(error)


def _body(model: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description; bodies are read by `openai/fields.py`, so their schemas are added here."""
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    described.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return described
