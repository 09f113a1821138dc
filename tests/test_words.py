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
    "keeper": "decoder_cache",
    "aside": "side_stream",
    "way": "backend",
    "ways": "backend",
    "visit": "on_device",
    "remember": "cache",
    "knows": "is_cached",
    "refuse": "skip_if_nonfinite",
    "pat": "heartbeat",
    "sitting": "attempt",
    "fewest": "min",
    "made_up": "synthetic",
    "label_fill": "queue_items",
    "talk_routes": "chat_routes",
    "long_lived": "freeze_gc",
    "settle": "freeze_gc",
    "house": "layering",
    "pending": "spool",
    "exchange": "import_export",
    "gate": "auth",
    "desk": "vote_writer",
    "door": "auth",
    "wish": "request",
    "told": "a noun for the value",
    "talks": "conversations",
}

# Words with another meaning in some packages (a SwiGLU gate, terms that are pending in a parser), or whose old use
# remains there.
EXCEPT = {
    "gate": {"accel", "models", "hub", "rewards"},
    "pending": {"rewards"},
    "refuse": {"rewards", "store"},
    "settle": {"rewards", "store", "train"},
    "exchange": {"rewards"},
    "remember": {"config", "rewards"},
    "told": {
        "accel",
        "api",
        "config",
        "data",
        "demo",
        "doctor",
        "evaluation",
        "rewards",
        "store",
        "train",
        "reports",
        "user_code",
    },
}
PREFIXES = {"most_": "max_", "fewest_": "min_", "longest_": "max_"}
PREFIXES_ALLOWED = {"most_common", "most_common_answer", "longest_common", "longest_row", "most_bytes", "most_slots"}

# Files of one name: a command and the package or module that it runs, and names that say the same in each package.
SAME_BASENAME = {
    "__init__": "packages",
    "app": "the application of a server",
    "serve": "a command and the servers that it starts",
    "schema": "the fields of a recipe, of a request, of the database",
    "chat": "the command, and the chat templates",
    "doctor": "the command and the doctor",
    "plan": "the command and the plan",
    "resume": "the command and what it runs",
    "load": "recipes and models",
    "logprobs": "the function and its kernels",
    "lora": "the adapters and their kernels",
    "records": "of data and of the database",
    "run": "the loop, and its handle in the Python API",
    "sampling": "the function and the audits of it",
    "training": "the API and what it calls",
}


def names_in(file: Path) -> set[str]:
    """The identifiers of a file, in lower case."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
    return {token.string.lower().lstrip("_") for token in tokens if token.type == tokenize.NAME}


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_names_are_the_field_s(file: Path):
    names = names_in(file)
    found = {name: WORDS[name] for name in names & WORDS.keys() if package_of(file) not in EXCEPT.get(name, set())}
    found |= {
        name: new + name.removeprefix(old)
        for name in names - PREFIXES_ALLOWED
        for old, new in PREFIXES.items()
        if name.startswith(old)
    }
    assert not found, f"{file.relative_to(ROOT)}: say {', '.join(f'{new} for {old}' for old, new in found.items())}"


def test_files_and_folders_have_the_field_s_names():
    places = [path for path in SOURCE.rglob("*") if path.suffix == ".py" or path.is_dir()]
    places += (ROOT / "tests").rglob("*.py")
    wrong = {
        str(path.relative_to(ROOT)): WORDS[path.stem.removeprefix("test_")]
        for path in places
        if path.stem.removeprefix("test_") in WORDS or path.stem.endswith("_verb")
    }
    assert not wrong, wrong


def test_no_two_files_share_a_name():
    seen: dict[str, list[str]] = {}
    for file in FILES:
        seen.setdefault(file.stem, []).append(str(file.relative_to(SOURCE)))
    twice = {stem: files for stem, files in seen.items() if len(files) > 1 and stem not in SAME_BASENAME}
    assert not twice, f"{twice}: rename one, or say in SAME_BASENAME why they share it"


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
