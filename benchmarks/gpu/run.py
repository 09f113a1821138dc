"""Tether, TRL 1.12 and the decode limit on one GPU, one after the other on the same shapes: JSON and a table.

    python benchmarks/gpu/run.py --json results.json [--docs docs/performance.md] [--repeats 3]
        [--tokenizer FOLDER --peer-path FOLDER] [--limit SCRIPT] [--only 1b 135m adapters 7b 32b]

Each measurement is its own process, so that none sees another's memory. The peer needs `trl==1.12.0`, in this
interpreter or as a folder of packages (`--peer-path`), and a tokenizer of 49,152 tokens; without `--tokenizer` it is
skipped. `--limit` is a script that prints the rate of a purpose-written decode step for each shape. With `--docs` the
table between the two marks in that file is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARKS = "<!-- iteration table -->", "<!-- end of iteration table -->"
SAME = ["--set", "optimizer.master_weights=none"]  # like the peer: weights and optimizer state in bf16
OURS: dict[str, tuple[str, list[str]]] = {
    "135m": ("135M, four models", ["--shape", "135m", "--micro-batch-tokens", "8192", "--release", *SAME]),
    "1b": ("1B, four models", ["--shape", "1b", "--release", *SAME]),
    "1b fp32": ("1B, four models, fp32 master weights and state", ["--shape", "1b", "--release"]),
    "adapters": (
        "1B, adapters, value head",
        ["--shape", "1b", "--mode", "lora", "--critic", "head", "--micro-batch-tokens", "8192", "--release"],
    ),
    "attention": (
        "1B, adapters on attention, value head",
        ["--shape", "1b", "--mode", "lora", "--critic", "head", "--micro-batch-tokens", "8192", "--release",
         "--set", "roles.lora_targets=q_proj,k_proj,v_proj,o_proj"],
    ),
    "adapters critic": (
        "1B, adapters, critic as adapters",
        ["--shape", "1b", "--mode", "lora", "--micro-batch-tokens", "8192", "--release"],
    ),
    "7b": (
        "7B, adapters, 64 x (256 + 256), one epoch",
        ["--shape", "7b", "--mode", "lora", "--prompts", "64", "--prompt", "256", "--new", "256", "--epochs", "1",
         "--release", "--set", "model.gradient_checkpointing=true"],
    ),
    "32b": (
        "32B, adapters, 16 x (256 + 256), one epoch",
        ["--shape", "32b", "--mode", "lora", "--prompts", "16", "--prompt", "256", "--new", "256", "--epochs", "1",
         "--warmup", "0", "--release", "--set", "model.gradient_checkpointing=true"],
    ),
    "65b": (
        "65B, adapters, 16 x (256 + 256), one epoch",
        ["--shape", "65b", "--mode", "lora", "--prompts", "16", "--prompt", "256", "--new", "256", "--epochs", "1",
         "--warmup", "0", "--release", "--set", "model.gradient_checkpointing=true"],
    ),
}  # fmt: skip
LARGE = ("32b", "65b")  # minutes each, so they run only on request


def process(command: list[str], path: str | None = None) -> tuple[str, str]:
    """`(stdout, why it failed)` of a process; the second is empty on success."""
    search = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH"), path]))
    print(" ".join(command), flush=True)
    environment = os.environ | {"PYTHONPATH": search}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=environment)
    why = "" if done.returncode == 0 else done.stderr[-1500:] or f"it ended with {done.returncode}"
    print(done.stdout[-1500:], f"failed: {why}" if why else "", flush=True)
    return done.stdout, why


def last_json(text: str, why: str) -> dict[str, Any]:
    """The last line of JSON that a process printed, or why there is none."""
    lines = re.findall(r"^\{.*\}$", text, flags=re.MULTILINE)
    return json.loads(lines[-1]) if lines and not why else {"failed": why or "no result"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All requested measurements, by name."""
    found: dict[str, Any] = {"ours": {}, "peer": {}, "limit": ""}
    for name in options.only:
        arguments = [str(HERE / "iteration.py"), *OURS[name][1], "--repeats", str(options.repeats)]
        found["ours"][name] = last_json(*process(arguments))
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    shapes = [shape for shape in dict.fromkeys(OURS[name][1][1] for name in options.only) if shape in ("135m", "1b")]
    for shape in shapes if options.tokenizer else []:
        arguments = [str(HERE / "peer_trl.py"), "--shape", shape, "--tokenizer", options.tokenizer]
        arguments += ["--iterations", str(options.peer_iterations)]
        found["peer"][shape] = last_json(*process(arguments, options.peer_path))
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.limit:
        found["limit"] = process([options.limit])[0]
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: one row per run, beside the peer on the same shape."""
    lines = [
        "| run | s per iteration | rollout | scores | evaluation | update | of the matrix rate | peak GiB "
        "| TRL 1.12: s, GiB | speedup |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, ours in found["ours"].items():
        title = OURS[name][0]
        if "failed" in ours:
            lines.append(f"| {title} | failed | | | | | | | | |")
            continue
        seconds, peer = ours["seconds"], found["peer"].get(ours["shape"], {})
        phases = " | ".join(f"{seconds[phase]:.2f}" for phase in ("rollout", "scores", "evaluation", "update"))
        beside = f"{peer['whole']:.1f}, {peer['peak']:.1f}" if "whole" in peer else ""
        ratio = f"{peer['whole'] / seconds['whole']:.1f}" if "whole" in peer else ""
        share = f"{100 * ours['update_share']:.0f} %"
        lines.append(
            f"| {title} | {seconds['whole']:.2f} | {phases} | {share} | {ours['peak']:.1f} | {beside} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write JSON and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[name for name in OURS if name not in LARGE], choices=list(OURS))
    parser.add_argument("--tokenizer", help="folder of a tokenizer with 49,152 tokens, for the peer")
    parser.add_argument("--peer-path", help="folder with TRL's packages")
    parser.add_argument("--peer-iterations", type=int, default=3)
    parser.add_argument("--limit", help="a script that prints the decode limit")
    options = parser.parse_args()
    for name in ("tokenizer", "peer_path"):
        if (folder := getattr(options, name)) and not Path(folder).is_dir():
            parser.error(f"--{name.replace('_', '-')}: there is no folder {folder}")
    if options.docs and not options.docs.is_file():
        parser.error(f"--docs: there is no file {options.docs}")
    if options.docs and not all(mark in options.docs.read_text() for mark in MARKS):
        parser.error(f"--docs: {options.docs} has no line {MARKS[0]} or no line {MARKS[1]}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    written = table(found)
    print(written)
    failed = [f"{side} {name}" for side in ("ours", "peer") for name in found[side] if "failed" in found[side][name]]
    if failed:
        raise SystemExit(f"failed, so no file but {options.json} was written: {', '.join(failed)}")
    if options.docs:
        text = options.docs.read_text()
        start, end = (text.index(mark) for mark in MARKS)
        options.docs.write_text(text[: start + len(MARKS[0])] + f"\n{written}\n" + text[end:])


if __name__ == "__main__":
    main()
