"""Reward functions as strangers write them; tests name them as `user_functions:NAME`.

Nothing heavy is imported at the top, for worker processes import this file.
"""

import asyncio
import os
import random
import re
import sys
import time
from pathlib import Path


def by_column(prompt, completion, difficulty, *, bonus=0.5, **rest):
    assert "answer" in rest and "messages" in rest and prompt == "question"
    return len(completion) - difficulty + bonus


def named_only(completion, difficulty):
    return difficulty


def other_names(question, reply, gold):
    return float(question == "question" and reply == gold)


def misspelt(prompt, completion, dificulty):
    return 0.0


def trl(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def trl_columns(prompts, completions, difficulty, answer, trainer_state, log_metric, **kwargs):
    assert set(kwargs) == {"id", "messages", "finish", "tags", "completion_ids", "log_extra"}
    log_metric("longest", max(map(len, completions)))
    return [d + trainer_state.global_step for d in difficulty]


def trl_conversational(prompts, completions, **kwargs):
    return [float(len(prompt)) + len(answer[0]["content"]) for prompt, answer in zip(prompts, completions, strict=True)]


def trl_ids(completion_ids):
    return [float(sum(ids)) for ids in completion_ids]


def trl_none(completions, **kwargs):
    return [None if completion == "a" else 2.0 for completion in completions]


async def trl_awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


async def awaited(prompt, completion):
    await asyncio.sleep(0.01)
    return float(len(completion))


_under_way = 0


async def meets_others(prompt, completion):
    """1 once twenty calls are under way, which calls one after another never are."""
    global _under_way
    _under_way += 1
    deadline = time.monotonic() + 10
    while _under_way < 20 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return float(_under_way >= 20)


async def awaited_for_ever(prompt, completion):
    await asyncio.sleep(100 if completion == "a" else 0)
    return 1.0


def unclear(**kwargs):
    return 0.0


def both(completion, completions):
    return 0.0


def raises(prompt, completion, answer):
    return {"b": 1.0}[completion]


def leaves(prompt, completion):
    sys.exit("enough")


def trl_raises(completions, **kwargs):
    raise RuntimeError("no\nmore   lines")


def values(prompt, completion):
    import numpy
    import torch

    from tether.types import Score

    return {
        "numpy": numpy.float32(1.5),
        "array": numpy.array([2.0]),
        "torch": torch.tensor(2.5),
        "bool": True,
        "nan": float("nan"),
        "text": "3",
        "dict": {"score": 1.0},
        "list": [1.0, 2.0],
        "none": None,
        "score": Score(4.0, {"inner": 1.0}),
        "large": 10**400,
    }[completion]


def gives_a_dict(completions, **kwargs):
    return dict.fromkeys(range(len(completions)), 1.0)


def gives_a_number(completions, **kwargs):
    return 1.0


def gives_a_tensor(completions, **kwargs):
    import torch

    return torch.arange(len(completions), dtype=torch.float32)


def spoils(rollouts):
    rollouts.sort(key=lambda rollout: rollout.completion)
    for rollout in rollouts:
        rollout.prompt.messages[0]["content"] = "spoilt"
        rollout.prompt.meta["difficulty"] = -1
        rollout.token_ids.zero_()
    return [1.0] * len(rollouts)


def spoils_columns(prompts, completions, difficulty, tags, **kwargs):
    completions.reverse()
    difficulty.clear()
    tags[0].append("spoilt")
    return [1.0] * len(completions)


def prints(prompt, completion):
    print("hello from the reward")
    os.write(1, b"")
    return 1.0


def meets_another_worker(prompt, completion):
    """Returns once two processes have called it; the completion is the folder where they meet."""
    (Path(completion) / str(os.getpid())).touch()
    while len(list(Path(completion).iterdir())) < 2:
        time.sleep(0.01)
    return 1.0


def draws(prompt, completion):
    return random.random()


def misbehaves(prompt, completion):
    if completion == "slow":
        time.sleep(0.2)
    if completion == "hangs":
        time.sleep(100)
    if completion == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if completion == "dies":
        os.kill(os.getpid(), 9)
    if completion == "leaves":
        os._exit(0)
    return float(len(completion))


def of_rollouts(rollouts):
    from tether.types import Score

    return [Score(float(rollout.token_ids.sum() + rollout.group_id), {"inner": 1.0}) for rollout in rollouts]


class AClass:
    def __call__(self, rollouts):
        return [1.0] * len(rollouts)


an_object = AClass()
not_callable = 3


def fails_for_x(prompt, completion, answer, difficulty):
    return {"y": 1.0}[answer] * difficulty


def trl_of_one(completions, **kwargs):
    if completions[0] == "a":
        raise ValueError("not this one")
    return [1.0]
