"""Names of other trainers are answered with ours, on the command line and in a file; lists are given as words."""

from pathlib import Path
from typing import cast

import pytest

from tether.config import RECIPES
from tether.config.foreign import FOREIGN, leads_to
from tether.config.load import Keys, load_recipe
from tether.config.recipes import PPORecipe
from tether.errors import ConfigError


def told(method: str, *flags: str, path: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(method, path, flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "flags", "answer"),
    [
        ("ppo", ["--lr", "1e-5"], "--lr: here it is --optimizer.policy_lr 1e-5; the rate of the critic"),
        ("ppo", ["--learning-rate=1e-5"], "here it is --optimizer.policy_lr 1e-5"),
        ("reward", ["--lr", "1e-5"], "here it is --optimizer.critic_lr 1e-5"),
        ("ppo", ["--optimizer.lr", "1e-5"], "--optimizer.lr: here it is --optimizer.policy_lr 1e-5"),
        ("ppo", ["--output_dir", "out/mine"], "here it is --run.directory out --run.name mine"),
        ("sft", ["--num_train_epochs", "3"], "here it is --run.epochs 3"),
        ("ppo", ["--num_train_epochs", "3"], "here it is --run.steps N; passes over each batch of rollouts"),
        ("sft", ["--per_device_train_batch_size", "4"], "here it is --sft.batch_size 4; it counts a whole"),
        ("ppo", ["--per_device_train_batch_size", "4"], "here it is --ppo.minibatch_size 4"),
        ("dpo", ["--gradient_accumulation_steps", "4"], "here it is --optimizer.micro_batch_tokens"),
        ("ppo", ["--wandb"], "here it is --store.trackers wandb"),
        ("ppo", ["--report_to", "tensorboard"], "here it is --store.trackers tensorboard"),
        ("ppo", ["--bf16"], "here it is --model.dtype bfloat16"),
        ("ppo", ["--max_steps", "10"], "here it is --run.steps 10"),
        ("sft", ["--warmup_ratio", "0.1"], "here it is --optimizer.warmup 0.1"),
        ("sft", ["--lora_r", "8"], "here it is --roles.lora_rank 8; with --roles.mode lora"),
        ("dpo", ["--beta", "0.1"], "here it is --dpo.beta 0.1"),
        ("grpo", ["--beta", "0.1"], "here it is --kl.coef 0.1"),
        ("sft", ["--beta", "0.1"], "sft has no such setting"),
        ("sft", ["--max_length", "512"], "here it is --data.max_length 512"),
        ("sft", ["--model_name_or_path", "m"], "here it is --model.path m"),
        ("sft", ["--dataset_name", "d"], "here it is --data.train d"),
        ("ppo", ["--dataset_name", "d"], "here it is --task.prompts d"),
        ("ppo", ["--kl_coef", "0.1"], "here it is --kl.coef 0.1"),
        ("ppo", ["--num_ppo_epochs", "2"], "here it is --ppo.epochs 2"),
        ("grpo", ["--num_generations", "8"], "here it is --rollout.samples_per_prompt 8"),
        ("sft", ["--early_stopping_patience", "3"], "here it is --evaluation.patience 3"),
        ("ppo", ["--deepspeed", "x.json"], "a run is one process on one device"),
    ],
)
def test_a_foreign_flag_is_answered_with_ours(method: str, flags: list[str], answer: str):
    said = told(method, *flags)
    assert answer in said
    assert said.count("\n") == 0, "one sentence, on one line"


def test_a_foreign_key_in_a_file_is_answered_in_the_files_words(tmp_path: Path):
    file = tmp_path / "x.yaml"
    file.write_text("learning_rate: 1e-5\nreport_to: wandb\noptimizer: {lr: 2e-5}\n")
    said = told("ppo", path=str(file))
    assert "line 1: here it is optimizer: {policy_lr: 1e-5}; the rate of the critic" in said
    assert "line 2: here it is store: {trackers: wandb}" in said
    assert "line 3: here it is optimizer: {policy_lr: 2e-5}" in said


def test_a_misspelling_inside_a_section_is_still_a_misspelling():
    assert "did you mean --ppo.clip_range?" in told("ppo", "--ppo.clip_rang", "0.1")


@pytest.mark.parametrize("method", RECIPES)
def test_every_foreign_name_leads_to_keys_that_are_there(method: str):
    """Where no method has the key, a key was renamed and this table was forgotten."""
    known = Keys(RECIPES[method]).leaves
    everywhere = {key for recipe in RECIPES.values() for key in Keys(recipe).leaves}
    for name, foreign in FOREIGN.items():
        ours = leads_to(name, method, known)
        assert ours is not None
        assert not ours or ours in known
        ever = [key for key in foreign.keys if key in everywhere or "{method}" in key]
        assert ever or not foreign.keys, f"{name} leads nowhere: {foreign.keys}"


# -- lists as flags


def trackers(*flags: str) -> tuple[str, ...]:
    return load_recipe("ppo", None, flags).store.trackers


def test_a_list_is_given_as_a_word_as_words_or_flag_by_flag():
    assert trackers("--store.trackers", "wandb") == ("wandb",)
    assert trackers("--store.trackers", "wandb,tensorboard") == ("wandb", "tensorboard")
    assert trackers("--store.trackers", "wandb", "--store.trackers", "tensorboard") == ("wandb", "tensorboard")
    assert trackers("--store.trackers", "[wandb, tensorboard]") == ("wandb", "tensorboard")
    assert trackers("--store.trackers", "wandb", "--store.trackers", "[]") == (), "a list in brackets replaces"


def test_every_key_that_holds_a_list_takes_words():
    recipe = cast(
        PPORecipe,
        load_recipe(
            "ppo",
            None,
            [
                *("--optimizer.betas", "0.9,0.95", "--rollout.stop_token_ids", "1", "--rollout.stop_token_ids", "2"),
                *("--reward.parts", "ended", "--reward.parts", "{kind: length, max: 9}"),
            ],
        ),
    )
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.rollout.stop_token_ids == (1, 2)
    assert [part.kind for part in recipe.reward.parts] == ["ended", "length"]


def test_a_single_value_in_a_file_is_a_list_of_one(tmp_path: Path):
    file = tmp_path / "x.yaml"
    file.write_text("store: {trackers: wandb}\n")
    assert load_recipe("ppo", str(file)).store.trackers == ("wandb",)


def test_a_wrong_word_in_a_list_is_told_with_the_choices():
    assert "each one of tensorboard, wandb, trackio" in told("ppo", "--store.trackers", "wandb,mlflow")
    assert "needs a value" in told("ppo", "--store.trackers")
