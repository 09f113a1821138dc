"""An engine that returns given answers: for tests of rewards, loops and tasks without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.protocols import RolloutEngine, Sampling
from tether.rollout.native import Tokenizer, assemble_rollout, check_request
from tether.types import Finish, Prompt, Rollout

Answers = Mapping[str, Sequence[str]] | Callable[[Prompt, int], str]


class ScriptedEngine(RolloutEngine):
    """Answers from a script, as real Rollouts.

    `answers` maps a prompt's id to its completions, which are cycled over the samples, or is a function of the prompt
    and the sample's index. Each answer ends with the end token and finish "stop", unless `end=False` or the length
    limit cuts it off, which is finish "length". Every sampled token has log-probability `logprob`.

        engine = ScriptedEngine(tiny_tokenizer(), {"sum": ["4", "5"]})
        rollouts = engine.generate([Prompt.from_text("sum", "2+2=")], Sampling(8), samples_per_prompt=2, seed=0)
    """

    def __init__(self, tokenizer: Tokenizer, answers: Answers, *, logprob: float = -1.0, end: bool = True) -> None:
        if end and tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end token: set its eos_token, or pass end=False")
        self.tokenizer = tokenizer
        self.answers = answers
        self.logprob = logprob
        self.end = end

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples_per_prompt: int,
        seed: int,  # noqa: ARG002 - part of the protocol
    ) -> list[Rollout]:
        """The scripted answers, those of one prompt side by side; `seed` is accepted and changes nothing."""
        check_request(prompts, samples_per_prompt)
        return [
            self._rollout(prompt, group, sample, sampling)
            for group, prompt in enumerate(prompts)
            for sample in range(samples_per_prompt)
        ]

    def _rollout(self, prompt: Prompt, group: int, sample: int, sampling: Sampling) -> Rollout:
        ids = self.tokenizer.encode(self._answer(prompt, sample), add_special_tokens=False)
        if self.end and self.tokenizer.eos_token_id is not None:
            ids = [*ids, self.tokenizer.eos_token_id]
        stops = {self.tokenizer.eos_token_id, *sampling.stop_token_ids}
        length = next((place + 1 for place, id in enumerate(ids) if id in stops), len(ids))
        ids = ids[: min(length, sampling.max_new_tokens)]
        if not ids:
            raise DataError(f"the script's answer to prompt {prompt.id!r} has no tokens: give it text, or end=True")
        finish: Finish = "stop" if ids[-1] in stops else "length"
        logprobs = torch.full((len(ids),), self.logprob)
        return assemble_rollout(
            prompt,
            group_id=group,
            sample_id=sample,
            prompt_ids=prompt_token_ids(self.tokenizer, prompt),
            answer_ids=ids,
            behavior=logprobs,
            untruncated=logprobs,
            completion=self.tokenizer.decode(ids, skip_special_tokens=True),
            finish=finish,
            policy_version=self.policy_version,
        )

    def _answer(self, prompt: Prompt, sample: int) -> str:
        if callable(self.answers):
            return self.answers(prompt, sample)
        completions = self.answers.get(prompt.id)
        if not completions:
            raise DataError(f"the script has no answer for prompt {prompt.id!r}: add it to `answers`")
        return completions[sample % len(completions)]
