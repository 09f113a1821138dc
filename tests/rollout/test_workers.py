"""Rollout workers: the bits of one process from any number of workers, by the weights of now and no others."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
import torch
from safetensors.torch import load_file
from worker_processes import TOKEN, SlowService, workers

from tether.config.load import load_recipe
from tether.errors import ConfigError, DataError, WorkersLost
from tether.http_client import PostError, post
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.load import load_causal_lm
from tether.models.sharing import build_sharing
from tether.protocols import AsyncRolloutEngine, Sampling
from tether.rollout.chunks import in_chunks
from tether.rollout.native import NativeEngine
from tether.rollout.native_worker import NativeWorker
from tether.rollout.rollout_pool import RolloutPool
from tether.rollout.weights import PolicyWeights, Snapshots
from tether.server.sampler_service import SamplerService
from tether.train.engines import model_to_load
from tether.types import Prompt, Rollout

SAMPLING = Sampling(12, temperature=1.0)
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers take the number of threads of the run, and forked ones may only have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def asked(prompts: list[Prompt]) -> list[Prompt]:
    return [*prompts, prompts[1]]  # one of them twice, as at the end of an epoch


def run_model(*flags: str):
    """`(policy, what a worker loads)` as a run would have them."""
    recipe = load_recipe("ppo", None, [*flags])
    description = model_to_load(recipe, loaded := load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0))
    description = dataclasses.replace(description, seed=0)
    sharing = build_sharing(loaded.model, recipe.roles, description.roles_seed)
    return dataclasses.replace(loaded, model=sharing.policy), description


@contextmanager
def pool_of(tmp_path, policy, description, urls, *, chunk=2, timeout=20.0, patience=20.0, hedge=0.0):
    """A pool that asks workers at these URLs."""
    pool = RolloutPool(
        Snapshots(PolicyWeights(policy.model), tmp_path), policy.tokenizer, chunk=chunk, hedge_seconds=hedge
    )
    pool.patience = patience
    try:
        for url in urls:
            pool.add(NativeWorker(url, TOKEN, description, timeout))
        yield pool
    finally:
        pool.close()


@contextmanager
def pool_on(tmp_path, policy, description, count=1, make=lambda: SamplerService("cpu"), **options):
    """A pool on so many workers of its own."""
    with workers(count, make) as found:
        urls = [each.url for each in found]
        with pool_of(tmp_path, policy, description, urls, **options) as pool:
            yield pool, *found


def in_process(policy, prompts, *, chunk=2, version=0, seed=5):
    engine = in_chunks(NativeEngine(policy), chunk)
    engine.policy_version = version
    return engine.generate(prompts, SAMPLING, samples_per_prompt=3, seed=seed)


def sampled(pool, prompts, *, version=0, seed=5):
    pool.policy_version = version
    return pool.generate(prompts, SAMPLING, samples_per_prompt=3, seed=seed)


def assert_same_bits(some: list[Rollout], others: list[Rollout]) -> None:
    """The same rollouts in the same order, to the bit of every column."""
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        for name in ("token_ids", "response_mask", "behavior_logprobs", "untruncated_logprobs"):
            mine, its = getattr(one, name), getattr(other, name)
            assert mine.dtype == its.dtype
            assert torch.equal(mine, its), (one.prompt.id, name)
        for name in ("prompt", "group_id", "sample_id", "completion", "finish", "policy_version"):
            assert getattr(one, name) == getattr(other, name), name


def move(policy) -> None:
    """As an update would: every trained weight, in place."""
    with torch.no_grad():
        for number, parameter in enumerate(each for each in policy.model.parameters() if each.requires_grad):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("flags", [(), LORA], ids=["whole", "lora"])
def test_any_number_of_workers_gives_the_bits_of_one_process(tmp_path, asked, count, flags):
    policy, description = run_model(*flags)
    with pool_on(tmp_path, policy, description, count) as (pool, *_):
        assert isinstance(pool, AsyncRolloutEngine)
        for version in range(2):
            assert_same_bits(sampled(pool, asked, version=version), in_process(policy, asked, version=version))
            move(policy)
        assert_same_bits(sampled(pool, asked, version=2), in_process(policy, asked, version=2))
        assert {rollout.policy_version for rollout in sampled(pool, asked, version=2)} == {2}


def test_a_lora_run_sends_its_adapters_alone(tmp_path):
    policy, _ = run_model(*LORA)
    weights = PolicyWeights(policy.model)
    snapshot = weights.snapshot(tmp_path, 3)
    assert {name for name in load_file(snapshot.path) if "lora_" not in name} == set()
    before = weights.digest()
    frozen = next(parameter for parameter in policy.model.parameters() if not parameter.requires_grad)
    with torch.no_grad():
        frozen.add_(1.0)
    assert before == snapshot.digest != PolicyWeights(policy.model).digest()  # the base counts for the digest


def test_a_call_keeps_the_weights_of_its_moment(tmp_path, asked):
    policy, description = run_model()
    before = copy.deepcopy(policy.model)
    with pool_on(tmp_path, policy, description, 2, make=lambda: SlowService("cpu")) as (pool, *_):
        pool.policy_version = 4
        first = pool.submit(asked, SAMPLING, samples_per_prompt=3, seed=5)
        move(policy)  # training goes on while workers sample
        pool.policy_version = 5
        second = pool.submit(asked, SAMPLING, samples_per_prompt=3, seed=6)
        old = dataclasses.replace(policy, model=before)
        assert_same_bits(second(), in_process(policy, asked, version=5, seed=6))
        assert_same_bits(first(), in_process(old, asked, version=4))
        sampled(pool, asked, version=6)
        assert len(list(tmp_path.glob("*.safetensors"))) == 1  # the newest: nobody needs the others


class Stale(SamplerService):
    """Samples with the weights that it has, whatever was asked for, as an actor that was started again did."""

    def generate(self, request):
        if self.model is not None and self.weights is not None:
            self.held = self.held or (self.weights.digest(), 0)
            request = request | {"weights": self.held[0], "policy_version": self.held[1], "model": self.model}
        return super().generate(request)


class Initial(Stale):
    """Says that it took over the weights, and keeps those it was loaded with."""

    def take(self, about, tensors):
        self.held = None
        return HTTPStatus.OK, "application/json", json.dumps({"weights": about["weights"]}).encode()


class Forgetful(Stale):
    """Was started again with the model, and holds its initial weights until it is given others."""

    def generate(self, request):
        if self.model is None:
            self.load(run_model()[1])
        return super().generate(request)


def test_a_worker_that_was_started_again_is_given_the_weights(tmp_path, asked):
    policy, description = run_model()
    with pool_on(tmp_path, policy, description) as (pool, worker):
        sampled(pool, asked)
        move(policy)
        sampled(pool, asked, version=1)
        worker.kill()
        worker.start(lambda: Forgetful("cpu"))  # answers with the initial weights, and says so
        lane = next(iter(pool._lanes.values()))
        lane.sampler.held = (PolicyWeights(policy.model).digest(), 1)  # the run does not know that it was away
        assert_same_bits(sampled(pool, asked, version=1), in_process(policy, asked, version=1))
        assert lane.sampler.healed == 1


def test_wrong_weights_twice_stop_the_run_before_its_update(tmp_path, asked):
    policy, description = run_model()
    move(policy)
    with (
        pool_on(tmp_path, policy, description, make=lambda: Initial("cpu")) as (pool, _),
        pytest.raises(WorkersLost, match=r"answered with wrong weights twice .* its rollouts were not used"),
    ):
        sampled(pool, asked, version=1)


def test_another_base_model_under_the_same_path_is_told_by_its_digest(tmp_path, asked):
    policy, description = run_model(*LORA)
    with torch.no_grad():
        next(parameter for parameter in policy.model.parameters() if not parameter.requires_grad).add_(1.0)
    with (
        pool_on(tmp_path, policy, description) as (pool, _),
        pytest.raises(WorkersLost, match="its base model is not the run's, though it has the same path"),
    ):
        sampled(pool, asked)


def test_a_worker_killed_in_the_middle_of_a_call_changes_nothing(tmp_path, asked):
    policy, description = run_model()
    with pool_on(tmp_path, policy, description, 2, make=lambda: SlowService("cpu"), chunk=1) as (pool, *found):
        pending = pool.submit(asked, SAMPLING, samples_per_prompt=3, seed=5)
        timer = threading.Timer(0.5, found[0].kill)
        timer.start()
        assert_same_bits(pending(), in_process(policy, asked, chunk=1))
        timer.join()
        assert pool.counts["lost"] == 1
        found[0].start()
        while pool.counts["connected"] < 3:  # it is used again
            assert_same_bits(sampled(pool, asked), in_process(policy, asked, chunk=1))


def test_a_worker_that_hangs_is_hedged(tmp_path, asked):
    policy, description = run_model()
    with pool_on(tmp_path, policy, description, 2, hedge=0.3) as (pool, *found):
        sampled(pool, asked)
        found[1].hang()
        assert_same_bits(sampled(pool, asked, seed=7), in_process(policy, asked, seed=7))
        assert pool.counts["hedged"] >= 1


def test_one_sentence_when_no_worker_is_left(tmp_path, asked):
    policy, description = run_model()
    with pool_on(tmp_path, policy, description, patience=0.3) as (pool, worker):
        sampled(pool, asked)
        worker.kill()
        with pytest.raises(WorkersLost, match=r"no rollout worker is left.* cannot be reached \(connection\)"):
            sampled(pool, asked)
        worker.start()
        pool.patience = 20.0
        assert_same_bits(sampled(pool, asked), in_process(policy, asked))


def test_workers_come_and_go(tmp_path, asked):
    policy, description = run_model()
    with workers(2, lambda: SlowService("cpu")) as (first, second), pool_of(tmp_path, policy, description, []) as pool:
        pending = pool.submit(asked, SAMPLING, samples_per_prompt=3, seed=5)
        pool.add(NativeWorker(first.url, TOKEN, description, 20.0))
        with pytest.raises(ValueError, match="in the pool already"):
            pool.add(NativeWorker(first.url, TOKEN, description, 20.0))
        pool.add(NativeWorker(second.url, TOKEN, description, 20.0))
        pool.remove(pool.names[0])
        assert_same_bits(pending(), in_process(policy, asked))
        assert pool.names == [f"the rollout worker at {second.url}"]


def test_errors_that_every_worker_would_meet_are_those_of_one_process(tmp_path):
    policy, description = run_model()
    long = [Prompt.from_text("long", "x" * 300)]
    with pool_on(tmp_path, policy, description) as (pool, worker):
        with pytest.raises(DataError) as here:
            in_process(policy, long)
        with pytest.raises(DataError) as there:
            sampled(pool, long)
        assert str(there.value) == f"the rollout worker at {worker.url}: {here.value}"


def test_another_tokenizer_is_told(tmp_path, asked):
    policy, description = run_model()
    other = tiny_tokenizer()
    other.chat_template = "!{{ messages[0]['content'] }}"
    with pool_on(tmp_path, policy, description) as (pool, _):
        pool.tokenizer = other
        with pytest.raises(DataError, match=r"reads prompt .* as other tokens than the run does"):
            sampled(pool, asked)


def test_a_wrong_token_and_a_wrong_server_are_told(tmp_path, asked):
    policy, description = run_model()
    with workers(1) as (worker,):
        with pool_of(tmp_path, policy, description, []) as pool:
            pool.add(NativeWorker(worker.url, "another token", description, 20.0))
            with pytest.raises(WorkersLost, match="refuses the token"):
                sampled(pool, asked)
        with pytest.raises(PostError, match="status_404"):
            post(f"{worker.url}/secrets", b"{}", token=TOKEN, timeout_seconds=5.0, max_bytes=100)
        for body in (b"", b"[]", b"{}", b'{"version": 1, "model": {}}', b"\xff" * 64):
            for path in ("model", "weights", "weights-file", "generate"):
                with pytest.raises(PostError, match=r"status_4\d\d"):
                    post(f"{worker.url}/{path}", body, token=TOKEN, timeout_seconds=5.0, max_bytes=100)
        with pytest.raises(PostError, match="status_422"):  # no folder was named, so no file is read
            body = json.dumps({"file": "/etc/passwd"}).encode()
            post(f"{worker.url}/weights-file", body, token=TOKEN, timeout_seconds=5.0, max_bytes=100)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout.workers", "2"], "distributed.rollout_chunk is 0"),
        (["--rollout.workers", "1", "--roles.mode", "shared_backbone"], "use roles.mode separate or lora"),
        (["--rollout.workers", "1", "--rollout.engine", "mine.py:make"], "which no worker runs"),
        (["--rollout.servers", "[ftp://here]"], "must start with http"),
        (["--rollout.servers", "[http://a:1, http://a:1]"], "names a URL twice"),
        (["--rollout.engine", "vllm"], "names no server"),
    ],
)
def test_recipes_that_cannot_be_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        load_recipe("ppo", None, flags)
