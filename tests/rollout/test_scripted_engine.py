"""The scripted engine gives real rollouts with the words it was told."""

from __future__ import annotations

import pytest
import torch

from tether.hub.tiny_model import END_ID, tiny_tokenizer
from tether.protocols import RolloutEngine, Sampling
from tether.rollout.scripted import ScriptedEngine
from tether.types import Prompt

PROMPTS = [Prompt.from_text("a", "2+2="), Prompt.from_text("b", "1+1=")]


def engine(answers=None, **options) -> ScriptedEngine:
    return ScriptedEngine(tiny_tokenizer(), answers or {"a": ["4", "five"], "b": ["2"]}, **options)


def test_answers_are_cycled_in_the_order_of_the_protocol():
    scripted: RolloutEngine = engine()
    rollouts = scripted.generate(PROMPTS, Sampling(8), samples_per_prompt=3, seed=0)
    assert [rollout.completion for rollout in rollouts] == ["4", "five", "4", "2", "2", "2"]
    assert [(rollout.group_id, rollout.sample_id) for rollout in rollouts] == [(g, s) for g in (0, 1) for s in range(3)]


def test_columns_line_up_and_the_end_token_is_trained():
    rollout = engine(logprob=-0.5).generate(PROMPTS, Sampling(8), samples_per_prompt=1, seed=0)[0]
    assert rollout.token_ids.tolist()[-1] == END_ID
    assert rollout.response_mask.tolist() == [False] * 4 + [True] * 2
    assert rollout.behavior_logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.5]
    assert torch.equal(rollout.behavior_logprobs, rollout.untruncated_logprobs)
    assert (rollout.finish, rollout.response_length, rollout.token_ids.dtype) == ("stop", 2, torch.int64)


def test_answers_from_a_function():
    scripted = engine(lambda prompt, sample: f"{prompt.id}{sample}")
    rollouts = scripted.generate(PROMPTS, Sampling(8), samples_per_prompt=2, seed=0)
    assert [rollout.completion for rollout in rollouts] == ["a0", "a1", "b0", "b1"]


def test_length_limit_and_missing_end():
    cut = engine().generate(PROMPTS, Sampling(3), samples_per_prompt=2, seed=0)[1]
    assert (cut.completion, cut.finish, cut.response_length) == ("fiv", "length", 3)
    open_ended = engine(end=False).generate(PROMPTS, Sampling(8), samples_per_prompt=2, seed=0)[1]
    assert (open_ended.completion, open_ended.finish, open_ended.response_length) == ("five", "length", 4)
    full = engine().generate(PROMPTS, Sampling(5), samples_per_prompt=2, seed=0)[1]
    assert (full.completion, full.finish) == ("five", "stop")


def test_stop_tokens_cut_the_answer_and_stay_in_it():
    stop = tiny_tokenizer().convert_tokens_to_ids("v")
    rollout = engine().generate(PROMPTS, Sampling(8, stop_token_ids=(stop,)), samples_per_prompt=2, seed=0)[1]
    assert (rollout.completion, rollout.finish) == ("fiv", "stop")


def test_the_policy_version_is_stamped():
    scripted = engine()
    scripted.policy_version = 4
    assert scripted.generate(PROMPTS, Sampling(8), samples_per_prompt=1, seed=0)[0].policy_version == 4


def test_bad_input():
    with pytest.raises(ValueError, match="no answer for prompt 'b'"):
        engine({"a": ["4"]}).generate(PROMPTS, Sampling(8), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match="prompts is empty"):
        engine().generate([], Sampling(8), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match="'a' has no tokens"):
        engine({"a": [""]}, end=False).generate(PROMPTS[:1], Sampling(8), samples_per_prompt=1, seed=0)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        ScriptedEngine(tokenizer, {})
