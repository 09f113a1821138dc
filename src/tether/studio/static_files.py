"""The page's own files, by a list made once: a path that is not in it does not exist."""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from tether.studio.replies import Reply

FOLDER = Path(__file__).parent / "static"

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}


@dataclass(frozen=True)
class StaticFiles:
    """The files under a folder by their addresses. Nothing that a request says is ever joined to a path."""

    folder: Path = FOLDER

    def find(self, address: str) -> Path | None:
        """The file at an address; `/` is the page itself."""
        return self._known.get("index.html" if address in ("", "/") else address.removeprefix("/"))

    def content(self, path: Path) -> tuple[bytes, str]:
        """What a file holds, and its tag. Read once: the page opens also while every thread waits for the database."""
        if path not in self._read:
            found = path.read_bytes()
            self._read[path] = found, f'"{hashlib.sha256(found).hexdigest()[:32]}"'
        return self._read[path]

    @cached_property
    def _read(self) -> dict[Path, tuple[bytes, str]]:
        return {}

    @cached_property
    def _known(self) -> dict[str, Path]:
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {path.relative_to(self.folder).as_posix(): path for path in files}


FILES = StaticFiles()
router = APIRouter(include_in_schema=False)


@router.api_route("/{address:path}", methods=["GET", "HEAD"])
async def static_file(request: Request, address: str) -> Response:
    """A file of the page."""
    found = FILES.find(address)
    if found is None or address.startswith("api/") or address == "api":
        return Reply({"error": "there is nothing at this address"}, 404)
    kind = KINDS.get(found.suffix) or mimetypes.guess_type(found.name)[0] or "application/octet-stream"
    content, tag = FILES.content(found)
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})
