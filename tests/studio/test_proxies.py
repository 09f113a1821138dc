"""Behind the nginx and the Caddy of docs/studio.md, with other ports and a certificate of our own."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, messages
from recording import Recording

PAGE = Path(__file__).parents[2] / "docs" / "studio.md"
NAME = "studio.example.org"


def from_docs(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def certificate(folder: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl, which makes the certificate, is not installed")
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    files = ["-keyout", str(folder / "studio.key"), "-out", str(folder / "studio.crt")]
    subprocess.run(["openssl", "req", *words, *names, *files], check=True, capture_output=True)


def nginx_command(folder: Path, port: int, behind: int) -> list[str]:
    site = from_docs("nginx").replace("/etc/ssl/", f"{folder}/").replace("listen 443", f"listen 127.0.0.1:{port}")
    site = site.replace("127.0.0.1:8420", f"127.0.0.1:{behind}")
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
    config += f"events {{}}\nhttp {{ access_log off;\n{places}{site}}}\n"
    (folder / "nginx.conf").write_text(config)
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", str(folder / "error.log")]


def caddy_command(folder: Path, port: int, behind: int) -> list[str]:
    site = from_docs("caddyfile").replace("127.0.0.1:8420", f"127.0.0.1:{behind}")
    own = f"{NAME}:{port} {{\n    bind 127.0.0.1\n    tls {folder}/studio.crt {folder}/studio.key"
    site = site.replace(f"{NAME} {{", own)
    (folder / "Caddyfile").write_text("{\n    admin off\n    auto_https disable_redirects\n}\n" + site)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextmanager
def proxy(kind: str, folder: Path, port: int, behind: int) -> Iterator[None]:
    """A proxy on loopback, stopped by its own process at the end."""
    if not shutil.which(kind):
        pytest.skip(f"{kind} is not installed: apt-get install {kind}")
    certificate(folder)
    command = {"nginx": nginx_command, "caddy": caddy_command}[kind](folder, port, behind)
    home = {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "PATH": "/usr/sbin:/usr/bin",
    }
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=home)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "proxy.log").read_text()
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(timeout=15)


@pytest.fixture
def resolved(monkeypatch):
    """The public name is this machine's, as a name server would say."""
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: known("127.0.0.1" if host == NAME else host, *rest, **more)
    )


@pytest.mark.parametrize("kind", ["nginx", "caddy"])
def test_people_enter_vote_and_listen_through_a_proxy(tmp_path: Path, kind: str, resolved):
    recording = Recording(tmp_path, None, steps=9)
    recording.steps(0, 1)
    assert recording.recorder.flush()
    folder, port = tmp_path / "proxy", free_port()
    folder.mkdir()
    url = f"https://{NAME}:{port}"
    more = ("--public-url", url, "--trusted-proxies", "127.0.0.1")
    with LiveServer(tmp_path / "runs", None, *more) as server:
        behind = int(server.told["address"].rpartition(":")[2])
        assert server.told["link"].startswith(f"{url}/#token=")
        with proxy(kind, folder, port, behind), _browser(url, folder / "studio.crt") as browser:
            page = browser.get("/")
            assert page.status_code == 401 and "/js/enter.js" in page.text and browser.get("/js/enter.js").is_success
            entered = browser.post("/api/login", json={"token": server.told["link"].partition("#token=")[2]})
            assert entered.status_code == 200, entered.text
            assert "__Host-" in entered.headers["set-cookie"] and "Secure" in entered.headers["set-cookie"]
            assert browser.get("/api/me").json()["role"] == "owner"
            made = browser.post("/api/raters", json={"name": "ann"})
            assert made.status_code == 200 and made.json()["link"].startswith(f"{url}/#token=")
            evil = {"origin": "https://evil.example"}
            assert browser.post("/api/raters", json={"name": "x"}, headers=evil).status_code == 403
            [session] = browser.get("/api/sessions").json()["sessions"]
            assert session["address"] == "127.0.0.2", "the proxy's word for the visitor counts"
            _listens(browser, recording)
            body = {"from": "file", "records": [{"prompt": "p" * 5000, "chosen": "a", "rejected": "b"}] * 1000}
            queue = browser.post("/api/label/queues", json={"name": "q"}).json()["id"]
            taken = browser.post(f"/api/label/queues/{queue}/fill", json=body).status_code
            assert taken in (200, 202), "5 MB pass: taken in at once, or in the background on a slow machine"
            _has_a_bucket_of_their_own(url, folder / "studio.crt", browser)
    recording.recorder.close("done")


def _listens(browser: httpx.Client, recording: Recording) -> None:
    """A live stream passes at once, and is not held back until it is long."""
    with browser.stream("GET", "/api/stream?run=1") as reply:
        told = messages(reply)
        assert next(told)[0] == "run"
        recording.steps(2)
        assert recording.recorder.flush()
        started = time.monotonic()
        while next(told)[0] != "step":
            pass
        assert time.monotonic() - started < 30


def _has_a_bucket_of_their_own(url: str, trust: Path, browser: httpx.Client) -> None:
    """Who guesses is slowed down, whatever they say of themselves, and no one else is."""
    with _browser(url, trust, "127.0.0.3") as guesser, _browser(url, trust, "127.0.0.4") as other:
        told = [
            guesser.get(
                "/api/me", headers={"authorization": f"Bearer {n}", "x-forwarded-for": f"9.9.{n % 250}.9"}
            ).status_code
            for n in range(260)
        ]
        assert 429 in told and set(told) <= {401, 429}
        assert other.get("/api/me").status_code == 401 and browser.get("/api/me").status_code == 200


def _browser(url: str, trust: Path, address: str = "127.0.0.2") -> httpx.Client:
    """A browser at another address than the proxy's."""
    import ssl

    context = ssl.create_default_context(cafile=str(trust))
    transport = httpx.HTTPTransport(verify=context, local_address=address)
    return httpx.Client(base_url=url, transport=transport, headers={"origin": url}, timeout=20.0)
