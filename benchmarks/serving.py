"""Compare `mtrain serve` with a bare loop over ONNX Runtime: the same file, images and threads, in turn.

The loop does for each image what a request needs: decode, prepare, compute (one image at a time), read predictions.
Its process and that of the server stay alive; in each round every form is measured for the same number of images, and
the ratio is taken within the round. Clients are coroutines of this process with one open connection each.

    python -m benchmarks.serving --weights digits.onnx --images digits/images
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from mtrain_deploy import serving
from mtrain_deploy.serving.decoding import decode
from mtrain_deploy.serving.predictor import Predictor
from mtrain_deploy.serving.uploads import Upload

CONFIDENCE = 0.25
WARMUP = 8


@dataclass(frozen=True)
class Block:
    """One measurement."""

    rate: float
    """Requests per second."""
    latencies_ms: np.ndarray
    cpu_ms: float
    """CPU time of the process that computes, per request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="an exported model")
    parser.add_argument("--images", type=Path, required=True, help="a folder")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--requests", type=int, default=200, help="images of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads that compute, in both")
    parser.add_argument("--flags", default="", help="further flags of `mtrain serve`")
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = sorted(file for file in options.images.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    contents = [files[number % len(files)].read_bytes() for number in range(options.requests)]
    if options.loop:
        bare_loop(options.weights, contents, options.threads)
        return
    rows = measured(options, contents)
    print(f"{options.weights.name}, {options.requests} requests a measurement, median of {options.rounds} rounds")
    print(
        "| clients | requests/s | of the loop's | p50 ms | p99 ms | CPU ms | of the loop's |\n|--:|--:|--:|--:|--:|--:|--:|"
    )
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(values) + " |")


def measured(options: argparse.Namespace, contents: Sequence[bytes]) -> dict[str, list[str]]:
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    again = [sys.executable, "-m", "benchmarks.serving", *sys.argv[1:], "--loop"]
    command = [sys.executable, "-m", "mtrain", "serve", "--weights", str(options.weights), "--port", "0"]
    command += ["--threads", str(options.threads), *options.flags.split()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    results: dict[str, list[Block]] = {}
    with subprocess.Popen(again, **pipes) as loop, subprocess.Popen(command, **pipes) as server:
        assert loop.stdin
        assert loop.stdout
        assert server.stdout
        try:
            server.stdout.readline()
            port = int(re.search(r":(\d+)/", server.stdout.readline())[1])
            assert loop.stdout.readline() == "ready\n"
            asyncio.run(block(port, contents[:WARMUP], 2))
            for number in range(options.rounds):
                names = ["bare loop", *map(str, options.concurrency)]
                for name in names if number % 2 else names[::-1]:
                    process = psutil.Process((loop if name == "bare loop" else server).pid)
                    before = sum(process.cpu_times()[:2])
                    if name == "bare loop":
                        loop.stdin.write("go\n")
                        loop.stdin.flush()
                        rate, seconds = json.loads(loop.stdout.readline())
                    else:
                        rate, seconds = asyncio.run(block(port, contents, int(name)))
                    cpu_ms = (sum(process.cpu_times()[:2]) - before) / len(contents) * 1000
                    results.setdefault(name, []).append(Block(rate, np.asarray(seconds) * 1000, cpu_ms))
        finally:
            server.terminate()
            loop.terminate()
    bare = results["bare loop"]
    return {name: row(results[name], bare) for name in ("bare loop", *map(str, options.concurrency))}


def row(blocks: Sequence[Block], bare: Sequence[Block]) -> list[str]:
    pairs = list(zip(blocks, bare, strict=True))
    rates = [
        f"{median(block.rate for block in blocks):.0f}",
        f"{median(a.rate / b.rate for a, b in pairs):.2f}",
    ]
    spans = [f"{median(np.percentile(block.latencies_ms, part) for block in blocks):.1f}" for part in (50, 99)]
    cpu = [f"{median(block.cpu_ms for block in blocks):.1f}", f"{median(a.cpu_ms / b.cpu_ms for a, b in pairs):.2f}"]
    return rates + spans + cpu


def bare_loop(weights: Path, contents: Sequence[bytes], threads: int) -> None:
    """Measure once for each line of standard input; print [requests per second, seconds of each]."""
    predictor = Predictor.open(weights, threads=threads)
    limit = serving.ServeSettings().max_pixels

    def answer(content: bytes) -> str:
        sample = predictor.sample(decode(Upload("image", content), max_pixels=limit))
        found = predictor.read(predictor.outputs([sample])[0], sample, confidence=CONFIDENCE)
        return json.dumps(list(found.rows))

    for content in contents[:WARMUP]:
        answer(content)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds, started = [], time.perf_counter()
        for content in contents:
            begun = time.perf_counter()
            answer(content)
            seconds.append(time.perf_counter() - begun)
        print(json.dumps([len(contents) / (time.perf_counter() - started), seconds]), flush=True)


async def block(port: int, contents: Sequence[bytes], clients: int) -> tuple[float, list[float]]:
    """Send all images with so many clients at once; return requests per second, and the seconds of each."""
    remaining, seconds = iter(contents), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for content in remaining:
            begun = time.perf_counter()
            head = f"POST /v1/predict?confidence={CONFIDENCE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            status = await reader.readline()
            assert b" 200 " in status, status
            length = 0
            while (line := (await reader.readline()).strip()) != b"":
                length = int(line[15:]) if line.lower().startswith(b"content-length:") else length
            await reader.readexactly(length)
            seconds.append(time.perf_counter() - begun)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(contents) / (time.perf_counter() - started), seconds


if __name__ == "__main__":
    main()
