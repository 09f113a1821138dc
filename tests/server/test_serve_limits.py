"""Requests to `tether serve` that are far too large, or nearly nothing: answered at once, and little memory taken."""

import pytest

from tether.models.load import load_causal_lm
from tether.server.generate import MAX_CHOICES, ServedModel
from tether.server.schema import ApiError, ChatRequest, CompletionRequest


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ServedModel("tiny", load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0), max_tokens=8)


def refused(work) -> ApiError:
    with pytest.raises(ApiError) as caught:
        work()
    return caught.value


def test_a_text_that_no_context_holds_is_not_made_into_tokens(served: ServedModel, monkeypatch):
    monkeypatch.setattr(type(served.loaded.tokenizer), "encode", lambda *_, **__: pytest.fail("it was"))
    text = "a b " * 5_000_000
    chat = ChatRequest(model="tiny", messages=[{"role": "user", "content": text}])
    error = refused(lambda: served.chat_job(chat))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    error = refused(lambda: served.completion_job(CompletionRequest(model="tiny", prompt=[text, "a"])))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")


def test_a_request_asks_for_so_many_answers_at_most(served: ServedModel):
    asked = CompletionRequest(model="tiny", prompt=["a"] * 20_000, n=64)
    assert refused(lambda: served.completion_job(asked)).status == 400
    assert served.completion_job(CompletionRequest(model="tiny", prompt=["a"] * (MAX_CHOICES // 64), n=64)).n == 64


@pytest.mark.parametrize("prompt", [[{}] * 90_000, [[{}] * 90_000], ["a", *[1] * 90_000]])
def test_thousands_of_wrong_prompts_are_told_by_the_first(prompt):
    with pytest.raises(ValueError, match="prompt") as caught:
        CompletionRequest(model="tiny", prompt=prompt)
    assert len(caught.value.errors()) < 10


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8])
def test_a_temperature_of_nearly_nothing_is_greedy(served: ServedModel, temperature: float):
    messages = [{"role": "user", "content": "hello"}]
    texts = []
    for given in (temperature, 0.0):
        job = served.chat_job(ChatRequest(model="tiny", messages=messages, temperature=given))
        texts.append([token.id for _, token in served.tokens(job)])
    assert texts[0] == texts[1]
