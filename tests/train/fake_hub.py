"""A small server that plays the part of the hub's API that a push needs, and keeps what it is sent."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a-token-of-the-tests"


class FakeHub(ThreadingHTTPServer):
    """Knows one token, lets it write to `owner`, and keeps files and requests."""

    daemon_threads = True

    def __init__(self, owner: str = "me") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.paths.append(f"GET {self.path}")
        name = "/".join(self.path.split("/")[3:5])
        if not self._known():
            return
        if name.startswith(f"{self.server.owner}/"):
            self._send(200, {"id": name, "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        else:
            self._send(404, {"error": "Repository not found"})

    def do_POST(self) -> None:
        self.server.paths.append(f"POST {self.path}")
        body = self._body()
        if not self._known():
            return None
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or self.server.owner
            if owner != self.server.owner:
                return self._send(403, {"error": "You don't have the rights to create a model under this namespace"})
            self.server.created.append(asked)
            return self._send(
                200, {"url": f"{self.server.url}/{owner}/{asked['name']}", "name": f"{owner}/{asked['name']}"}
            )
        if self.path.startswith("/api/models/") and not self.path.startswith(f"/api/models/{self.server.owner}/"):
            return self._send(403, {"error": "You don't have write access to this repository"})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            name = "/".join(self.path.split("/")[3:5])
            url = f"{self.server.url}/{name}/commit/{'1' * 40}"
            return self._send(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})
        return self._send(200, {"errors": [], "warnings": []})  # the card's YAML is fine

    def log_message(self, *_) -> None:
        pass

    def _known(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            return True
        self._send(401, {"error": "Invalid credentials in Authorization header"})
        return False

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
