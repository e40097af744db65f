"""The paths of the open inference protocol, version 2, which clients of KServe and Triton use."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from mtrain import __version__
from mtrain_deploy.exported.metadata import COUNTS
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

    @app.get("/v2/models/stats")
    async def all_statistics() -> dict[str, Any]:
        """Describe what was computed, as Triton does."""
        return _statistics(service)

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

    @app.get(path + "/config")
    async def configuration(name: str, version: str = VERSION) -> dict[str, Any]:
        """Describe the model as Triton's configuration does, with what ultralytics' client looks for."""
        predictor = _serve(service, name, version)
        entries = predictor.yolo_entries()
        # That client takes the first output by name for the boxes. One that is not listed can still be asked for.
        listed = [each for each in predictor.results() if not entries or each.name != COUNTS]
        return {
            "name": name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": 0,
            "input": [each.as_triton() for each in predictor.inputs()],
            "output": [each.as_triton() for each in listed],
            "parameters": {"metadata": {"string_value": str(entries)}} if entries else {},
        }

    @app.get(path + "/stats")
    async def statistics(name: str, version: str = VERSION) -> dict[str, Any]:
        """Describe what was computed, as Triton does."""
        _serve(service, name, version)
        return _statistics(service)

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


def _statistics(service: Service) -> dict[str, Any]:
    value = service.metrics.value
    batches = int(value("batch_size_count"))

    def duration(count: float, seconds: float) -> dict[str, int]:
        return {"count": int(count), "ns": int(seconds * 1e9)}

    times = {
        "success": duration(value("predict_seconds_count"), value("predict_seconds_sum")),
        "fail": duration(value("failed_images_total"), 0),
        "compute_infer": duration(batches, value("forward_seconds_sum")),
    }
    row = {"name": service.predictor.name, "version": VERSION, "inference_stats": times}
    return {"model_stats": [{**row, "inference_count": int(value("batch_size_sum")), "execution_count": batches}]}


def _readiness(service: Service) -> Response:
    is_ready = service.state == "ready"
    return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)
