"""What a round did: the true score and the KL of its policy, its reward model's score, and whether raters agree.

Round 0 is the policy before the rounds. Everything is measured on the same held-out prompts with the same random draws.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tether.config.pipeline_recipe import CollectRecipe, Pipeline
from tether.errors import ConfigError
from tether.evaluation.evaluate import evaluate_model, with_kl
from tether.evaluation.metrics import bootstrap_mean
from tether.files import read_plain_json, sealed, unsealed
from tether.models.load import LoadedModel, load_causal_lm
from tether.pipeline.answers import TextAnswer, held_out_prompts, load_reward, reward_of, task_with
from tether.pipeline.order import HELD_OUT_FILE, PipelineStep, StagePlaces
from tether.pipeline.rankings import read_lines
from tether.protocols import RewardFn, Sampling
from tether.rewards.model import RewardModelReward
from tether.rewards.pool import close_workers
from tether.seeds import derive_seed
from tether.store.find import find_model
from tether.store.folder import write_whole
from tether.types import Prompt

FOLDER, TRUE = "measured", "true"

Figures = dict[str, Any]


def measured_file(root: Path, round: int) -> Path:
    """The file with the figures of a round."""
    return root / FOLDER / f"round-{round}.json"


def read_measured(root: Path, round: int) -> Figures | None:
    """The figures of a round; None where they were not measured yet."""
    try:
        return dict(unsealed(read_plain_json(measured_file(root, round))))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measure_round(places: StagePlaces, round: int) -> Figures:
    """Measure the policy at the end of a round, and write the figures."""
    pipeline, root = places.pipeline, places.root
    figures: Figures = {"round": round}
    try:
        if pipeline.has_truth:
            figures |= _policy_figures(places, round)
        reward = reward_step(places, round)
        if reward is not None:
            model = load_reward(places.model(reward))
            if pipeline.has_truth:
                figures["proxy"] = _proxy_figures(places, round, model, figures["answers"])
            figures["agreement"] = _agreement(places, round, model)
    finally:
        close_workers()
    measured_file(root, round).parent.mkdir(exist_ok=True)
    write_whole(measured_file(root, round), sealed(figures))
    return figures


def _policy_figures(places: StagePlaces, round: int) -> Figures:
    """The true score and the KL to the policy before the rounds, with intervals; and the answers."""
    settings, seed = places.pipeline.settings.truth, places.pipeline.settings.seed
    policy, first = places.policy_before(round + 1), places.policy_before(1)
    if policy is None or first is None:
        raise ConfigError("truth is measured from before the first round on, and no stage before it makes a policy")
    model = _load(policy, places.pipeline)
    task = task_with(places.pipeline.settings.task)
    prompts = held_out_prompts(task, settings.prompts, model, settings.max_new_tokens)
    found = evaluate_model(
        model,
        prompts,
        sampling=Sampling(settings.max_new_tokens, settings.temperature),
        name=f"round {round}",
        rewards={TRUE: reward_of(settings, task, model, seed)},
        samples_per_prompt=settings.samples,
        seed=derive_seed(seed, "truth"),
        max_num_seqs=settings.max_num_seqs,
    )
    found = with_kl(found, model, _load(first, places.pipeline) if round else model, seed=seed)
    kept = (TRUE, "kl_k1", "kl_k3", "length", "ended", *(name for name in found.metrics if name.startswith(f"{TRUE}/")))
    return {
        "policy": policy,
        "metrics": {name: asdict(found.metrics[name]) for name in kept if name in found.metrics},
        "true_scores": list(found.columns[TRUE]),
        "answers": [
            {"id": answer.prompt.id, "text": answer.completion, "ended": answer.finish == "stop"}
            for answer in found.rollouts
        ],
    }


def _load(path: str, pipeline: Pipeline) -> LoadedModel:
    settings = pipeline.settings
    seed = derive_seed(settings.seed, "model")
    return load_causal_lm(find_model(path), dtype=settings.truth.dtype, device=settings.truth.device, seed=seed)


def reward_step(places: StagePlaces, round: int) -> PipelineStep | None:
    """The last stage of a round that trains a reward model."""
    found = [step for step in places.steps if step.stage.makes == "reward" and step.round == round]
    return found[-1] if found else None


def _proxy_figures(places: StagePlaces, round: int, model: RewardModelReward, answers: list[Figures]) -> Figures:
    """The score of this round's reward model on the policy before the round, and after it."""
    prompts = {prompt.id: prompt for prompt in task_with(places.pipeline.settings.task).held_out()}
    found: Figures = {}
    earlier = read_measured(places.root, round - 1) if round else None
    for name, given in (("before", earlier["answers"] if earlier else None), ("after", answers)):
        if given is not None:
            scores = _text_scores(
                model, [TextAnswer(prompts[each["id"]], each["text"], each["ended"]) for each in given]
            )
            found[name] = asdict(bootstrap_mean(scores, seed=derive_seed(places.pipeline.settings.seed, "proxy", name)))
    return found


def _text_scores(reward: RewardFn, answers: Sequence[TextAnswer]) -> list[float]:
    """The scores of the answers that have one."""
    return [score.value for score in reward([answer.rollout() for answer in answers]) if score.usable]


def _agreement(places: StagePlaces, round: int, model: RewardModelReward) -> Figures:
    """How often the last round's reward model and this round's agree with the held-out ratings of this round."""
    files = [
        places.folder(step) / HELD_OUT_FILE
        for step in places.steps
        if step.round == round and isinstance(step.stage.settings, CollectRecipe) and step.stage.settings.held_out
    ]
    if not files:
        return {}
    records = [record for file in files for record in read_lines(file)]
    seed = derive_seed(places.pipeline.settings.seed, "agreement")
    found: Figures = {"after": agreement(model, records, seed)}
    earlier = reward_step(places, round - 1) if round else None
    if earlier is not None:
        found["before"] = agreement(load_reward(places.model(earlier)), records, seed)
    return found


def agreement(reward: RewardFn, records: Sequence[Figures], seed: int) -> Figures:
    """The share of the decided pairs that the reward orders as the raters did, with an interval over the prompts.

    Each prompt counts by the mean over its pairs; equal scores count one half.
    """
    answers = [
        TextAnswer(Prompt(str(number), tuple(record["prompt"])), text, ended, place)
        for number, record in enumerate(records)
        for place, (text, ended) in enumerate(zip(record["answers"], record["ended"], strict=True))
    ]
    values = iter(reward([answer.rollout() for answer in answers]))
    by_prompt: dict[str, list[float]] = {}
    for record in records:
        scores = [next(values) for _ in record["answers"]]
        outcomes = by_prompt.setdefault(json.dumps(record["prompt"]), [])
        ranked = list(zip(record["ranks"], scores, strict=True))
        outcomes += [
            _outcome(ours.value - theirs.value)
            for rank, ours in ranked
            for lower, theirs in ranked
            if rank < lower and ours.usable and theirs.usable
        ]
    means = [sum(outcomes) / len(outcomes) for outcomes in by_prompt.values() if outcomes]
    return asdict(bootstrap_mean(means, seed=seed)) | {"pairs": sum(map(len, by_prompt.values()))}


def _outcome(lead: float) -> float:
    return 1.0 if lead > 0 else 0.5 if lead == 0 else 0.0
