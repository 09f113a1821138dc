"""Write one record to the database within the caller's transaction, and choose the steps whose rollouts are kept.

Applying a record twice has the same effect as applying it once. A process can die after a commit and before it deletes
the record's file, and the next process that finds the file applies it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, insert, select, update

from tether.store.database.records import ATTEMPT_EVENTS, StoreRecord, plain
from tether.store.database.schema import events, lineage, metrics, rollouts, row_digest, runs, step_digest, steps


@dataclass(frozen=True)
class KeepRollouts:
    """Keep the rollouts of every `every`-th step (1: all, 0: none), and of at most `most` steps, evenly spaced."""

    every: int = 1
    most: int | None = 200  # None: no limit

    def wants(self, step: int) -> bool:
        """Whether a step's rollouts are written."""
        return self.every > 0 and step % self.every == 0

    def to_drop(self, steps: Sequence[int]) -> list[int]:
        """The steps to drop from the kept ones; the first and the last always stay.

        It repeatedly drops the step whose neighbours are closest together, and of equals the older one. The remaining
        steps cover the whole run as evenly as possible.
        """
        kept, dropped = list(steps), []
        while self.most is not None and len(kept) > max(self.most, 2):
            places = range(1, len(kept) - 1)
            dropped.append(kept.pop(min(places, key=lambda place: kept[place + 1] - kept[place - 1])))
        return dropped


# Built once: building a statement costs more than running it.
_FIND = select(runs.c.id, runs.c.uid, runs.c.created).where(
    runs.c.workspace == bindparam("place"), runs.c.name == bindparam("called")
)
_DELETE_STEP = delete(steps).where(steps.c.run_id == bindparam("run"), steps.c.step == bindparam("at"))
_INSERT_STEP, _INSERT_METRICS, _INSERT_ROLLOUTS = insert(steps), insert(metrics), insert(rollouts)
_COME_FURTHER = (
    update(runs)
    .where(runs.c.id == bindparam("run"))
    .values(
        updated=bindparam("now"),
        steps_done=case((runs.c.steps_done < bindparam("done"), bindparam("done")), else_=runs.c.steps_done),
    )
)


def apply_record(
    connection: Connection, workspace: str, name: str, record: StoreRecord, start: StoreRecord | None = None
) -> None:
    """Apply a record of the run called `name`; a run that is not in the database is first added from `start`."""
    if record.kind == "start":
        _begin(connection, workspace, {**record.data, "name": name})  # a spooled file cannot name another run
        return
    run = _find(connection, workspace, name)
    if run is None:
        if start is None:
            raise LookupError(f"the run store has no run {name}")
        _begin(connection, workspace, {**start.data, "name": name})
        run = _find(connection, workspace, name)
    assert run is not None
    match record.kind:
        case "step":
            _add_step(connection, run.id, record)
        case "event":
            _add_event(connection, run.id, record.data)
        case "rewind":
            _rewind(connection, run.id, record.data["step"])
        case "state":
            _touch(connection, run.id, record.data["time"], state=record.data["state"])


def _find(connection: Connection, workspace: str, name: str) -> Any:
    return connection.execute(_FIND, {"place": workspace, "called": name}).first()


def _begin(connection: Connection, workspace: str, data: Any) -> None:
    """Add a run, replacing an earlier one of the same name; a resumed run keeps its steps.

    If the earlier run's folder was only moved, its records are kept under its new name.
    """
    known = _find(connection, workspace, data["name"])
    described = {
        "uid": data["uid"],
        "method": data["method"],
        "state": "running",
        "steps_target": data["steps"],
        "config": data["config"],
        "environment": data["environment"],
    }
    if known is not None and not data["resumes"] and known.uid != data["uid"]:
        moved = data.get("moved", {}).get(known.uid)
        if moved is not None and _find(connection, workspace, moved) is None:
            connection.execute(update(runs).where(runs.c.id == known.id).values(name=moved))
        else:
            connection.execute(delete(runs).where(runs.c.id == known.id))
        known = None
    if known is None:
        times = {"created": data["time"], "updated": data["time"], "steps_done": 0}
        notes = _notes(data["config"])
        entered = insert(runs).values(workspace=workspace, name=data["name"], **times, **described, **notes)
        run_id = connection.execute(entered.returning(runs.c.id)).scalar_one()
    else:
        run_id = known.id
        seal = row_digest("runs", described | {"created": known.created})
        _touch(connection, run_id, data["time"], **described, digest=seal)
        connection.execute(delete(lineage).where(lineage.c.run_id == run_id))
    for position, source in enumerate(data["sources"]):
        row = _find(connection, workspace, source["run"]) if source["run"] else None
        connection.execute(
            insert(lineage).values(
                run_id=run_id,
                position=position,
                role=source["role"],
                source=plain(source["source"]),
                source_run_id=None if row is None else row.id,
                sha256=source["sha256"],
            )
        )


def _notes(config: Any) -> dict[str, Any]:
    """The note, tags and group in the recipe of a new run; a resumed run keeps those in the store."""
    said = config.get("run") if isinstance(config, dict) else None
    said = said if isinstance(said, dict) else {}
    return {
        "note": said.get("note") or "",
        "tags": list(said.get("tags") or ()),
        "run_group": said.get("group") or "",
    }


def _touch(connection: Connection, run_id: int, time: float, **changes: Any) -> None:
    connection.execute(update(runs).where(runs.c.id == run_id).values(updated=time, **changes))


def _add_step(connection: Connection, run_id: int, record: StoreRecord) -> None:
    data, step = record.data, record.data["step"]
    place = {"run_id": run_id, "step": step}
    connection.execute(_DELETE_STEP, {"run": run_id, "at": step})  # with its metrics and rollouts
    values = {plain(name): value for name, value in data["metrics"].items()}
    kept = {"digest": step_digest(step, values), "rollouts": len(data["rollouts"])}
    connection.execute(_INSERT_STEP, place | {"recorded": data["time"]} | kept)
    if values:
        connection.execute(_INSERT_METRICS, [place | {"name": name, "value": value} for name, value in values.items()])
    if data["rollouts"]:
        rows = zip(data["rollouts"], record.blobs, strict=True)
        connection.execute(_INSERT_ROLLOUTS, [place | row | {"content": content} for row, content in rows])
        _thin_out(connection, run_id, data["most"])
    connection.execute(_COME_FURTHER, {"run": run_id, "now": data["time"], "done": step + 1})


def _thin_out(connection: Connection, run_id: int, most: int | None) -> None:
    if most is None:
        return
    kept = select(rollouts.c.step).where(rollouts.c.run_id == run_id).distinct().order_by(rollouts.c.step)
    dropped = KeepRollouts(most=most).to_drop(connection.execute(kept).scalars().all())
    if dropped:
        connection.execute(delete(rollouts).where(rollouts.c.run_id == run_id, rollouts.c.step.in_(dropped)))
        thinned = update(steps).where(steps.c.run_id == run_id, steps.c.step.in_(dropped))
        connection.execute(thinned.values(rollouts=0))


def put_step_back(connection: Connection, run_id: int, data: Any) -> None:
    """Write the metrics of a step again; its rollouts stay, and their count is updated."""
    place, values = {"run_id": run_id, "step": data["step"]}, {plain(n): v for n, v in data["metrics"].items()}
    here = (rollouts.c.run_id == run_id, rollouts.c.step == data["step"])
    said = {
        "recorded": data["time"],
        "digest": step_digest(data["step"], values),
        "rollouts": connection.execute(select(func.count()).select_from(rollouts).where(*here)).scalar_one(),
    }
    there = update(steps).where(steps.c.run_id == run_id, steps.c.step == data["step"]).values(**said)
    if not connection.execute(there).rowcount:
        connection.execute(_INSERT_STEP, place | said)
    connection.execute(delete(metrics).where(metrics.c.run_id == run_id, metrics.c.step == data["step"]))
    if values:
        connection.execute(_INSERT_METRICS, [place | {"name": name, "value": value} for name, value in values.items()])


def put_event_back(connection: Connection, run_id: int, data: Any) -> None:
    """Write an event again, replacing a damaged one."""
    connection.execute(delete(events).where(events.c.run_id == run_id, events.c.uid == data["uid"]))
    _add_event(connection, run_id, data)


def _steps_done(connection: Connection, run_id: int) -> int:
    last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
    return 0 if last is None else last + 1


def _add_event(connection: Connection, run_id: int, data: Any) -> None:
    if connection.execute(select(events.c.id).where(events.c.uid == data["uid"])).first() is None:
        connection.execute(insert(events).values(run_id=run_id, **data))


def _rewind(connection: Connection, run_id: int, step: int) -> None:
    """Remove everything from a step on, because the run repeats it; events of the run itself stay."""
    connection.execute(delete(steps).where(steps.c.run_id == run_id, steps.c.step >= step))
    again = events.c.kind.not_in(ATTEMPT_EVENTS)  # the others will be recorded again
    connection.execute(delete(events).where(events.c.run_id == run_id, events.c.step >= step, again))
    connection.execute(update(runs).where(runs.c.id == run_id).values(steps_done=_steps_done(connection, run_id)))
