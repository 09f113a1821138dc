"""docs/python.md, the examples and the notebook run as they stand, on the tiny model."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import tether

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "ppo_in_a_notebook.ipynb"


def on_the_tiny_model(code: str) -> str:
    """The same code with the tiny model and few steps."""
    return re.sub(r"\bsteps=20\b", "steps=2", code.replace("smollm2-135m", "tiny-bytes"))


def run_blocks(blocks: list[str], name: str) -> dict[str, object]:
    """Run blocks of code one after the other, as a reader or a notebook does."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for place, block in enumerate(blocks):
        exec(compile(on_the_tiny_model(block), f"{name}, block {place + 1}", "exec"), namespace)
    return namespace


def test_every_block_of_the_document_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) >= 6
    names = run_blocks(blocks, "docs/python.md")
    run = names["run"]
    assert isinstance(run, tether.Run) and run.finished and run.name == "in-two-parts" and run.steps == 4
    assert (tmp_path / "my-model" / "config.json").is_file()
    assert "Estimate" in capsys.readouterr().out


def test_the_document_lists_every_public_name():
    missing = [name for name in tether.__all__ if f"tether.{name}" not in DOCUMENT and f"`{name}`" not in DOCUMENT]
    missing = [name for name in missing if name not in ("Answer", "Run")]  # what calls return, told by their fields
    assert not missing
    told = DOCUMENT[DOCUMENT.index("## The run") : DOCUMENT.index("## Demonstrations")]
    assert not [name for name in vars(tether.Run) if not name.startswith("_") and name not in told]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_runs_on_the_tiny_model(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [file.name, "--model", "tiny-bytes", "--steps", "2"])
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out
    finished = [tether.load_run(path.parent) for path in Path("runs").glob("*/finished.json")]
    assert finished and all(run.steps == 2 for run in finished)


def test_the_notebook_runs_and_keeps_the_output_of_every_cell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "executed once, in order"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    names = run_blocks(["".join(cell["source"]) for cell in cells], NOTEBOOK.name)
    run, whole, longer = names["run"], names["whole"], names["longer"]
    assert isinstance(run, tether.Run) and isinstance(whole, tether.Run) and isinstance(longer, tether.Run)
    weights = [each.model_path / "model.safetensors" for each in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    score = run.metrics["score"]
    assert score.iloc[-5:].mean() > 2 * score.iloc[:5].mean(), "it learns"
    assert longer.steps == 60 and (tmp_path / "lower-case-model" / "model.safetensors").is_file()
