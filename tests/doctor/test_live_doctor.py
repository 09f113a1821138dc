"""The doctor beside a run that trains: what is new, now and then, with bounded memory."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_runs import read_recorded
from synthetic import answered, synthetic

from tether.doctor.doctor import AUDITS, Doctor, LiveDoctor, spread_out, with_measures
from tether.doctor.findings import Audit, Finding
from tether.store.recorded import RecordedRun

NAMES = (
    *("score", "score_std", "entropy", "kl_ref_k1", "kl_ref_k3", "response_length", "truncated", "clip_fraction"),
    *("explained_variance", "value_loss", "grad_norm/policy", "steps", "skipped_steps", "early_stop", "approx_kl"),
    *("logprob_diff", "truncation_gap", "held_out/score", "reward/true", "dropped/unscored", "answers/top_share"),
    *("prompts/distinct", "prompts/asked", "answers/repetition", "advantage_top_share", "zero_std_groups"),
)


def watch(run: RecordedRun, every: int = 5) -> list[tuple[int, Finding]]:
    doctor = LiveDoctor(run.method, run.config, every=every)
    kept = set(run.rollout_steps)
    return [
        (int(row["step"]), finding)
        for row in run.metrics
        for finding in doctor.see(
            int(row["step"]), row, run.rollouts(int(row["step"])) if int(row["step"]) in kept else ()
        )
    ]


def test_a_disease_is_told_while_the_run_goes_on_and_only_once():
    said = watch(read_recorded("sick-constant-reward"))
    flat = [step for step, finding in said if finding.audit == "flat-scores"]
    assert flat == [4]


def test_a_finding_is_told_again_when_it_has_become_graver():
    values = [0.4] * 20 + [0.9] * 60
    said = [
        finding.severity for _, finding in watch(synthetic(clip_fraction=values, steps=80)) if finding.audit == "clip"
    ]
    assert said == ["warning", "alarm"]


def test_it_looks_only_every_so_many_steps():
    said = watch(read_recorded("sick-constant-reward"), every=20)
    assert {step for step, _ in said} <= {19}


def test_its_memory_is_bounded_and_holds_the_start_and_the_end():
    doctor = LiveDoctor("ppo", {}, every=1000, first_steps=3, latest_steps=4, kept_rollouts=2)
    for step in range(50):
        doctor.see(step, {"score": 0.0}, [answered([1, 2], step=step)])
    remembered = doctor._recorded()
    assert [int(row["step"]) for row in remembered.metrics] == [0, 1, 2, 46, 47, 48, 49]
    assert list(remembered.rollout_steps) == [0, 48, 49]


def test_an_audit_that_fails_never_stops_a_run():
    def broken(run: RecordedRun) -> Finding:
        raise ZeroDivisionError(run.name)

    doctor = LiveDoctor("ppo", {}, every=1, doctor=Doctor((Audit("broken", "?", broken), *AUDITS)))
    assert [found.audit for step in range(6) for found in doctor.see(step, {"score": 1.0, "score_std": 0.0})] == [
        "flat-scores"
    ]


def test_a_finished_run_is_read_at_few_of_its_kept_steps():
    read: list[int] = []
    run = RecordedRun("long", "ppo", {}, [{"step": float(step)} for step in range(1000)], (), range(1000))
    run = RecordedRun(**{**vars(run), "rollouts": lambda step: read.append(step) or ()})
    with_measures(run)
    assert len(read) == 12
    assert (read[0], read[-1]) == (0, 999)
    assert spread_out([3, 5], 12) == [3, 5]


number = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e300])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), number), max_size=45), st.sampled_from(["ppo", "grpo", "sft"]))
def test_no_metrics_whatever_make_an_audit_fail(rows: list[dict[str, float]], method: str):
    metrics = [{"step": float(step)} | row for step, row in enumerate(rows)]
    config = {"reward": {"parts": [{"kind": "task", "name": "true", "weight": 0}]}}
    said = Doctor().examination(RecordedRun("any", method, config, metrics))
    assert len(said.verdicts) == len(AUDITS)
