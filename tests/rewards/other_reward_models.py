"""Reward models of other makers, tiny and random: another tokenizer, their own chat template, their own heads."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """Bytes with other ids than tiny-bytes has; the template ends a turn with </s> and a newline."""
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)
    fast.chat_template = template
    return fast


def save_llama(folder: Path, *, labels: int = 1, **tokenizer_options) -> LlamaForSequenceClassification:
    tokenizer = byte_tokenizer(**tokenizer_options)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=96, num_labels=labels, pad_token_id=2, **shape
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_encoder(folder: Path, kind: str, *, labels: int = 1):
    tokenizer = byte_tokenizer(template=None)
    config_of, model_of = {
        "bert": (BertConfig, BertForSequenceClassification),
        "roberta": (RobertaConfig, RobertaForSequenceClassification),
    }[kind]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = config_of(
        vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=2, num_labels=labels, **shape
    )
    torch.manual_seed(0)
    model = model_of(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
