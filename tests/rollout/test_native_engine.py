"""The native engine: its log-probs, its independence of batching, compaction, stopping and bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tether.hub.tiny_model import END_ID
from tether.models.load import LoadedModel
from tether.protocols import RolloutEngine, Sampling
from tether.rollout.native import CachedBatch, NativeEngine
from tether.types import Prompt

OFTEN = tuple(range(0, 256, 10))  # stop tokens that end an answer after about ten tokens, at different steps


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12),
        Sampling(12, temperature=0.7),
        Sampling(12, temperature=1.5, top_k=20),
        Sampling(12, top_p=0.8),
        Sampling(12, temperature=0.9, top_k=30, top_p=0.9, stop_token_ids=OFTEN),
        Sampling(12, temperature=0.0),
    ],
    ids=["whole", "cool", "top-k", "top-p", "both", "greedy"],
)
def test_logprobs_are_those_of_a_plain_forward_pass(
    loaded: LoadedModel, prompts: list[Prompt], sampling: Sampling, assert_matches_plain_forward
):
    rollouts = NativeEngine(loaded, max_num_seqs=8).generate(prompts, sampling, samples_per_prompt=2, seed=1)
    assert_matches_plain_forward(loaded.model, rollouts, sampling)
    same = sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0)
    assert same == all(torch.equal(r.behavior_logprobs, r.untruncated_logprobs) for r in rollouts)


def test_rollouts_come_in_input_order_with_whole_columns(loaded: LoadedModel, prompts: list[Prompt]):
    engine: RolloutEngine = NativeEngine(loaded, max_num_seqs=5)
    rollouts = engine.generate(prompts, Sampling(9, stop_token_ids=OFTEN), samples_per_prompt=3, seed=0)
    assert [(r.prompt.id, r.group_id, r.sample_id) for r in rollouts] == [
        (prompt.id, group, sample) for group, prompt in enumerate(prompts) for sample in range(3)
    ]
    for rollout in rollouts:
        text = rollout.prompt.messages[0]["content"]
        assert rollout.response_mask.tolist() == [False] * len(text) + [True] * rollout.response_length
        assert loaded.tokenizer.decode(rollout.token_ids[: len(text)]) == text
        answer = rollout.token_ids[rollout.response_mask]
        assert rollout.completion == loaded.tokenizer.decode(answer, skip_special_tokens=True)
        dtypes = (rollout.token_ids.dtype, rollout.response_mask.dtype, rollout.behavior_logprobs.dtype)
        assert dtypes == (torch.int64, torch.bool, torch.float32)
        assert len(rollout.token_ids) == len(rollout.untruncated_logprobs) == len(rollout.behavior_logprobs)
    assert len({rollout.completion for rollout in rollouts}) > len(prompts), "samples of one prompt differ"


@pytest.mark.parametrize(
    "sampling", [Sampling(10), Sampling(10, top_p=0.9, stop_token_ids=OFTEN)], ids=["whole", "top-p"]
)
def test_the_result_does_not_depend_on_batching(
    exact: LoadedModel, prompts: list[Prompt], sampling: Sampling, assert_same_rollouts
):
    reference = NativeEngine(exact).generate(prompts, sampling, samples_per_prompt=3, seed=4)
    shuffled = [prompts[i] for i in (3, 0, 6, 5, 1, 4, 2)]
    assert_same_rollouts(NativeEngine(exact).generate(shuffled, sampling, samples_per_prompt=3, seed=4), reference)
    for size in (1, 2, 4):
        engine = NativeEngine(exact, max_num_seqs=size)
        assert_same_rollouts(engine.generate(prompts, sampling, samples_per_prompt=3, seed=4), reference)
    alone = [NativeEngine(exact).generate([prompt], sampling, samples_per_prompt=3, seed=4) for prompt in prompts]
    assert_same_rollouts([rollout for one in alone for rollout in one], reference)
    fewer = NativeEngine(exact).generate(prompts, sampling, samples_per_prompt=1, seed=4)
    assert_same_rollouts(fewer, [rollout for rollout in reference if rollout.sample_id == 0])


def test_a_prompt_given_twice_gets_further_samples(exact: LoadedModel, prompts: list[Prompt]):
    def tokens(given: list[Prompt], samples: int) -> list[list[int]]:
        rollouts = NativeEngine(exact).generate(given, Sampling(6), samples_per_prompt=samples, seed=0)
        assert [r.group_id for r in rollouts] == [group for group in range(len(given)) for _ in range(samples)]
        return [rollout.token_ids.tolist() for rollout in rollouts]

    first, other = prompts[:2]
    four, twice = tokens([first], 4), tokens([first, other, first], 2)
    assert len({str(answer) for answer in four}) == 4
    assert [*twice[:2], *twice[4:]] == four


def test_the_seed_decides_and_the_global_stream_does_not(loaded: LoadedModel, prompts: list[Prompt]):
    def completions(seed: int) -> list[str]:
        return [
            r.completion for r in NativeEngine(loaded).generate(prompts, Sampling(6), samples_per_prompt=1, seed=seed)
        ]

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = completions(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert completions(0) == first
    assert completions(1) != first


def test_a_longer_limit_continues_the_same_answers(exact: LoadedModel, prompts: list[Prompt]):
    short = NativeEngine(exact).generate(prompts, Sampling(5), samples_per_prompt=2, seed=0)
    long = NativeEngine(exact).generate(prompts, Sampling(20), samples_per_prompt=2, seed=0)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a.token_ids, b.token_ids[: len(a.token_ids)])


def test_greedy_takes_the_most_likely_token(loaded: LoadedModel, prompts: list[Prompt]):
    rollouts = NativeEngine(loaded).generate(prompts, Sampling(8, temperature=0.0), samples_per_prompt=2, seed=0)
    for rollout in rollouts:
        with torch.no_grad():
            best = loaded.model(rollout.token_ids[None]).logits[0].argmax(-1)
        assert torch.equal(best[:-1][rollout.response_mask[1:]], rollout.token_ids[rollout.response_mask])


def test_first_tokens_follow_the_distribution(loaded: LoadedModel):
    prompt, count = Prompt.from_text("p", "some prompt"), 1500
    engine = NativeEngine(loaded, max_num_seqs=500)
    rollouts = engine.generate([prompt], Sampling(1, top_k=6), samples_per_prompt=count, seed=0)
    with torch.no_grad():
        logits = loaded.model(rollouts[0].token_ids[None, :-1]).logits[0, -1].double()
    best = logits.topk(6)
    expected = best.values.softmax(-1) * count
    drawn = torch.stack([rollout.token_ids[-1] for rollout in rollouts])
    counts = torch.stack([(drawn == id).sum() for id in best.indices])
    assert int(counts.sum()) == count
    assert float(((counts - expected) ** 2 / expected).sum()) < 26, (
        "0.9999 quantile of chi-square, 5 degrees of freedom"
    )


def forward_rows(model: torch.nn.Module, call) -> list[tuple[int, int]]:
    """(rows, columns) of every forward pass that `call` makes."""
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    return shapes


def test_finished_sequences_leave_the_batch_and_prompts_are_read_once(loaded: LoadedModel, prompts: list[Prompt]):
    rollouts = []
    sampling = Sampling(30, stop_token_ids=OFTEN)

    def call() -> None:
        rollouts.extend(NativeEngine(loaded).generate(prompts, sampling, samples_per_prompt=4, seed=0))

    shapes = forward_rows(loaded.model, call)
    lengths = [rollout.response_length for rollout in rollouts]
    assert shapes[0] == (len(prompts), 36), "one row for each prompt, as wide as the longest"
    expected = [(sum(length > step for length in lengths), 1) for step in range(1, max(lengths))]
    assert shapes[1:] == expected
    assert expected[-1][0] < len(rollouts) // 2, "the test needs answers of different lengths"


def test_a_cache_that_cannot_select_rows_gives_the_same_result(
    exact: LoadedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, assert_same_rollouts
):
    sampling = Sampling(15, stop_token_ids=OFTEN)

    def generate():
        return NativeEngine(exact).generate(prompts, sampling, samples_per_prompt=2, seed=0)

    expected = generate()
    monkeypatch.setattr(CachedBatch, "can_select", False)
    found = []
    shapes = forward_rows(exact.model, lambda: found.extend(generate()))
    assert_same_rollouts(found, expected)
    assert {rows for rows, columns in shapes if columns == 1} == {len(found)}


def test_stop_tokens_and_the_end_token(loaded: LoadedModel, prompts: list[Prompt]):
    free = NativeEngine(loaded).generate(prompts, Sampling(8), samples_per_prompt=1, seed=0)
    third = int(free[0].token_ids[len(prompts[0].messages[0]["content"]) + 2])
    stopped = NativeEngine(loaded).generate(prompts, Sampling(8, stop_token_ids=(third,)), samples_per_prompt=1, seed=0)
    answer = stopped[0].token_ids[stopped[0].response_mask].tolist()
    assert answer[-1] == third and third not in answer[:-1]
    assert stopped[0].finish == "stop"
    as_end = NativeEngine(dataclasses.replace(loaded, end_id=third))
    assert torch.equal(
        as_end.generate(prompts, Sampling(8), samples_per_prompt=1, seed=0)[0].token_ids, stopped[0].token_ids
    )
    for rollout in free:
        last = int(rollout.token_ids[-1])
        assert rollout.finish == ("stop" if last == END_ID else "length")
        assert rollout.finish == "stop" or rollout.response_length == 8


def test_an_end_token_at_the_limit_is_a_stop(loaded: LoadedModel):
    prompt = Prompt.from_text("p", "abc")
    token = int(NativeEngine(loaded).generate([prompt], Sampling(1), samples_per_prompt=1, seed=0)[0].token_ids[-1])
    sampling = Sampling(1, stop_token_ids=(token,))
    rollout = NativeEngine(loaded).generate([prompt], sampling, samples_per_prompt=1, seed=0)[0]
    assert (rollout.finish, rollout.response_length) == ("stop", 1)


def test_training_mode_and_checkpointing_change_nothing(
    loaded: LoadedModel, prompts: list[Prompt], assert_same_rollouts
):
    engine = NativeEngine(loaded)
    expected = engine.generate(prompts, Sampling(5), samples_per_prompt=1, seed=0)
    loaded.model.gradient_checkpointing_enable()
    loaded.model.train()
    try:
        assert_same_rollouts(engine.generate(prompts, Sampling(5), samples_per_prompt=1, seed=0), expected)
        assert loaded.model.training, "the mode is given back"
    finally:
        loaded.model.gradient_checkpointing_disable()
        loaded.model.eval()


def test_rollouts_can_be_trained_on(loaded: LoadedModel, prompts: list[Prompt]):
    rollout = NativeEngine(loaded).generate(prompts, Sampling(4), samples_per_prompt=1, seed=0)[1]
    columns = (rollout.token_ids, rollout.behavior_logprobs, rollout.untruncated_logprobs)
    assert not any(column.is_inference() for column in columns)
    logits = loaded.model(rollout.token_ids[None, :-1]).logits[0].log_softmax(-1)
    ratio = (logits.gather(-1, rollout.token_ids[1:, None])[:, 0] - rollout.behavior_logprobs[1:]).exp()
    ratio[rollout.response_mask[1:]].sum().backward()
    assert loaded.model.lm_head.weight.grad.abs().sum() > 0
    loaded.model.zero_grad()


def test_the_policy_version_is_stamped(loaded: LoadedModel, prompts: list[Prompt]):
    engine = NativeEngine(loaded)
    engine.policy_version = 7
    assert engine.generate(prompts[:1], Sampling(1), samples_per_prompt=1, seed=0)[0].policy_version == 7


def test_a_prompt_that_leaves_no_room_is_named_with_the_repair(loaded: LoadedModel):
    prompts = [Prompt.from_text("fits", "x"), Prompt.from_text("long", "y" * 250)]
    NativeEngine(loaded).generate(prompts, Sampling(6), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match=r"'long' has 250 tokens.*max_new_tokens 7.*context of 256.*at most 6"):
        NativeEngine(loaded).generate(prompts, Sampling(7), samples_per_prompt=1, seed=0)


def test_bad_requests(loaded: LoadedModel, prompts: list[Prompt]):
    engine = NativeEngine(loaded)
    with pytest.raises(ValueError, match="prompts is empty"):
        engine.generate([], Sampling(1), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match="samples_per_prompt is 0"):
        engine.generate(prompts, Sampling(1), samples_per_prompt=0, seed=0)
    with pytest.raises(ValueError, match=r"sampling\.top_p"):
        engine.generate(prompts, Sampling(1, top_p=2.0), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match="prompt 'blank' is empty"):
        engine.generate([Prompt.from_text("blank", "")], Sampling(1), samples_per_prompt=1, seed=0)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        NativeEngine(loaded, max_num_seqs=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_step(loaded: LoadedModel, prompts: list[Prompt], poison: float):
    calls = []

    def spoil(_module, _given, output):
        calls.append(1)
        if len(calls) == 3:
            output.logits[0, -1, 5] = poison
        return output

    hook = loaded.model.register_forward_hook(spoil)
    try:
        with pytest.raises(FloatingPointError, match=r"not finite at step 2 of prompt 'prompt 3'"):
            NativeEngine(loaded).generate(prompts, Sampling(6), samples_per_prompt=1, seed=0)
    finally:
        hook.remove()
    assert len(calls) == 3
