"""How `--vary` is read: values, ranges, and a clear sentence for everything wrong."""

import pytest

from tether.config.load import load_recipe, load_section
from tether.config.sweep_settings import SweepSettings
from tether.errors import ConfigError
from tether.sweeps.design import chosen_sampler, listed_settings
from tether.sweeps.variation import parse_options, read_variations


def ppo(**settings):
    return load_recipe("ppo", settings={"kl.apply_to": "reward", **settings})


def vary(*words: str):
    return read_variations(ppo(), parse_options(words))


def test_values_are_read_as_flags_are():
    clip, switch, value_clip, mode = vary(
        "ppo.clip_range=0.1, 0.2", "ppo.whiten-advantages=true,false", "ppo.value_clip=null,0.2", "roles.mode=lora"
    )
    assert (clip.key, clip.values) == ("ppo.clip_range", (0.1, 0.2))
    assert (switch.key, switch.values) == ("ppo.whiten_advantages", (True, False))
    assert value_clip.values == (None, 0.2) and mode.values == ("lora",)


def test_lists_in_brackets_are_one_value_each():
    assert vary("optimizer.betas=[0.9,0.95],[0.9,0.999]")[0].values == ([0.9, 0.95], [0.9, 0.999])


def test_points_of_ranges_are_spaced_evenly_or_in_the_logarithm():
    assert vary("ppo.lam=0..1:5")[0].values == (0.0, 0.25, 0.5, 0.75, 1.0)
    # 0.01, 0.1 and 1 are evenly spaced in their logarithm
    assert vary("kl.coef=0.01..1:log:3")[0].values == (0.01, 0.1, 1.0)
    assert vary("ppo.epochs=1..4")[0].values == (1, 2, 3, 4)
    assert vary("ppo.epochs=1..100:log:3")[0].values == (1, 10, 100)


def test_an_open_range_has_ends_and_no_values():
    [coef] = vary("kl.coef=0.01..0.3:log")
    assert coef.is_range and coef.log and (coef.low, coef.high) == (0.01, 0.3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ppo.clip_rang=0.1"], "did you mean ppo.clip_range?"),
        (["ppo=0.1"], "is a section: vary one of its keys"),
        (["ppo.clip_range"], "write KEY=VALUES"),
        (["ppo.clip_range="], "no value is given"),
        (["ppo.clip_range=0.1", "ppo.clip_range=0.2"], "given twice: give all its values at once"),
        (["ppo.clip_range=0.1,0.1"], "0.1 is listed twice"),
        (["ppo.clip_range=0.3..0.1"], "the low end 0.3 is above the high end 0.1"),
        (["ppo.clip_range=0.1..0.1"], "the range is empty"),
        (["ppo.clip_range=..0.1"], "an end is missing"),
        (["ppo.clip_range=0.1..x"], "x is not a number"),
        (["kl.coef=0..0.3:log"], "a logarithmic range starts above 0"),
        (["kl.coef=-1..0.3:log:3"], "a logarithmic range starts above 0"),
        (["kl.coef=0.1..0.3:1"], "a whole number from 2 to 100"),
        (["kl.coef=0.1..0.3:log:many"], "a whole number from 2 to 100"),
        (["ppo.epochs=1.5..4"], "the key takes whole numbers"),
        (["ppo.clip_range=0.1,-1"], "ppo.clip_range: expected a number above 0, got -1"),
        (["ppo.epochs=often"], "--vary ppo.epochs: expected a whole number of at least 1"),
        (["run.seed=1,2"], "use --seeds"),
        (["run.name=a,b"], "names, groups and stores its runs itself"),
        ([], "nothing is varied"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(words: list[str], said: str):
    with pytest.raises(ConfigError) as caught:
        vary(*words)
    assert said in str(caught.value)


def test_a_grid_with_an_open_range_asks_for_points():
    variations = vary("kl.coef=0.01..0.3:log")
    with pytest.raises(ConfigError, match=r"how many points: write 0\.01\.\.0\.3:log:5"):
        chosen_sampler(SweepSettings(sampler="grid"), variations)
    assert chosen_sampler(SweepSettings(), variations) == "random"
    assert chosen_sampler(SweepSettings(), vary("kl.coef=0.1,0.2")) == "grid"


def test_every_combination_of_a_grid_is_checked_against_the_recipe():
    recipe = ppo()
    variations = read_variations(recipe, {"ppo.n_steps": [None, 2], "ppo.critic_lam": [None, 0.9]})
    with pytest.raises(ConfigError, match=r"ppo.n_steps 2, ppo.critic_lam 0.9: .*n_steps takes its place"):
        listed_settings(recipe, variations, "grid")


def test_one_at_a_time_is_the_recipe_and_each_other_value():
    recipe = ppo(**{"ppo.clip_range": 0.2, "kl.coef": 0.05})
    variations = read_variations(recipe, {"ppo.clip_range": [0.1, 0.2], "kl.coef": [0, 0.5]})
    assert listed_settings(recipe, variations, "one-at-a-time") == [
        {"ppo.clip_range": 0.2, "kl.coef": 0.05},
        {"ppo.clip_range": 0.1, "kl.coef": 0.05},
        {"ppo.clip_range": 0.2, "kl.coef": 0},
        {"ppo.clip_range": 0.2, "kl.coef": 0.5},
    ]
    same = read_variations(recipe, {"kl.coef": [0.05]})
    with pytest.raises(ConfigError, match="every listed value is the recipe's own"):
        listed_settings(recipe, same, "one-at-a-time")


# -- the section of a file


def section(path, *flags: str, **settings):
    return load_section(SweepSettings, "sweep", str(path), flags, settings)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("method: ppo\nsweep:\n  seeds: 4\n  vary:\n    kl.coef: [0, 0.1]\nkl:\n  coef: 0.1\n")
    return path


def test_a_recipe_s_file_holds_the_sweep_and_trains_without_it(file):
    found = section(file)
    assert (found.seeds, found.vary) == (4, {"kl.coef": [0, 0.1]})
    assert section(file, "--seeds=2").seeds == 2
    assert load_recipe("ppo", str(file)).kl.coef == 0.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep: {seed: 3}", "did you mean seeds?"),
        ("sweep: {seeds: 0}", "seeds in {path}, line 1: expected a whole number of at least 1, got 0"),
        ("sweep: {sampler: gird}", "expected one of grid, one-at-a-time, random, tpe"),
        ("sweep: [1]", "expected a section with keys under it"),
        ("sweep: {sampler: grid, budget: 3}", "leave budget out"),
    ],
)
def test_a_wrong_section_names_its_place(tmp_path, text: str, said: str):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        section(path)
    assert said.replace("{path}", str(path)) in str(caught.value)


def test_zero_seeds_are_refused(file):
    with pytest.raises(ConfigError, match=r"seeds in the flags: expected a whole number of at least 1, got 0"):
        section(file, "--seeds=0")
