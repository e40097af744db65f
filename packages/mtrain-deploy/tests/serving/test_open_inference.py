"""The open inference protocol: tensors in and out as KServe's and Triton's clients send and read them; new files."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from tests.serving.files import SIDE, exported
from tests.serving.servers import Server, encoded, plain, serving, until

from mtrain_deploy.exported.metadata import COUNTS, DETECTIONS
from mtrain_deploy.serving.tensors import TensorType
from tests.starts import starts_processes

pytest.importorskip("onnx", reason="the extra export is not installed")


@pytest.fixture(scope="module")
@starts_processes
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(exported(tmp_path_factory.mktemp("v2") / "colours.onnx", "detection")) as started:
        until(lambda: started.client.get(f"{started.url}/v2/health/ready").status_code == 200)
        yield started


def pictures(*colours: tuple[int, int, int]) -> np.ndarray:
    return np.stack([plain(colour, width=SIDE, height=SIDE) for colour in colours])


def infer(
    server: Server, request: dict, rest: bytes = b"", *, model: str = "colours", binary: bool = False
) -> httpx.Response:
    text = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if binary else {}
    return server.client.post(f"{server.url}/v2/models/{model}/infer", content=text + rest, headers=headers)


def given(images: np.ndarray, **more: object) -> dict:
    return {"name": "images", "shape": list(images.shape), "datatype": "UINT8", **more}


def expected(server: Server, images: np.ndarray) -> list[float]:
    """Return the best score of each image by the own protocol."""
    answers = [server.predict(encoded(image), "image/png", confidence=0.0).json() for image in images]
    return [answer["images"][0]["predictions"][0]["score"] for answer in answers]


def test_the_model_says_its_inputs_and_outputs(server):
    found = server.client.get(f"{server.url}/v2/models/colours").json()
    assert found["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, SIDE, SIDE, 3]}]
    assert found["outputs"] == [{"name": "decoded", "datatype": "FP32", "shape": [-1, 1, 8]}]
    assert server.client.get(f"{server.url}/v2/models/colours/versions/1/ready").json() == {"ready": True}
    assert server.client.get(f"{server.url}/v2/health/live").json() == {"live": True}
    (row,) = server.client.post(f"{server.url}/v2/repository/index", json={}).json()
    assert (row["name"], row["version"], row["state"]) == ("colours", "1", "READY")


def test_triton_configuration_and_statistics_are_answered(server):
    infer(server, {"inputs": [given(pictures((0, 0, 0)), data=[0] * 3 * SIDE * SIDE)]})
    url = f"{server.url}/v2/models/colours"
    found = server.client.get(f"{url}/config").json()
    assert found["input"] == [{"name": "images", "data_type": "TYPE_UINT8", "dims": [-1, SIDE, SIDE, 3]}]
    assert found["output"] == [{"name": "decoded", "data_type": "TYPE_FP32", "dims": [-1, 1, 8]}]
    assert found["parameters"] == {}  # its images are not what programs for YOLO models send
    assert server.client.get(f"{server.url}/v2/models/other/config").status_code == 404
    (row,) = server.client.get(f"{url}/versions/1/stats").json()["model_stats"]
    assert (row["name"], row["version"]) == ("colours", "1")
    assert row["inference_count"] >= row["execution_count"] == row["inference_stats"]["compute_infer"]["count"] > 0
    assert row["inference_stats"]["compute_infer"]["ns"] > 0
    (same,) = server.client.get(f"{server.url}/v2/models/stats").json()["model_stats"]
    assert same["execution_count"] == row["execution_count"]


def test_a_client_for_yolo_models_gets_its_entries_and_the_boxes_alone():
    from fastapi import FastAPI  # the extra serve

    from mtrain_deploy.serving.kserve import add_open_inference

    outputs = [TensorType(DETECTIONS, "float32", (1, 300, 6)), TensorType(COUNTS, "int64", (1,))]
    for entries, expected_names in (({"task": "detect"}, [DETECTIONS]), ({}, [DETECTIONS, COUNTS])):
        predictor = SimpleNamespace(name="m", inputs=list, results=lambda: outputs, yolo_entries=lambda e=entries: e)
        app = FastAPI()
        add_open_inference(app, SimpleNamespace(predictor=predictor))
        (answer,) = (route.endpoint for route in app.routes if route.path == "/v2/models/{name}/config")
        found = asyncio.run(answer("m"))
        assert [each["name"] for each in found["output"]] == expected_names
        assert found["parameters"] == ({"metadata": {"string_value": str(entries)}} if entries else {})


def test_tensors_as_json_and_as_bytes_give_what_images_give(server):
    images = pictures((255, 0, 0), (10, 130, 20))
    as_json = infer(server, {"id": "7", "inputs": [given(images, data=images.tolist())]}).json()
    assert (as_json["id"], as_json["model_name"], as_json["model_version"]) == ("7", "colours", "1")
    (output,) = as_json["outputs"]
    values = np.reshape(output["data"], output["shape"])
    assert (values[:, 0, 4] * values[:, 0, 5:].max(1)) == pytest.approx(expected(server, images), abs=1e-6)
    flat = infer(server, {"inputs": [given(images, data=images.ravel().tolist())]}).json()
    assert flat["outputs"] == as_json["outputs"]
    request = {"inputs": [given(images, parameters={"binary_data_size": images.size})]}
    request["parameters"] = {"binary_data_output": True}
    response = infer(server, request, images.tobytes(), binary=True)
    length = int(response.headers["Inference-Header-Content-Length"])
    head = json.loads(response.content[:length])
    assert head["outputs"][0]["parameters"] == {"binary_data_size": len(response.content) - length}
    assert np.array_equal(np.frombuffer(response.content[length:], np.float32), np.float32(output["data"]))


def test_an_empty_batch_is_answered(server):
    answer = infer(server, {"inputs": [given(pictures((0, 0, 0))[:0], data=[])]})
    assert answer.json()["outputs"][0]["shape"] == [0, 1, 8]


ONE = pictures((1, 2, 3))


@pytest.mark.parametrize(
    ("request_of", "status", "words"),
    [
        ({"inputs": [given(ONE, data=[1, 2])]}, 400, "expected 12288 numbers of UINT8"),
        ({"inputs": [given(ONE, data=[256] * ONE.size)]}, 400, "expected 12288 numbers of UINT8"),
        ({"inputs": [given(ONE, data=[0.5] * ONE.size)]}, 400, "expected 12288 numbers of UINT8"),
        ({"inputs": [{**given(ONE, data=[]), "shape": [1, 32, 32, 3]}]}, 400, "expected UINT8 [-1, 64, 64, 3]"),
        ({"inputs": [{**given(ONE, data=[]), "datatype": "FP32"}]}, 400, "expected UINT8 [-1, 64, 64, 3]"),
        ({"inputs": [{**given(ONE, data=[]), "name": "pixels"}]}, 400, "'pixels' is unknown"),
        ({"inputs": []}, 400, "images is missing"),
        ({"outputs": []}, 400, "expected a list of objects"),
        ({"inputs": [given(ONE, parameters={"binary_data_size": ONE.size})]}, 400, "more than the request holds"),
        ({"inputs": [given(ONE, parameters={"binary_data_size": 5})]}, 400, "UINT8 [1, 64, 64, 3] has 12288"),
        (
            {"inputs": [given(ONE, data=ONE.tolist())], "outputs": [{"name": "boxes"}]},
            400,
            "'boxes' is unknown; expected decoded",
        ),
        ({"inputs": [given(np.repeat(ONE, 33, 0), data=[0] * 33 * ONE.size)]}, 413, "33 samples, more than 32"),
    ],
)
def test_wrong_tensors_are_refused_by_name(server, request_of, status, words):
    response = infer(server, request_of)
    assert response.status_code == status
    assert words in response.json()["error"]


def test_bytes_that_belong_to_nothing_and_other_models_are_refused(server):
    request = {"inputs": [given(ONE, parameters={"binary_data_size": ONE.size})]}
    response = infer(server, request, ONE.tobytes() + b"x", binary=True)
    assert (response.status_code, response.json()["error"][:7]) == (400, "1 bytes")
    assert infer(server, request, model="other").status_code == 404
    assert server.client.get(f"{server.url}/v2/models/colours/versions/2").status_code == 404
    long = {"Inference-Header-Content-Length": "99999"}
    refused = server.client.post(f"{server.url}/v2/models/colours/infer", content=b"{}", headers=long)
    assert "Inference-Header-Content-Length" in refused.json()["error"]


@pytest.mark.job
def test_images_of_many_pixels_are_refused(tmp_path):
    with serving(exported(tmp_path / "colours.onnx", "detection"), "--max-request-pixels", "8000") as server:
        until(lambda: server.client.get(f"{server.url}/v2/health/ready").status_code == 200)
        two = pictures((1, 2, 3), (4, 5, 6))
        assert infer(server, {"inputs": [given(two[:1], data=two[:1].tolist())]}).status_code == 200
        response = infer(server, {"inputs": [given(two, data=two.tolist())]})
        assert (response.status_code, "million pixels" in response.json()["error"]) == (413, True)
