"""End tokens that a model's generation config names: sampling stops at each, training appends the chat template's."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.data.chat import prompt_token_ids
from tether.data.examples import RowEncoder
from tether.files import FILES
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.backbones import ScalarHead
from tether.models.load import LoadedModel, load_causal_lm
from tether.models.save import save_model
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Separate
from tether.protocols import Sampling
from tether.rewards.model import load_vocabulary
from tether.rollout.native import NativeEngine
from tether.studio.chat_routes import stream_answer
from tether.types import Message, Prompt

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
KINDS = {
    "llama 3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>"], "<end_of_turn>"),
}
QUESTION = (Message(role="user", content="Hi?"),)


def tokenizer_of(kind: str, *, turn_is_special: bool = True) -> PreTrainedTokenizerFast:
    """Bytes, and the family's own tokens; the second of them is the tokenizer's end token."""
    template, names, turn = KINDS[kind]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": names[0], "eos_token": names[1], "pad_token": names[1]})
    tokenizer.add_tokens(names[2:], special_tokens=True)
    tokenizer.add_tokens([turn], special_tokens=turn_is_special)
    tokenizer.chat_template = template
    return tokenizer


def model_of(tokenizer: PreTrainedTokenizerFast, turn: str, *, eos: object = None) -> LlamaForCausalLM:
    """A model that draws every token equally often, so that answers end with either end token."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes))
    torch.nn.init.zeros_(model.lm_head.weight)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(turn)] if eos is None else eos
    model.generation_config = GenerationConfig(eos_token_id=ends, bos_token_id=tokenizer.bos_token_id)
    return model


@pytest.fixture(params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    tokenizer, turn = tokenizer_of(request.param), KINDS[request.param][2]
    return save_model(model_of(tokenizer, turn), tokenizer, tmp_path / "model"), turn


def load(path: Path) -> LoadedModel:
    return load_causal_lm(str(path), dtype="float32", device="cpu", seed=0)


def test_the_end_of_a_turn_is_what_training_appends_and_both_end_answers(folder: tuple[Path, str]):
    loaded = load(folder[0])
    own, turn = loaded.tokenizer.eos_token_id, loaded.tokenizer.convert_tokens_to_ids(folder[1])
    assert (loaded.end_id, loaded.end_ids) == (turn, {own, turn})
    assert loaded.pad_id not in loaded.end_ids  # the tokenizer pads with its end token
    assert any(f"they end with {folder[1]} ({turn})" in notice for notice in loaded.notices)


def test_a_row_is_the_conversation_as_the_template_has_it_up_to_the_end_of_the_turn(folder: tuple[Path, str]):
    loaded = load(folder[0])
    row = RowEncoder(loaded.tokenizer, loaded.end_id, 200)(QUESTION, "Yes.", "line 1", "completion")
    turns = [*QUESTION, Message(role="assistant", content="Yes.")]
    whole = loaded.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    last = len(whole) - 1 - whole[::-1].index(loaded.end_id)
    assert row.tokens.tolist() == whole[: last + 1]
    assert row.tokens[~row.response_mask].tolist() == prompt_token_ids(loaded.tokenizer, Prompt("p", QUESTION))


@pytest.mark.parametrize("general", [False, True], ids=["decoder", "general"])
def test_sampling_stops_at_each_end_token(folder: tuple[Path, str], general: bool):
    loaded = load(folder[0])
    rollouts = NativeEngine(loaded, general=general).generate(
        [Prompt("p", QUESTION)], Sampling(100), samples_per_prompt=60, seed=0
    )
    last = set()
    for rollout in rollouts:
        answer = rollout.token_ids[rollout.response_mask].tolist()
        ended = answer[-1] in loaded.end_ids
        assert rollout.finish == ("stop" if ended else "length") and (ended or len(answer) == 100)
        assert not loaded.end_ids & set(answer[:-1])
        last |= {answer[-1]} & loaded.end_ids
    assert last == loaded.end_ids


def test_a_streamed_answer_stops_there_too(folder: tuple[Path, str]):
    loaded, engine_prompt = load(folder[0]), Prompt("p", QUESTION)
    for seed in range(8):
        rollout = NativeEngine(loaded).generate([engine_prompt], Sampling(60), samples_per_prompt=1, seed=seed)[0]
        tokens = list(stream_answer(loaded, engine_prompt, Sampling(60), seed, Lock()))
        assert (len(tokens), tokens[-1].finish) == (rollout.response_length, rollout.finish)
        assert "".join(token.text for token in tokens) == rollout.completion


def test_an_end_token_is_no_text_even_where_the_tokenizer_does_not_call_it_special(tmp_path: Path):
    tokenizer, turn = tokenizer_of("gemma", turn_is_special=False), "<end_of_turn>"
    loaded = load(save_model(model_of(tokenizer, turn), tokenizer, tmp_path / "model"))
    rollouts = NativeEngine(loaded).generate([Prompt("p", QUESTION)], Sampling(100), samples_per_prompt=40, seed=0)
    ended = [rollout for rollout in rollouts if int(rollout.token_ids[-1]) == loaded.end_id]
    assert ended and not any(turn in rollout.completion for rollout in ended)


def test_a_saved_model_and_a_reward_model_made_of_it_keep_their_end_tokens(folder: tuple[Path, str], tmp_path: Path):
    loaded = load(folder[0])
    again = load(save_model(loaded.model, loaded.tokenizer, tmp_path / "again"))
    assert (again.end_id, again.end_ids) == (loaded.end_id, loaded.end_ids)
    assert set(again.model.generation_config.eos_token_id) == loaded.end_ids
    head = ScalarHead.like_output(loaded.model, deviation=1.0, seed=0)
    reward = ScalarModel(Separate(loaded.model).scalar_backbone(0), head, "reward")
    saved = save_model(reward, loaded.tokenizer, tmp_path / "reward")
    vocabulary = load_vocabulary(saved, ScalarModel.load(saved, "float32", "cpu").backbone.model)
    assert (vocabulary.end_id, vocabulary.end_ids, vocabulary.pad_id) == (loaded.end_id, loaded.end_ids, loaded.pad_id)


def without(model: Path, name: str) -> None:
    """Take a file out on purpose, as the sentence of a folder that is not what was written says."""
    (model / name).unlink()
    (model / FILES).unlink()


def test_without_the_generation_config_the_tokenizers_end_token_is_the_only_one(folder: tuple[Path, str]):
    without(folder[0], "generation_config.json")
    loaded = load(folder[0])  # whose architecture's default end token, 2, is a letter here
    assert loaded.end_ids == {loaded.tokenizer.eos_token_id}


def test_without_a_chat_template_the_tokenizers_end_token_is_appended(folder: tuple[Path, str]):
    without(folder[0], "chat_template.jinja")
    loaded = load(folder[0])
    assert loaded.end_id == loaded.tokenizer.eos_token_id and len(loaded.end_ids) == 2


def test_a_tokenizer_without_an_end_token_takes_the_models(tmp_path: Path):
    tokenizer = tokenizer_of("gemma")
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    model = model_of(tokenizer, "<end_of_turn>", eos=turn)
    tokenizer.eos_token = None
    loaded = load(save_model(model, tokenizer, tmp_path / "model"))
    assert (loaded.end_id, loaded.end_ids) == (turn, {turn})


def test_a_template_that_raises_leaves_the_tokenizers_end_token(tmp_path: Path):
    tokenizer = tokenizer_of("gemma")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    loaded = load(save_model(model_of(tokenizer, "<end_of_turn>"), tokenizer, tmp_path / "model"))
    assert loaded.end_id == tokenizer.eos_token_id
