"""Pages while a long run is being read: other pages answer, and the long one is read in pieces."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra ui is not installed")

from starlette.requests import Request
from starlette.responses import Response
from tests.pages.folders import records, start, update, write_run

from mtrain.records.history import Tail
from mtrain_ui.pages import app, following, overview, timeline
from mtrain_ui.pages.app import Pages
from mtrain_ui.pages.folder import Runs
from mtrain_ui.pages.following import Followers
from mtrain_ui.pages.timeline import Follower

WAIT_S = 60.0


class Held:
    """Calls of a function about the run ``big``, which wait until they are let go."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, path: Path) -> None:
        if "big" in path.parts:
            self.begun.set()
            assert self.released.wait(WAIT_S)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.released.set()


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    write_run(tmp_path / "big", records(300))
    write_run(tmp_path / "small", records(3))
    return Pages(Runs(tmp_path))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def asked(page: Any, name: str = "", query: bytes = b"") -> Response:
    scope = {"type": "http", "path_params": {"name": name}, "query_string": query, "headers": []}
    return page(Request(scope))


def text(response: Response) -> str:
    assert response.status_code == 200
    return bytes(response.body).decode()


def test_while_a_run_is_being_read_other_pages_answer(pages, pool, held, monkeypatch):
    read = Tail.iterate

    def reading(self: Tail, **limits: Any) -> Any:
        held(self.path)
        return read(self, **limits)

    monkeypatch.setattr(Tail, "iterate", reading)
    big = pool.submit(asked, pages.run, "big")
    assert held.begun.wait(WAIT_S)
    others = {
        page: pool.submit(asked, getattr(pages, page), "small") for page in ("run", "live", "index", "rows", "report")
    }
    answered = {page: text(other.result(WAIT_S)) for page, other in others.items()}
    assert "made all its updates" in answered["live"]
    assert "/run/small" in answered["rows"]
    # The same run, and a comparison with it, show how far it has been read.
    assert "being read: 0 %" in text(pool.submit(asked, pages.live, "big").result(WAIT_S))
    assert "being read: 0 %" in text(pool.submit(asked, pages.comparison, "", b"run=big&run=small").result(WAIT_S))
    assert not big.done()
    held.released.set()
    assert "made all its updates" in text(big.result(WAIT_S))


def test_while_the_list_is_being_read_other_pages_answer_and_it_is_shown_as_it_was(
    pages, pool, held, monkeypatch, tmp_path
):
    ends = overview._ends

    def reading(run: Any) -> Any:
        held(run.path)
        return ends(run)

    monkeypatch.setattr(overview, "_ends", reading)
    first = pool.submit(asked, pages.index)
    assert held.begun.wait(WAIT_S)
    assert "made all its updates" in text(pool.submit(asked, pages.run, "small").result(WAIT_S))
    busy = pool.submit(asked, pages.rows).result(WAIT_S)
    assert (busy.status_code, "retry-after" in busy.headers) == (503, True)
    held.released.set()
    assert "/run/big" in text(first.result(WAIT_S))
    held.begun.clear()
    held.released.clear()
    write_run(tmp_path / "big", records(301))
    again = pool.submit(asked, pages.rows)
    assert held.begun.wait(WAIT_S)
    assert "/run/big" in text(pool.submit(asked, pages.rows).result(WAIT_S))
    held.released.set()
    again.result(WAIT_S)


def test_a_few_reports_are_written_at_once_and_the_threads_of_other_pages_stay_free(pages, pool, held, monkeypatch):
    write = app.report.page

    def writing(run: Any) -> str:
        held(run.path)
        return write(run)

    monkeypatch.setattr(app.report, "page", writing)
    reports = [pool.submit(asked, pages.report, "big") for _ in range(app.REPORTS_AT_ONCE + 1)]
    assert held.begun.wait(WAIT_S)
    (refused,) = [each for each in reports if _done(each, reports)]
    assert refused.result().status_code == 503
    held.released.set()
    assert sorted(each.result(WAIT_S).status_code for each in reports) == [200] * app.REPORTS_AT_ONCE + [503]
    assert text(asked(pages.report, "small"))


def _done(each: Any, all_of_them: list[Any]) -> bool:
    from concurrent.futures import FIRST_COMPLETED, wait

    wait(all_of_them, WAIT_S, return_when=FIRST_COMPLETED)
    return bool(each.done())


def test_a_long_run_is_read_in_pieces_and_shown_when_all_of_it_was_read(tmp_path, monkeypatch):
    lines = [start(), *(update(number) for number in range(500))]
    folder = write_run(tmp_path / "big", lines)
    monkeypatch.setattr(timeline, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(following, "PIECE_BYTES", 20_000)
    size = (folder / "metrics.jsonl").stat().st_size
    followers, run, shares = Followers(), Runs(tmp_path).run("big"), []
    while not shares or shares[-1] < 100:
        shown = followers.look("big", run)
        shares.append(shown.read)
    assert -(-size // 24_096) <= len(shares) <= -(-size // 16_000)
    assert shares == sorted(set(shares))
    assert shown.timeline.updates == Follower(run).refresh().updates == lines[1:]


def test_what_was_shown_does_not_change_when_more_is_read(tmp_path):
    folder = write_run(tmp_path / "run", [start(), update(0)])
    followers, run = Followers(), Runs(tmp_path).run("run")
    before = followers.look("run", run)
    write_run(folder, [start(), update(0), update(1)])
    assert [len(each.timeline.updates) for each in (before, followers.look("run", run))] == [1, 2]
