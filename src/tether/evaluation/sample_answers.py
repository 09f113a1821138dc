"""Sample a model's answers to prompts in batches, and write them as records for annotators and trainers.

A record keeps the prompt's messages, the answers' texts and token ids, whether each answer has an end token, and its
log-probability. Ranks come from a reward. Without one every answer has rank 0, a tie, which no trainer uses as a
preference.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.models.load import LoadedModel
from tether.protocols import RewardFn, Sampling
from tether.rewards.scoring import score_rollouts
from tether.rollout.native import NativeEngine
from tether.types import Prompt, Rollout

CPU_BATCH, GPU_BATCH = 64, 2048  # answers between two progress reports

Progress = Callable[[int, int], None]  # (prompts done, total prompts)


@dataclass(frozen=True)
class Sampled:
    """The answers to one prompt. `scores` has the reward's values, None for a failure; empty without a reward."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[float | None, ...] = ()

    def different(self) -> Sampled:
        """The answers that can be compared: non-empty, scored where there is a reward, without duplicates."""
        kept: dict[str, int] = {}
        for place, rollout in enumerate(self.rollouts):
            if rollout.completion.strip() and not (self.scores and self.scores[place] is None):
                kept.setdefault(rollout.completion, place)
        scores = tuple(self.scores[place] for place in kept.values()) if self.scores else ()
        return Sampled(self.prompt, tuple(self.rollouts[place] for place in kept.values()), scores)


def sample_answers(
    model: LoadedModel | NativeEngine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
    progress: Progress | None = None,
    *,
    reward: RewardFn | None = None,
    skip: Callable[[Prompt, str], None] | None = None,
    batch_answers: int | None = None,
) -> Iterator[Sampled]:
    """`n` answers to each prompt, in the order of the prompts, yielded batch by batch.

    The draws depend only on the seed, the prompt's id and the answer's number, so a run that starts in the middle of
    `prompts` gives the same answers; call `unique_prompts` first where ids may repeat. A prompt that leaves no room for
    an answer in the model's context is reported to `skip(prompt, reason)`; without `skip` it is an error.
    """
    engine = model if isinstance(model, NativeEngine) else NativeEngine(model)
    fitting = [prompt for prompt in prompts if _fits(engine.loaded, prompt, sampling, skip)]
    on_gpu = engine.loaded.model.device.type == "cuda"
    size = max(1, (batch_answers or (GPU_BATCH if on_gpu else CPU_BATCH)) // n)
    done = len(prompts) - len(fitting)
    for start in range(0, len(fitting), size):
        group = fitting[start : start + size]
        rollouts = engine.generate(group, sampling, samples_per_prompt=n, seed=seed)
        scores = _scores(reward, rollouts)
        done += len(group)
        if progress is not None:
            progress(done, len(prompts))
        for place, prompt in enumerate(group):
            rows = slice(place * n, (place + 1) * n)
            yield Sampled(prompt, tuple(rollouts[rows]), tuple(scores[rows]))


def unique_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with unique ids: the second prompt of an id gets the suffix `#2`, and so on."""
    seen: Counter[str] = Counter()
    taken = {prompt.id for prompt in prompts}
    named: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.id] += 1
        name, number = prompt.id, seen[prompt.id]
        while number > 1 and (name := f"{prompt.id}#{number}") in taken:
            number += 1
        taken.add(name)
        named.append(prompt if name == prompt.id else dataclasses.replace(prompt, id=name))
    return named


def _fits(loaded: LoadedModel, prompt: Prompt, sampling: Sampling, skip: Callable[[Prompt, str], None] | None) -> bool:
    length, context = len(prompt_token_ids(loaded.tokenizer, prompt)), loaded.context_length
    if length + sampling.max_new_tokens <= context:
        return True
    reason = (
        f"prompt {prompt.id!r} has {length} tokens, and with an answer of {sampling.max_new_tokens} it exceeds the "
        f"model's context of {context}"
    )
    if skip is None:
        raise DataError(f"{reason}: shorten the prompt, or lower the answer length")
    skip(prompt, reason)
    return False


def _scores(reward: RewardFn | None, rollouts: Sequence[Rollout]) -> list[float | None]:
    if reward is None:
        return []
    scores = score_rollouts(reward, rollouts, max_failure_rate=1.0)
    return [score.value if score.valid and math.isfinite(score.value) else None for score in scores]


# -- records ------------------------------------------------------------------------------------------------------


def ranking_record(sampled: Sampled) -> dict[str, Any] | None:
    """All distinct answers to the prompt as one record, ranked by score; None where there are none.

    `tether train reward` and `dpo` read the fields `prompt`, `answers`, `ranks` and `ended`.
    """
    kept = sampled.different()
    if not kept.rollouts:
        return None
    record = _head(kept.prompt) | {
        "answers": [rollout.completion for rollout in kept.rollouts],
        "ended": [rollout.finish == "stop" for rollout in kept.rollouts],
        "ranks": ranks_of(kept.scores) if kept.scores else [0] * len(kept.rollouts),
        "logprobs": [answer_logprob(rollout) for rollout in kept.rollouts],
        "token_ids": [rollout.token_ids[rollout.response_mask].tolist() for rollout in kept.rollouts],
    }
    return record | ({"scores": list(kept.scores)} if kept.scores else {})


def pair_records(sampled: Sampled) -> list[dict[str, Any]]:
    """The prompt's answers in pairs.

    With scores, one pair: the best answer (`chosen`) against the worst (`rejected`); none where all tie. Without
    scores, as many disjoint pairs as possible, to be judged: `answers` of two, with equal ranks.
    """
    kept = sampled.different()
    if not kept.scores:
        groups = [kept.rollouts[place : place + 2] for place in range(0, len(kept.rollouts) - 1, 2)]
        records = [ranking_record(Sampled(kept.prompt, tuple(group))) for group in groups]
        return [record for record in records if record is not None]
    known = sorted(zip(ranks_of(kept.scores), range(len(kept.rollouts)), strict=True))
    if known[0][0] == known[-1][0]:
        return []
    best, worst = known[0][1], known[-1][1]
    record = _head(kept.prompt)
    for name, place in (("chosen", best), ("rejected", worst)):
        rollout = kept.rollouts[place]
        record |= {
            name: rollout.completion,
            f"{name}_ended": rollout.finish == "stop",
            f"{name}_score": kept.scores[place],
            f"{name}_logprob": answer_logprob(rollout),
            f"{name}_token_ids": rollout.token_ids[rollout.response_mask].tolist(),
        }
    return [record]


def ranks_of(scores: Sequence[float | None]) -> list[int]:
    """0 for the best; equal scores tie. No score may be None."""
    numbers = [math.nan if score is None else score for score in scores]
    order = sorted(set(numbers), reverse=True)
    return [order.index(number) for number in numbers]


def answer_logprob(rollout: Rollout) -> float:
    """log pi(answer | prompt), summed over its tokens, at the sampling temperature over the whole vocabulary."""
    return float(rollout.untruncated_logprobs[rollout.response_mask].double().sum())


def _head(prompt: Prompt) -> dict[str, Any]:
    reference = {} if prompt.answer is None else {"answer": prompt.answer}
    return {"id": prompt.id, "prompt": [dict(message) for message in prompt.messages], **reference}
