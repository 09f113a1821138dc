"""A server on loopback that misbehaves as it is told. Every wait ends when the server is closed, or by itself."""

import json
import socket
import threading
from collections.abc import Callable

Behaviour = Callable[["Request"], None]
MAX_SECONDS = 10.0  # seconds that any behaviour may last


class Request:
    def __init__(self, connection: socket.socket, number: int, stop: threading.Event) -> None:
        self.connection, self.number, self.stop = connection, number, stop
        self.headers, self.items = self.read()

    def read(self) -> tuple[str, list[dict]]:
        received = b""
        while b"\r\n\r\n" not in received and (chunk := self.connection.recv(65536)):
            received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        while len(body) < length and (chunk := self.connection.recv(65536)):
            body += chunk
        return head.decode(), json.loads(body)["items"] if body else []

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def reply(self, status: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        self.send("\r\n".join(lines).encode() + body)

    def score(self, *values: object) -> None:
        """Answers well; `values` are cycled over the items, 1.0 where there are none."""
        chosen = values or (1.0,)
        scores = [{"id": item["id"], "value": chosen[i % len(chosen)]} for i, item in enumerate(self.items)]
        self.reply("200 OK", json.dumps({"scores": scores}).encode())


class FaultServer:
    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.requests: list[Request] = []
        self.stop = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/score"
        self.thread = threading.Thread(target=self.listen, daemon=True)

    def __enter__(self) -> "FaultServer":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(5)
        self.listener.close()

    def listen(self) -> None:
        while not self.stop.is_set():
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def handle(self, connection: socket.socket) -> None:
        connection.settimeout(MAX_SECONDS)
        with connection:
            try:
                request = Request(connection, len(self.requests), self.stop)
                self.requests.append(request)
                self.behave(request)
            except OSError:
                pass  # the client hung up, which is what is tested


def hang(request: Request) -> None:
    request.stop.wait(MAX_SECONDS)


def drip_headers(request: Request) -> None:
    _drip(request, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 1000)


def drip_body(request: Request) -> None:
    _drip(request, b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000)


def _drip(request: Request, data: bytes) -> None:
    for byte in data:
        if request.stop.wait(0.02):
            return
        request.send(bytes([byte]))


def answer_500(request: Request) -> None:
    request.reply("500 Internal Server Error", b"oh")


def answer_400(request: Request) -> None:
    request.reply("400 Bad Request", b"no")


def close(request: Request) -> None:
    request.connection.close()


def close_early(request: Request) -> None:
    request.send(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"scores": [')


def redirect(request: Request) -> None:
    request.reply("302 Found", b"", "Location: http://127.0.0.1:1/elsewhere")


def not_json(request: Request) -> None:
    request.reply("200 OK", b"<html>hello</html>")


def wrong_shape(request: Request) -> None:
    request.reply("200 OK", b"[1.0, 1.0]")


def too_large(request: Request) -> None:
    request.reply("200 OK", b" " * 300_000)


def too_large_and_unannounced(request: Request) -> None:
    request.send(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(1000):
        request.send(b" " * 10_000)


def too_few(request: Request) -> None:
    request.items = request.items[:-1]
    request.score()


def too_many(request: Request) -> None:
    request.items = [*request.items, {"id": "nobody asked"}]
    request.score()


def twice(request: Request) -> None:
    request.items = [*request.items, request.items[0]]
    request.score()
