"""Each audit on made-up curves: the cause that it names, how grave it says it is, and where it keeps silent."""

import math
from typing import Any

import pytest
from synthetic import answered, found, silent, synthetic, undecided, wave

from tether.doctor.drift import entropy_collapse, kl_runaway, length_drift, mode_collapse, never_ends, repeating
from tether.doctor.learning import (
    clip,
    critic,
    critic_lr,
    dominated_advantages,
    early_stop,
    gradient_spikes,
    not_finite,
    not_training,
)
from tether.doctor.sampling import negative_kl, rollout_mismatch
from tether.doctor.scores import (
    few_prompts,
    flat_scores,
    held_out,
    over_optimisation,
    reward_failures,
    score_collapse,
)

LEARNING = wave(0.0, 1.0)

# -- sampler and trainer ------------------------------------------------------------------------------------------


def test_rounding_in_float32_is_no_mismatch():
    assert silent(rollout_mismatch(synthetic(logprob_diff=2e-6, logprob_diff_max=2e-5)))


@pytest.mark.parametrize(("gap", "severity"), [(0.02, "warning"), (0.08, "alarm")])
def test_a_mismatch_is_graver_the_larger_it_is(gap: float, severity: str):
    finding = found(rollout_mismatch(synthetic(logprob_diff=gap, logprob_diff_max=1.5)))
    assert finding.severity == severity
    assert "1.50 at one token" in finding.saw


@pytest.mark.parametrize(("gap", "severity"), [(0.04, None), (0.15, "warning"), (0.3, "alarm")])
def test_bfloat16_is_allowed_the_rounding_that_it_has(gap: float, severity: str | None):
    verdict = rollout_mismatch(synthetic(config={"model": {"dtype": "bfloat16"}}, logprob_diff=gap))
    assert silent(verdict) if severity is None else found(verdict).severity == severity


def test_the_token_with_the_largest_gap_comes_first():
    rollout = answered([7, 8, 9], old_logprob=[-1.0, -2.0, -3.0], untruncated_logprob=[-1.0, -2.9, -3.1])
    finding = found(rollout_mismatch(synthetic(rollouts=[rollout], logprob_diff=0.3)))
    assert "token 3 '<8>': sampler −2.90, trainer −2" in finding.examples[0]
    assert "90 %" in finding.saw  # the worst twentieth, one token of three, has 0.9 of 1.0


def test_a_trainer_that_disagrees_with_itself_is_told_apart():
    finding = found(rollout_mismatch(synthetic(logprob_diff=1e-6, first_approx_kl=0.005)))
    assert finding.metric == "first_approx_kl"
    assert "10 %" in finding.saw  # sqrt(2 x 0.005)


# -- negative KL --------------------------------------------------------------------------------------------------


def test_a_kl_that_grows_from_zero_is_healthy():
    assert silent(negative_kl(synthetic(kl_ref_k1=wave(0.0, 5.0), kl_ref_k3=wave(0.0, 5.0), response_length=10)))


@pytest.mark.parametrize(
    ("more", "cause", "severity"),
    [
        ({"truncation_gap": 0.2}, "truncated sampling", "warning"),
        ({"logprob_diff": 0.1}, "sampler and trainer disagree", "warning"),
        ({"logprob_diff": 1e-6, "truncation_gap": 0.0}, "log-probs are not those of the sampled tokens", "alarm"),
    ],
)
def test_the_cause_of_a_negative_kl_is_named(more: dict[str, Any], cause: str, severity: str):
    run = synthetic(kl_ref_k1=wave(0.0, -2.0), kl_ref_k3=wave(0.0, 0.5), response_length=10, **more)
    finding = found(negative_kl(run))
    assert cause in finding.saw
    assert finding.severity == severity


def test_a_negative_kl_within_its_noise_is_only_noted():
    # Two answers a step: the standard error of k1 is sqrt(2 x 0.02 / 2 / 12) = 0.04, and the mean is -0.02.
    run = synthetic(
        config={"rollout": {"prompts_per_step": 2}},
        kl_ref_k1=wave(-0.02, -0.02, noise=0.05),
        kl_ref_k3=[0.0, *[0.02] * 23],
        response_length=10,
    )
    finding = found(negative_kl(run))
    assert finding.severity == "note"
    assert "chance" in finding.saw


def test_a_reference_that_moves_with_the_policy_is_found():
    finding = found(negative_kl(synthetic(kl_ref_k1=0.0, kl_ref_k3=0.0, approx_kl=0.01, response_length=10)))
    assert "policy itself" in finding.saw


def test_a_policy_that_does_not_move_says_nothing_of_its_reference():
    assert undecided(negative_kl(synthetic(kl_ref_k1=0.0, kl_ref_k3=0.0, approx_kl=0.0)))


def test_a_reference_that_is_another_model_from_the_start_is_found():
    finding = found(negative_kl(synthetic(kl_ref_k1=wave(4.0, 6.0), kl_ref_k3=wave(4.0, 6.0), response_length=10)))
    assert "0.40 per token" in finding.saw


# -- drift --------------------------------------------------------------------------------------------------------


def test_a_kl_far_above_its_target_is_found():
    config = {"kl": {"controller": "proportional", "target": 2.0}}
    run = synthetic(config=config, kl_ref_k1=8.0, response_length=100, score=LEARNING)
    assert "4.0 times kl.target" in found(kl_runaway(run)).saw


def test_a_kl_that_buys_score_is_not_running_away():
    grows = wave(0.0, 20.0)
    assert silent(kl_runaway(synthetic(kl_ref_k1=grows, response_length=20, score=LEARNING)))
    finding = found(kl_runaway(synthetic(kl_ref_k1=grows, response_length=20, score=wave(1.0, 1.0, noise=0.1))))
    assert finding.severity == "warning"


def test_entropy_that_falls_while_the_score_rises_is_learning():
    falls = [2.0 * 0.8**step for step in range(24)]
    assert silent(entropy_collapse(synthetic(entropy=falls, score=LEARNING, score_std=0.3)))
    assert found(entropy_collapse(synthetic(entropy=falls, score=0.2, score_std=0.3))).severity == "alarm"


def test_a_solved_task_may_be_without_entropy():
    run = synthetic(entropy=[2.0] * 4 + [0.01] * 20, score=[0.1] * 4 + [1.0] * 20, score_std=[0.3] * 4 + [0.0] * 20)
    assert silent(entropy_collapse(run))


def test_a_task_that_repeats_by_nature_is_not_blamed():
    assert silent(repeating(synthetic(answers__repetition=0.7)))
    assert found(repeating(synthetic(answers__repetition=wave(0.0, 0.9)))).severity == "warning"


def test_yes_and_no_to_everything_from_the_start_is_no_collapse():
    assert silent(mode_collapse(synthetic(answers__top_share=0.6, prompts__distinct=20)))
    assert undecided(mode_collapse(synthetic(answers__top_share=wave(0.1, 1.0), prompts__distinct=3)))
    assert found(mode_collapse(synthetic(answers__top_share=wave(0.1, 1.0), prompts__distinct=20)))


@pytest.mark.parametrize(
    ("tie", "score", "severity"), [(0.9, LEARNING, "warning"), (0.0, LEARNING, "note"), (0.9, 0.5, "note")]
)
def test_length_is_hacking_only_where_it_pays(tie: float, score: float | list[float], severity: str):
    run = synthetic(response_length=wave(10, 40), length_score_correlation=tie, score=score)
    assert found(length_drift(run)).severity == severity


def test_a_little_growth_is_nothing():
    assert silent(length_drift(synthetic(response_length=wave(10, 14), length_score_correlation=0.9, score=LEARNING)))


def test_answers_of_a_fixed_length_may_go_without_an_end():
    short = {"rollout": {"max_new_tokens": 8}}
    assert silent(never_ends(synthetic(config=short, truncated=1.0, score=LEARNING)))
    assert found(never_ends(synthetic(config=short, truncated=1.0, score=0.1))).severity == "note"
    assert found(never_ends(synthetic(truncated=1.0, score=LEARNING))).severity == "warning"
    assert silent(never_ends(synthetic(truncated=0.9, score=0.1)))


# -- scores -------------------------------------------------------------------------------------------------------

LOOKED_AT = {"reward": {"parts": [{"kind": "model", "weight": 1.0}, {"kind": "task", "name": "true", "weight": 0.0}]}}


def test_a_true_score_that_turns_while_the_proxy_climbs_is_found():
    turned = [*wave(0.2, 0.8, steps=12), *wave(0.8, 0.1, steps=12)]
    finding = found(over_optimisation(synthetic(config=LOOKED_AT, score=LEARNING, reward__true=turned)))
    assert finding.metric == "reward/true"
    assert "over-optimised" in finding.saw
    assert silent(over_optimisation(synthetic(config=LOOKED_AT, score=LEARNING, reward__true=wave(0.2, 0.8))))


def test_both_scores_falling_is_left_to_the_audit_of_collapse():
    falls = [*wave(0.0, 1.0, steps=12), *wave(1.0, 0.0, steps=12)]
    run = synthetic(config=LOOKED_AT, score=falls, reward__true=falls)
    assert silent(over_optimisation(run))
    assert found(score_collapse(run)).first_step == pytest.approx(12, abs=2)


def test_without_a_score_to_look_at_over_optimisation_cannot_be_judged():
    assert undecided(over_optimisation(synthetic(score=LEARNING, reward__proxy=LEARNING)))


def test_held_out_prompts_that_lose_are_found_in_their_own_words():
    finding = found(held_out(synthetic(score=LEARNING, held_out__score=wave(0.8, 0.2))))
    assert "proxy" not in finding.saw
    assert "true score" not in finding.saw
    assert silent(held_out(synthetic(score=LEARNING, held_out__score=LEARNING)))


def test_a_score_that_wobbles_has_not_collapsed():
    assert silent(score_collapse(synthetic(score=wave(0.0, 1.0, noise=0.1))))
    assert silent(score_collapse(synthetic(score=wave(0.5, 0.5, noise=0.2), score_std=0.3)))


def test_equal_scores_are_an_alarm_and_a_solved_task_is_not():
    assert found(flat_scores(synthetic(score=0.5, score_std=0.0))).severity == "alarm"
    assert silent(flat_scores(synthetic(score=LEARNING, score_std=wave(0.3, 0.0))))
    assert found(flat_scores(synthetic(score=-5.0, score_std=1e-3))).severity == "warning"


def test_groups_without_a_difference_are_found():
    assert found(flat_scores(synthetic(score=0.1, score_std=0.3, zero_std_groups=0.97)))


@pytest.mark.parametrize(("a_step", "severity"), [(0.1, "note"), (1.0, "warning"), (4.0, "alarm")])
def test_failures_of_the_reward_are_counted_with_their_reasons(a_step: float, severity: str):
    run = synthetic(
        config={"rollout": {"prompts_per_step": 64}},
        steps=100,
        dropped__unscored=a_step,
        reward__judge__failed=a_step,
        reward__judge__failed__timeout=a_step,
    )
    finding = found(reward_failures(run))
    assert finding.severity == severity
    assert f"judge/failed/timeout {100 * a_step:.0f}" in finding.saw


def test_a_few_failures_are_nothing():
    assert silent(reward_failures(synthetic(dropped__unscored=[1.0, *[0.0] * 23])))


def test_two_prompts_are_too_few():
    assert found(few_prompts(synthetic(prompts__distinct=2, prompts__asked=64)))
    assert found(few_prompts(synthetic(prompts__distinct=12, prompts__asked=64)))  # each five times in one step
    assert silent(few_prompts(synthetic(prompts__distinct=48, prompts__asked=64)))
    assert undecided(few_prompts(synthetic(prompts__distinct=1, prompts__asked=1)))


# -- learning -----------------------------------------------------------------------------------------------------


def test_a_critic_is_given_time():
    assert undecided(critic(synthetic(explained_variance=0.0, steps=12)))
    assert found(critic(synthetic(explained_variance=0.0, steps=30))).severity == "note"
    assert found(critic(synthetic(explained_variance=0.0, steps=60))).severity == "warning"
    assert silent(critic(synthetic(explained_variance=0.3, steps=60)))


def test_the_warm_up_of_the_critic_does_not_count():
    run = synthetic(config={"ppo": {"critic_warmup": 50}}, explained_variance=0.0, steps=60)
    assert undecided(critic(run))


def test_where_all_scores_are_alike_there_is_nothing_to_explain():
    run = synthetic(explained_variance=-50.0, score=1.0, score_std=[0.3] * 4 + [1e-4] * 56, steps=60)
    assert undecided(critic(run))
    assert undecided(critic_lr(run))


def test_a_critic_worse_than_the_mean_has_too_high_a_rate():
    run = synthetic(explained_variance=-0.5, score=0.5, score_std=0.3, value_loss=0.1, steps=60)
    assert found(critic_lr(run)).severity == "warning"
    assert silent(critic(run))  # one disease, one finding


def test_a_value_loss_far_above_the_variance_of_scores_shows_it_too():
    run = synthetic(explained_variance=0.0, score=0.5, score_std=0.1, value_loss=[5.0] * 4 + [0.01] * 20)
    assert found(critic_lr(run)).metric == "value_loss"


@pytest.mark.parametrize(("share", "sick"), [(0.13, False), (0.6, True)])
def test_few_answers_with_most_of_the_advantage_are_found(share: float, sick: bool):
    verdict = dominated_advantages(synthetic(advantage_top_share=share))
    assert silent(verdict) != sick


@pytest.mark.parametrize(("clipped", "severity"), [(0.1, None), (0.4, "warning"), (0.6, "alarm")])
def test_the_clip_may_bind_but_not_on_everything(clipped: float, severity: str | None):
    verdict = clip(synthetic(clip_fraction=clipped, approx_kl=0.01, steps=24))
    assert silent(verdict) if severity is None else found(verdict).severity == severity


def test_a_clip_that_cannot_act_is_not_blamed():
    # One optimiser step an update: every ratio is 1.
    one = synthetic(clip_fraction=0.0, approx_kl=0.0, score=0.1)
    for row in one.metrics:
        row["steps"] = 1.0  # pyright: ignore[reportIndexIssue] (a dict underneath)
    assert silent(clip(one))


def test_updates_that_all_end_early_are_found_with_the_steps_they_took():
    config = {"ppo": {"epochs": 4, "minibatch_size": 16, "target_kl": 0.01}, "rollout": {"prompts_per_step": 64}}
    run = synthetic(config=config, early_stop=1.0)
    for row in run.metrics:
        row["steps"] = 3.0  # pyright: ignore[reportIndexIssue] (a dict underneath)
    finding = found(early_stop(run))
    assert "3 of 16 optimizer steps" in finding.saw
    assert silent(early_stop(synthetic(early_stop=[0.0, 1.0] * 12)))


def test_a_spike_is_far_above_what_came_before_and_above_the_start():
    calm = [1.0 + 0.1 * (step % 3) for step in range(24)]
    spiky = [*calm[:15], 30.0, *calm[16:20], 40.0, *calm[21:]]
    assert silent(gradient_spikes(synthetic(grad_norm__policy=calm)))
    finding = found(gradient_spikes(synthetic(grad_norm__policy=calm, grad_norm__critic=spiky)))
    assert (finding.metric, finding.first_step, finding.last_step) == ("grad_norm/critic", 15, 20)
    converged = [*wave(5.0, 1e-4, steps=15), 0.01, *[1e-4] * 8]
    assert silent(gradient_spikes(synthetic(grad_norm__policy=converged)))


def test_skipped_steps_are_found():
    run = synthetic(skipped_steps=[0.0] * 20 + [4.0] * 4)
    assert found(not_finite(run)).severity == "alarm"
    assert found(not_finite(run)).first_step == 20
    assert silent(not_finite(synthetic(skipped_steps=0.0)))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (synthetic(grad_norm__policy=0.0), "no gradient reaches the weights"),
        (synthetic(config={"roles": {"mode": "lora"}}, grad_norm__policy=0.0), "no gradient reaches the adapters"),
        (synthetic(config={"optimizer": {"policy_lr": 0.0}}, grad_norm__policy=1.0), "policy_lr is 0"),
        (synthetic("reward", {"optimizer": {"critic_lr": 0.0}}, grad_norm__reward=1.0), "critic_lr is 0"),
        (synthetic(grad_norm__policy=1.0, weight_change__policy=0.0), "weight_change/policy is exactly 0"),
    ],
)
def test_weights_that_do_not_train_are_an_alarm_with_its_cause(run, words: str):
    finding = found(not_training(run))
    assert finding.severity == "alarm"
    assert words in finding.saw


def test_a_method_of_one_step_an_update_trains_though_its_kl_is_zero():
    assert silent(not_training(synthetic("reinforce", grad_norm__policy=1.0, approx_kl=0.0)))


def test_what_is_not_finite_is_left_out_of_a_curve():
    assert silent(rollout_mismatch(synthetic(logprob_diff=[math.nan, math.inf, *[1e-6] * 22])))
