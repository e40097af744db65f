"""Keys of the query: what a path does not know is refused by name, in the process of the test."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.serving.predictors import Colours
from tests.serving.servers import encoded, plain

from mtrain_deploy.serving.application import build
from mtrain_deploy.serving.settings import ServeSettings

PATHS = ("/healthz", "/readyz", "/metrics", "/v1/model", "/openapi.json", "/")
IMAGE = encoded(plain((255, 0, 0)))


@pytest.fixture
def ask() -> Iterator[Any]:
    """A function that requests an address of an application that computes."""
    app = build(Colours(), ServeSettings(threads=1))
    with asyncio.Runner() as runner:
        computing = runner.get_loop().create_task(app.state.service.run())

        def asked(method: str, address: str, content: bytes = b"") -> httpx.Response:
            async def request() -> httpx.Response:
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                    return await client.request(method, address, content=content)

            return runner.run(request())

        yield asked
        computing.cancel()


@pytest.mark.parametrize("path", PATHS)
def test_a_path_without_keys_refuses_any(ask, path):
    answer = ask("GET", f"{path}?confidence=0.5")
    assert answer.status_code == 400
    assert "confidence" in answer.json()["error"]
    assert ask("GET", path).status_code in (200, 503)


@pytest.mark.parametrize(
    "query", ["confidense=0.9", "conf=0.9&confidence=0.3", "confidence=x&treshold=0.5", "Draw=true"]
)
def test_an_unknown_key_is_refused_by_name_with_the_known_ones(ask, query):
    answer = ask("POST", f"/v1/predict?{query}", IMAGE)
    unknown = next(part for part in query.replace("=", "&").split("&") if part not in ("confidence", "draw"))
    sentence = answer.json()["error"]
    assert answer.status_code == 400
    assert unknown in sentence
    assert "confidence or draw" in sentence


def test_a_key_that_is_given_twice_is_refused_because_only_one_value_can_count(ask):
    answer = ask("POST", "/v1/predict?confidence=0.1&confidence=0.9", IMAGE)
    assert (answer.status_code, "confidence 2 times" in answer.json()["error"]) == (400, True)


def test_known_keys_are_what_they_were(ask):
    answer = ask("POST", "/v1/predict?confidence=0.1&draw=false", IMAGE)
    assert (answer.status_code, answer.json()["images"][0]["predictions"]) == (200, [{"class": "red", "score": 1.0}])
    assert {"confidence", "draw"} == {
        each["name"] for each in ask("GET", "/openapi.json").json()["paths"]["/v1/predict"]["post"]["parameters"]
    }
