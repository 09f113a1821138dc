"""Whether two models read the same token ids as the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tether.errors import ConfigError
from tether.hub.safe_files import check_folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved beside a reward model."""
    check_folder(folder, "reward model")
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{folder} has no tokenizer beside the reward model: save the one it was trained with"
        ) from error
    return cast(PreTrainedTokenizerBase, loaded)


def tokenizer_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """In what two tokenizers differ, in a few words; None where ids of one are ids of the other."""
    pairs = {
        "vocabulary size": (len(ours), len(theirs)),
        "end token id": (ours.eos_token_id, theirs.eos_token_id),
        "first token id": (ours.bos_token_id, theirs.bos_token_id),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            return f"{name} {other}, not {one}"
    if ours is not theirs and ours.get_vocab() != theirs.get_vocab():
        return "equally many tokens, with other ids"
    templates = [str(getattr(one, "chat_template", None) or "").strip() for one in (ours, theirs)]
    return "another chat template" if templates[0] != templates[1] else None
