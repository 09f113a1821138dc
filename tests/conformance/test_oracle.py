"""The oracle against hand-worked numbers, finite differences and the identities of the mathematics."""

import ast
import math
import random
from pathlib import Path

import pytest

from conformance import generate, oracle
from conformance.families import all_families
from conformance.oracle import ppo_update, trust_region

FAMILIES = {family.name: family for family in all_families()}
HAND_CASES = [
    pytest.param(case, id=f"{family.name}: {case.name}")
    for family in FAMILIES.values()
    for case in family.cases
    if case.source == "hand"
]
STEP = 1e-5


def numbers(rows, width, low, high, seed):
    source = random.Random(seed)
    return [[source.uniform(low, high) for _ in range(width)] for _ in range(rows)]


OLD = numbers(2, 6, -2, -0.3, seed=1)
NEW = [[x + d for x, d in zip(*rows, strict=True)] for rows in zip(OLD, numbers(2, 6, -0.9, 0.9, seed=2), strict=True)]
ADVANTAGES = numbers(2, 6, -2, 2, seed=3)
EVERYWHERE = [[True] * 6] * 2
MASK = [[False, True, True, False, True, True], [True, True, True, False, False, False]]
REWARDS = numbers(2, 6, -1, 1, seed=4)
VALUES = numbers(2, 6, -1, 1, seed=5)


def assert_close(left, right, tolerance=1e-12):
    assert not generate.differences(left, right, tolerance)


# -- the shape of the suite ------------------------------------------------------------------------------------------
def test_the_suite_is_as_large_as_promised():
    assert len(FAMILIES) >= 22
    assert sum(len(family.cases) for family in FAMILIES.values()) >= 200
    assert len(HAND_CASES) >= 30


def test_the_oracle_is_independent_and_plain():
    for path in Path(oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.split(".")[0] in {"conformance", "math", "typing", "types", "collections"}, (path, module)


@pytest.mark.parametrize("case", HAND_CASES)
def test_hand_worked_cases(case):
    answer = getattr(oracle, case.method)(**case.inputs)
    assert_close(generate.like(answer, case.expected), answer, 1e-11)


def test_the_traces_on_disk_are_what_the_oracle_says():
    assert generate.main(["--check"]) == 0


def test_check_notices_a_change(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "TRACES", tmp_path)
    assert generate.main([]) == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert generate.main(["--check"]) == 0
    (tmp_path / "gae.json").write_text("{}", encoding="utf-8")
    (tmp_path / "stranger.json").write_text("{}", encoding="utf-8")
    assert generate.main(["--check"]) == 1
    assert "gae.json" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


# -- gradients by finite differences ---------------------------------------------------------------------------------
def assert_grad_by_finite_differences(loss_of, x):
    grad = loss_of(x)["grad"]
    for b, row in enumerate(x):
        for t in range(len(row)):
            losses = []
            for direction in (1, -1):
                moved = [list(r) for r in x]
                moved[b][t] += direction * STEP
                losses.append(loss_of(moved)["loss"][b][t])
            assert (losses[0] - losses[1]) / (2 * STEP) == pytest.approx(grad[b][t], abs=1e-7, rel=1e-7)


def test_reinforce_gradient():
    assert_grad_by_finite_differences(lambda x: oracle.reinforce_loss(x, ADVANTAGES), NEW)


def test_unclipped_gradient():
    assert_grad_by_finite_differences(lambda x: oracle.unclipped_loss(x, OLD, ADVANTAGES), NEW)


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("clip_high", [0.2, 0.35])
def test_clip_gradient(dual, clip_high):
    def loss_of(x):
        return oracle.clip_loss(x, OLD, ADVANTAGES, EVERYWHERE, 0.2, clip_high, dual)

    assert_grad_by_finite_differences(loss_of, NEW)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_gradient(estimator):
    assert_grad_by_finite_differences(lambda x: oracle.kl_penalty_loss(x, OLD, ADVANTAGES, 0.7, estimator), NEW)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_gradient(clip):
    assert_grad_by_finite_differences(lambda x: oracle.value_loss(x, OLD, ADVANTAGES, clip), NEW)


def ppo_setups():
    return [pytest.param(case.inputs["setup"], id=case.name) for case in FAMILIES["ppo_trace"].cases]


@pytest.mark.parametrize("setup", ppo_setups())
def test_ppo_gradient(setup):
    """At every theta the trace visits, clipped or not, and for each of its minibatches."""
    credited = ppo_update.advantages(setup)
    trace = oracle.ppo_trace(setup)
    for theta, rows in zip([setup["theta"], *trace["thetas"]], setup["minibatches"], strict=False):

        def result(at, rows=rows):
            return ppo_update.minibatch_result(at, setup, rows, credited["old_logprobs"], credited["advantages"])

        gradient = result(theta).gradient
        for i in (0, 1):
            up, down = ([t + sign * STEP * (i == j) for j, t in enumerate(theta)] for sign in (1, -1))
            slope = (result(up).loss - result(down).loss) / (2 * STEP)
            assert slope == pytest.approx(gradient[i], abs=1e-8)


def trpo_setups():
    return [pytest.param(case.inputs["setup"], id=case.name) for case in FAMILIES["trpo"].cases]


@pytest.mark.parametrize("setup", trpo_setups())
def test_trpo_gradient_and_fisher(setup):
    theta = setup["theta"]
    gradient = trust_region.surrogate_gradient(theta, setup)
    fisher = trust_region.fisher_matrix(theta, setup, damping=0.0)
    step = 1e-4

    def moved(*shifts):
        return [theta[j] + step * sum(sign for i, sign in shifts if i == j) for j in (0, 1)]

    def kl(*shifts):
        return trust_region.mean_kl(theta, moved(*shifts), setup)

    for i in (0, 1):
        rise = [trust_region.surrogate(theta, moved((i, sign)), setup) for sign in (1, -1)]
        assert (rise[0] - rise[1]) / (2 * step) == pytest.approx(gradient[i], abs=1e-7)
        for j in (0, 1):
            crossed = kl((i, 1), (j, 1)) - kl((i, 1), (j, -1)) - kl((i, -1), (j, 1)) + kl((i, -1), (j, -1))
            assert crossed / (4 * step * step) == pytest.approx(fisher[i][j], abs=1e-6)


@pytest.mark.parametrize("setup", trpo_setups())
def test_trpo_keeps_its_promise(setup):
    result = oracle.trpo_step(setup)
    assert result["kl"] <= setup["max_kl"]
    assert result["accepted"] == (result["surrogate_after"] > result["surrogate_before"])
    assert result["accepted"] or result["theta"] == setup["theta"]


# -- identities of returns and advantages ----------------------------------------------------------------------------
def test_gae_sum_equals_its_recursion():
    rewards, values = REWARDS[0], VALUES[0]
    expected, advantage, next_value = [0.0] * 6, 0.0, 0.3
    for t in reversed(range(6)):
        advantage = rewards[t] + 0.9 * next_value - values[t] + 0.9 * 0.8 * advantage
        expected[t], next_value = advantage, values[t]
    result = oracle.gae([rewards], [values], [[True] * 6], 0.9, 0.8, [0.3])
    assert_close([expected], result["advantages"])


def test_lambda_zero_is_the_td_residual():
    result = oracle.gae(REWARDS, VALUES, MASK, 0.9, 0.0, [0.4, 0.0])["advantages"]
    assert_close(oracle.td_residuals(REWARDS, VALUES, MASK, 0.9, [0.4, 0.0])["residuals"], result)
    assert_close(oracle.n_step(REWARDS, VALUES, MASK, 0.9, 1, [0.4, 0.0])["advantages"], result)


def test_lambda_one_is_monte_carlo_minus_the_value():
    result = oracle.gae(REWARDS, VALUES, MASK, 0.9, 1.0, None)
    assert_close(oracle.reward_to_go(REWARDS, MASK, 0.9)["returns"], result["returns"])
    assert_close(
        oracle.reinforce_weights(REWARDS, VALUES, MASK, 0.9, 0.5, "baselined")["weights"], result["advantages"]
    )
    assert_close(oracle.n_step(REWARDS, VALUES, MASK, 0.9, 99, None)["advantages"], result["advantages"])


def test_gamma_zero_is_reward_minus_value():
    result = oracle.gae(REWARDS, VALUES, EVERYWHERE, 0.0, 0.7, None)["advantages"]
    difference = [[r - v for r, v in zip(*rows, strict=True)] for rows in zip(REWARDS, VALUES, strict=True)]
    assert_close(difference, result)


def test_gae_is_the_weighted_mean_of_n_step():
    """A = (1 - lambda) sum_n lambda^(n-1) A(n), the last one taking the rest of the weight."""
    lam, row = 0.8, [[True] * 6]
    steps = [oracle.n_step(REWARDS[:1], VALUES[:1], row, 0.9, n, None)["advantages"][0][0] for n in range(1, 7)]
    weights = [(1 - lam) * lam ** (n - 1) for n in range(1, 6)] + [lam**5]
    expected = math.fsum(w * a for w, a in zip(weights, steps, strict=True))
    assert oracle.gae(REWARDS[:1], VALUES[:1], row, 0.9, lam, None)["advantages"][0][0] == pytest.approx(expected)


def test_gaps_pass_as_if_they_were_not_there():
    dense = [[x for x, is_sampled in zip(REWARDS[0], MASK[0], strict=True) if is_sampled]]
    dense_values = [[x for x, is_sampled in zip(VALUES[0], MASK[0], strict=True) if is_sampled]]
    expected = oracle.gae(dense, dense_values, [[True] * 4], 0.9, 0.8, None)["advantages"][0]
    sparse = oracle.gae(REWARDS, VALUES, MASK, 0.9, 0.8, None)["advantages"][0]
    assert [x for x in sparse if x is not None] == expected


def test_leave_one_out_is_the_scaled_group_advantage():
    """s_i - mean of the others = (s_i - mean of all) n / (n - 1)."""
    scores = [0.3, 1.7, -0.4, 0.9]
    centred = oracle.group_advantages(scores, [0] * 4, False, False, 0.0)["advantages"]
    assert_close([x * 4 / 3 for x in centred], oracle.leave_one_out(scores, [0] * 4)["advantages"])


# -- identities of distributions and losses --------------------------------------------------------------------------
def test_log_probs_are_of_a_distribution():
    logits = [[0.3, -1.2, 2.0], [0.0, 0.0, 0.0]]
    probabilities = [
        math.exp(oracle.token_logprobs([logits], [[0, token]], 0.7)["logprobs"][0][1]) for token in range(3)
    ]
    assert math.fsum(probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl(estimator):
    logits, other = [0.3, -1.2, 2.0], [1.0, 0.4, -0.3]

    def logprob(z, token):
        return oracle.token_logprobs([[z, z]], [[0, token]], 1.0)["logprobs"][0][1]

    terms = []
    for token in range(3):
        p, q = logprob(logits, token), logprob(other, token)
        terms.append(math.exp(p) * oracle.kl_estimate([[p]], [[q]], estimator)["kl"][0][0])
    assert math.fsum(terms) == pytest.approx(oracle.exact_kl([logits], [other])["kl"][0])


def test_whitened_numbers_have_no_mean_and_unit_variance():
    whitened = oracle.whiten(REWARDS, MASK, shift_mean=True, unbiased=False, epsilon=0.0)["whitened"]
    assert oracle.masked_mean(whitened, MASK)["mean"] == pytest.approx(0.0, abs=1e-15)
    assert oracle.masked_variance(whitened, MASK, unbiased=False)["variance"] == pytest.approx(1.0)


def test_kwise_of_two_is_pairwise():
    chosen, rejected = [1.3, -0.2, 0.5], [0.1, 0.4, 0.5]
    scores = [s for pair in zip(chosen, rejected, strict=True) for s in pair]
    kwise = oracle.kwise_loss(scores, [1, 2] * 3, [0, 0, 1, 1, 2, 2])
    assert kwise["loss"] == pytest.approx(oracle.pairwise_loss(chosen, rejected)["loss"])


def test_dpo_without_reference_is_pairwise():
    chosen, rejected, nothing = [1.3, -0.2], [0.1, 0.4], [0.0, 0.0]
    dpo = oracle.dpo_loss(chosen, rejected, nothing, nothing, beta=1.0, label_smoothing=0.0)["loss"]
    assert math.fsum(dpo) / 2 == pytest.approx(oracle.pairwise_loss(chosen, rejected)["loss"])


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
def test_micro_batches_change_nothing(mode):
    whole = oracle.aggregate(REWARDS, MASK, mode, 8)["loss"]
    for split in ([[0, 1]], [[0], [1]], [[1], [0]]):
        parts = oracle.aggregate_micro_batches(REWARDS, MASK, mode, 8, split)["loss"]
        assert parts == pytest.approx(whole, abs=1e-15)


def test_conjugate_gradient_solves():
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, -0.5], [0.5, -0.5, 2.0]]
    solution = oracle.conjugate_gradient(matrix, [1.0, -2.0, 0.5], 3)["solution"]
    assert_close([1.0, -2.0, 0.5], trust_region.times(matrix, solution))
