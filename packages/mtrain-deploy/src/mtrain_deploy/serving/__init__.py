"""An HTTP endpoint for exported models: ``mtrain serve``, ``mtrain.serve`` and an ASGI application.

No framework is imported: ONNX Runtime computes. FastAPI, uvicorn and python-multipart are in the extra ``serve``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.spec import remedies
from mtrain_deploy.serving.settings import ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["ServeSettings", "app", "serve"]
_NEEDED = ("fastapi", "uvicorn", "multipart", "prometheus_client", "onnxruntime", "cv2", "PIL")


def app(weights: str | os.PathLike[str], **settings: Any) -> "FastAPI":
    """Return an ASGI application that answers with an exported model, for any ASGI server.

    A file ``asgi.py`` with ``application = mtrain_deploy.serving.app("digits.onnx")`` is run by
    ``uvicorn asgi:application`` or ``gunicorn -k uvicorn.workers.UvicornWorker asgi:application``. Each process has a
    model, a queue and metrics of its own.

    Args:
        weights: A file that ``mtrain export --format onnx`` wrote.
        settings: Values of ``ServeSettings``; the address is the server's own matter.

    Raises:
        UsageError: A library is missing, a setting is out of range, or the file cannot be used.
    """
    return _application(weights, ServeSettings(**settings))


def serve(weights: str | os.PathLike[str], *, say: Callable[[str], None] = print, **settings: Any) -> int:
    """Answer requests with an exported model until SIGTERM or Ctrl-C, as ``mtrain serve`` does.

    Call it from the main thread, which alone is told of signals.

    Args:
        weights: A file that ``mtrain export --format onnx`` wrote.
        say: Takes the lines for people, the first with the address.
        settings: Values of ``mtrain_deploy.serving.ServeSettings``, such as ``port=8080``.

    Returns:
        The exit code: 0 if every request in flight was answered, else 1.

    Raises:
        UsageError: A library is missing, a setting is out of range, the file cannot be used, or the address is in use.
    """
    chosen = ServeSettings(**settings)
    application = _application(weights, chosen)
    from mtrain_deploy.serving.process import serve_until_asked

    description = application.state.service.predictor.description()
    classes = len(description["class_names"])
    say(f"{weights}: {description['model']}, {description['task']}, {classes} classes, {description['precision']}")
    return serve_until_asked(application, chosen, say)


def _application(weights: str | os.PathLike[str], settings: ServeSettings) -> "FastAPI":
    remedies.require(_NEEDED, what="serve", extra="mtrain-deploy")
    # These modules import FastAPI and ONNX Runtime, whose absence was told above in one sentence.
    from mtrain_deploy.serving.application import build
    from mtrain_deploy.serving.predictor import Predictor

    return build(Predictor.open(Path(weights), threads=settings.threads), settings)
