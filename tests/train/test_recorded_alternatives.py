"""A run keeps, beside each token, how undecided the policy was and what else it might have said."""

from pathlib import Path

import numpy as np
import pytest

from tether.cli import main
from tether.store.read import open_workspace, read_run

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-ppo.yaml"


def trained(folder: Path, *flags: str):
    words = ["train", "ppo", str(RECIPE), "--run.directory", str(folder), "--run.name", "tiny", "--run.steps", "2"]
    assert main([*words, "--run.save", "false", *flags]) == 0
    with open_workspace(folder) as opened:
        run = read_run(opened, "tiny")
        return {step: run.rollouts(step) for step in run.rollout_steps}


def test_entropy_and_alternatives_are_those_of_one_distribution(tmp_path):
    for rollout in trained(tmp_path)[0]:
        entropy, own = rollout.answer("entropy"), np.exp(rollout.answer("old_logprob"))
        assert np.isfinite(entropy).all() and (entropy >= 0).all()
        others = rollout.top_logprobs.at_each()
        answer = np.flatnonzero(rollout.columns["response"])
        assert all(not others[place] for place in range(len(others)) if place not in set(answer.tolist()))
        for place, chance, undecided in zip(answer.tolist(), own.tolist(), entropy.tolist(), strict=True):
            logprobs = [logprob for _, logprob in others[place]]
            assert logprobs == sorted(logprobs, reverse=True) and len(logprobs) <= 5
            known = [chance, *np.exp(logprobs)]
            assert sum(known) <= 1.01, "float16 rounds in the third digit"
            assert undecided >= -sum(p * np.log(p) for p in known) - 0.02, "what is left out only adds"


@pytest.mark.parametrize("flags", [("--store.top_logprobs", "0"), ("--store.rollouts_every", "2")])
def test_steps_that_do_not_want_them_do_not_pay(tmp_path, flags, monkeypatch):
    import tether.models.roles as roles

    asked: list[int] = []
    whole = roles.top_tokens
    monkeypatch.setattr(roles, "top_tokens", lambda *a, **options: asked.append(1) or whole(*a, **options))
    kept = trained(tmp_path, *flags)
    assert sorted(kept) == ([0, 1] if flags[0] == "--store.top_logprobs" else [0])
    assert bool(asked) == (flags[0] != "--store.top_logprobs")
    assert all((row.top_logprobs is None) == (not asked) for rows in kept.values() for row in rows)
