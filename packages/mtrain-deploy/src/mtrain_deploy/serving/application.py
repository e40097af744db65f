"""The HTTP side of a server: paths, answers to errors, headers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtrain import __version__
from mtrain_deploy.serving import metrics, page
from mtrain_deploy.serving.kserve import add_open_inference
from mtrain_deploy.serving.predictor import Predictor
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.service import Service
from mtrain_deploy.serving.settings import ServeSettings

_STRICT_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MAX_KEY = 100
"""Characters of a key that a refusal repeats."""
_BODY = {
    "required": True,
    "content": {
        "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
        "image/png": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
    },
}


def build(predictor: Predictor, settings: ServeSettings) -> FastAPI:
    """Return the ASGI application that answers with a model. ``state.service`` is its ``Service``."""
    service = Service(predictor, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    # The pages of FastAPI's documentation load scripts from another site. Its route of the schema has no dependencies.
    app = FastAPI(
        title="mtrain serve",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(_check_keys)],
    )
    app.state.service = service
    _add_errors(app)
    _add_predict(app, service)
    _add_information(app, service)
    add_open_inference(app, service)
    app.add_middleware(_Counted, service=service)
    return app


async def _check_keys(request: Request) -> None:
    """Refuse keys of the query that the path does not have, and those that are given twice.

    Raises:
        Refusal: There is one; it is named.
    """
    route = request.scope["route"]
    known = [parameter.alias for parameter in route.dependant.query_params]
    expected = f"expected {' or '.join(known)}" if known else "this path has none"
    given = [key for key, _ in request.query_params.multi_items()]
    for key in given:
        if key not in known:
            raise Refusal(400, f"the query has the unknown key {key[:_MAX_KEY]!r}; {expected}")
        if given.count(key) > 1:
            raise Refusal(400, f"the query has {key} {given.count(key)} times; give it once")


def _add_predict(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/predict",
        openapi_extra={"requestBody": _BODY},
        responses={400: {"description": "One sentence under the key `error`; so for every status from 400"}},
        response_class=JSONResponse,
    )
    async def predict(
        request: Request,
        confidence: Annotated[float, Query(ge=0, lt=1, description="Lowest score that is kept")] = 0.25,
        draw: Annotated[bool, Query(description="Answer with the image, on which is drawn what was found")] = False,  # noqa: FBT002 - a parameter of the address
    ) -> Response:
        """Find objects, the class or the mask of one image or of several."""
        return await service.answer(request, confidence=confidence, draw=draw)


def _add_information(app: FastAPI, service: Service) -> None:
    shown = page.content()

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "live"}

    @app.get("/readyz")
    async def readyz() -> Response:
        """Say whether predictions are answered: status 200 or 503."""
        return JSONResponse({"status": service.state}, status_code=200 if service.state == "ready" else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        """Return metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/model")
    async def model() -> dict[str, Any]:
        """Describe the model and the limits of requests."""
        settings = service.settings
        limits = {
            "body_bytes": settings.max_body_bytes,
            "pixels": settings.max_pixels,
            "request_pixels": settings.request_pixels,
            "images": service.max_files,
            "queue": settings.queue,
            "batch": service.max_batch,
            "timeout_s": settings.timeout_s,
        }
        return {**service.predictor.description(), "limits": limits}

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> dict[str, Any]:
        return app.openapi()

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return Response(shown.html, media_type="text/html", headers={"Content-Security-Policy": shown.policy})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def answer_refusal(_: Request, error: Refusal) -> Response:
        return _sentence(error.status, error.sentence, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # One sentence is promised for every refusal: the first error is enough to correct the request.
        first = error.errors()[0]
        return _sentence(400, f"{first['loc'][-1]}: given {str(first['input'])[:100]!r}; {_lower(first['msg'])}")

    @app.exception_handler(HTTPException)
    async def wrong(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:100]
        sentences = {
            404: f"there is nothing at {path}; images are sent to /v1/predict, tensors to /v2/models/NAME/infer",
            405: f"{request.method} is not possible at {path}; images are sent with POST to /v1/predict",
        }
        return _sentence(error.status_code, sentences.get(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def answer_failure(_: Request, error: Exception) -> Response:
        return _sentence(500, "the server has failed; its log has the reason", {"Connection": "close"})


def _sentence(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status_code=status, headers=dict(headers or {}))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


class _Counted:
    """Adds headers to every answer, and counts it by path and status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name.encode().lower(): value.encode() for name, value in _STRICT_HEADERS.items()}
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(item for item in known.items() if item[0] not in present)]
                self._count(scope, message["status"])
            await send(message)

        await self._app(scope, receive, count_and_send)

    def _count(self, scope: Scope, status: int) -> None:
        # Paths that strangers make up would fill the memory: only those of the application are labels.
        route = scope.get("route")
        self._service.metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()
