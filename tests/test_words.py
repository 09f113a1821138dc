"""One concept, one word, and that word is the field's: names that gave way to a standard one do not come back."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tether"
FILES = sorted(SOURCE.rglob("*.py"))

# what it was called -> what it is called
WORDS = {
    "policy_rate": "policy_lr",
    "critic_rate": "critic_lr",
    "micro_tokens": "micro_batch_tokens",
    "masters": "master_weights",
    "top_layers": "trainable_layers",
    "trunk": "backbone",
    "trunk_states": "backbone_cache",
    "critic_from": "critic_init",
    "offload_frozen": "offload_reference",
    "kl_place": "kl_apply_to",
    "max_kl_old": "target_kl",
    "importance_cap": "importance_sampling_cap",
    "max_batch": "max_num_seqs",
    "alternatives": "top_logprobs",
    "missing_end_penalty": "missing_eos_penalty",
    "stall_seconds": "hang_timeout",
    "centre_on": "center_on",
    "kl_old": "approx_kl",
    "sampler_gap": "logprob_diff",
    "measures": "metrics",
    "verb": "command",
    "travel": "device_transfer",
    "deposit": "gradient_accumulation",
    "likeliest": "top_tokens",
    "captured_pass": "cuda_graphs",
    "linear_parts": "lora_linear",
    "adapter_gate": "lora_swiglu",
    "row_attention": "short_sequence_attention",
    "last_look": "token_stats",
    "sinks": "trackers",
    "consultation": "diagnosis",
    "ballot": "vote",
    "vote_desk": "vote_writer",
    "doubts": "uncertainty",
    "doorkeeper": "auth",
    "buckets": "rate_limit",
    "credit": "advantages",
    "crediting": "advantage_settings",
    "weigh": "importance_weights",
    "mix_in": "ptx",
    "departure": "unsupported_reason",
    "wayback": "backward_context",
    "way_for": "backend_for",
    "foresee": "prefetch",
    "halve": "shrink_micro_batch",
    "trainingwish": "training_request",
}


def names_in(file: Path) -> set[str]:
    """The identifiers of a file, in lower case."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
    return {token.string.lower().lstrip("_") for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_names_are_the_field_s(file: Path):
    found = {name: WORDS[name] for name in names_in(file) & WORDS.keys()}
    assert not found, f"{file.relative_to(ROOT)}: say {', '.join(f'{new} for {old}' for old, new in found.items())}"
    assert file.stem not in WORDS, f"{file.relative_to(ROOT)}: call it {WORDS.get(file.stem)}"


def test_settings_and_metrics_are_the_field_s():
    keys = (ROOT / "tests" / "commands" / "surface.json").read_text(encoding="utf-8")
    gone = [old for old in WORDS if f'.{old}"' in keys]
    assert not gone
    for file in [*(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.yaml"), ROOT / "README.md"]:
        text = file.read_text(encoding="utf-8")
        wrong = [old for old in WORDS if f"`{old}`" in text or f".{old}`" in text or f"\n  {old}:" in text]
        assert not wrong, f"{file.relative_to(ROOT)}: {wrong}"


def test_no_two_classes_share_a_name():
    """Private ones and the command line's own option classes may."""
    seen: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                seen.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    twice = {name: files for name, files in seen.items() if len(files) > 1}
    assert not twice, twice
