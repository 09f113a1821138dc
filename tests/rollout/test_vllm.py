"""vLLM as a rollout engine: after each update its greedy tokens are the trainer's, by the weights of now and no others.

One server for the whole file, on the smallest embedded model, in float32; it takes about a minute to start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch
from vllm_server import PYTHON, TOKEN, Server, serving

from tether.config.load import load_recipe
from tether.errors import ConfigError, DataError, WorkersLost
from tether.http_client import post
from tether.hub.catalog import resolve_model_path
from tether.models.load import LoadedModel, load_causal_lm
from tether.models.sharing import build_sharing
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.rollout.rollout_pool import RolloutPool
from tether.rollout.vllm_worker import VllmWorker
from tether.rollout.weights import PolicyWeights, Snapshots
from tether.types import Prompt

MODEL = "smollm2-135m"
TEXTS = ["The capital of Canada", "Write a line about the sea.", "1, 2, 3,", "Why is the sky blue?"]
PROMPTS = [Prompt.from_text(f"p{number}", text) for number, text in enumerate(TEXTS)]


def model_folder():
    try:
        return resolve_model_path(MODEL)
    except ConfigError:
        return None


if not PYTHON.is_file():
    pytest.skip("vLLM: its environment is not there (make vllm)", allow_module_level=True)
if model_folder() is None:
    pytest.skip(f"vLLM: {MODEL} is not in the cache (tether models fetch {MODEL})", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(model_folder(), "--enable-lora", "--max-lora-rank", "8") as found:
        yield found


def policy_of(*flags: str) -> LoadedModel:
    loaded = load_causal_lm(MODEL, dtype="float32", device="cpu", seed=0)
    sharing = build_sharing(loaded.model, load_recipe("ppo", None, [*flags]).roles, 0)
    return dataclasses.replace(loaded, model=sharing.policy)


def pool_on(tmp_path, policy: LoadedModel, url: str, *, token: str = TOKEN, patience: float = 60.0) -> RolloutPool:
    pool = RolloutPool(Snapshots(PolicyWeights(policy.model), tmp_path), policy.tokenizer, chunk=2, patience=patience)
    pool.add(VllmWorker(url, token, policy, 300.0, tmp_path))
    return pool


def move(policy: LoadedModel, number: int) -> None:
    """An update: every trained weight in place, by about as much as it takes to change what is said."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                scale = 0.05 if "lora_" in name else 0.1 * float(parameter.std() if parameter.numel() > 1 else 0)
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def gaps(policy: LoadedModel, rollouts) -> torch.Tensor:
    """|log-prob of the server - log-prob of the trainer's model|, for each sampled token."""
    found = []
    with torch.no_grad():
        for rollout in rollouts:
            logits = policy.model(input_ids=rollout.token_ids[None]).logits[0, :-1]
            own = logits.log_softmax(-1).gather(-1, rollout.token_ids[1:, None])[:, 0]
            inside = rollout.response_mask[1:]
            found.append((own - rollout.behavior_logprobs[1:])[inside].abs())
    return torch.cat(found)


@pytest.mark.parametrize(
    "flags", [("--roles.mode", "lora", "--roles.lora_rank", "8"), ()], ids=["lora", "whole"]
)  # the first on the base as it is
def test_after_each_update_it_says_what_the_trainer_s_model_says(tmp_path, server, flags):
    policy = policy_of(*flags)
    pool = pool_on(tmp_path, policy, server.url)
    greedy = Sampling(8, temperature=0.0)
    said = []
    try:
        for version in range(3):
            pool.policy_version = version
            rollouts = pool.generate(PROMPTS, greedy, samples_per_prompt=1, seed=0)
            own = NativeEngine(policy).generate(PROMPTS, greedy, samples_per_prompt=1, seed=0)
            assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in own]
            assert {rollout.policy_version for rollout in rollouts} == {version}
            said.append([rollout.completion for rollout in rollouts])
            sampled = pool.generate(PROMPTS, Sampling(8), samples_per_prompt=2, seed=version)
            assert float(gaps(policy, sampled).max()) < 1e-3
            assert len({rollout.completion for rollout in sampled}) > len(PROMPTS)
            move(policy, version)
        assert said[0] != said[1] != said[2]
    finally:
        pool.close()


def test_a_server_whose_weights_somebody_changed_is_given_the_run_s(tmp_path, server):
    policy = policy_of()
    move(policy, 7)
    pool = pool_on(tmp_path, policy, server.url)
    try:
        first = pool.generate(PROMPTS, Sampling(8), samples_per_prompt=1, seed=3)
        # As after a start: the initial weights, and no label of ours.
        for path, body in (
            ("collective_rpc", {"method": "reload_run_weights", "kwargs": {"weights_path": str(model_folder())}}),
            ("update_weight_version", {"new_version": "default"}),
        ):
            post(f"{server.url}/{path}", json.dumps(body).encode(), token=TOKEN, timeout_seconds=300, max_bytes=1 << 20)
        again = pool.generate(PROMPTS, Sampling(8), samples_per_prompt=1, seed=3)
        assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
        assert float(gaps(policy, again).max()) < 1e-3
        assert next(iter(pool._lanes.values())).sampler.healed == 1
    finally:
        pool.close()


def test_what_cannot_be_is_told_in_one_sentence(tmp_path, server, monkeypatch):
    policy = policy_of()
    with pytest.raises(WorkersLost, match="refuses the token"):
        pool_on(tmp_path, policy, server.url, token="another-token").generate(
            PROMPTS, Sampling(4), samples_per_prompt=1, seed=0
        )
    with pytest.raises(WorkersLost, match=r"no rollout worker is left.* vLLM server at .* \(connection\)"):
        pool_on(tmp_path, policy, "http://127.0.0.1:9", patience=0.5).generate(
            PROMPTS, Sampling(4), samples_per_prompt=1, seed=0
        )
    with pytest.raises(ConfigError, match="set top_p 1 and top_k 0"):
        pool_on(tmp_path, policy, server.url).generate(PROMPTS, Sampling(4, top_k=3), samples_per_prompt=1, seed=0)
    other = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0).tokenizer
    pool = pool_on(tmp_path, dataclasses.replace(policy, tokenizer=other), server.url)
    with pytest.raises(DataError, match="turns text into other tokens than the run does"):
        pool.generate(PROMPTS, Sampling(4), samples_per_prompt=1, seed=0)
    monkeypatch.setattr(VllmWorker, "_held", lambda self: "0-another")
    with pytest.raises(WorkersLost, match=r"held other weights than version 0, \w+, twice"):
        pool_on(tmp_path, policy, server.url).generate(PROMPTS, Sampling(4), samples_per_prompt=1, seed=0)
