"""The model card of a trained model: README.md with the hub's front matter, made from what the run recorded.

It holds names, settings and numbers. Paths are cut down to their last part, and addresses are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tether import __version__
from tether.plain_file import read_plain_json
from tether.store.find import run_config
from tether.store.read import RunSummary
from tether.store.recorded import RecordedRun

CARD = "README.md"
METHODS = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward": "comparisons of answers, as a reward model",
    "dpo": "direct preference optimization",
    "ppo": "Proximal Policy Optimization",
    "grpo": "group-relative policy optimization",
    "rloo": "REINFORCE with a leave-one-out baseline",
    "reinforce": "the policy gradient (REINFORCE)",
    "trpo": "trust region policy optimization",
}
SECTIONS = ("roles", "optimizer", "rollout", "kl", "data", "reward")  # and the method's own
LEFT_OUT = {"parts", "train", "held_out", "columns", "options", "micro_batch_tokens", "backbone_cache", "critic_init"}
SHOWN = ("score", "held_out/score", "accuracy", "held_out/accuracy", "loss", "held_out/loss", "kl_ref_k3", "entropy")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MAX_CHAIN = 16


@dataclass(frozen=True)
class CardFacts:
    """What is exported. `step` is the step whose metrics are the model's, None for the last."""

    kind: str  # model, adapters, reward, reward-adapters
    dtype: str | None = None
    step: int | None = None
    licence: str | None = None
    repository: str | None = None  # OWNER/NAME on the hub


def write_card(folder: Path, summary: RunSummary, run: RecordedRun, facts: CardFacts) -> None:
    """Put README.md into the folder."""
    (folder / CARD).write_text(card_text(summary, run, facts), encoding="utf-8")


def card_text(summary: RunSummary, run: RecordedRun, facts: CardFacts) -> str:
    """The whole card."""
    chain = base_models(str(summary.config.get("model", {}).get("path", "")))
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(summary, facts, chain[-1]), sort_keys=False)}---",
        f"# {facts.repository.rpartition('/')[2] if facts.repository else summary.name}",
        _opening(summary, facts, chain),
        "\n".join(["## Use", "", *_usage(facts)]),
        "\n".join(["## Results", "", *_results(summary, run, facts)]),
        "\n".join(["## Training", "", *_training(summary)]),
    ]
    return "\n\n".join(parts) + "\n"


def base_models(path: str) -> list[str]:
    """What the model was trained from, nearest first: runs by their folder's name, then the model at the beginning."""
    chain: list[str] = []
    while len(chain) < MAX_CHAIN:
        config = run_config(path) if path else {}
        if not config:
            return [*chain, _base_name(path)]
        folder = Path(path)
        chain.append((folder.parent if folder.name in ("model", "best") else folder).name)
        path = str(config.get("model", {}).get("path", ""))
    return chain


def _base_name(path: str) -> str:
    """A hub id or a known name as it is; of a folder its last part."""
    if HUB_ID.fullmatch(path) and not Path(path).exists():
        return path
    return Path(path).name or "unknown"


def _front_matter(summary: RunSummary, facts: CardFacts, base: str) -> dict[str, Any]:
    front: dict[str, Any] = {"license": facts.licence or base_licence(base) or "other"}
    if HUB_ID.fullmatch(base):  # the hub refuses a base model that is no id
        front["base_model"] = base
    front["library_name"] = "peft" if facts.kind.endswith("adapters") else "transformers"
    front["pipeline_tag"] = "text-classification" if facts.kind.startswith("reward") else "text-generation"
    tags = ["tether", "rlhf", summary.method, *(["reward-model"] if facts.kind.startswith("reward") else [])]
    return front | {"tags": tags}


def base_licence(base: str) -> str | None:
    """The licence of a model that Tether knows by name."""
    from tether.hub.catalog import EMBEDDED

    return EMBEDDED[base].licence.lower() if base in EMBEDDED else None


def _opening(summary: RunSummary, facts: CardFacts, chain: list[str]) -> str:
    what = METHODS.get(summary.method, summary.method)
    through = f" by way of {', '.join(f'`{name}`' for name in reversed(chain[:-1]))}" if chain[:-1] else ""
    step = summary.steps_done if facts.step is None else facts.step + 1
    text = f"Trained from `{chain[-1]}`{through} with {what}, {step} of {summary.steps_target} steps"
    form = {"adapters": ", saved as LoRA adapters", "reward-adapters": ", saved as LoRA adapters"}.get(facts.kind, "")
    stored = f", weights in {facts.dtype}" if facts.dtype else ""
    note = "" if facts.licence or base_licence(chain[-1]) else " The licence of the base model applies; state it above."
    return f"{text}{form}{stored}.{note}"


def _usage(facts: CardFacts) -> Iterator[str]:
    name = facts.repository or "THIS_FOLDER"
    yield "```python"
    if facts.kind == "model":
        yield "from transformers import pipeline"
        yield ""
        yield f'chat = pipeline("text-generation", "{name}")'
        yield 'print(chat([{"role": "user", "content": "Hello"}], max_new_tokens=128)[0]["generated_text"][-1])'
    elif facts.kind == "reward":
        yield "import torch"
        yield "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
        yield ""
        yield f'model = AutoModelForSequenceClassification.from_pretrained("{name}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        yield 'talk = [{"role": "user", "content": "Hello"}]'
        yield "ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)"
        yield 'ids += [*tokenizer.encode("Hello to you.", add_special_tokens=False), tokenizer.eos_token_id]'
        yield "score = model(torch.tensor([ids])).logits[0, 0]  # read at the end token"
        yield "print(score)  # plus the bias in scalar_head.json, which is the same for every answer"
    else:
        loader = "AutoPeftModelForSequenceClassification" if "reward" in facts.kind else "AutoPeftModelForCausalLM"
        yield f"from peft import {loader}"
        yield ""
        yield f'model = {loader}.from_pretrained("{name}")'
    yield "```"


def _results(summary: RunSummary, run: RecordedRun, facts: CardFacts) -> Iterator[str]:
    rows = [row for row in run.metrics if facts.step is None or row["step"] <= facts.step]
    found = {name: _last(rows, name) for name in (*SHOWN, *_held_out(rows))}
    start = {name: next((row[f"start/{name}"] for row in rows if f"start/{name}" in row), None) for name in found}
    intervals = _intervals(summary.folder, facts)
    shown = {name: value for name, value in found.items() if value is not None}
    if not shown:
        yield "The run recorded no metric that says how good the model is."
        return
    yield "| metric | before training | this model |"
    yield "|---|---|---|"
    for name, value in shown.items():
        before = start[name]
        interval = f" ({intervals[name][0]:.3g} to {intervals[name][1]:.3g})" if name in intervals else ""
        yield f"| {name} | {'' if before is None else f'{before:.4g}'} | {value:.4g}{interval} |"
    if intervals:
        yield "\nIn brackets: the 95 % interval."


def _held_out(rows: list[Mapping[str, float]]) -> list[str]:
    names = {name for row in rows for name in row if name.startswith("held_out/")}
    return sorted(names - set(SHOWN))


def _last(rows: list[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return values[-1] if values else None


def _intervals(folder: Path, facts: CardFacts) -> dict[str, tuple[float, float]]:
    """Those of the report that a finished reward model has."""
    try:
        report = read_plain_json(folder / "report.json")
        low, high = report["accuracy_interval"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"held_out/accuracy": (float(low), float(high))} if facts.step is None else {}


def _training(summary: RunSummary) -> Iterator[str]:
    config = summary.config
    data = config.get("data", {})
    task = config.get("task", {})
    named = {"training data": data.get("train"), "held-out data": data.get("held_out"), "prompts": task.get("prompts")}
    named["task"] = None if task.get("prompts") else task.get("name")
    for what, value in named.items():
        if value:
            yield f"- {what}: {', '.join(f'`{_short(one)}`' for one in ([value] if isinstance(value, str) else value))}"
    parts = config.get("reward", {}).get("parts") or ()
    if parts:
        yield f"- reward: {', '.join(_part(part) for part in parts)}"
    yield f"- seed: {config.get('run', {}).get('seed')}"
    yield f"- made with: Tether {__version__}"
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    for key, value in _settings(config, summary.method):
        yield f"| `{key}` | {value} |"


def _part(part: Mapping[str, Any]) -> str:
    of = part.get("path") or part.get("function")
    named = f" `{_short(of)}`" if isinstance(of, str) else ""
    return f"{part.get('kind')}{named}, weight {part.get('weight', 1.0)}"


def _settings(config: Mapping[str, Any], method: str) -> Iterator[tuple[str, str]]:
    yield "model.dtype", str(config.get("model", {}).get("dtype"))
    for section in dict.fromkeys((*SECTIONS, method)):
        values = config.get(section)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if key not in LEFT_OUT and isinstance(value, bool | int | float | str) and not _is_idle(config, key):
                yield f"{section}.{key}", _short(value) if isinstance(value, str) else str(value)


def _is_idle(config: Mapping[str, Any], key: str) -> bool:
    """Settings of another mode than the run's."""
    mode = config.get("roles", {}).get("mode")
    return (key.startswith("lora_") and mode != "lora") or (key == "trainable_layers" and mode != "shared_backbone")


def _short(text: Any) -> str:
    """A path as its last part; a URL as nothing but what it is."""
    said = str(text)
    if "://" in said:
        return "(an address)"
    return re.split(r"[/\\]", said.rstrip("/\\"))[-1] if ("/" in said or "\\" in said) else said
