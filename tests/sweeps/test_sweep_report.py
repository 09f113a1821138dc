"""The manifest, the table and the report of a sweep whose numbers are known."""

import json
import re
from dataclasses import replace

import pytest
from sweep_folders import make_sweep

from tether.errors import ConfigError
from tether.sweeps.manifest import PruneDecision, read_manifest
from tether.sweeps.prepare import SweepRequest, begun_before, default_direction, prepare
from tether.sweeps.ranking import judge_settings
from tether.sweeps.results import open_results, read_results
from tether.sweeps.run_sweep import write_results
from tether.sweeps.sweep_report import sweep_content


def content(manifest):
    with open_results(manifest) as opened:
        results = read_results(opened, manifest)
    return sweep_content(manifest, judge_settings(manifest, results), results)


def test_a_manifest_reads_as_it_was_written_and_shows_damage(tmp_path):
    manifest = make_sweep(tmp_path)
    decided = manifest.changed(decisions=(PruneDecision(0, 2, None, (1, 2)),))
    found = read_manifest(manifest.folder)
    assert found == decided and found.stopped == {1: 2, 2: 2}
    path = manifest.folder / "sweep.json"
    path.write_text(path.read_text().replace('"score"', '"loss"'))
    with pytest.raises(ConfigError, match=r"damaged .its SHA-256 differs"):
        read_manifest(manifest.folder)


def test_the_table_has_the_values_that_the_runs_recorded(tmp_path):
    manifest = make_sweep(tmp_path)
    _, page = write_results(manifest)
    table = json.loads((manifest.folder / "table.json").read_text())
    best = table["settings"][3]
    assert best["values"] == {"ppo.clip_range": 0.2, "ppo.epochs": 2}
    # the last quarter is steps 6 and 7: 7.5 / 8 of the level 0.9, and of 0.02 more or less
    assert best["seeds"] == pytest.approx([0.88 * 0.9375, 0.9 * 0.9375, 0.92 * 0.9375])
    assert best["interval"]["mean"] == pytest.approx(0.84375) and best["behind_best"] is None
    assert best["chance_of_best"] == 1.0 and sum(each["chance_of_best"] for each in table["settings"]) == 1.0
    # the seeds differ alike in every setting, so the differences have no spread
    behind = table["settings"][2]["behind_best"]
    assert [behind[end] for end in ("mean", "low", "high")] == pytest.approx([0.09375] * 3)
    assert page.is_file()


def test_the_report_says_what_to_choose(tmp_path):
    found = content(make_sweep(tmp_path))
    assert found.headline[0].label == "Best setting" and found.headline[0].value == "0.84"
    assert found.findings[0].text.startswith("ppo.clip_range: 0.2 is the best of 3")
    assert "Clearly worse: 0.1 (by 0.28" in found.findings[0].text
    choices, settings = found.tables
    assert [row[:2] for row in choices.rows] == [("ppo.clip_range", "0.2"), ("ppo.epochs", "2")]
    assert choices.rows[1][5] == "4, not run" and choices.rows[0][5] == "the same"
    assert len(settings.rows) == 6 and settings.rows[0][0] == "ppo.clip_range 0.2, ppo.epochs 2"
    kinds = [[type(chart).__name__ for chart in group.charts] for group in found.charts]
    assert kinds == [["Chart", "Chart"], ["HeatMap", "ParallelCoordinates"], ["Chart"] * 6]
    heat = found.charts[1].charts[0]
    assert heat.columns == ("0.1", "0.2", "0.4") and heat.rows == ("1", "2")
    assert heat.cells[1][1] == pytest.approx(0.84375)


def test_the_page_is_one_safe_file_with_every_picture(tmp_path):
    manifest = make_sweep(tmp_path, diverged=True)
    page = write_results(manifest)[1].read_text()
    assert page.count("<svg") == 1 + 2 + 2 + 6, "the mark, the effects, the map and the lines, the curves"
    assert "<script" not in page and "default-src 'none'" in page
    assert "1 trial diverged" in page and "1 of 3 diverged" in page
    assert not re.search(r'="[^"]*(?:nan|inf)[^"]*"', page), "a place that is no number"


def test_a_sweep_that_goes_on_is_reported_too(tmp_path):
    manifest = make_sweep(tmp_path, unfinished=4)
    found = content(manifest)
    assert found.findings[-1].text.startswith("4 trials are not complete")
    assert [row[4] for row in found.tables[1].rows].count("2 of 3 seeds") == 4


def test_a_metric_that_no_trial_recorded_names_the_nearest(tmp_path):
    manifest = replace(make_sweep(tmp_path), metric="scor")
    with open_results(manifest) as opened, pytest.raises(ConfigError, match="no trial recorded it: did you mean score"):
        read_results(opened, manifest)


def test_the_same_sweep_is_continued_and_another_refused(tmp_path):
    manifest = make_sweep(tmp_path)
    assert begun_before(manifest, replace(manifest, seeds=(0, 1, 2, 3, 4))).seeds == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"other settings .--metric differ.: choose another --name"):
        begun_before(manifest, replace(manifest, metric="loss"))
    pruned = replace(manifest, prune=True)
    with pytest.raises(ConfigError, match="--seeds differ"):
        begun_before(pruned, replace(pruned, seeds=(0, 1, 2, 3)))


def test_a_folder_that_is_no_sweep_is_left_alone(tmp_path):
    from tether.config.load import load_recipe
    from tether.config.sweep_settings import SweepSettings

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    recipe = load_recipe("ppo", settings={"run.directory": str(tmp_path)})
    settings = SweepSettings(vary={"ppo.epochs": [1, 2]})
    with pytest.raises(ConfigError, match="exists already and is no sweep"):
        prepare(SweepRequest(recipe, "ppo", settings, "taken"))
    for name in ("../up", "a/b", "..", "x" * 81):
        with pytest.raises(ConfigError, match="--name"):
            prepare(SweepRequest(recipe, "ppo", settings, name))
    assert prepare(SweepRequest(recipe, "ppo", settings, "free")).metric == "score"
    assert not (tmp_path / "free").exists(), "a check writes nothing"


def test_less_of_a_loss_and_of_a_kl_is_better():
    assert [default_direction(name) for name in ("held_out/loss", "kl_ref_k3", "score", "held_out/score")] == [
        *("min", "min", "max", "max")
    ]
