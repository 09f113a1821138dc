"""A task of the user's own for lm-evaluation-harness: a YAML file that holds data and templates, and no code.

lm-eval itself would import Python functions that such a file names, include other files and fetch metrics. Here the
file is read as plain YAML, only keys that name no code are accepted, and its data is files beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tether.errors import ConfigError

MAX_BYTES = 1_000_000
KEYS = frozenset(
    (
        *("task", "dataset_path", "data_files", "output_type", "doc_to_text", "doc_to_target", "doc_to_choice"),
        *("training_split", "validation_split", "test_split", "fewshot_split", "num_fewshot", "repeats"),
        *("target_delimiter", "fewshot_delimiter", "description", "generation_kwargs", "metric_list", "metadata"),
    )
)
METRIC_KEYS = frozenset(("metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation"))
READERS = ("json", "csv", "parquet")
NEEDED = ("task", "dataset_path", "data_files", "output_type", "doc_to_text", "doc_to_target")


def is_own_task(name: str) -> bool:
    """Whether a name is that of a file."""
    return name.endswith((".yaml", ".yml"))


def read_own_task(name: str) -> dict[str, Any]:
    """The task as lm-eval's configuration; raises ConfigError, in one sentence, for anything but data."""
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"lm-eval:{name} is larger than {MAX_BYTES} bytes, too large for a task")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"lm-eval:{name} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        what = "names a Python function (!function)" if "!function" in str(error) else "is no plain YAML"
        raise ConfigError(f"lm-eval:{name} {what}: a task of your own may hold data and templates alone") from None
    if not isinstance(found, dict):
        raise ConfigError(f"lm-eval:{name} must hold a mapping of keys, such as task: NAME")
    if other := sorted(str(key) for key in set(found) - KEYS):
        raise ConfigError(
            f"lm-eval:{name} has {other[0]}, which a task of your own may not: use {', '.join(sorted(KEYS))}"
        )
    if missing := [key for key in NEEDED if key not in found]:
        raise ConfigError(f"lm-eval:{name} has no {missing[0]}")
    _check_metrics(name, found.get("metric_list", []))
    if found["dataset_path"] not in READERS:
        raise ConfigError(f"lm-eval:{name}: dataset_path must be one of {', '.join(READERS)}, to read data_files")
    config = {key: value for key, value in found.items() if key != "data_files"}
    return {**config, "dataset_kwargs": {"data_files": _data_files(name, path.parent, found["data_files"])}}


def _check_metrics(name: str, given: object) -> None:
    listed = given if isinstance(given, list) else [given]
    for each in listed:
        if not isinstance(each, dict) or set(each) - METRIC_KEYS:
            raise ConfigError(f"lm-eval:{name}: a metric of metric_list may have only {', '.join(sorted(METRIC_KEYS))}")


def _data_files(name: str, folder: Path, given: object) -> dict[str, list[str]]:
    """Files by split; a single name is the split `test`."""
    splits = given if isinstance(given, dict) else {"test": given}
    found: dict[str, list[str]] = {}
    for split, files in splits.items():
        names = files if isinstance(files, list) else [files]
        places = [(folder / str(each)).resolve() for each in names]
        if missing := [place for place in places if not place.is_file()]:
            raise ConfigError(f"lm-eval:{name}: there is no file {missing[0]}")
        found[str(split)] = [str(place) for place in places]
    return found
