"""What tests of the run store share: rollouts made of numbers, and a recorder with what it said."""

from pathlib import Path

import numpy as np

from tether.store.database.open import Workspace, workspace_at
from tether.store.recorded import TOKEN_COLUMNS, StoredRollout
from tether.store.recorder import RunRecorder, RunStart

CONFIG = {"method": "ppo", "model": {"path": "tiny-bytes"}, "run": {"seed": 7}}


def synthetic(step: int, row: int, length: int = 6, *, completion: str = "yes") -> StoredRollout:
    """A rollout whose every number follows from its step and row."""
    numbers = np.random.default_rng(1000 * step + row)
    columns = {}
    for name, kind in TOKEN_COLUMNS.items():
        if kind == "float32":
            columns[name] = numbers.normal(size=length).astype("float32")
        else:
            columns[name] = numbers.integers(0, 2 if kind == "bool" else 50_000, length).astype(kind)
    columns["response"][:2], columns["response"][2:] = False, True
    return StoredRollout(
        step=step,
        row=row,
        prompt_id=f"p{row}",
        group_id=row // 2,
        sample_id=row % 2,
        prompt_text=f"question {row}",
        messages=({"role": "user", "content": f"question {row}"},),
        completion=completion,
        finish="stop",
        score=float(np.float32(0.1) * row),
        temperature=0.7,
        columns=columns,
        pieces=[f"t{place}" for place in range(length)],
        parts={"rule": 0.25},
        final_value=float(np.float32(0.3)),
    )


def same(one: StoredRollout, other: StoredRollout) -> bool:
    """Whether two rollouts are equal, their columns bit for bit."""
    plain = [
        {name: value for name, value in vars(rollout).items() if name not in ("columns", "pieces", "parts")}
        for rollout in (one, other)
    ]
    texts = list(one.pieces) == list(other.pieces) and dict(one.parts) == dict(other.parts)
    return plain[0] == plain[1] and texts and same_columns(one.columns, other.columns)


def same_columns(one, other) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in one
    )


def experience(lengths, numbers, *, critic=True, reference=True, left=False):
    """A padded batch of random numbers, its rows as long as told."""
    import torch  # here: processes that only record need not wait for it

    from tether.types import Experience

    B, T = len(lengths), max(lengths)
    ends = torch.tensor(lengths)[:, None]
    real = torch.arange(T) >= T - ends if left else torch.arange(T) < ends

    def column():
        return torch.from_numpy(numbers.normal(size=(B, T)).astype("float32")).masked_fill(~real, 0.0)

    tokens = torch.from_numpy(numbers.integers(1, 99, (B, T))).masked_fill(~real, 5)
    return Experience(
        tokens=tokens,
        attention_mask=real,
        response_mask=real & torch.from_numpy(numbers.random((B, T)) < 0.7),
        temperature=0.9,
        behavior_logprobs=column(),
        untruncated_logprobs=column(),
        scores=torch.from_numpy(numbers.normal(size=B).astype("float32")),
        group_ids=torch.arange(B) // 2,
        truncated=torch.tensor([row % 2 == 0 for row in range(B)]),
        old_logprobs=column(),
        ref_logprobs=column() if reference else None,
        values=column() if critic else None,
        final_values=torch.from_numpy(numbers.normal(size=B).astype("float32")) if critic else None,
        rewards=column(),
        advantages=column(),
        returns=column() if critic else None,
    )


def rollouts_of(batch):
    """The rollouts that the rows of a batch could have come from."""
    from tether.types import Prompt, Rollout

    return [
        Rollout(
            prompt=Prompt.from_text(f"p{row}", f"question {row}"),
            group_id=int(batch.group_ids[row]),
            sample_id=row % 2,
            token_ids=batch.tokens[row][batch.attention_mask[row]],
            response_mask=batch.response_mask[row][batch.attention_mask[row]],
            behavior_logprobs=batch.behavior_logprobs[row][batch.attention_mask[row]],
            untruncated_logprobs=batch.untruncated_logprobs[row][batch.attention_mask[row]],
            completion="...",
            finish="length" if bool(batch.truncated[row]) else "stop",
        )
        for row in range(len(batch))
    ]


class Recording:
    """A workspace with a recorder in it, and what the recorder said."""

    def __init__(self, root: Path, url: str | None = None, name: str = "a", steps: int = 10, **options) -> None:
        self.workspace: Workspace = workspace_at(root / "runs", url)
        self.said: list[str] = []
        self.folder = self.workspace.folder(name)
        config = options.pop("config", CONFIG)
        start = RunStart(options.pop("method", "ppo"), steps, config, {"python": "3"}, options.pop("sources", ()))
        options = {"notify": self.said.append, "wait": 0.2} | options
        self.recorder = RunRecorder(self.workspace, self.folder, start, **options)

    def steps(self, *numbers: int, rollouts: int = 0) -> None:
        for step in numbers:
            rows = [synthetic(step, row) for row in range(rollouts)]
            self.recorder.record(step, {"score": 0.1 * step, "third": 1 / 3}, rows or None)
