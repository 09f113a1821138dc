"""The routes that turn votes into a reward model and a policy, and show how that goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from tether.runs.find import find_model
from tether.runs.read import RunSummary, list_runs
from tether.studio.context import Studio, studio_of
from tether.studio.exchange import export_records
from tether.studio.launch_routes import OURS, free_name
from tether.studio.replies import BIGGEST, Body, Refused, Reply
from tether.studio.run_queries import run_with_id
from tether.studio.vote_training import VOTES, TrainingWish, split_pairs, write_plan

router = APIRouter(prefix="/api", default_response_class=Reply)

Place = Annotated[int, Field(ge=0, le=BIGGEST)]
Steps = Annotated[int, Field(ge=1, le=1_000_000)]


class Settings(Body):
    """Settings of the two runs that are not their defaults, by dotted keys."""

    reward: dict[str, Any] = Field(default_factory=dict, max_length=200)
    ppo: dict[str, Any] = Field(default_factory=dict, max_length=200)


class Training(Body):
    """Which votes to learn from, and what the policy starts from."""

    queue_id: Place
    from_run: Place | None = None
    model: str = Field(default="tiny-bytes", min_length=1, max_length=1000)
    name: str | None = Field(default=None, max_length=100)
    reward_steps: Steps = 60
    ppo_steps: Steps = 40
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    settings: Settings = Settings()


@router.post("/train")
def train(request: Request, wanted: Training) -> Any:
    """Train a reward model on a queue's votes, and then a policy against it."""
    studio = studio_of(request)
    studio.labels.queue(wanted.queue_id)
    for key in [*wanted.settings.reward, *wanted.settings.ppo]:
        if key in (*OURS, "run.name"):
            raise Refused(422, f"settings: {key} is not for these to say")
    votes = studio.labels.standing_votes(wanted.queue_id)
    split = split_pairs(export_records(votes, "pairs"), wanted.held_out)
    before = _run_before(studio, wanted.from_run, votes)
    name = wanted.name or f"votes-{wanted.queue_id}-{time.strftime('%Y%m%d-%H%M%S')}"
    for run in ("reward", "ppo"):
        free_name(studio, f"{name}/{run}")
    wish = TrainingWish(
        name=name,
        queue=wanted.queue_id,
        model=wanted.model if before is None else _model_of(before),
        config={} if before is None else before.config,
        reward_steps=wanted.reward_steps,
        ppo_steps=wanted.ppo_steps,
        considered=[vote.id for vote in votes],
        reward_settings=wanted.settings.reward,
        ppo_settings=wanted.settings.ppo,
    )
    plan = write_plan(studio.opened.workspace.directory, wish, split)
    job = studio.launcher.python(name, "train", ["-m", "tether.studio.train_process", str(plan)])
    told = {"name": name, "job": job.id, "votes": len(split.votes), "pairs": len(split.train)}
    return Reply(told | {"reward_run": f"{name}/reward", "ppo_run": f"{name}/ppo"})


def _run_before(studio: Studio, run: int | None, votes: list[Any]) -> RunSummary | None:
    """The run that was named, or else the one that the judged answers came from, where that is a run of PPO."""
    if run is not None:
        return run_with_id(studio.opened, run)
    named = {answer.get("source", {}).get("run") for vote in votes for answer in vote.answers}
    found = [one for one in list_runs(studio.opened) if one.name in named and one.method == "ppo"]
    return found[0] if found else None


def _model_of(run: RunSummary) -> str:
    """What the run ended with; where it saved nothing, what it started from."""
    if (run.folder / "model").is_dir():
        return str(Path(find_model(str(run.folder))).resolve())
    return run.config.get("model", {}).get("path", "tiny-bytes")


# -- how it goes --------------------------------------------------------------------------------------------------


@router.get("/train/curve")
def curve(request: Request, queue: Annotated[int, Query(ge=0, le=BIGGEST)]) -> Any:
    """The held-out accuracy of every reward model of a queue by its votes, and how many votes came since."""
    studio = studio_of(request)
    studio.labels.queue(queue)
    votes = studio.labels.standing_votes(queue)
    trained = [(run, used) for run in list_runs(studio.opened) if (used := _votes_of(run, queue)) is not None]
    trained.sort(key=lambda pair: pair[0].created)
    last = trained[-1][1] if trained else {}
    known = set(last.get("considered", ()))
    return Reply(
        {
            "votes": len(votes),
            "pairs": len(export_records(votes, "pairs")),
            "since_last": sum(vote.id not in known for vote in votes),
            "points": [_point(studio, run, used) for run, used in trained],
        }
    )


def _votes_of(run: RunSummary, queue: int) -> dict[str, Any] | None:
    """What a reward model of this queue was trained on."""
    if run.method != "reward":
        return None
    try:
        used = json.loads((run.folder / VOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return used if isinstance(used, dict) and used.get("queue") == queue else None


def _point(studio: Studio, run: RunSummary, used: dict[str, Any]) -> dict[str, Any]:
    measured = studio.metrics.series(run.id).get("held_out/accuracy")
    accuracy = float(measured.values[-1]) if measured is not None and len(measured.values) else None
    return {
        "run": run.name,
        "id": run.id,
        "votes": len(used.get("votes", ())),
        "pairs": used.get("pairs"),
        "accuracy": accuracy,
        "held_out": used.get("held_out_pairs"),
        "created": run.created,
        "state": run.state,
    }
