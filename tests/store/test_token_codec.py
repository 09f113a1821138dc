"""A rollout survives the store to the bit, whatever its numbers and texts are."""

import dataclasses
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import experience, rollouts_of, same, same_columns, synthetic

from tether.errors import StorageError
from tether.store.recorded import TOKEN_COLUMNS, StoredRollout, TopLogprobs, decode_rollout, encode_rollout
from tether.store.tokens import StepRollouts, padded_columns, stored_experience, stored_rollouts
from tether.types import Experience

ANY_TEXT = st.text(st.characters(), max_size=12)  # lone surrogates and control codes included
BITS = st.integers(0, 2**32 - 1)  # every float there is: infinities, NaNs with a payload, both zeros


def decoded(content: bytes, rollout: StoredRollout) -> StoredRollout:
    names = ("step", "row", "group_id", "sample_id", "finish", "score")
    return decode_rollout(content, **{name: getattr(rollout, name) for name in names})


@st.composite
def columns(draw, names=tuple(TOKEN_COLUMNS)):
    length = draw(st.integers(1, 9))
    made = {}
    for name in names:
        bits = np.array(draw(st.lists(BITS, min_size=length, max_size=length)), dtype=np.uint32)
        made[name] = bits.astype(bool) if TOKEN_COLUMNS[name] == "bool" else bits.view(TOKEN_COLUMNS[name])
    return made


@given(columns(), ANY_TEXT, ANY_TEXT, st.data())
def test_every_bit_and_every_letter_comes_back(made, prompt, completion, data):
    pieces = [data.draw(ANY_TEXT) for _ in made["token"]]
    rollout = dataclasses.replace(
        synthetic(3, 1), columns=made, prompt_text=prompt, completion=completion, pieces=pieces, final_value=None
    )
    assert same(decoded(encode_rollout(rollout), rollout), rollout)


def test_a_column_that_was_not_there_is_not_there_afterwards():
    rollout = synthetic(0, 0)
    without = {name: column for name, column in rollout.columns.items() if name not in ("value", "clipped")}
    rollout = dataclasses.replace(rollout, columns=without)
    assert same_columns(decoded(encode_rollout(rollout), rollout).columns, without)


@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b"\x09" + b[1:], lambda b: b"", lambda b: b[:1] + b"x"])
def test_damaged_bytes_are_an_error_that_names_the_sample(damage):
    rollout = synthetic(4, 2)
    with pytest.raises(StorageError, match="step 4, sample 2"):
        decoded(damage(encode_rollout(rollout)), rollout)


# -- between tensors and rollouts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_batch_that_was_learned_from_is_rebuilt_exactly(lengths, critic, reference, seed):
    batch = experience(lengths, np.random.default_rng(seed), critic=critic, reference=reference)
    stored = stored_rollouts(2, StepRollouts(batch, rollouts_of(batch)))
    through = [decoded(encode_rollout(rollout), rollout) for rollout in stored]
    rebuilt = stored_experience(through, pad_id=5)
    for field in dataclasses.fields(Experience):
        before, after = getattr(batch, field.name), getattr(rebuilt, field.name)
        if isinstance(before, torch.Tensor):
            assert before.dtype == after.dtype and torch.equal(before, after), field.name
        else:
            assert before == after, field.name


def test_a_row_keeps_its_own_tokens_and_leaves_the_padding_on_either_side():
    batch = experience([3, 1], np.random.default_rng(0), left=True)
    ratios, clipped = batch.old_logprobs.exp(), batch.old_logprobs > 0
    source = StepRollouts(batch, rollouts_of(batch), ratios, clipped, [{"rule": 1.0}, {}])
    long, short = stored_rollouts(7, source, lambda tokens: [f"<{token}>" for token in tokens])
    assert long.columns["token"].tolist() == batch.tokens[0].tolist() and (long.step, long.row) == (7, 0)
    assert short.columns["token"].tolist() == batch.tokens[1, 2:].tolist()
    assert short.columns["ratio"].tolist() == ratios[1, 2:].tolist()
    assert long.columns["clipped"].tolist() == clipped[0].tolist()
    assert list(short.pieces) == [f"<{int(batch.tokens[1, 2])}>"] and dict(long.parts) == {"rule": 1.0}
    assert long.prompt_text == "question 0" and long.score == float(batch.scores[0])
    assert padded_columns([long, short])["attention"].tolist() == [[True] * 3, [True, False, False]]


def test_kl_is_old_minus_reference_on_the_answer_and_zero_elsewhere():
    rollout = synthetic(0, 0, length=3)
    old, ref = np.float32([-1.0, -2.0, -3.0]), np.float32([-1.5, -2.5, -2.0])
    answer = np.array([False, True, True])
    rollout = dataclasses.replace(
        rollout, columns=dict(rollout.columns) | {"old_logprob": old, "ref_logprob": ref, "response": answer}
    )
    assert rollout.kl.tolist() == [0.0, 0.5, -1.0]


def test_a_thousand_rollouts_of_512_tokens_fit_into_40_megabytes():
    rollout = synthetic(0, 0, length=512)  # random mantissas in every column: nothing compresses worse
    pieces = [f" word{place % 89}" for place in range(512)]
    rollout = dataclasses.replace(rollout, pieces=pieces, completion="".join(pieces), prompt_text="".join(pieces[:99]))
    assert len(encode_rollout(rollout)) * 1000 < 30e6


# -- what else might have been said


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_alternatives_come_back_to_the_bit_and_to_the_letter(counts, data):
    total = sum(counts)
    bits = data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=total, max_size=total))
    tokens = np.array(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total)), dtype=np.int32)
    others = TopLogprobs(
        np.array(counts, dtype=np.uint8),
        tokens,
        np.array(bits, dtype=np.uint16).view(np.float16),
        {int(token): data.draw(ANY_TEXT) for token in tokens},
    )
    rollout = dataclasses.replace(synthetic(0, 0, length=len(counts)), top_logprobs=others)
    back = decoded(encode_rollout(rollout), rollout).top_logprobs
    assert back.counts.tolist() == counts and back.tokens.tolist() == tokens.tolist() and back.texts == others.texts
    assert back.logprobs.tobytes() == others.logprobs.tobytes()
    assert [len(here) for here in back.at_each()] == counts


def test_a_rollout_of_the_first_version_still_opens():
    rollout = synthetic(0, 0)
    body = zlib.decompress(encode_rollout(rollout)[1:])
    (size,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + size])
    del header["top_logprobs"]
    old = json.dumps(header).encode()
    first = b"\x01" + zlib.compress(struct.pack("<I", len(old)) + old + body[4 + size :])
    assert same(decoded(first, rollout), rollout) and decoded(first, rollout).top_logprobs is None


def test_alternatives_leave_out_the_token_itself_the_rare_and_the_prompt():
    batch = experience([2], np.random.default_rng(0))
    own = int(batch.tokens[0, 1])
    top_tokens = torch.tensor([[[7, 8, 9], [own, 8, 9]]], dtype=torch.int32)
    logprobs = torch.tensor([[[-0.1, -0.2, -0.3], [-0.25, -2.0, -7.0]]])  # e^-7 < 0.001
    answer = torch.tensor([[False, True]])
    batch = dataclasses.replace(batch, response_mask=answer, top_tokens=top_tokens, top_logprobs=logprobs)
    source = StepRollouts(batch, rollouts_of(batch))
    [row] = stored_rollouts(0, source, lambda tokens: [f"<{token}>" for token in tokens])
    assert row.top_logprobs.at_each() == [[], [("<8>", -2.0)]]
