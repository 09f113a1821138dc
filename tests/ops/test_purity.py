"""The functions of tether.ops are pure: they keep nothing between calls and leave their arguments alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import tether.ops
from tether.ops.sampling import draw, draw_columns
from tether.protocols import Sampling

FILES = sorted(Path(tether.ops.__file__).parent.glob("*.py"))
CACHES = {"cache", "lru_cache", "cached_property", "tensor_cached", "TensorCache", "WeakIdKeyDictionary"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_module_holds_no_state(file: Path):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global | ast.Nonlocal), f"line {node.lineno} writes to an outer name"
        assert not (isinstance(node, ast.Name) and node.id in CACHES), f"line {node.lineno}: {node.id}"
        assert not (isinstance(node, ast.Attribute) and node.attr in CACHES), f"line {node.lineno}: {node.attr}"
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            assert not isinstance(node.value, MUTABLE), f"line {node.lineno} makes a value that can change"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawing_leaves_the_logits_alone(temperature: float):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 4, generator=generator)
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    before = logits.clone()
    sampling = Sampling(1, temperature=temperature)
    columns = draw_columns(logits, uniforms, sampling)
    assert torch.equal(logits, before)
    rows = draw(logits.t().contiguous(), uniforms, sampling)
    assert torch.equal(logits, before) and torch.equal(columns.tokens, rows.tokens)
