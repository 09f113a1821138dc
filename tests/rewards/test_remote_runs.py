"""PPO against a reward server that misbehaves: below the limit the run goes on without what failed, above it exit 5."""

import json
from collections import Counter

import fault_server as faults
import pytest
from fault_server import FaultServer

from tether import cli

STEPS, ROLLOUTS, BATCH = 2, 8, 2  # so 4 requests a step
PATIENT = 60.0  # seconds: where no time-out is meant, a busy machine must not bring one about


def train(capsys, tmp_path, behave, limit: float, retries: int = 0, timeout: float = PATIENT) -> tuple[int, list[dict]]:
    with FaultServer(behave) as server:
        part = {"kind": "remote", "url": server.url, "batch_size": BATCH, "timeout_seconds": timeout}
        part["retries"] = retries
        part["backoff_seconds"] = 0.01
        parts = [part, {"kind": "ended", "weight": 0.5}]
        code = cli.main(
            [
                *("train", "ppo", "--json", "--model.device", "cpu", "--run.save", "false"),
                *("--run.steps", str(STEPS), "--run.directory", str(tmp_path), "--run.name", "r"),
                *("--rollout.prompts_per_step", str(ROLLOUTS), "--rollout.max_new_tokens", "3"),
                *("--reward.parts", json.dumps(parts), "--reward.max_failure_rate", str(limit)),
            ]
        )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, lines


def one_in_four(misbehave):
    """The first request of every step goes wrong: those are the rollouts 0 and 1."""
    return lambda request: (misbehave if request.items[0]["id"] == "0" else faults.Request.score)(request)


def seconds_for(reason: str) -> float:
    return 2.0 if reason == "timeout" else PATIENT


FAULTS = {
    "timeout": faults.hang,
    "status_500": faults.answer_500,
    "not_finite": lambda request: request.score(float("nan")),
    "not_a_number": lambda request: request.score("0.5"),
    "missing": lambda request: request.reply("200 OK", b'{"scores": []}'),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_below_the_limit_the_run_goes_on_without_what_failed(capsys, tmp_path, reason: str):
    code, steps = train(capsys, tmp_path, one_in_four(FAULTS[reason]), limit=0.5, timeout=seconds_for(reason))
    assert code == 0 and len(steps) == STEPS
    for metrics in steps:
        assert metrics["reward/remote/failed"] == metrics[f"reward/remote/failed/{reason}"] == BATCH
        assert metrics["dropped/unscored"] == BATCH, "masked, not trained on"
        assert metrics["reward/remote"] == 1.0, "the mean of what was scored: a failure is no zero"
        assert metrics["reward/ended/failed"] == 0 and 0 <= metrics["reward/ended"] <= 1
        assert 1.0 <= metrics["score"] <= 1.5, "the weighted sum, over what was scored"


@pytest.mark.parametrize("reason", FAULTS)
def test_above_the_limit_the_run_ends_with_exit_code_5(capsys, tmp_path, reason: str):
    code, steps = train(capsys, tmp_path, one_in_four(FAULTS[reason]), limit=0.2, timeout=seconds_for(reason))
    assert code == 5
    [last] = steps
    assert last["exit_code"] == 5
    assert f"2 of 8 scores are missing or not finite (remote: {reason} (2))" in last["error"]


def test_a_server_that_recovers_costs_nothing_but_time(capsys, tmp_path):
    tries: Counter[str] = Counter()

    def behave(request):
        """Every request fails at first, whatever else is under way."""
        tries[request.items[0]["id"]] += 1
        (faults.answer_500 if tries[request.items[0]["id"]] % 2 else faults.Request.score)(request)

    code, steps = train(capsys, tmp_path, behave, limit=0.0, retries=1)
    assert code == 0 and [metrics["reward/remote/failed"] for metrics in steps] == [0.0, 0.0]
