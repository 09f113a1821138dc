"""Recipes from YAML and flags: what wins, what is kept, and what every mistake is told."""

from pathlib import Path
from typing import cast

import pytest

from tether.config import RECIPES
from tether.config.load import load_recipe, load_settings
from tether.config.load_pipeline import load_pipeline
from tether.config.recipes import DemoRecipe, GRPORecipe, PPORecipe, SFTRecipe
from tether.errors import ConfigError
from tether.pipeline.order import check_references

RECIPE_FOLDER = Path(__file__).parents[2] / "recipes"


def ppo(path: str | None = None, *flags: str) -> PPORecipe:
    return cast(PPORecipe, load_recipe("ppo", path, flags))


def grpo(path: str | None = None, *flags: str) -> GRPORecipe:
    return cast(GRPORecipe, load_recipe("grpo", path, flags))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a recipe to x.yaml in the working folder, and return its name."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str) -> str:
        Path("x.yaml").write_text(text)
        return "x.yaml"

    return _write


def message(method: str, path: str | None, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(method, path, flags)
    return str(caught.value)


# -- precedence and merging


def test_without_file_or_flags_a_recipe_is_its_defaults():
    assert ppo() == PPORecipe()


def test_flags_win_over_yaml_and_yaml_over_defaults(write):
    recipe = ppo(write("ppo: {clip_range: 0.3, gamma: 0.9}"), "--ppo.gamma", "0.5")
    assert (recipe.ppo.lam, recipe.ppo.clip_range, recipe.ppo.gamma) == (0.95, 0.3, 0.5)


def test_a_section_given_in_part_keeps_this_recipes_own_defaults(write):
    kl = grpo(write("kl: {coef: 0.2}")).kl
    assert (kl.apply_to, kl.estimator, kl.coef) == ("loss", "k3", 0.2)
    assert grpo(None, "--kl.coef", "0.2").kl == kl
    assert grpo(None, "--grpo.aggregation.fixed_length", "null").grpo.aggregation.over == "sequence"
    rollout = grpo(write("rollout: {temperature: 0.5}")).rollout
    assert (rollout.prompts_per_step, rollout.samples_per_prompt) == (16, 4)


def test_nested_sections_merge_across_file_and_flags(write):
    penalty = ppo(write("ppo: {penalty: {coef: 2}}"), "--ppo.penalty.adaptive", "false").ppo.penalty
    assert (penalty.coef, penalty.adaptive, penalty.target) == (2.0, False, 0.01)


@pytest.mark.parametrize("text", ["", "# only a comment", "kl:", "~"])
def test_what_says_nothing_changes_nothing(write, text: str):
    assert ppo(write(text)) == PPORecipe()


@pytest.mark.parametrize("file", sorted(RECIPE_FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_recipe_parses(file: Path):
    text = file.read_text()
    assert text.startswith("# "), "say at the top what the recipe is for"
    if file.name == "demo.yaml":
        assert load_settings(DemoRecipe, str(file)).seed == 0
        return
    method = text.partition("method: ")[2].split()[0]
    if method == "pipeline":
        check_references(load_pipeline(str(file)))
        return
    recipe = load_recipe(method, str(file))
    assert recipe.method == method
    if file.name.startswith("tiny-"):
        uncommented = [line for line in text.splitlines() if ": " in line and "#" not in line]
        assert not uncommented, f"say why, on each line of a newcomer's recipe: {uncommented}"


def test_there_are_shipped_recipes():
    names = {file.name for file in RECIPE_FOLDER.glob("*.yaml")}
    assert {f"tiny-{method}.yaml" for method in ("ppo", "reinforce", "rloo", "grpo", "trpo")} <= names
    assert {"demo.yaml", "sft.yaml", "reward.yaml", "ppo.yaml", "ppo-lora-1gpu.yaml", "ppo-verifiable.yaml"} <= names
    assert {"grpo-verifiable.yaml", "dpo.yaml", "tldr-style.yaml", "instructgpt-style.yaml"} <= names


# -- values


@pytest.mark.parametrize("flag", ["--ppo.clip-range=0.1", "--ppo.clip_range=0.1", "--ppo.clip-range 0.1"])
def test_flags_take_dashes_or_underscores_and_equals_or_a_space(flag: str):
    assert ppo(None, *flag.split()).ppo.clip_range == 0.1


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("optimizer.policy_lr", "1e-5", 1e-5),
        ("optimizer.policy_lr", "1", 1.0),
        ("optimizer.policy_lr", "0.5e-3", 5e-4),
        ("optimizer.max_grad_norm", "null", None),
        ("optimizer.betas", "[0.9, 0.95]", (0.9, 0.95)),
        ("run.steps", "10_000", 10_000),
        ("run.save", "false", False),
        ("run.name", "7", "7"),
        ("run.name", "a: b # c", "a: b # c"),
        ("run.name", "null", None),
        ("run.name", "'null'", "null"),
        ("task.name", "package.module:factory", "package.module:factory"),
        ("reward.missing_eos_penalty", "-1.5", -1.5),
        ("kl.apply_to", "none", "none"),
    ],
)
def test_values_on_flags(flag: str, text: str, value: object):
    recipe = ppo(None, f"--{flag}", text)
    section, name = flag.split(".")
    assert getattr(getattr(recipe, section), name) == value


def test_a_bare_flag_is_true():
    assert ppo(None, "--reward.whiten", "--run.steps", "3").reward.whiten is True
    assert ppo(None, "--run.steps", "3", "--reward.whiten").reward.whiten is True


def test_of_a_flag_given_twice_the_last_counts():
    assert ppo(None, "--run.seed", "1", "--run.seed", "2").run.seed == 2


def test_yaml_has_no_surprises(write):
    run = ppo(write("run: {name: no, directory: 2026-01-01, seed: 010}\noptimizer: {policy_lr: 3e-3}")).run
    assert (run.name, run.directory, run.seed) == ("no", "2026-01-01", 10)
    assert ppo("x.yaml").optimizer.policy_lr == 3e-3


# -- mistakes in the file


def test_an_unknown_key_is_told_the_nearest(write):
    said = message("ppo", write("run: {seed: 1}\nppo:\n  clip_rnage: 0.1\n"))
    assert said == "unknown key ppo.clip_rnage in x.yaml, line 3: did you mean ppo.clip_range?"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("clip_range: 0.1", "unknown key clip_range in x.yaml, line 1: did you mean ppo.clip_range?"),
        ("ppo: {clip: 0.1}", "unknown key ppo.clip in x.yaml, line 1: did you mean ppo.clip_range?"),
        ("rollouts: {temperature: 1}", "unknown key rollouts in x.yaml, line 1: did you mean rollout?"),
        ("policy_lrs: 1", "unknown key policy_lrs in x.yaml, line 1: did you mean optimizer.policy_lr?"),
        ("grpo: {epochs: 1}", "unknown key grpo in x.yaml, line 1: it belongs to another method, and this is ppo"),
        ("zzz: 1", "unknown key zzz in x.yaml, line 1: `tether train ppo --help` lists them all"),
        ("ppo.gamma: 1", "key ppo.gamma in x.yaml, line 1: nest it, as ppo: {gamma: ...}"),
    ],
)
def test_other_unknown_keys(write, text: str, advice: str):
    assert message("ppo", write(text)) == advice


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ppo: {epochs: 1.5}", "ppo.epochs in x.yaml, line 1: expected a whole number of at least 1, got 1.5"),
        ("ppo: {epochs: true}", "ppo.epochs in x.yaml, line 1: expected a whole number of at least 1, got true"),
        ("ppo: {epochs: '4'}", 'expected a whole number of at least 1, got "4" (text)'),
        ("ppo: {gamma: 1.5}", "ppo.gamma in x.yaml, line 1: expected a number from 0 to 1, got 1.5"),
        ("ppo: {gamma: abc}", 'ppo.gamma in x.yaml, line 1: expected a number from 0 to 1, got "abc" (text)'),
        ("ppo: {value_clip: 0}", "expected a number above 0, or null, got 0"),
        ("ppo: {gamma: {a: 1}}", 'got {"a": 1}'),
        ("ppo: {objective: clp}", "expected one of clip, unclipped, kl_penalty, got"),
        ("reward: {whiten: 1}", "expected true or false, got 1"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas in x.yaml, line 1: expected a list of 2 numbers"),
        ("optimizer: {betas: [0.9, x]}", "optimizer.betas in x.yaml, line 1: expected a list of 2 numbers"),
        ("run: {name: 5}", "expected text, or null, got 5 (a whole number): put it in quotes"),
        ("model: {path: null}", "model.path in x.yaml, line 1: expected text, got null"),
        ("kl: {coef: .nan}", "kl.coef in x.yaml, line 1: expected a number of at least 0, got NaN"),
        ("kl: {coef: .inf}", "kl.coef in x.yaml, line 1: expected a number of at least 0, got Infinity"),
        ("ppo: 5", "ppo in x.yaml, line 1: expected a section with keys under it, got a single value"),
        ("ppo: [1]", "ppo in x.yaml, line 1: expected a section with keys under it, got a list"),
        ("run: {name: !!binary aGk=}", "run.name in x.yaml, line 1: expected text, or null, got a tag"),
    ],
)
def test_a_wrong_type_says_what_was_expected_and_given(write, text: str, said: str):
    assert said in message("ppo", write(text))


def test_every_wrong_value_is_told_at_once(write):
    said = message("ppo", write("ppo:\n  gamma: 2\n  lam: x\n"), "--run.steps", "0")
    assert len(said.splitlines()) == 3
    assert "x.yaml, line 2" in said and "x.yaml, line 3" in said and "run.steps in the flags" in said


@pytest.mark.parametrize("text", ["- a", "hello", "[ppo]"])
def test_a_recipe_is_a_mapping(write, text: str):
    assert "x.yaml, line 1: a recipe is a mapping" in message("ppo", write(text))


def test_a_key_given_twice_is_an_error(write):
    said = message("ppo", write("ppo:\n  epochs: 1\n  epochs: 1\n"))
    assert said == "key ppo.epochs is given twice in x.yaml, lines 2 and 3: keep one"
    assert "key run is given twice in x.yaml, lines 1 and 2" in message("ppo", write("run: {seed: 1}\nrun: {steps: 1}"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ppo:\n\tepochs: 1", 2),
        ("ppo: {", 1),
        ("a: 1\n---\nb: 2", 2),
        ("a: &x 1\nb: *x", 2),
        ("run: {steps: !!int x}", 1),
        ("run: {steps: !!python/object/apply:os.system [ls]}", 1),
        ("run: {name: {[a]: 1}}", 1),
    ],
)
def test_broken_yaml_names_the_line(write, text: str, line: int):
    said = message("ppo", write(text))
    assert said.startswith(f"x.yaml, line {line}: ") and "\n" not in said


def test_the_method_in_the_file_must_match(write):
    assert ppo(write("method: ppo")) == PPORecipe()
    assert message("ppo", write("run: {seed: 1}\nmethod: grpo")) == (
        "method in x.yaml, line 2 is grpo, but ppo was asked for: run `tether train grpo`"
    )


def test_files_that_cannot_be_read(write, tmp_path: Path):
    write("")
    assert message("ppo", "y.yaml") == "recipe y.yaml does not exist: did you mean x.yaml?"
    assert message("ppo", "nowhere/a.yaml") == "recipe nowhere/a.yaml does not exist"
    assert "cannot be read: Is a directory" in message("ppo", str(tmp_path))
    Path("x.yaml").write_bytes(b"run: {name: \xff}")
    assert "recipe x.yaml cannot be read" in message("ppo", "x.yaml")


# -- mistakes on the command line, and rules over several keys


def test_a_missing_required_key():
    assert message("sft", None).startswith("data.train is missing: set it with --data.train, or in a recipe file")
    assert cast(SFTRecipe, load_recipe("sft", None, ["--data.train", "a.jsonl"])).data.max_length == 1024


def test_a_missing_required_key_with_a_file(write):
    said = message("dpo", write("data: {max_length: 5}"))
    assert said.startswith("data.train is missing: set it in x.yaml, or with --data.train")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ppo.clip-rnage 1", "unknown flag --ppo.clip_rnage: did you mean --ppo.clip_range?"),
        ("--clip-range 1", "unknown flag --clip_range: did you mean --ppo.clip_range?"),
        ("--grpo.epochs 1", "unknown flag --grpo.epochs: it belongs to another method, and this is ppo"),
        ("--ppo 1", "flag --ppo is a section: set one of its keys, such as --ppo.epochs"),
        ("--ppo.epochs", "flag --ppo.epochs needs a value: whole number of at least 1"),
        ("--ppo.epochs --reward.whiten", "flag --ppo.epochs needs a value: whole number of at least 1"),
        ("--ppo.epochs [", "flag --ppo.epochs: expected a whole number of at least 1, got ["),
        ("--ppo.epochs 0", "ppo.epochs in the flags: expected a whole number of at least 1, got 0"),
        ("--reward.whiten maybe", 'reward.whiten in the flags: expected true or false, got "maybe" (text)'),
        ("stray", "unexpected word stray: the recipe comes right after the method, and flags are --key value"),
        ("-x 1", "unexpected word -x"),
    ],
)
def test_mistakes_on_flags(flags: str, said: str):
    assert message("ppo", None, *flags.split()).startswith(said)


def test_rules_over_several_keys_keep_their_own_words_and_name_the_place(write):
    said = message("grpo", write("rollout:\n  samples_per_prompt: 1"))
    assert "set it to 2 or more (rollout.samples_per_prompt is set in x.yaml, line 2)" in said
    said = message("ppo", None, "--ppo.aggregation.over", "fixed")
    assert said.startswith("ppo.aggregation: fixed_length must be set")
    assert said.endswith("(ppo.aggregation.over is set in the flags)")


def test_an_unknown_method():
    assert message("pop", None) == "unknown method pop: did you mean ppo?"
    assert message("zzzz", None) == f"unknown method zzzz: choose one of {', '.join(RECIPES)}"


@pytest.mark.parametrize(("word", "value"), [("32", 32), ("auto", "auto")])
def test_beside_a_choice_of_words_a_number_is_a_number(word: str, value: object):
    assert ppo(None, "--rollout.max_num_seqs", word).rollout.max_num_seqs == value
