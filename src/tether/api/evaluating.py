"""Measuring models from Python, alone or against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from tether.api.given import model_name, prompts_of, reward_of
from tether.api.run import MAX_NEW_TOKENS, Run
from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.errors import ConfigError
from tether.evaluation.judges import ScoreJudge
from tether.evaluation.measure import EvaluationReport, NamedJudge, Question, fitting, for_all, measure
from tether.models.load import load_causal_lm
from tether.ops.sampling import check_sampling
from tether.progress import working
from tether.protocols import Sampling
from tether.rewards.parts import build_reward
from tether.seeds import derive_seed
from tether.store.find import find_model, find_run_or_model, run_config
from tether.train.run import tell


def evaluate(
    model: str | Path | Run,
    prompts: Any,
    reward: Any = None,
    *,
    against: str | Path | Run | None = None,
    n: int = 1,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = True,
) -> EvaluationReport:
    """Measure a model's answers to prompts: `report.metrics["score"]` has a mean and its 95 % interval.

    `prompts` and `reward` are as for `ppo`. With `against`, a second model answers the same prompts with the same
    random draws: `report.differences` has the difference of each metric, `report.win_rates["reward"]` how often the
    first model's answer got the higher reward. Length and temperature are by default those of the model's run.
    """
    if n < 1:
        raise ConfigError(f"n is {n}: it must be at least 1")
    names = [find_run_or_model(model_name(each)) for each in (model, against) if each is not None]
    rollout = run_config(names[0]).get("rollout", {})
    sampling = Sampling(
        max_new_tokens=rollout.get("max_new_tokens", MAX_NEW_TOKENS) if max_new_tokens is None else max_new_tokens,
        temperature=rollout.get("temperature", 1.0) if temperature is None else temperature,
    )
    check_sampling(sampling)
    asked = prompts_of(prompts)
    parts, functions = reward_of(reward) if reward is not None else ([], {})
    checked = load_recipe("ppo", settings={"reward.parts": parts})
    assert isinstance(checked, RLRecipe)
    console = Console(stderr=True, quiet=not progress)
    models = []
    for name in names:
        with working(f"loading {name}", quiet=not progress):
            models.append(load_causal_lm(find_model(name), dtype=dtype, device=device, seed=derive_seed(seed, "model")))
    question = fitting(Question(asked, None), models, sampling, lambda text: tell(console, text))
    judges: list[NamedJudge] = []
    if parts:
        scorer = build_reward(checked.reward.parts, own=None, policy=models[0], seed=seed, functions=functions)
        scorer = for_all(scorer, models)
        question = Question(question.prompts, scorer)
        judges.append(NamedJudge("reward", ScoreJudge(scorer), None))
    return measure(names, models, question, judges, sampling, samples=n, seed=seed, quiet=not progress)
