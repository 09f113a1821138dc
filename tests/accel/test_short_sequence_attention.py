"""Attention over short rows against softmax written out, run by Triton's interpreter. Skipped where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from triton_interpreter import interpret

interpret()

from tether.accel.fused_pass.fused_layer import Attention
from tether.accel.fused_pass.packed import packed_states
from tether.accel.kernels import attention as row_kernels
from tether.accel.kernels.attention import TILES, AttentionTiles, Tile
from tether.ops.masks import Packing, Rows
from tether.types import Sequences

LENGTHS = (1, 130, 2, 63, 64, 256, 65)
SCALING = 0.2


def layer(window: int | None = None, cap: float | None = None) -> Any:
    """What attention reads of a layer."""
    return SimpleNamespace(scaling=SCALING, window=window, score_cap=cap)


class Case:
    """Random queries, keys, values and a gradient, in float32, for rows of which the last `asks` tokens ask."""

    def __init__(
        self, lengths: tuple[int, ...], heads: int, key_heads: int, width: int, asks: tuple[int, ...] | None = None
    ) -> None:
        place = torch.arange(max(lengths))
        self.lengths, self.asks = lengths, lengths if asks is None else asks
        self.packing = Packing.of(place[None] < torch.tensor(lengths)[:, None])
        self.rows: Rows | None = None
        if asks is not None:
            ends = torch.tensor(lengths)[:, None]
            self.rows = self.packing.rows((place[None] < ends) & (place[None] >= ends - torch.tensor(asks)[:, None]))
        draws = torch.Generator().manual_seed(sum(lengths) + heads)
        self.query = torch.randn(sum(self.asks), heads, width, generator=draws)
        self.key, self.value = torch.randn(2, sum(lengths), key_heads, width, generator=draws)
        self.grad = torch.randn(sum(self.asks), heads * width, generator=draws)

    def found(self, attention: Any = row_kernels, **kind: Any) -> list[torch.Tensor]:
        """Mixed values and the three gradients, by the kernels."""
        place = (self.packing, self.rows, layer(**kind))
        mixed, lse = attention.forward(self.query, self.key, self.value, *place)
        return [mixed, *attention.backward(self.grad, self.query, self.key, self.value, mixed, lse, *place)]

    def expected(self, window: int | None = None, cap: float | None = None) -> list[torch.Tensor]:
        """The same in float64, a row and a head at a time, by autograd."""
        inputs = [x.double().requires_grad_() for x in (self.query, self.key, self.value)]
        group, mixed, key_start, query_start = self.query.shape[1] // self.key.shape[1], [], 0, 0
        for length, asks in zip(self.lengths, self.asks, strict=True):
            query = inputs[0][query_start : query_start + asks]
            key, value = (x[key_start : key_start + length] for x in inputs[1:])
            hidden = torch.ones(asks, length).triu(1 + length - asks).bool()
            if window is not None:
                hidden |= torch.ones(asks, length).tril(length - asks - window).bool()
            heads = []
            for head in range(query.shape[1]):
                scores = (query[:, head] @ key[:, head // group].T) * SCALING
                scores = scores if cap is None else torch.tanh(scores / cap) * cap
                heads.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value[:, head // group])
            mixed.append(torch.stack(heads, dim=1).flatten(1))
            key_start, query_start = key_start + length, query_start + asks
        whole = torch.cat(mixed)
        return [whole.detach(), *torch.autograd.grad(whole, inputs, self.grad.double())]


def assert_near(case: Case, attention: Any = row_kernels, **kind: Any) -> None:
    for found, expected in zip(case.found(attention, **kind), case.expected(**kind), strict=True):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("heads", "key_heads"), [(9, 3), (8, 2), (4, 4)])
def test_rows_of_any_length_attend_as_softmax_does(heads: int, key_heads: int):
    assert_near(Case(LENGTHS, heads, key_heads, 64))


@pytest.mark.parametrize("width", [16, 32, 128])
def test_heads_of_any_width_attend_as_softmax_does(width: int):
    assert_near(Case((70, 1, 33), 6, 2, width))


@pytest.mark.parametrize(
    "asks", [(1, 100, 1, 63, 7, 129, 64), (1,) * 7, (0, 3, 0, 0, 64, 256, 1)], ids=["many", "once", "some never"]
)
def test_the_last_tokens_of_rows_alone_attend_as_softmax_does(asks: tuple[int, ...]):
    assert_near(Case(LENGTHS, 6, 2, 64, asks))


def test_wherever_the_asking_tokens_begin_masks_cover_what_is_hidden():
    """Blocks of queries that begin right where one sees all keys of a block, and just before and after."""
    asks = (64, 65, 66, 67, 68, 69, 70, 127, 128, 129)
    assert_near(Case((130,) * len(asks), 1, 1, 16, asks))
    assert_near(Case((130,) * 4, 4, 1, 16, (65, 66, 67, 68)))


def every_tile() -> list[Tile]:
    """Those that differ in what they compute."""
    tiles = [tile for of_width in TILES.values() for tile in of_width]
    return list(dict.fromkeys(Tile(tile.queries, tile.keys, 4, 2) for tile in tiles))


@pytest.mark.parametrize("tile", every_tile(), ids=str)
def test_whatever_the_tile_rows_attend_as_softmax_does(tile: Tile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_kernels, "TILES", {64: AttentionTiles(tile, tile, tile)})
    assert_near(Case((3, 150, 129), 3, 1, 16, asks=(3, 101, 129)))


@pytest.mark.parametrize("asks", [None, (1, 100, 1, 63, 7, 129, 64)], ids=["all", "some"])
@pytest.mark.parametrize("window", [2, 5, 64, 100, 300])
def test_a_window_hides_the_keys_before_it(window: int, asks: tuple[int, ...] | None):
    assert_near(Case(LENGTHS, 6, 2, 16, asks), window=window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("width", "cap"), [(16, 0.5), (64, 2.0), (256, 3.0)])
def test_capped_scores_attend_as_softmax_of_their_tanh_does(width: int, cap: float, window: int | None):
    assert_near(Case((70, 1, 33), 4, 2, width, asks=(65, 1, 20)), window=window, cap=cap)


def test_capped_scores_have_kernels_wherever_the_asking_tokens_stand():
    case = Case((40, 9), 4, 2, 16)
    for ours, theirs in zip(case.found(Attention, cap=0.7), case.expected(cap=0.7), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    mask = torch.arange(40)[None] < torch.tensor([[40], [9]])
    case.rows = case.packing.rows(mask & (torch.arange(40) % 3 == 0))
    assert case.rows.starts is None
    whole, tokens = Case((40, 9), 4, 2, 16), case.rows.tokens
    whole.grad = torch.zeros_like(whole.grad).index_copy(0, tokens, case.grad[tokens])
    expected = whole.expected(cap=0.7)
    case.query, case.grad = case.query[tokens].contiguous(), case.grad[tokens].contiguous()
    found = case.found(Attention, cap=0.7)
    assert (found[0] - expected[0][tokens]).abs().max() <= 1e-5
    for ours, theirs in zip(found[1:], (expected[1][tokens], *expected[2:]), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_large_scores_are_softened_without_overflow():
    case = Case((90, 20), 4, 2, 16)
    case.query *= 40.0
    assert_near(case)


def test_tokens_that_nobody_asks_for_have_no_gradient():
    case = Case((5, 70), 4, 2, 16, asks=(0, 0))
    mixed, *gradients = case.found()
    assert len(mixed) == 0 and all(not gradient.any() for gradient in gradients)


def test_no_row_is_touched_by_another():
    """Rows that stand beside others give the bits they give alone."""
    whole = Case((40, 130, 7), 4, 2, 16)
    alone = Case((130,), 4, 2, 16)
    alone.query, alone.key, alone.value, alone.grad = (
        x[40:170].contiguous() for x in (whole.query, whole.key, whole.value, whole.grad)
    )
    for ours, theirs in zip(whole.found(), alone.found(), strict=True):
        assert torch.equal(ours[40:170], theirs)


class OnHopper:
    """A tensor as the choice of kernels sees it, on a device of its kind."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.is_cuda, self.device = tensor.shape, dtype, True, "cuda"


def test_many_short_rows_of_half_precision_are_what_they_are_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def usable(case: Case, **kind: Any) -> bool:
        query: Any = OnHopper(case.query, **kind)
        return row_kernels.usable(query, case.key, case.packing, case.rows)

    many = (60,) * 50
    assert usable(Case(many, 4, 2, 64))
    assert usable(Case(many, 4, 2, 64, asks=(7,) * 50))
    assert not usable(Case(many, 4, 2, 64), dtype=torch.float32)
    assert not usable(Case(many[:47], 4, 2, 64))  # 94 programs
    assert not usable(Case((*many, 513), 4, 2, 64))
    assert not usable(Case(many, 4, 2, 48))
    gaps = Case(many, 4, 2, 64)
    gaps.rows = gaps.packing.rows((torch.arange(60) % 2 == 0).expand(50, 60))
    assert gaps.rows.starts is None and not usable(gaps)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not usable(Case(many, 4, 2, 64))
    monkeypatch.undo()
    assert not row_kernels.usable(gaps.query, gaps.key, gaps.packing, None)  # on a CPU


def test_attention_goes_their_way_where_they_are_usable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_kernels, "usable", lambda *inputs: True)
    case = Case((20, 9), 4, 2, 16, asks=(20, 3))
    for ours, theirs in zip(case.found(Attention), case.found(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wanted", [False, True], ids=["all", "wanted"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma2", "Gemma3Text"])
def test_a_model_of_theirs_has_the_states_and_gradients_of_the_plain_parts(
    kind: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_kernels, "usable", lambda *inputs: True)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if kind != "Llama":
        shape |= {"sliding_window": 11}
    if kind.startswith("Gemma"):
        shape |= {"layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 1.5}
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0] = mask[1, 4:7] = mask[2, 2:37] = True
    response = mask & (torch.arange(40) > 5)
    batch = Sequences(tokens=torch.randint(0, 40, mask.shape), attention_mask=mask, response_mask=response)
    numbers = []
    for backend in ("plain", "fused"):
        model.zero_grad()
        states = packed_states(model, batch, wanted=response if wanted else None, backend=backend)
        assert states is not None
        (states * torch.sin(torch.arange(states.numel()).view(states.shape) * 1.0)).sum().backward()
        numbers.append([states.detach(), *(parameter.grad for parameter in model.parameters())])
    for expected, found in zip(*numbers, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()
