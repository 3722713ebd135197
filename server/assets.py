"""The page and its files, from the `web` package. Serves what lies in that one folder, nothing below or beside it."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from server.failures import route_not_found

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def web_folder() -> Path:
    with resources.as_file(resources.files("web")) as folder:
        return folder


class Assets:
    """`names` are the URL paths that answer with a file: fixed when the app is made, while the files are read anew."""

    def __init__(self, folder: Path) -> None:
        self._files = {f"/{path.name}": path for path in folder.iterdir() if path.suffix in MEDIA_TYPES}
        for alias, name in (("/", "/index.html"), ("/favicon.ico", "/favicon.svg")):
            if name in self._files:
                self._files.setdefault(alias, self._files[name])
        self.names = frozenset(self._files)

    async def file(self, request: Request) -> Response:
        path = self._files.get(request.url.path)
        if path is None:
            raise route_not_found(request.method, request.url.path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise route_not_found(request.method, request.url.path) from error
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if path.suffix == ".html":
            headers["content-security-policy"] = CONTENT_SECURITY_POLICY
        if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=MEDIA_TYPES[path.suffix])
