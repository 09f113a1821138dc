"""`model.numerics: exact` in the loop: no log-prob differs, nothing is computed twice, other settings are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tether.config.load import load_recipe
from tether.errors import ConfigError, Diverged
from tether.models.roles import ActorCritic
from tether.protocols import StepOutcome
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts, train_rl

STEPS = 2
SMALL = [
    *("--run.steps", str(STEPS), "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "6"),
    *("--rollout.samples_per_prompt", "2", "--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3"),
    *("--model.device", "cpu", "--store.top_logprobs", "0"),
]
EXACT = ("--model.numerics", "exact")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
SHARED = ("--roles.mode", "shared_backbone", "--roles.trainable_layers", "1")
HEAD = ("--roles.critic", "head")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("ppo", ("--ppo.minibatch_size", "4")),
    "ppo, value head": ("ppo", (*HEAD, "--ppo.minibatch_size", "4", "--ppo.critic_warmup", "1")),
    "ppo, lora": ("ppo", LORA),
    "ppo, lora, value head": ("ppo", (*LORA, *HEAD)),
    "ppo, shared backbone": ("ppo", SHARED),
    "ppo, shared backbone, value head": ("ppo", (*SHARED, *HEAD)),
    "ppo, layers recomputed": ("ppo", ("--model.gradient_checkpointing", "true")),
    "ppo, small micro-batches": ("ppo", ("--optimizer.micro_batch_tokens", "40", "--rollout.max_num_seqs", "3")),
    "ppo, chunks": ("ppo", ("--distributed.rollout_chunk", "1")),
    "ppo, truncated sampling": ("ppo", ("--rollout.top_p", "0.8", "--rollout.temperature", "0.7")),
    "ppo, most likely tokens": ("ppo", ("--store.top_logprobs", "3", "--optimizer.micro_batch_tokens", "40")),
    "ppo, lag": ("ppo", ("--rollout.lag", "1")),
    "grpo": ("grpo", ("--kl.apply_to", "loss")),
    "rloo": ("rloo", ()),
    "reinforce": ("reinforce", ("--reinforce.weighting", "baselined")),
    "trpo": ("trpo", ("--trpo.cg_iterations", "2")),
}


def build(method: str, *flags: str) -> RLParts:
    epochs = ("--ppo.epochs", "2") if method == "ppo" else ()
    recipe = load_recipe(method, None, [*SMALL, *epochs, *EXACT, *flags])
    return build_rl(recipe, load_policy(recipe))  # pyright: ignore[reportArgumentType]


def weights(parts: RLParts) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in parts.roles.actor.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_no_log_prob_differs_in_any_step(case: str):
    method, flags = CASES[case]
    parts = build(method, *flags)
    results = list(train_rl(parts))
    assert len(results) == STEPS
    for result in results:
        assert result.metrics["logprob_unequal"] == 0
        assert 0 < result.metrics["logprob_compared"] <= result.metrics["tokens/sampled"]
        assert result.metrics.get("first_approx_kl", 0.0) == 0.0
        experience, mask = result.experience, result.experience.response_mask
        if "lag" not in case:
            assert torch.equal(experience.old_logprobs[mask], experience.untruncated_logprobs[mask])
            assert result.metrics["logprob_diff_max"] == 0.0
    if results[0].experience.ref_logprobs is not None:
        assert results[0].metrics["kl_ref_k1"] == 0.0 == results[0].metrics["kl_ref_k3"]
        warming = "--ppo.critic_warmup" in flags  # then the policy has not moved before the last step
        assert (results[-1].metrics["kl_ref_k3"] > 0.0) is not warming
    assert float(results[-1].experience.old_logprobs.abs().max()) > 0.1


def test_the_policy_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch):
    passes: list[int] = []
    original = ActorCritic._pass

    def counted(self: ActorCritic, batch: object) -> object:
        passes.append(1)
        return original(self, batch)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ActorCritic, "_pass", counted)
    flags = ("--optimizer.micro_batch_tokens", "40", "--ppo.epochs", "1")
    counts: list[int] = []
    for numerics in ("fast", "exact"):
        passes.clear()
        next(iter(train_rl(build("ppo", *flags, "--model.numerics", numerics))))
        counts.append(len(passes))
    assert counts[1] > 0
    assert counts[0] == 2 * counts[1]  # one evaluation and one epoch, and the epoch alone


def test_values_without_the_output_layer_are_the_same():
    parts = build("ppo", *HEAD, "--optimizer.micro_batch_tokens", "40")
    results = train_rl(parts)
    next(results)
    batch = next(results).experience
    with torch.no_grad():
        values, final = parts.roles.actor.values(batch)
        whole = parts.roles.actor.evaluate(batch)
    assert values is not None and final is not None and whole.values is not None
    assert torch.equal(values, whole.values)
    assert torch.equal(final, whole.final_values)  # pyright: ignore[reportArgumentType]


def test_a_stopped_run_goes_on_with_the_same_bits():
    undisturbed = build("ppo")
    whole = list(train_rl(undisturbed))
    first = build("ppo")
    outcome = next(iter(train_rl(first)))
    second = build("ppo")
    second.learner.load_state(first.learner.state(copy=True))
    rest = list(train_rl(second, start=1, controllers=outcome.controllers))
    for ours, theirs in zip(rest, whole[1:], strict=True):
        assert torch.equal(ours.experience.old_logprobs, theirs.experience.old_logprobs)
        assert ours.metrics["policy_loss"] == theirs.metrics["policy_loss"]
    assert all(torch.equal(value, weights(undisturbed)[name]) for name, value in weights(second).items())


def test_a_bit_that_differs_ends_the_run():
    parts = build("ppo", "--optimizer.micro_batch_tokens", "40")
    engine = parts.engine
    original = engine.generate

    def disturbed(*given, **named):
        rollouts = original(*given, **named)
        said = rollouts[0].untruncated_logprobs.clone()
        said[-1] = torch.nextafter(said[-1], torch.tensor(0.0))
        return [dataclasses.replace(rollouts[0], untruncated_logprobs=said), *rollouts[1:]]

    engine.generate = disturbed
    with pytest.raises(Diverged, match="1 log-probs of step 0 differ"):
        next(iter(train_rl(parts)))


def test_a_hook_that_appears_is_refused():
    parts = build("ppo")
    parts.roles.actor.policy.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="has a forward hook"):
        next(iter(train_rl(parts)))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model.dtype", "bfloat16"), "model.dtype is bfloat16"),
        (("--model.device", "cuda:1"), "model.device is cuda:1"),
        ((*LORA, "--model.quantize", "8bit"), "model.quantize is 8bit"),
        (("--rollout.engine", "transformers"), "rollout.engine is transformers"),
        (("--rollout.servers", '["http://127.0.0.1:1"]'), "rollout.servers"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_loading(flags: tuple[str, ...], reason: str):
    with pytest.raises(ConfigError, match="numerics") as raised:
        load_recipe("ppo", None, [*EXACT, *flags])
    assert reason in str(raised.value)


@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
def test_methods_that_sample_nothing_refuse_it(method: str):
    with pytest.raises(ConfigError, match="samples nothing"):
        load_recipe(method, None, [*EXACT, "--data.train", "demonstrations.jsonl"])


def test_an_engine_of_ones_own_is_refused():
    from tether.train.objects import Objects

    recipe = load_recipe("ppo", None, [*SMALL, *EXACT])
    policy = load_policy(recipe)
    own = Objects(engine=lambda loaded: build("ppo").engine)
    with pytest.raises(ConfigError, match="engine of your own"):
        build_rl(recipe, policy, objects=own)  # pyright: ignore[reportArgumentType]


def outcome_of(result: StepOutcome) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if not name.startswith("seconds/")}


def test_workers_on_this_machine_give_the_same_bits(tmp_path):
    own = [outcome_of(result) for result in train_rl(build("ppo"))]
    pooled = build("ppo", "--rollout.workers", "1", "--rollout.weights_dir", str(tmp_path))
    try:
        others = [outcome_of(result) for result in train_rl(pooled)]
    finally:
        pooled.engine.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert others == own
