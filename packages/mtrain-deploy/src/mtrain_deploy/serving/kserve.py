"""The paths of the open inference protocol, version 2, which clients of KServe and Triton use."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from mtrain import __version__
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.service import Service
from mtrain_deploy.serving.tensors import VERSION

_MODEL = "/v2/models/{name}"
_MODELS = (_MODEL, _MODEL + "/versions/{version}")


def add_open_inference(app: FastAPI, service: Service) -> None:
    """Add the paths ``/v2/...`` to an application."""

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Describe the server."""
        return {"name": "mtrain", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Say that the process answers."""
        return {"live": True}

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        """Say whether predictions are answered: status 200 or 503."""
        return _readiness(service)

    @app.post("/v2/repository/index")
    async def index() -> list[dict[str, str]]:
        """List the one model, for clients of Triton that look for a name."""
        state = "READY" if service.state == "ready" else "UNAVAILABLE"
        return [{"name": service.predictor.name, "version": VERSION, "state": state, "reason": ""}]

    for path in _MODELS:
        _add_model(app, service, path)


def _add_model(app: FastAPI, service: Service, path: str) -> None:
    @app.get(path)
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """Describe the inputs and outputs of the model."""
        predictor = _serve(service, name, version)
        return {
            "name": name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [each.as_json() for each in predictor.inputs()],
            "outputs": [each.as_json() for each in predictor.results()],
        }

    @app.get(path + "/ready")
    async def model_ready(name: str, version: str = VERSION) -> Response:
        """Say whether the model answers: status 200 or 503."""
        _serve(service, name, version)
        return _readiness(service)

    @app.post(path + "/infer", response_class=JSONResponse)
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Compute the outputs of the model for tensors, as it was exported."""
        _serve(service, name, version)
        return await service.infer(request, name=name)


def _serve(service: Service, name: str, version: str) -> Any:
    known = service.predictor.name
    if name != known or version != VERSION:
        raise Refusal(
            404,
            f"there is no model {name[:100]!r} of version {version[:20]!r}; expected {known!r} of version {VERSION}",
        )
    return service.predictor


def _readiness(service: Service) -> Response:
    is_ready = service.state == "ready"
    return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)
