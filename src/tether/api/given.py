"""What a program gives, as a recipe names it: models, records and rewards."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tether.data.conversations import prompt_of
from tether.data.prompts import read_prompts
from tether.data.records import PLAIN, Record
from tether.errors import ConfigError, DataError, StorageError
from tether.train.inputs import name_of
from tether.types import Prompt

if TYPE_CHECKING:
    from tether.api.run import Run

INPUTS = "inputs"  # the folder of a workspace that keeps records which a program gave as objects


# -- models -------------------------------------------------------------------------------------------------------


def model_name(model: Any) -> str:
    """A model as `model.path` names it: text, a path, or a run."""
    if _is_run(model):
        return str(model.path)
    if isinstance(model, str | os.PathLike) and os.fspath(model):
        return os.fspath(model)  # pyright: ignore[reportReturnType] (text)
    raise ConfigError(f"model: expected a name, a folder or a run, was given {_kind(model)}")


# -- records ------------------------------------------------------------------------------------------------------


def source_of(records: Any, directory: str, field: str, *, texts: bool = False) -> str | list[str]:
    """Records as a recipe names them: a path stays one, objects are written to a file of the workspace.

    The file is called by the digest of its content, so the same records are the same file, and resuming a run checks
    that they have not changed. With `texts` a plain text is a prompt.
    """
    if isinstance(records, str | os.PathLike):
        return str(records)
    if isinstance(records, list | tuple) and records and all(isinstance(each, os.PathLike) for each in records):
        return [str(each) for each in records]
    rows = rows_of(records, field, texts=texts)
    content = "".join(_line(row, f"{field}[{place}]") for place, row in enumerate(rows)).encode()
    name = f"{field}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    file = Path(directory).expanduser().absolute() / INPUTS / name
    try:
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as beside:
                beside.write(content)
            Path(beside.name).replace(file)
    except OSError as error:
        raise StorageError(f"{field}: cannot write {file} ({error.strerror})") from error
    return str(file)


def rows_of(records: Any, field: str, *, texts: bool = False) -> list[dict[str, Any]]:
    """One mapping for each record of a list, a `datasets.Dataset` or a pandas DataFrame."""
    if hasattr(records, "to_dict") and hasattr(records, "columns"):  # a DataFrame, which iterates over its columns
        records = records.to_dict("records")
    wanted = "texts or mappings, such as {'prompt': ...}" if texts else "mappings, such as {'prompt': ...}"
    if isinstance(records, Mapping) or not isinstance(records, Iterable):
        raise DataError(f"{field}: expected a file or a list of {wanted}, was given {_kind(records)}")
    rows: list[dict[str, Any]] = []
    for place, row in enumerate(records):
        if isinstance(row, Mapping):
            rows.append({str(name): value for name, value in row.items()})
        elif texts and isinstance(row, str):
            rows.append({"prompt": row})
        else:
            raise DataError(f"{field}[{place}]: expected one of {wanted}, was given {_kind(row)}")
    if not rows:
        raise DataError(f"{field} is empty: give at least one record")
    return rows


def prompts_of(prompts: Any, field: str = "prompts") -> list[Prompt]:
    """Prompts to answer now: of a file, or of objects."""
    if isinstance(prompts, str | os.PathLike):
        return read_prompts(str(prompts))
    rows = rows_of(prompts, field, texts=True)
    return [prompt_of(Record(row, f"{field}[{place}]"), PLAIN, place)[0] for place, row in enumerate(rows)]


def _line(row: dict[str, Any], place: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: it cannot be kept as JSON ({error}): leave out what is no text, number or list"
        ) from None


def _plain(value: Any) -> Any:
    """A number or an array of NumPy's as Python's."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"a {type(value).__name__}")


# -- rewards ------------------------------------------------------------------------------------------------------

Functions = dict[str, Callable[..., Any]]


def reward_of(reward: Any) -> tuple[list[dict[str, Any]], Functions]:
    """A reward as `reward.parts`, and the functions of its parts of kind object by name.

    A reward is a function, the run or folder of a reward model, `package.module:name`, a part as in a recipe, a list of
    these, or a mapping of names to these. Each may stand in a pair with its weight.
    """
    if isinstance(reward, Mapping) and "kind" not in reward:
        given = [(str(name), *_weighted(one)) for name, one in reward.items()]
    else:
        several = isinstance(reward, list | tuple) and not _is_weighted(reward)
        given = [(None, *_weighted(one)) for one in (reward if several else [reward])]
    parts: list[dict[str, Any]] = []
    functions: Functions = {}
    for name, one, weight in given:
        part = _part(one)
        if callable(one) and not _is_run(one):
            name = name or _free(name_of(one), functions)
            functions[name] = one
        parts.append(part | ({"name": name} if name else {}) | ({} if weight is None else {"weight": weight}))
    if not parts:
        raise ConfigError("reward is empty: give at least one function")
    return parts, functions


def _part(one: Any) -> dict[str, Any]:
    if _is_run(one):
        if one.method != "reward":
            raise ConfigError(f"reward: {one.path} was trained by {one.method}, and is no reward model")
        return {"kind": "model", "path": str(one.path / "model")}
    if callable(one):
        return {"kind": "object"}
    if isinstance(one, Mapping):
        return dict(one)
    if isinstance(one, str | os.PathLike):
        text = str(one)
        if Path(text).expanduser().is_dir():
            saved = Path(text).expanduser() / "model"
            return {"kind": "model", "path": str(saved if saved.is_dir() else text)}
        return {"kind": "function", "function": text} if ":" in text else {"kind": text}
    raise ConfigError(
        f"reward: expected a function such as f(prompt, completion), a reward model or a part of a recipe, was given "
        f"{_kind(one)}"
    )


def _is_weighted(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], int | float)


def _weighted(one: Any) -> tuple[Any, float | None]:
    return (one[0], float(one[1])) if _is_weighted(one) else (one, None)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _is_run(thing: Any) -> TypeGuard[Run]:
    from tether.api.run import Run

    return isinstance(thing, Run)


def _kind(thing: Any) -> str:
    return "nothing" if thing is None else f"a {type(thing).__name__}"
