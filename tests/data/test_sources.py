"""Where records may be: compressed files, globs, lists, saved datasets, and ids that are read from the local cache."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from tether.cli import main
from tether.config.base import ReadSettings
from tether.data.prompts import read_prompts
from tether.data.records import read_records
from tether.data.sources import places_of, source_digest
from tether.errors import DataError

ONE, TWO = {"prompt": "one"}, {"prompt": "two"}


def written(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def asked(source, **settings) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in read_prompts(source, ReadSettings(**settings))]


def test_several_files_and_globs(tmp_path: Path):
    first, second = written(tmp_path / "b.jsonl", ONE), written(tmp_path / "a.jsonl", TWO)
    assert asked((first, second)) == ["one", "two"]
    assert asked(str(tmp_path / "*.jsonl")) == ["two", "one"]  # by name
    (tmp_path / "deep" / "er").mkdir(parents=True)
    written(tmp_path / "deep" / "er" / "c.jsonl", {"prompt": "three"})
    assert asked(str(tmp_path / "**" / "*.jsonl")) == ["two", "one", "three"]
    assert [place.kind for place in places_of((first, "acme/maths", "imdb"))] == ["file", "id", "id"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("*.jsonl", "no file matches this pattern"),
        ("folder", "name its files, such as"),
        ("none.jsonl", "there is no such file"),
        ("none.tsv", "unknown file ending '.tsv'"),
        ("cut.jsonl.gz", "not a complete gzip file"),
        ("half", "the saved dataset is damaged"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(tmp_path: Path, source: str, said: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 50)[:-20])
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "state.json").write_text("{")
    with pytest.raises(DataError, match=said):
        read_records(str(tmp_path / source))


def test_a_saved_dataset_with_splits(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([ONE]), "test": datasets.Dataset.from_list([TWO])}
    )
    whole.save_to_disk(tmp_path / "saved")
    source = str(tmp_path / "saved")
    assert asked(source) == ["one"] and asked(source, split="test") == ["two"]
    with pytest.raises(DataError, match="no split 'dev'; there are train, test"):
        asked(source, split="dev")
    assert source_digest(source) != source_digest(source, "test")
    reward = ["--reward.parts", "[{kind: ended}]", "--model.device", "cpu", "--rollout.prompts_per_step", "2"]
    flags = [
        "--data.held_out_split",
        "test",
        "--evaluation.every",
        "1",
        "--run.steps",
        "1",
        "--rollout.max_new_tokens",
        "2",
    ]
    place = ["--run.directory", str(tmp_path / "runs"), "--run.name", "r", "--json"]
    assert main(["train", "reinforce", "--task.prompts", source, *flags, *reward, *place]) == 0
    plain = written(tmp_path / "p.jsonl", ONE)
    assert main(["train", "reinforce", "--task.prompts", plain, *flags, *reward, *place]) == 5


def cached_dataset(cache: Path, name: str, config: str, splits: dict[str, list[dict]]) -> None:
    """A dataset as `datasets` leaves it in its cache once it was downloaded."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    short = name.rpartition("/")[2]
    folder = cache / name.replace("/", "___") / config / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    infos, features = {}, datasets.Dataset.from_list(next(iter(splits.values()))).features
    for split, rows in splits.items():
        with ArrowWriter(features=features, path=str(folder / f"{short}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            count, size = writer.finalize()
        infos[split] = datasets.SplitInfo(split, size, count, dataset_name=short)
    info = datasets.DatasetInfo(
        features=features, builder_name="parquet", dataset_name=short, config_name=config, version="0.0.0"
    )
    info.splits = datasets.SplitDict(infos)
    info.write_to_directory(str(folder))


def test_an_id_is_read_from_the_cache_where_the_hub_is_away(tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tether.data.sources.reachable", lambda endpoint: False)
    maths = {"train": [{"question": "1 + 1?", "answer": "2"}], "test": [{"question": "2 + 2?", "answer": "4"}]}
    cached_dataset(tmp_path, "acme/maths", "main", maths)
    settings = ReadSettings(columns={"prompt": "question"}, config="main", split="test")
    [prompt] = read_prompts("acme/maths", settings)
    assert (prompt.messages[0]["content"], prompt.answer) == ("2 + 2?", "4")
    digest = source_digest("acme/maths", "train", "main")
    assert digest is not None and digest != source_digest("acme/maths", "test", "main")
    offline: list[bool] = []
    load = datasets.load_dataset

    def watched(*args, **settings):
        offline.append(datasets.config.HF_HUB_OFFLINE)  # without it `datasets` tries for 23 s
        return load(*args, **settings)

    monkeypatch.setattr(datasets, "load_dataset", watched)
    with pytest.raises(DataError, match="no such file or folder, the hub cannot be reached, and the local cache"):
        read_records("acme/nothing")
    assert offline == [True]
    assert datasets.config.HF_HUB_OFFLINE is False  # and is left as it was


def test_an_id_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'tether-rl\[datasets\]'"):
        read_records("acme/maths")
