"""The chat page: static files that need neither an API key nor a loaded model."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {
    "/" if path.name == "page.html" else f"/{path.relative_to(_STATIC).as_posix()}": (
        path.read_bytes(),
        _KINDS[path.suffix],
    )
    for path in sorted(_STATIC.rglob("*"))
    if path.suffix in _KINDS
}

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Response headers that let the web page load files and data only from this server."""

PAGE_PATHS = tuple(_FILES)


def page_file(path: str) -> Response:
    content, kind = _FILES[path]
    return Response(content, media_type=kind, headers=_HEADERS)
