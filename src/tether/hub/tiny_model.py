"""A tokenizer and a random model small enough to train in a test, built in code: nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
PAD_ID = 256  # after the 256 bytes
END_ID = 257
VOCABULARY = 258


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so any text round-trips; pad and end are two distinct tokens (ids 256 and 257)."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    assert (len(fast), fast.pad_token_id, fast.eos_token_id) == (VOCABULARY, PAD_ID, END_ID)
    return fast


def tiny_model(seed: int, layers: int = 2, width: int = 64, heads: int = 4, context: int = 256) -> LlamaForCausalLM:
    """A float32 Llama over the bytes of `tiny_tokenizer`, its weights a function of `seed` alone.

    The global random stream is left as it was, so that building a model never shifts what comes after it.
    """
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}: choose a width that the heads divide")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.float().eval()
