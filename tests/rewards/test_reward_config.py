"""`reward.parts` in recipes, flags, help and documents."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.config.rewards import EndedPart, LengthPart
from tether.config.schema import describe, kinds_of
from tether.config.sections import RewardSettings
from tether.errors import ConfigError
from tether.rewards.tasks import ReasoningOptions

DOCUMENT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
KINDS = kinds_of(RewardSettings.model_fields["parts"].annotation)


def parts_of(flag: str) -> tuple[Any, ...]:
    recipe = load_recipe("ppo", None, ["--reward.parts", flag])
    assert isinstance(recipe, RLRecipe)
    return recipe.reward.parts


def test_parts_from_a_flag():
    parts = parts_of("[{kind: ended}, {kind: length, name: short, max: 5, weight: -1}]")
    assert parts == (EndedPart(kind="ended"), LengthPart(kind="length", name="short", max=5, weight=-1.0))
    assert [part.label for part in parts] == ["ended", "short"]
    assert parts_of("[]") == ()


def test_parts_from_a_file_and_over_it(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("reward:\n  parts:\n    - kind: json\n      keys: [a]\n  clip: 2\n")
    recipe = load_recipe("ppo", str(file))
    assert recipe.reward.parts[0].keys == ("a",)
    recipe = load_recipe("ppo", str(file), ["--reward.parts", "[{kind: ended}]"])
    assert [part.kind for part in recipe.reward.parts] == ["ended"] and recipe.reward.clip == 2
    again = type(recipe).model_validate_json(recipe.model_dump_json())
    assert again == recipe, "the saved recipe is the recipe"


@pytest.mark.parametrize("flag", ["ended", "{kind: ended}", "[{kind: ended}]"])
def test_one_part_needs_no_brackets(flag: str):
    [part] = load_recipe("ppo", None, ["--reward.parts", flag]).reward.parts
    assert part.kind == "ended"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("3", "reward.parts[0] in the flags: expected a mapping such as {kind: ended}, got 3"),
        ("[ended]", "reward.parts[0] in the flags: expected a mapping such as {kind: ended}, got 'ended'"),
        ("[{kind: ended}, {kind: endd}]", "reward.parts[1] in the flags: unknown kind endd: did you mean ended?"),
        ("[{name: a}]", "reward.parts[0] in the flags: set its kind to one of task, model"),
        ("[{kind: model}]", "reward.parts[0] (model) in the flags: path is missing"),
        ("[{kind: json, kyes: [a]}]", "reward.parts[0] (json) in the flags: unknown key kyes: did you mean keys?"),
        ("[{kind: ended, weight: true}]", "weight must be number, not True"),
        ("[{kind: ended, weight: .nan}]", "reward.parts"),
        ("[{kind: json, keys: [1]}]", "keys must be list of texts"),
        ("[{kind: ended, name: 'a b'}]", "name 'a b' does not match"),
        ("[{kind: ended}, {kind: ended}]", "parts has ended more than once: give each its own name"),
        ("[{kind: length}]", "length needs target, or min, max or both"),
        ("[{kind: length, target: 1, max: 2}]", "length needs target, or min, max or both"),
        ("[{kind: length, min: 3, max: 2}]", "length has min 3 above max 2"),
        ("[{kind: regex, pattern: '('}]", "pattern '(' is not a regular expression"),
        ("[{kind: function, function: mine}]", "function 'mine' does not match"),
        ("[{kind: remote, url: 'ftp://x'}]", "must start with http:// or https://"),
        ("[{kind: remote, url: 'http://'}]", "must start with http:// or https://"),
        ("[{kind: remote, url: 'file:///etc/passwd'}]", "must start with http:// or https://"),
        ("[{kind: remote, url: 'http://u:p@x/'}]", "must contain no user or password"),
        ("[{kind: remote, url: 'http://x:99999/'}]", "has a port that is not between 1 and 65535"),
    ],
)
def test_what_is_wrong_names_the_item_and_the_repair(flag: str, said: str):
    with pytest.raises(ConfigError) as error:
        parts_of(flag)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_mistake_in_a_file_names_the_line(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("run:\n  seed: 1\nreward:\n  parts:\n    - kind: modl\n")
    with pytest.raises(ConfigError, match=r"reward.parts\[0\] in .*a.yaml, line 4: unknown kind modl"):
        load_recipe("ppo", str(file))
    file.write_text("reward:\n  parts:\n    - kind: ended\n      weight: 1\n      weight: 2\n")
    with pytest.raises(ConfigError, match=r"a.yaml, line 5: key weight is given twice"):
        load_recipe("ppo", str(file))


def test_options_are_a_mapping():
    recipe = load_recipe("ppo", None, ["--task.options", "{a: 1, b: [x, 2], c: true, d: 0.5}"])
    assert recipe.task.options == {"a": 1, "b": ["x", 2], "c": True, "d": 0.5}
    with pytest.raises(ConfigError, match=r"^task.options in the flags: expected a mapping of names to values"):
        load_recipe("ppo", None, ["--task.options", "{a: {b: 1}}"])


def test_help_says_it_in_words():
    words = {leaf.key: leaf.type for leaf in describe(type(load_recipe("ppo")))}
    assert words["reward.parts"] == f"list of mappings, each with a kind: {', '.join(KINDS)}"
    assert words["task.options"] == "mapping of names to values"


# -- docs/rewards.md


def fragments() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.parametrize("fragment", fragments())
def test_every_recipe_in_the_document_is_a_recipe(fragment: str, tmp_path: Path):
    file = tmp_path / "fragment.yaml"
    file.write_text(fragment)
    load_recipe("ppo", str(file))


def test_the_document_shows_every_kind_and_every_key():
    shown: dict[str, set[str]] = {}
    for fragment in fragments():
        for part in yaml.safe_load(fragment).get("reward", {}).get("parts", ()):
            shown.setdefault(part["kind"], set()).update(part)
    assert set(shown) == set(KINDS)
    for kind, settings in KINDS.items():
        missing = set(settings.model_fields) - shown[kind] - {"name", "weight"}
        assert not missing, f"docs/rewards.md shows no {sorted(missing)} of {kind}"
    options = yaml.safe_load(next(text for text in fragments() if "reasoning-gym" in text))["task"]["options"]
    assert set(ReasoningOptions.model_fields) <= set(options)


def test_every_link_in_the_document_has_its_heading():
    headings = [line.lstrip("#").strip() for line in DOCUMENT.splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT))
    assert linked <= anchors, linked - anchors


def test_every_failure_reason_in_the_code_is_in_the_document():
    source = Path(__file__).parents[2] / "src" / "tether" / "rewards"
    reasons: set[str] = set()
    for file in ("remote.py", "model.py", "../http_client.py"):
        text = (source / file).read_text()
        reasons |= set(re.findall(r'(?:failed|PostError)\("(\w+)"', text))
    missing = {reason for reason in reasons if f"`{reason}`" not in DOCUMENT}
    assert not missing
