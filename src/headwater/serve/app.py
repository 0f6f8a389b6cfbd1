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
from headwater.serve.explain.diff import DiffRequest, explain_diff
from headwater.serve.explain.routes import explain, explain_finished
from headwater.serve.front import Front
from headwater.serve.guard import Guard
from headwater.serve.limits import HeaderLimit
from headwater.serve.openai.chat import create_chat_completion
from headwater.serve.openai.completions import create_completion
from headwater.serve.openai.models import get_model, list_models
from headwater.serve.openai.protocol import ChatRequest, CompletionRequest
from headwater.serve.stream import ClientLeft
from headwater.serve.ui import routes as ui

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client left; nobody reads it."""


def create_app(front: Front) -> FastAPI:
    """The application that serves ``front``."""
    app = FastAPI(title="Headwater", version=version("headwater"))
    _add_openai_routes(app, front)
    _add_admin_routes(app, front)
    _add_ui_routes(app, front)
    _add_error_handlers(app)
    app.add_middleware(HeaderLimit)
    asking = {"/ui": lambda: ui.asking_page(front)}
    # The last one added is asked first.
    app.add_middleware(Guard, access=front.access, routes=app.routes, asking=asking)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _add_openai_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=_body("CompletionRequest"))
    async def completions(request: Request) -> Response:
        return await create_completion(front, request)

    @app.post("/v1/chat/completions", openapi_extra=_body("ChatRequest"))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(front, request)

    @app.post("/v1/explain", openapi_extra=_body("CompletionRequest", "ChatRequest"))
    async def explain_request(request: Request) -> Response:
        return await explain(front, request)

    @app.post("/v1/explain/diff", openapi_extra=_body("DiffRequest"))
    async def explain_difference(request: Request) -> Response:
        return await explain_diff(front, request)

    @app.get("/v1/explain/{request_id}")
    async def explain_answer(request: Request, request_id: str) -> Response:
        return explain_finished(front, request, request_id)

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


def _add_ui_routes(app: FastAPI, front: Front) -> None:
    @app.get("/ui")
    async def page() -> Response:
        return ui.page(front)

    @app.get("/ui/stream")
    async def stream() -> Response:
        return ui.stream(front)

    @app.get("/ui/{name}")
    async def asset(name: str) -> Response:
        return ui.asset(front, name)

    @app.get("/admin/view")
    async def view() -> Response:
        return await ui.view(front)

    @app.get("/admin/view/blocks/{block}")
    async def view_block(block: int) -> Response:
        return await ui.view_block(front, block)

    @app.get("/admin/view/branches/{branch}")
    async def view_branch(branch: str) -> Response:
        return await ui.view_branch(front, branch)


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


def _body(*models: str) -> dict[str, Any]:
    schemas = [{"$ref": f"#/components/schemas/{model}"} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description; bodies are read by `openai/fields.py`, so their schemas are added here."""
    described = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation"), (DiffRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    described.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return described
