"""The runner: right implementations pass, planted faults are caught by the family that names them."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from conformance import oracle
from tether.conformance.adapter import Adapter, Unsupported
from tether.conformance.runner import load_families, load_target, main, render, report_json, run

METHODS = [name for name in vars(Adapter) if not name.startswith("_")]


def oracle_with(**replacements):
    """A factory for the oracle with some methods replaced; None takes one away."""
    methods = {name: getattr(oracle, name) for name in METHODS} | replacements
    return lambda dtype: SimpleNamespace(**{name: method for name, method in methods.items() if method is not None})


def families_that_fail(**replacements):
    report = run(oracle_with(**replacements), dtypes=("float64",))
    return {failure.family for failure in report.failed}


# -- a right implementation ------------------------------------------------------------------------------------------
def test_the_oracle_passes_everything():
    report = run(oracle_with())
    assert report.failed == []
    assert report.not_claimed == []
    assert report.partly_claimed == []
    assert report.passed == report.cases >= 200
    assert len(report.families) >= 22


def test_every_method_of_the_contract_has_cases():
    asked = {case["method"] for trace in load_families() for case in trace["cases"]}
    assert asked == set(METHODS)


def test_float64_is_held_to_ten_digits():
    tolerances = [case["tolerance"] for trace in load_families() for case in trace["cases"]]
    assert all(tolerance["float64"] == 1e-10 and tolerance["float32"] <= 1e-4 for tolerance in tolerances)


# -- planted faults --------------------------------------------------------------------------------------------------
def test_whitening_over_padding_is_caught():
    def whiten(x, mask, **settings):
        return oracle.whiten(x, [[True] * len(row) for row in mask], **settings)

    assert "whitening" in families_that_fail(whiten=whiten)


def test_score_on_the_last_column_is_caught():
    def token_rewards(scores, kl, mask, kl_coef):
        rewards = oracle.token_rewards([0.0] * len(scores), kl, mask, kl_coef)["rewards"]
        return {"rewards": [[*row[:-1], row[-1] + score] for row, score in zip(rewards, scores, strict=True)]}

    assert "reward_placement" in families_that_fail(token_rewards=token_rewards)


def test_score_on_every_token_is_caught():
    def token_rewards(scores, kl, mask, kl_coef):
        rewards = oracle.token_rewards([0.0] * len(scores), kl, mask, kl_coef)["rewards"]
        paid = [[r + s * m for r, m in zip(*rows, strict=True)] for *rows, s in zip(rewards, mask, scores, strict=True)]
        return {"rewards": paid}

    assert "reward_placement" in families_that_fail(token_rewards=token_rewards)


def test_kl_with_the_wrong_sign_is_caught():
    def kl_estimate(logprobs, other_logprobs, estimator):
        return oracle.kl_estimate(other_logprobs, logprobs, estimator)

    assert "kl_estimators" in families_that_fail(kl_estimate=kl_estimate)


def test_kl_paid_instead_of_charged_is_caught():
    def token_rewards(scores, kl, mask, kl_coef):
        return oracle.token_rewards(scores, kl, mask, -kl_coef)

    assert "kl_placement" in families_that_fail(token_rewards=token_rewards)


def gae_that_zeroes_gaps(rewards, values, mask, gamma, lam, final_values):
    """The usual loop over columns, with the values and rewards of unsampled tokens set to zero."""
    advantages = []
    for b, row in enumerate(mask):
        row_advantages, advantage, next_value = [0.0] * len(row), 0.0, 0.0
        last = max((t for t, sampled in enumerate(row) if sampled), default=-1)
        for t in reversed(range(len(row))):
            if t == last:
                next_value = 0.0 if final_values is None else final_values[b]
            value, reward = (values[b][t], rewards[b][t]) if row[t] else (0.0, 0.0)
            advantage = reward + gamma * next_value - value + gamma * lam * advantage
            row_advantages[t], next_value = advantage, value
        advantages.append(row_advantages)
    returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)]
    return {"advantages": advantages, "returns": returns}


def test_gae_that_zeroes_gaps_is_caught():
    failing = families_that_fail(gae=gae_that_zeroes_gaps)
    assert "gae_across_gaps" in failing
    assert "gae" not in failing  # nothing else is wrong with it: the fault has a name


def test_mean_of_micro_batch_means_is_caught():
    def aggregate_micro_batches(losses, mask, mode, fixed_length, micro_batches):
        parts = [
            oracle.aggregate([losses[b] for b in rows], [mask[b] for b in rows], mode, fixed_length)["loss"]
            for rows in micro_batches
        ]
        return {"loss": sum(parts) / len(parts)}

    assert families_that_fail(aggregate_micro_batches=aggregate_micro_batches) == {"micro_batches"}


def test_signed_early_stop_is_caught():
    def early_stop(minibatches, limit):
        flipped = [m | {"logprobs": m["old_logprobs"], "old_logprobs": m["logprobs"]} for m in minibatches]
        return oracle.early_stop(flipped, limit)

    assert families_that_fail(early_stop=early_stop) == {"early_stop"}


def test_clip_that_forgets_the_pessimistic_minimum_is_caught():
    def clip_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
        result = oracle.clip_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip)
        for b, row in enumerate(mask):
            for t, sampled in enumerate(row):
                if sampled:
                    ratio = math.exp(logprobs[b][t] - old_logprobs[b][t])
                    result["loss"][b][t] = -min(max(ratio, 1 - clip_low), 1 + clip_high) * advantages[b][t]
        return result

    assert "clip_cases" in families_that_fail(clip_loss=clip_loss)


def test_temperature_left_out_is_caught():
    def token_logprobs(logits, tokens, temperature):
        return oracle.token_logprobs(logits, tokens, 1.0)

    assert "logprobs_temperature" in families_that_fail(token_logprobs=token_logprobs)


def test_pairs_weighted_alike_across_prompts_is_caught():
    def kwise_loss(scores, ranks, group_ids):
        pairs = [
            (i, j)
            for i in range(len(scores))
            for j in range(len(scores))
            if group_ids[i] == group_ids[j] and ranks[i] < ranks[j]
        ]
        return oracle.pairwise_loss([scores[i] for i, _ in pairs], [scores[j] for _, j in pairs])

    assert families_that_fail(kwise_loss=kwise_loss) == {"kwise"}


# -- what is said about a failure ------------------------------------------------------------------------------------
def first_failure(**replacements):
    return run(oracle_with(**replacements), dtypes=("float64",), families=["kl_estimators"]).failed[0]


def test_a_failure_names_the_place_and_the_numbers():
    def kl_estimate(logprobs, other_logprobs, estimator):
        kl = oracle.kl_estimate(logprobs, other_logprobs, estimator)["kl"]
        kl[0][1] += 0.5
        return {"kl": kl}

    failure = first_failure(kl_estimate=kl_estimate)
    assert (failure.family, failure.case, failure.method) == ("kl_estimators", "k1 by hand", "kl_estimate")
    assert (failure.path, failure.expected, failure.actual) == ("kl[0][1]", -1.0, -0.5)
    assert (failure.dtype, failure.tolerance, failure.places) == ("float64", 1e-10, 1)


def test_nan_is_a_failure():
    failure = first_failure(kl_estimate=lambda **_: {"kl": [[math.nan] * 3]})
    assert math.isnan(failure.actual)
    json.dumps(report_json(run(oracle_with(kl_estimate=lambda **_: {"kl": [[math.nan]]}))), allow_nan=False)


def test_a_wrong_shape_is_a_failure():
    assert first_failure(kl_estimate=lambda **_: {"kl": [[1.0]]}).path == "kl[0]"
    assert first_failure(kl_estimate=lambda **_: {"kl": 1.0}).path == "kl"
    assert first_failure(kl_estimate=lambda **_: 1.0).path == "(result)"


def test_an_exception_is_a_failure_that_shows_it():
    def kl_estimate(**_):
        raise ZeroDivisionError("too bad")

    assert first_failure(kl_estimate=kl_estimate).actual == "ZeroDivisionError: too bad"


def test_what_has_tolist_is_converted():
    class Tensor:
        def __init__(self, content):
            self.content = content

        def tolist(self):
            return self.content

    def kl_estimate(**inputs):
        return {"kl": Tensor(oracle.kl_estimate(**inputs)["kl"])}

    assert run(oracle_with(kl_estimate=kl_estimate), families=["kl_estimators"]).failed == []


def test_an_adapter_may_spoil_its_inputs():
    def masked_mean(x, mask):
        result = oracle.masked_mean(x, mask)
        x.clear()
        return result

    assert run(oracle_with(masked_mean=masked_mean), families=["statistics"]).failed == []


# -- what is not claimed ---------------------------------------------------------------------------------------------
def test_a_missing_method_is_not_claimed():
    report = run(oracle_with(trpo_step=None), families=["trpo", "conjugate_gradient"])
    assert report.failed == []
    assert {(item.family, item.method) for item in report.not_claimed} == {("trpo", "trpo_step")}
    assert report.families["trpo"].not_claimed == report.families["trpo"].cases


def test_unsupported_is_not_claimed_and_says_why():
    def kl_estimate(logprobs, other_logprobs, estimator):
        if estimator == "k2":
            raise Unsupported("no k2")
        return oracle.kl_estimate(logprobs, other_logprobs, estimator)

    report = run(oracle_with(kl_estimate=kl_estimate), families=["kl_estimators"])
    assert report.failed == []
    assert {item.reason for item in report.not_claimed} == {"no k2"}


def test_a_result_left_out_is_claimed_in_part():
    def gae(**inputs):
        return {"advantages": oracle.gae(**inputs)["advantages"]}

    report = run(oracle_with(gae=gae), families=["gae"])
    assert report.failed == []
    assert report.passed == report.cases == len(report.partly_claimed)
    assert "returns" in report.partly_claimed[0].reason
    empty = run(oracle_with(gae=lambda **_: {}), families=["gae"])
    assert empty.passed == 0
    assert len(empty.not_claimed) == empty.cases


def test_a_dtype_that_is_not_offered_is_not_claimed():
    def factory(dtype):
        if dtype == "float64":
            raise Unsupported
        return oracle

    report = run(factory, families=["gae"])
    assert report.failed == []
    assert report.passed == 0


# -- targets, output, exit status ------------------------------------------------------------------------------------
def test_targets_load_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_ppo_adapter.py").write_text("def factory(dtype):\n    return dtype\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert load_target("my_ppo_adapter:factory")("float32") == "float32"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("conformance.oracle", "package.module:factory"),
        ("conformance.oracle:", "package.module:factory"),
        ("no_such_package.module:adapter", "no module 'no_such_package'"),
        ("conformance.no_such_module:adapter", "no module 'conformance.no_such_module'"),
        ("conformance.oracle:no_such_attribute", "it has"),
        ("conformance.oracle:__doc__", "not callable"),
    ],
)
def test_bad_targets_name_the_repair(target, message):
    with pytest.raises(ValueError, match="target: ") as caught:
        load_target(target)
    assert message in str(caught.value)


def test_a_target_whose_own_import_is_missing_says_which(tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="imports 'no_such_dependency', which is not installed"):
        load_target("needs_something:adapter")


def test_unknown_families_are_named():
    with pytest.raises(ValueError, match="no family 'gaee'; choose from"):
        load_families(["gaee"])


def test_main_prints_json(capsys):
    assert main("conformance.oracle:adapter", json_output=True, families=["gae", "rloo"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cases", "families", "failed", "failures", "not_claimed", "target"} <= report.keys()
    assert report["target"] == "conformance.oracle:adapter"
    assert set(report["families"]) == {"gae", "rloo"}
    assert report["failed"] == 0


def test_main_prints_tables_and_fails(tmp_path, monkeypatch, capsys):
    source = "from conformance import oracle\n\n\nclass Wrong:\n    def leave_one_out(self, scores, group_ids):\n"
    source += "        return {'advantages': scores}\n\n\ndef adapter(dtype):\n    return Wrong()\n"
    (tmp_path / "wrong_adapter.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main("wrong_adapter:adapter", json_output=False, families=["rloo", "gae"]) == 1
    assert "rloo" in capsys.readouterr().out


def test_render_shows_the_path_literally():
    console = Console(record=True, width=200)
    render(run(oracle_with(kl_estimate=lambda **_: {"kl": [[9.0] * 3]}), families=["kl_estimators"]), console)
    text = console.export_text()
    assert "kl[0][0]" in text
    assert "failed" in text


def test_the_documentation_counts_right():
    page = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    section = page.split("## The families")[1].split("\n## ")[0]
    families = {name: int(count) for name, count in re.findall(r"^\| (\w+) \| (\d+) \|", section, re.MULTILINE)}
    traces = load_families()
    assert families == {trace["family"]: len(trace["cases"]) for trace in traces}
    prose = " ".join(page.split())
    assert f"**{sum(families.values())} cases in {len(families)} families**" in prose
    by_hand = sum(case["source"] == "hand" for trace in traces for case in trace["cases"])
    assert f"{by_hand} of them were also worked out by hand" in prose
