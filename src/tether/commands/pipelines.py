"""The command `tether pipeline`: its flags are keys of the pipeline, or of a stage under the stage's name."""

from __future__ import annotations

from tether.errors import UsageError

PIPELINE_HELP = """Usage: tether pipeline PIPELINE.yaml [--rounds N] [--name NAME] [--STAGE.section.key VALUE ...]

Supervised fine-tuning, ratings, reward models and RL in one file, for as many rounds as asked. Each training stage is
an ordinary run. The same command, or `tether resume runs/NAME`, goes on where it was stopped or killed; with more
rounds it adds them. docs/pipelines.md explains the file.

Options:
  --check      read the file, show the order of the stages, and stop
  --json       print one JSON line a stage, and the summary as the last
  --allow-code PACKAGE or FILE.py whose code the file may name; see docs/security.md
  --help       this text; `tether pipeline --keys METHOD` lists the settings of a stage's method

Try: tether pipeline recipes/pipeline-tiny.yaml
"""


def pipeline_command(words: list[str]) -> int:
    """Run a pipeline."""
    if not words or any(word in ("--help", "-h") for word in words):
        print(PIPELINE_HELP, end="")
        if words:
            return 0
        raise UsageError("pipeline needs a file: tether pipeline PIPELINE.yaml")
    if words[0] == "--keys":
        return print_keys(words[1:])
    switches = {name: f"--{name}" in words for name in ("json", "check")}
    words = [word for word in words if word not in ("--json", "--check")]
    if not words or words[0].startswith("-"):
        raise UsageError("pipeline needs a file first: tether pipeline PIPELINE.yaml")
    path, *flags = words

    from tether.config.load_pipeline import load_pipeline

    pipeline = load_pipeline(path, flags)  # before torch is imported: a wrong key is reported at once
    from tether.pipeline.order import check_references, order_lines

    check_references(pipeline)
    if switches["check"]:
        print("\n".join(order_lines(pipeline)))
        return 0
    from tether.pipeline.run_pipeline import pipeline_names, run_pipeline
    from tether.rewards.agree import agree_to_file

    agree_to_file(pipeline_names(pipeline), path)
    return run_pipeline(pipeline, json_output=switches["json"])


def print_keys(methods: list[str]) -> int:
    """List the settings of a stage's method, or of the pipeline itself."""
    from tether.commands.options import suggestion
    from tether.config.pipeline_recipe import STAGES, PipelineSettings
    from tether.config.schema import describe

    if methods and methods[0] not in STAGES:
        raise UsageError(f"--keys: unknown method {methods[0]}: {suggestion(methods[0], STAGES)}")
    for leaf in describe(STAGES[methods[0]] if methods else PipelineSettings):
        print(f"{leaf.key:32} {leaf.default_text:20} {leaf.description}")
    return 0
