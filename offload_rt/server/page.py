"""The web page at `/`, served from files of the package."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
SCRIPTS = ("page.js", "basics.js", "markdown.js", "sessions.js", "watch.js")
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers that restrict the page to requests to this server."""


def add_page(app: FastAPI) -> None:
    for path, (name, kind) in FILES.items():
        _add(app, path, (FOLDER / name).read_bytes(), kind)


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)
