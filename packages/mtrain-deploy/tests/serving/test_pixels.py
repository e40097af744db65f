"""What large images may take: a request of many is refused by its headers, and leaves others their turn."""

import asyncio
import io
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.serving.predictors import Colours

from mtrain.core.interfaces import Array
from mtrain.errors import UsageError
from mtrain_deploy.serving import service
from mtrain_deploy.serving.application import build
from mtrain_deploy.serving.decoding import SHARE_PIXELS, PixelBudget
from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.settings import ServeSettings

WAIT_S = 60.0


class Decoding:
    """In place of the decoder: notes what it decodes, and waits where the name of the image begins with ``wait``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def __call__(self, upload: Any, *, max_pixels: int) -> Array:
        self.begun.append(upload.name)
        if upload.name.startswith("wait"):
            assert self.go_on.wait(WAIT_S)
        return np.full((8, 8, 3), (0, 0, 255), np.uint8)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    made = Decoding()
    monkeypatch.setattr(service, "decode", made)
    return made


def image(width: int, height: int, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height)).save(content, form)
    return content.getvalue()


SMALL = image(10, 10)


class Client:
    """Requests of an application in this process."""

    def __init__(self, client: httpx.AsyncClient, app: Any) -> None:
        self._client, self.service = client, app.state.service

    async def predict(self, images: dict[str, bytes]) -> httpx.Response:
        files = [("file", item) for item in images.items()]
        return await asyncio.wait_for(self._client.post("/v1/predict", files=files), WAIT_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)


def with_client(scenario: Callable[[Client], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a scenario with an application that computes."""

    async def running() -> None:
        app = build(Colours(), ServeSettings(**settings))
        computing = asyncio.create_task(app.state.service.run())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            await scenario(Client(client, app))
        computing.cancel()

    asyncio.run(running())


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_images_are_counted_by_their_headers_before_any_is_decoded(decoding, form):
    content = image(30, 20, form)

    async def scenario(client: Client) -> None:
        answer = await client.predict({f"{number}.x": content for number in range(4)})
        assert answer.status_code == 413
        sentence = answer.json()["error"]
        assert "0.0024 million pixels" in sentence  # 4 * 30 * 20
        assert "0.002399 million" in sentence
        assert "send fewer or smaller" in sentence
        assert decoding.begun == []
        assert (await client.predict({f"{number}.x": content for number in range(3)})).status_code == 200
        assert client.service.in_work == 0

    with_client(scenario, max_request_pixels=2399, threads=1)


def test_a_request_may_have_twice_the_pixels_of_an_image_unless_told_otherwise():
    assert ServeSettings(max_pixels=1000).request_pixels == 2000
    assert ServeSettings(max_pixels=1000, max_request_pixels=500).request_pixels == 500
    with pytest.raises(UsageError, match="max_request_pixels"):
        ServeSettings(max_request_pixels=0)


def test_while_a_request_decodes_a_thread_is_left_for_others(decoding):
    async def scenario(client: Client) -> None:
        large = asyncio.create_task(client.predict({f"wait{number}": SMALL for number in range(6)}))
        await client.until(lambda: len(decoding.begun) == 2)
        answer = await client.predict({"small": SMALL})
        assert (answer.status_code, decoding.begun) == (200, ["wait0", "wait1", "small"])
        decoding.go_on.set()
        assert (await large).status_code == 200

    with_client(scenario, threads=3)


def test_requests_take_turns_on_the_only_thread(decoding):
    async def scenario(client: Client) -> None:
        first = asyncio.create_task(client.predict({f"wait{number}": SMALL for number in range(8)}))
        await client.until(lambda: decoding.begun == ["wait0"])
        others = [asyncio.create_task(client.predict({f"other{number}": SMALL})) for number in range(2)]
        await client.until(lambda: client.service.in_work == 10 and client.service._pool._work_queue.qsize() == 2)
        decoding.go_on.set()
        assert [(await each).status_code for each in (first, *others)] == [200, 200, 200]
        # Of the others the sizes are read first, in turn with images of the first request: two or three of these pass,
        # as fast as the event loop is. Without turns all eight did.
        assert max(decoding.begun.index(f"other{number}") for number in range(2)) < decoding.begun.index("wait6")

    with_client(scenario, threads=1)


def test_large_images_wait_outside_and_small_ones_are_still_taken():
    metrics = Metrics()
    budget = PixelBudget(10_000_000, metrics)
    with budget.hold([SHARE_PIXELS + 30_000_000]):
        with pytest.raises(Refusal) as refusal, budget.hold([SHARE_PIXELS + 10_000_001]):
            pass
        assert (refusal.value.status, refusal.value.headers["Retry-After"]) == (503, "1")
        with budget.hold([SHARE_PIXELS + 5_000_000, SHARE_PIXELS + 5_000_000]), budget.hold([SHARE_PIXELS] * 32):
            assert b"mtrain_pixels_in_work 4e+07" in metrics.text()
            with pytest.raises(Refusal), budget.hold([SHARE_PIXELS + 1]):
                pass
    assert b"mtrain_pixels_in_work 0.0" in metrics.text()
