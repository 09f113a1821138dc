"""A vLLM server in the environment that `make vllm` makes, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tether.distributed.launch import free_port
from tether.http_client import PostError, post
from tether.rollout import vllm_extension

TOKEN = "a-token-for-vllm-servers"
PYTHON = Path(os.environ.get("TETHER_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv" / "vllm" / "bin" / "python")
OPTIONS = (
    "--dtype float32 --max-model-len 1024 --enforce-eager --logprobs-mode processed_logprobs --generation-config vllm"
)
OWN = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
OWN |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
EXTENSION = Path(vllm_extension.__file__).parent
OPTIONS += " --worker-extension-cls tether_vllm.RunWeights"
START_SECONDS = 600.0


class Server:
    """One server at a fixed port, which can be killed and started again."""

    def __init__(self, model: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = (*OPTIONS.split(), *options, "--model", str(model), "--served-model-name", "policy")
        self.words = [*words, "--host", "127.0.0.1", "--port", str(self.port), "--api-key", TOKEN]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        clean = os.environ | {"PYTHONPATH": str(EXTENSION)}
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *self.words],
            env=clean | OWN,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(PostError):
                post(f"{self.url}/v1/models", None, token=TOKEN, timeout_seconds=5.0, max_bytes=1 << 20)
                return
            time.sleep(0.5)
        self.kill()
        raise RuntimeError("the vLLM server did not start")

    def kill(self) -> None:
        """End it and its engine process, without a word."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """A server for the length of a test."""
    server = Server(model, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
