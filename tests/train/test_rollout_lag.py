"""`rollout.lag` in the loop: whose weights sample which step, at the same time as training, for every method."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from threaded_engine import ThreadedEngine

from tether.config.load import load_recipe
from tether.data.rows import collate
from tether.errors import DataError
from tether.learner.batching import evaluate_tokens
from tether.protocols import RolloutEngine
from tether.rewards.scoring import score_rollouts
from tether.rollout.ahead import RolloutQueue
from tether.seeds import derive_seed
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl

STEPS = 5
SMALL = [
    *("--run.steps", str(STEPS), "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4"),
    *("--rollout.samples_per_prompt", "2", "--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3"),
    *("--evaluation.every", "2", "--evaluation.prompts", "2"),
]
WARM = ("--ppo.critic_warmup", "2", "--roles.critic", "head")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
SHARED = ("--roles.mode", "shared_backbone", "--roles.trainable_layers", "1")
CAPPED = ("--rollout.importance_sampling_cap", "2")
CASES = {
    "ppo": ("ppo", CAPPED),
    "ppo, adaptive KL and penalty": (
        "ppo",
        ("--kl.controller", "adaptive", "--kl.target", "0.05", "--ppo.objective", "kl_penalty"),
    ),
    "ppo, value head and warm-up": ("ppo", WARM),
    "ppo, lora": ("ppo", LORA),
    "ppo, shared backbone": ("ppo", (*SHARED, *CAPPED)),
    "ppo, chunks": ("ppo", ("--distributed.rollout_chunk", "1")),
    "ppo, truncated sampling": ("ppo", ("--rollout.top_p", "0.8", *CAPPED)),
    "grpo": ("grpo", CAPPED),
    "rloo": ("rloo", CAPPED),
    "reinforce": ("reinforce", ("--reinforce.weighting", "baselined", *CAPPED)),
    "trpo": ("trpo", ("--trpo.cg_iterations", "2", *CAPPED)),
}


def build(method: str, *flags: str):
    recipe = load_recipe(method, None, [*SMALL, *flags])
    return build_rl(recipe, load_policy(recipe))


def threaded(method: str, *flags: str):
    return build(method, *flags, "--rollout.engine", "threaded_engine:ThreadedEngine")


def weights(parts) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in parts.roles.actor.state_dict().items()}


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


def outcome(parts):
    """Every metric of every step, and the weights at the end."""
    return [timeless(result.metrics) for result in train_rl(parts)], weights(parts)


def same(one, other) -> bool:
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def by_the_book(parts) -> dict[str, torch.Tensor]:
    """The loop as docs/architecture.md writes it, without a queue; the weights at its end."""
    learner, controllers = parts.learner, parts.algorithm.controllers
    for step in range(parts.steps):
        learner.set_progress((step + 0.5) / parts.steps)
        parts.engine.policy_version = step
        prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
        rollouts = parts.engine.generate(
            prompts,
            parts.sampling,
            samples_per_prompt=parts.samples_per_prompt,
            seed=derive_seed(parts.seed, "rollout", step),
        )
        scores = score_rollouts(parts.reward, rollouts, max_failure_rate=0.1)
        made = collate(rollouts, scores, pad_id=parts.pad_id, temperature=1.0, need_groups=False)
        evaluated = evaluate_tokens(
            made.batch,
            parts.roles,
            minibatch_size=parts.algorithm.minibatch_size,
            micro_batch_tokens=learner.micro_batch_tokens,
            device=learner.device,
            shrink_micro_batch=learner.shrink_micro_batch,
        )
        coefficients = controllers.coefficients()
        experience, _ = parts.algorithm.advantages(evaluated, coefficients.reference)
        generator = torch.Generator().manual_seed(derive_seed(parts.seed, "minibatches", step))
        parts.algorithm.update(learner, experience, parts.algorithm.objective_at(step, coefficients), generator, None)
    return weights(parts)


def test_without_a_lag_the_loop_is_the_plain_one_to_the_bit():
    expected = by_the_book(build("ppo"))
    metrics, found = outcome(build("ppo", "--rollout.lag", "0"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not any("staleness" in row for row in metrics)
    parts = threaded("ppo")
    assert same(outcome(parts), (metrics, found))
    assert parts.engine.asked == []  # an engine that can be asked ahead is not


class Seen(RolloutEngine):
    """Which steps' rollouts are sampled, in order, with the weights of which step."""

    def __init__(self, parts):
        self.parts, self.engine, self.found = parts, parts.engine, []
        self.known = [weights(parts)]

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.engine.policy_version = self.policy_version
        rollouts = self.engine.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
        steps = [step for step in range(STEPS) if seed == derive_seed(self.parts.seed, "rollout", step)]
        now = weights(self.parts)
        versions = [
            version
            for version, known in enumerate(self.known)
            if all(torch.equal(value, now[name]) for name, value in known.items())
        ]
        self.found += [(step, *versions) for step in steps]
        return rollouts


@pytest.mark.parametrize("lag", [1, 2, 4, 9])
def test_step_s_takes_what_the_weights_of_step_s_minus_lag_sampled(lag):
    parts = build("ppo", "--rollout.lag", str(lag))
    seen = Seen(parts)
    parts = dataclasses.replace(parts, engine=seen)
    results = []
    for result in train_rl(parts):
        seen.known.append(weights(parts))
        results.append(result)
    # Each step was asked for once, in order, and nothing beyond the last.
    assert seen.found == [(step, max(0, step - lag)) for step in range(STEPS)]
    for step, result in enumerate(results):
        assert {(rollout.policy_version, rollout.step) for rollout in result.rollouts} == {(max(0, step - lag), step)}
        assert result.metrics["staleness"] == min(step, lag)
        assert result.metrics["first_approx_kl"] == 0.0  # the ratio of the update is new / old, whatever the lag
        assert (result.metrics["logprob_diff"] > 1e-4) == (step > 0)  # old against behavior: what training has changed
    assert [rollout.prompt.id for rollout in results[3].rollouts[::2]] == [
        prompt.id for prompt in parts.prompts.take(3 * parts.prompts_per_step, parts.prompts_per_step)
    ]


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_samples_elsewhere_gives_the_bits_of_one_that_samples_when_asked(case):
    method, flags = CASES[case]
    here, apart = build(method, *flags, "--rollout.lag", "2"), threaded(method, *flags, "--rollout.lag", "2")
    found = outcome(here)
    assert same(found, outcome(apart))
    assert not same(found, outcome(build(method, *flags)))  # the lag has an effect
    engine = getattr(apart.engine, "engine", apart.engine)
    assert sorted(set(engine.asked)) == [0, 1, 2]
    assert all(map(torch.isfinite, torch.tensor([list(row.values()) for row in found[0][-1:]]).flatten()))


def test_ptx_mixes_in_the_texts_of_the_step_at_hand(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "red red red"}\n{"text": "blue blue"}\n')
    flags = ("--rollout.lag", "1", "--ptx.data", str(texts), "--ptx.coef", "1")
    assert same(outcome(build("ppo", *flags)), outcome(threaded("ppo", *flags)))


def test_the_importance_weight_is_old_over_behavior_and_corrects_the_update():
    plain = list(train_rl(build("ppo", "--rollout.lag", "2")))
    parts = build("ppo", "--rollout.lag", "2", "--rollout.importance_sampling_cap", "1.1")
    for step, result in enumerate(train_rl(parts)):
        one = result.experience
        mask = one.response_mask
        weight = (one.old_logprobs - one.behavior_logprobs)[mask].double().exp()
        expected = weight.clamp(max=1.1).mean().item()
        assert result.metrics["importance/mean"] == pytest.approx(expected, rel=1e-5)
        assert result.metrics["importance/truncated"] == pytest.approx((weight > 1.1).double().mean().item())
        assert (result.metrics["importance/mean"] == pytest.approx(1.0, abs=1e-5)) == (step == 0)
    assert result.metrics["policy_loss"] != plain[-1].metrics["policy_loss"]


def test_the_sampler_works_while_the_update_runs():
    """The sampling of a later step ends only after an update has begun, so one waits for the other, or both run."""
    parts = threaded("ppo", "--rollout.lag", "1", "--evaluation.every", "0")
    updates = [threading.Event() for _ in range(STEPS)]
    waited: list[int] = []

    def wait_for_an_update(version: int) -> None:
        if version:  # version 1 samples step 2, while step 1 is updated
            assert updates[version].wait(30.0)
            waited.append(version)

    def heartbeat(words: str) -> None:
        phase, _, step = words.partition(", step ")
        if phase == "update":
            updates[int(step)].set()

    assert isinstance(parts.engine, ThreadedEngine)
    parts.engine.before_sampling = wait_for_an_update
    assert len(list(train_rl(parts, heartbeat=heartbeat))) == STEPS
    assert waited == [1, 2, 3]


def test_an_answer_of_another_version_ends_the_run_before_its_update():
    parts = threaded("ppo", "--rollout.lag", "1")

    def other_version(version: int) -> None:
        if version == 2:
            parts.engine.there.policy_version = 1

    inner = parts.engine.there.generate

    def generate(*args, **words):
        other_version(parts.engine.there.policy_version)
        return inner(*args, **words)

    parts.engine.there.generate = generate
    taken: list[int] = []
    with pytest.raises(DataError, match=r"rollout 0 of ThreadedEngine for step 3 has policy_version 1.*version 2"):
        taken.extend(result.step for result in train_rl(parts))
    assert taken == [0, 1, 2]


def test_a_reward_knows_the_step_that_trains_on_its_answer():
    recipe = load_recipe("ppo", None, [*SMALL, "--rollout.lag", "2", "--evaluation.every", "0"])
    parts = build_rl(recipe, load_policy(recipe))
    inner, seen = parts.reward, []

    def reward(rollouts):
        seen.append({(rollout.trained_in, rollout.policy_version) for rollout in rollouts})
        return inner(rollouts)

    list(train_rl(dataclasses.replace(parts, reward=reward)))
    assert seen == [{(step, max(0, step - 2))} for step in range(STEPS)]


def test_a_run_that_starts_in_its_middle_asks_for_what_it_does_not_have():
    parts = build("ppo", "--rollout.lag", "2", "--evaluation.every", "0")
    versions = [result.rollouts[0].policy_version for result in train_rl(parts, start=2)]
    assert versions == [2, 2, 2]


def test_a_queue_without_a_lag_has_nothing_to_keep():
    parts = build("ppo")
    list(train_rl(parts))
    assert parts.queue.state() == ({"lag": 0, "asked": {}}, {})
    assert RolloutQueue().lag == 0
