"""The web page over a folder of runs, as an ASGI application. It reads, and never writes.

Names in addresses come from a browser: `folder.Runs` decides which exist. Texts in pages come from strangers: templates
escape them, and the policy of each answer forbids any script but the one that comes with mtrain.
"""

import socket
import threading
from collections.abc import Collection
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtrain.spec.hostnames import is_named
from mtrain_ui.pages import charts, report
from mtrain_ui.pages.content import Content, collect
from mtrain_ui.pages.differing import differing_keys, final_metrics
from mtrain_ui.pages.folder import Absent, RunFiles, Runs
from mtrain_ui.pages.following import Followers, Shown
from mtrain_ui.pages.overview import Overview, Unread
from mtrain_ui.pages.rendering import ASSETS, render, style

MAX_COMPARED = 8
REPORTS_AT_ONCE = 4
"""Reports that are written at once, each of which reads all records of a run; further ones are refused."""
LOG_BYTES = 64 << 10
MAX_LISTED = 1000
"""Runs, the newest ones, that the list shows unless all are asked for; a browser takes seconds for ten thousand."""
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Pages:
    """The answers to all addresses. Several threads may call."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._overview = Overview(runs)
        self._followers = Followers()
        self._reports = threading.Semaphore(REPORTS_AT_ONCE)

    def index(self, request: Request) -> Response:
        """Answer with the list of runs."""
        return self._list("index.html", request, root=str(self._runs.root))

    def rows(self, request: Request) -> Response:
        """Answer with the lines of the list, for its next state."""
        return self._list("rows.html", request)

    def run(self, request: Request) -> Response:
        """Answer with the page of one run."""
        name, run = self._find_run(request)
        shown, content = self._state(name, run)
        values: dict[str, Any] = {
            "name": name,
            "content": content,
            "curves": charts.run_charts(shown.timeline),
            "read": shown.read,
            "link": _link,
        }
        logs = run.logs()
        values |= {"logs": logs, "log": logs[0] if logs else None}
        return self._page("run.html", **values, refreshes=shown.read < 100 or _goes_on(content))

    def live(self, request: Request) -> Response:
        """Answer with the part of the page of a run that changes."""
        name, run = self._find_run(request)
        shown, content = self._state(name, run)
        return self._page(
            "live.html",
            content=content,
            curves=charts.run_charts(shown.timeline),
            read=shown.read,
        )

    def log(self, request: Request) -> Response:
        """Answer with the end of a log."""
        _, run = self._find_run(request)
        name = request.query_params.get("file", "")
        if name not in run.logs():
            raise Absent(name)
        text, before = run.tail(f"logs/{name}", limit=LOG_BYTES)
        head = f"... {before} bytes before these lines are not shown\n" if before else ""
        return PlainTextResponse(head + text)

    def report(self, request: Request) -> Response:
        """Answer with the report of a run, as `mtrain report` would write it."""
        _, run = self._find_run(request)
        if not self._reports.acquire(blocking=False):
            return self._busy("Other reports are being written")
        try:
            return HTMLResponse(report.page(run).encode("utf-8", errors="replace"))
        finally:
            self._reports.release()

    def compare(self, request: Request) -> Response:
        """Answer with several runs over each other."""
        return self._comparison(request, "compare.html")

    def comparison(self, request: Request) -> Response:
        """Answer with the part of a comparison that changes."""
        return self._comparison(request, "comparison.html")

    def asset(self, request: Request) -> Response:
        """Answer with the style sheet or the script."""
        if request.path_params["file"] == "page.css":
            return Response(str(style()), media_type="text/css")
        if request.path_params["file"] == "ui.js":
            content = (resources.files("mtrain_ui.pages") / ASSETS / "ui.js").read_bytes()
            return Response(content, media_type="text/javascript")
        raise Absent("asset")

    def _comparison(self, request: Request, template: str) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(names) <= MAX_COMPARED:
            text = f"{len(names)} runs are chosen; choose 2 to {MAX_COMPARED} in the list."
            return self._page("message.html", title="Nothing to compare", text=text, status=400)
        runs = {name: self._runs.run(name) for name in names}
        states = {name: self._state(name, run) for name, run in runs.items()}
        contents = {name: content for name, (_, content) in states.items()}
        return self._page(
            template,
            contents=contents,
            curves=charts.overlaid({name: shown.timeline for name, (shown, _) in states.items()}),
            read=min(shown.read for shown, _ in states.values()),
            metrics=final_metrics(contents),
            differences=differing_keys(runs),
            query=urlencode([("run", name) for name in names]),
            refreshes=any(shown.read < 100 or _goes_on(content) for shown, content in states.values()),
            link=_link,
        )

    def _find_run(self, request: Request) -> tuple[str, RunFiles]:
        name = request.path_params["name"]
        return name, self._runs.run(name)

    def _state(self, name: str, run: RunFiles) -> tuple[Shown, Content]:
        """Return what a run has recorded, as far as it has been read."""
        shown = self._followers.look(name, run)
        return shown, collect(run, shown.timeline)

    def _list(self, template: str, request: Request, **values: Any) -> Response:
        try:
            every = "all" in request.query_params
            listed = self._overview.entries(most=None if every else MAX_LISTED)
        except Unread:
            return self._busy("The runs are being read for the first time")
        poll = "/rows?all" if every else "/rows"
        return self._page(template, entries=listed, total=self._overview.total, poll=poll, link=_link, **values)

    def _busy(self, reason: str) -> Response:
        answer = self._page("message.html", title="A moment", text=f"{reason}. Load this page again.", status=503)
        answer.headers["retry-after"] = "2"
        return answer

    @staticmethod
    def _page(template: str, *, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(render(template, **values).encode("utf-8", errors="replace"), status_code=status)


def _link(kind: str, name: str) -> str:
    """Return the address of a page of a run."""
    return f"/{kind}/{quote(name)}"


def _goes_on(content: Content) -> bool:
    return content.state == "running"


async def _absent(request: Request, error: Exception) -> Response:
    text = "There is no such page, or the run has been removed."
    return HTMLResponse(render("message.html", title="Not found", text=text), status_code=404)


class Guard:
    """Refuses requests that name another host (``hostnames.is_named``), and adds the headers of safety to each answer."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guard(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and is_named(hosts[0].decode("latin-1"), self._names):
            await self._app(scope, receive, guard)
        else:
            answer = PlainTextResponse("the Host header names another host\n", status_code=421)
            await answer(scope, receive, guard)


def application(runs: Runs, *, host: str) -> ASGIApp:
    """Return the application. ``host``: the name or address under which it is reached."""
    pages = Pages(runs)
    routes = [
        Route("/", pages.index),
        Route("/rows", pages.rows),
        Route("/compare", pages.compare),
        Route("/comparison", pages.comparison),
        Route("/assets/{file}", pages.asset),
        *(Route(f"/{kind}/{{name:path}}", getattr(pages, kind)) for kind in ("run", "live", "log", "report")),
    ]
    app = Starlette(routes=routes, exception_handlers={Absent: _absent, 404: _absent})
    return Guard(app, {"localhost", host, socket.gethostname()})
