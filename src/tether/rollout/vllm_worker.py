"""A vLLM server as a rollout worker: token ids in and out, by the weights that it was given last.

The server runs in an environment of its own (`make vllm`), started with VLLM_SERVER_DEV_MODE=1, and reads weights from
a folder that it shares with the run. A whole model is loaded by `vllm_extension` and labelled with its version and
digest; the label is read before and after each chunk, and a server that was started again has lost it. Adapters are
loaded under a name of version and digest, so a request for others is refused by the server.

The label says what the run gave, and is not computed from what the server holds: see docs/rollout-workers.md.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tether.errors import ConfigError, DataError, WorkersLost
from tether.http_client import PostError, post
from tether.models.load import LoadedModel
from tether.models.lora import CONFIG, PREFIX, WEIGHTS, has_lora
from tether.rollout.messages import ChunkRequest, Sampler, WorkerGone, prompt_ids_of
from tether.rollout.native import assemble_rollout
from tether.rollout.weights import Snapshot
from tether.seeds import derive_seed
from tether.types import Rollout

HEALTH_SECONDS = 10.0
LOAD_SECONDS = 1800.0
MAX_BYTES = 1 << 30  # of a response
AT_ONCE = 64  # requests of a chunk under way: the server batches them
PROBE = "The quick brown fox jumps over 13 lazy dogs.\n\nWhich of them was faster? \u00e9\u4e2d"
SEEDS = 1 << 62  # vLLM takes a signed 64-bit number, and adds the sample's index


class VllmWorker(Sampler):
    """A server at a URL. `folder` is where it reads weights, seen by both under the same path."""

    def __init__(self, url: str, token: str, policy: LoadedModel, timeout: float, folder: Path) -> None:
        self.url, self.token, self.timeout, self.folder = url.rstrip("/"), token, timeout, folder
        self.name = f"the vLLM server at {self.url}"
        self.policy, self.adapters = policy, has_lora(policy.model)
        self.model = ""  # the name under which the server serves the base model
        self.loaded: str | None = None  # the label of what it was given last
        self.healed = 0

    # -- what it is ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """See whether it is up, and a vLLM server that can be used; what it can never be used for is an error."""
        self.loaded = None
        try:
            self.model = str(self._ask("/v1/models", None, HEALTH_SECONDS)["data"][0]["id"])
            config = self._ask("/server_info?config_format=json", None, HEALTH_SECONDS)["vllm_config"]
            mode = config["model_config"]["logprobs_mode"]
        except PostError as error:
            raise self._failure(error, "connecting") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WorkerGone(f"{self.name} does not answer as one: start it as docs/rollout-workers.md says") from error
        if mode != "processed_logprobs":
            raise WorkerGone(f"{self.name} reports {mode}: start it with --logprobs-mode processed_logprobs")

    def check_tokenizer(self) -> None:
        """Raise where it turns text into other tokens than the run."""
        asked = json.dumps({"model": self.model, "prompt": PROBE, "add_special_tokens": False}).encode()
        tokenizer: Any = self.policy.tokenizer
        if self._ask("/tokenize", asked, HEALTH_SECONDS).get("tokens") != tokenizer.encode(
            PROBE, add_special_tokens=False
        ):
            raise DataError(
                f"{self.name} turns text into other tokens than the run does: start it with the model of the run, "
                "whose tokenizer it then uses"
            )

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, request: ChunkRequest, snapshot: Snapshot) -> list[Rollout]:
        """Sample by these weights; what was sampled while the server held others is not used."""
        sampling = request.sampling
        if sampling.top_p < 1 or sampling.top_k:
            raise ConfigError("rollout.engine vllm has no log-probs before top-p and top-k: set top_p 1 and top_k 0")
        label = label_of(snapshot)
        try:
            for _ in range(2):  # a server that was started again is given the weights once more
                if self.loaded != label:
                    self.check_tokenizer()
                    self._give(snapshot)
                if self._held() == label and (found := self._all(request, snapshot)) and self._held() == label:
                    return found
                self.loaded = None
                self.healed += 1
        except PostError as error:
            raise self._failure(error, "sampling") from error
        raise WorkersLost(
            f"{self.name} held other weights than version {snapshot.version}, {snapshot.digest[:12]}, twice, and "
            "what it sampled was not used: no other run may use it; end it, start it again, and resume the run"
        )

    def _all(self, request: ChunkRequest, snapshot: Snapshot) -> list[Rollout]:
        """Every prompt's samples; one request for each prompt id. Empty where adapters are not there any more."""
        prompt_ids = prompt_ids_of(request.prompts, self.policy.tokenizer)
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(request.prompts):
            places.setdefault(prompt.id, []).append(place)

        def ask(group: Sequence[int]) -> list[dict[str, Any]]:
            number = len(group) * request.samples_per_prompt
            return self._complete(request, prompt_ids[group[0]], request.prompts[group[0]].id, number, snapshot)

        try:
            with ThreadPoolExecutor(min(AT_ONCE, len(places))) as threads:
                answers = dict(zip(places, threads.map(ask, places.values()), strict=True))
        except PostError as error:
            if self.adapters and error.reason == "status_404":
                return []
            raise
        rollouts: list[Rollout] = []
        taken: Counter[str] = Counter()
        for place, prompt in enumerate(request.prompts):
            for sample in range(request.samples_per_prompt):
                choice = answers[prompt.id][taken[prompt.id]]
                taken[prompt.id] += 1
                rollouts.append(self._rollout(request, place, sample, prompt_ids[place], choice, snapshot.version))
        return rollouts

    def _complete(
        self, request: ChunkRequest, ids: list[int], prompt_id: str, number: int, snapshot: Snapshot
    ) -> list[dict[str, Any]]:
        """`number` answers to one prompt."""
        asked = {
            "model": label_of(snapshot) if self.adapters else self.model,
            "prompt": ids,
            "n": number,
            "max_tokens": request.sampling.max_new_tokens,
            "temperature": request.sampling.temperature,
            "seed": derive_seed(request.seed, "vllm", prompt_id) % SEEDS,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,  # the run's own end tokens are below
            "stop_token_ids": sorted(self.policy.end_ids | set(request.sampling.stop_token_ids)),
        }
        choices = self._ask("/v1/completions", json.dumps(asked).encode(), self.timeout).get("choices")
        if not isinstance(choices, list) or len(choices) != number:
            raise ValueError(f"{number} answers were asked for")
        return sorted(choices, key=lambda choice: choice["index"])

    def _rollout(
        self, request: ChunkRequest, place: int, sample: int, ids: list[int], choice: dict[str, Any], version: int
    ) -> Rollout:
        try:
            tokens = [int(token) for token in choice["token_ids"]]
            logprobs = torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32)
            read = choice["prompt_token_ids"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"an answer lacks {error}") from error
        if not tokens or len(logprobs) != len(tokens) or read != ids:
            raise ValueError("an answer has other tokens than log-probs, or is to another prompt")
        ends = self.policy.end_ids
        shown = tokens[:-1] if tokens[-1] in ends else tokens  # an end token is not text
        text: Any = self.policy.tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return assemble_rollout(
            request.prompts[place],
            group_id=place,
            sample_id=sample,
            prompt_ids=ids,
            answer_ids=tokens,
            behavior=logprobs,
            untruncated=logprobs,
            completion=text,
            finish="stop" if tokens[-1] in ends | set(request.sampling.stop_token_ids) else "length",
            policy_version=version,
        )

    # -- weights ------------------------------------------------------------------------------------------------------

    def _held(self) -> str:
        """The label of the weights that the server holds; of adapters, their name if it has them."""
        if self.adapters:
            names = [each.get("id") for each in self._ask("/v1/models", None, HEALTH_SECONDS)["data"]]
            return self.loaded or "" if self.loaded in names else ""
        return str(self._ask("/weight_info", None, HEALTH_SECONDS).get("weight_version"))

    def _give(self, snapshot: Snapshot) -> None:
        """Have it load the weights of a snapshot."""
        label, before = label_of(snapshot), self.loaded
        target = self.folder / f"vllm-{label}-{os.getpid()}-{id(self)}"
        target.mkdir(exist_ok=True)
        try:
            if self.adapters:
                write_adapters(self.policy.model, snapshot, target)
                self._load_adapters(label, target, before)
            else:
                os.link(snapshot.path, target / "model.safetensors")
                # First a label that nobody asks for: a load that ends half way leaves it.
                self._ask("/update_weight_version", json.dumps({"new_version": "loading"}).encode(), HEALTH_SECONDS)
                reload = {"method": "reload_run_weights", "kwargs": {"weights_path": str(target)}}
                self._ask("/collective_rpc", json.dumps(reload).encode(), LOAD_SECONDS)
                self._ask("/reset_prefix_cache", b"", HEALTH_SECONDS)
                self._ask("/update_weight_version", json.dumps({"new_version": label}).encode(), HEALTH_SECONDS)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        self.loaded = label

    def _load_adapters(self, label: str, target: Path, before: str | None) -> None:
        for name in [each["id"] for each in self._ask("/v1/models", None, HEALTH_SECONDS)["data"]]:
            if name in (before, label):
                self._ask("/v1/unload_lora_adapter", json.dumps({"lora_name": name}).encode(), LOAD_SECONDS)
        asked = {"lora_name": label, "lora_path": str(target)}
        self._ask("/v1/load_lora_adapter", json.dumps(asked).encode(), LOAD_SECONDS)

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: bytes | None, seconds: float) -> dict[str, Any]:
        """The answer to a request, as JSON; empty where it is no JSON object."""
        answer = post(f"{self.url}{path}", body, token=self.token, timeout_seconds=seconds, max_bytes=MAX_BYTES)
        try:
            found = json.loads(answer)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _failure(self, error: PostError, doing: str) -> Exception:
        said = " ".join(error.body[:400].decode(errors="replace").split())
        if error.reason == "status_401":
            return WorkersLost(f"{self.name} refuses the token: set rollout.token_env to a variable with its --api-key")
        if error.reason in ("status_400", "status_422"):
            return DataError(f"{self.name} refused the request: {said}")
        if error.reason == "status_404":
            return WorkersLost(
                f"{self.name} lacks what weights are changed by ({said}): start it with VLLM_SERVER_DEV_MODE=1, and "
                "for adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        return WorkerGone(f"{self.name} failed while {doing} ({error.reason}{': ' if said else ''}{said})")


def label_of(snapshot: Snapshot) -> str:
    """Version and digest in one word."""
    return f"{snapshot.version}-{snapshot.digest}"


def write_adapters(model: Any, snapshot: Snapshot, target: Path) -> None:
    """A snapshot of adapters as peft saves them, which vLLM reads."""
    tensors = {f"{PREFIX}{name.replace('.default.', '.')}": each for name, each in load_file(snapshot.path).items()}
    save_file(tensors, target / WEIGHTS)
    config = model.peft_config["default"]
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.r, "lora_alpha": config.lora_alpha}
    about |= {"target_modules": sorted(config.target_modules), "bias": "none", "lora_dropout": 0.0}
    (target / CONFIG).write_text(json.dumps(about), encoding="utf-8")
