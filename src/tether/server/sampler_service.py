"""`tether worker`: samples for runs elsewhere. It holds one model, by the weights that it was given last.

The protocol is in `tether.rollout.messages`. Whoever has the token chooses which model is loaded, from a folder of this
machine or by its name; only safetensors and JSON are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import signal
import sys
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from tether.config.sections import RolesSettings
from tether.errors import ConfigError, DataError, TetherError, UsageError, first_line
from tether.http_server import JSON, BadRequestError, TokenServer
from tether.models.load import load_causal_lm, resolve_device
from tether.models.sharing import build_sharing
from tether.rollout.messages import ERRORS, ChunkRequest, ModelToLoad, pack_rollouts
from tether.rollout.native import NativeEngine
from tether.rollout.native_worker import TOKEN_VARIABLE
from tether.rollout.weights import VERSION, PolicyWeights, pack, unpack
from tether.store.find import find_model
from tether.studio.settings import chosen_token, is_loopback

MAX_BYTES = 1 << 37  # of the weights of a model
READ_SECONDS = 3600.0  # in which they arrive
BINARY = "application/octet-stream"
Answer = tuple[HTTPStatus, str, bytes]


class SamplerService:
    """The model, its engine and its weights; one request at a time."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        """`folder` is where weights may be read from a file."""
        self.device, self.folder = device, folder
        self.lock = threading.Lock()
        self.model: str | None = None  # digest of its description
        self.engine: NativeEngine | None = None
        self.weights: PolicyWeights | None = None
        self.held: tuple[str, int] | None = None  # digest and policy version
        self.threads = torch.get_num_threads()

    def answer(self, path: str, body: bytes) -> Answer:
        """The response to a request."""
        with self.lock:
            torch.set_num_threads(self.threads)  # each request has a thread of its own
            try:
                return self._answer(path, body)
            except BadRequestError:
                raise
            except TetherError as error:
                kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), "DataError")
                return _json({"error": str(error), "kind": kind}, HTTPStatus.UNPROCESSABLE_ENTITY)
            except (ValueError, RecursionError) as error:
                raise BadRequestError(first_line(error)) from error
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                return _json({"error": reason}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer(self, path: str, body: bytes) -> Answer:
        if path == "/weights":
            return self.take(*unpack(body))
        request = json.loads(body)
        if not isinstance(request, dict):
            raise BadRequestError("the request must be a JSON object")
        if path == "/weights-file":
            return self.take(*unpack(self._file(str(request.get("file"))).read_bytes()))
        if request.get("version") != VERSION:
            raise BadRequestError(f'the request must have "version": {VERSION}: use the same Tether on both sides')
        return self.load(ModelToLoad.read(request.get("model"))) if path == "/model" else self.generate(request)

    def load(self, model: ModelToLoad) -> Answer:
        """Load a model, unless it is the one that is held."""
        if self.model != model.digest():
            self.model = self.engine = self.weights = self.held = None  # frees its memory first
            self.threads = max(1, model.threads)
            torch.set_num_threads(self.threads)
            loaded = load_causal_lm(
                find_model(model.path),
                dtype=model.dtype,
                device=resolve_device(self.device),
                seed=model.seed,
                attention=model.attention,
                quantize=model.quantize,
            )
            sharing = build_sharing(loaded.model, RolesSettings.model_validate(dict(model.roles)), model.roles_seed)
            loaded = dataclasses.replace(loaded, model=sharing.policy)
            slots: Any = model.max_num_seqs
            self.engine = NativeEngine(loaded, max_num_seqs=slots, general=model.general, exact=model.exact)
            self.weights = PolicyWeights(sharing.policy)
            self.model = model.digest()
        return _json({"model": self.model})

    def take(self, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Answer:
        """Take over weights; the digest of what is held then is computed from it."""
        if self.weights is None or about.get("version") != VERSION:
            raise BadRequestError("there is no model yet: POST /model first")
        self.held = None
        self.weights.load(tensors)
        digest = self.weights.digest()
        self.held = (digest, int(about["policy_version"]))
        return _json({"weights": digest})

    def generate(self, request: dict[str, Any]) -> Answer:
        """Sample a chunk, by the weights that were asked for and no others."""
        asked, held = (request.get("weights"), request.get("policy_version")), self.held
        if self.engine is None or held is None or held != asked or self.model != request.get("model"):
            return _json({"weights": held and held[0], "model": self.model}, HTTPStatus.CONFLICT)
        digest, self.engine.policy_version = held
        chunk = ChunkRequest.read(request)
        rollouts = self.engine.generate(
            chunk.prompts, chunk.sampling, samples_per_prompt=chunk.samples_per_prompt, seed=chunk.seed
        )
        self.engine.release()
        texts, columns = pack_rollouts(rollouts)
        about = {"rollouts": texts, "weights": digest, "policy_version": self.engine.policy_version}
        return HTTPStatus.OK, BINARY, pack(about, columns)

    def _file(self, name: str) -> Path:
        if self.folder is None or Path(name).name != name:
            raise DataError("this worker reads no such file of weights: start it with --weights-dir")
        return self.folder / name


class WorkerServer(TokenServer):
    """The HTTP around it."""

    paths = ("/model", "/weights", "/weights-file", "/generate")
    read_seconds = READ_SECONDS

    def __init__(self, service: SamplerService, *, host: str, port: int, token: str) -> None:
        self.service = service
        super().__init__(host=host, port=port, token=token, max_bytes=MAX_BYTES)

    def health(self) -> dict[str, Any]:
        """That it is a worker, and of which version of the protocol."""
        return {"status": "ok", "worker": VERSION}

    def answer(self, path: str, body: bytearray) -> Answer:
        """One request at a time."""
        return self.service.answer(path, bytes(body))


def _json(values: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return status, JSON, json.dumps(values).encode()


def serve_worker(options: argparse.Namespace) -> int:
    """Serve until stopped; prints the address once it listens."""
    host, port = read_address(options.listen)
    chosen = chosen_token(options, TOKEN_VARIABLE)
    if chosen is None and not is_loopback(host):
        raise ConfigError(
            f"--listen {host} lets other machines in, which needs a token of yours: set {TOKEN_VARIABLE}, or name a "
            "--token-file"
        )
    token = chosen or secrets.token_urlsafe(32)
    folder = Path(options.weights_dir) if options.weights_dir else None
    try:
        server = WorkerServer(SamplerService(options.device, folder), host=host, port=port, token=token)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {options.listen}: {error}; choose another --listen HOST:PORT") from error
    if options.json:
        print(json.dumps({"url": server.address, "token": None if chosen else token}), flush=True)
    else:
        shown = (
            f"the token is {token}" if chosen is None else f"the token is what {TOKEN_VARIABLE} or --token-file holds"
        )
        print(f"Sampling at {server.address}. Ctrl-C ends it.\n\nIn a recipe:\n\nrollout:\n  servers: ", end="")
        print(f"[{server.address}]\n\nWhere the run is, export {TOKEN_VARIABLE}: {shown}.", flush=True)
    if not is_loopback(host):
        print(f"tether: {host} can be reached from outside, and HTTP is not encrypted: use a tunnel", file=sys.stderr)
    if options.exit_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with server:
            server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def read_address(listen: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen: expected HOST:PORT, such as 127.0.0.1:8423, got {listen}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _end_with_stdin() -> None:
    """Whoever started this process holds the other end of its standard input, and is gone once that closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
