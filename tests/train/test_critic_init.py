"""`roles.critic_init`: a critic that starts as a reward model, of any size in mode separate; or a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.backbones import ScalarHead
from tether.models.save import save_model
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Adapters, Separate, Sharing, Tops
from tether.plan.machine import Machine
from tether.plan.plan import make_plan
from tether.plan.workload import Lengths, shape_of
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts, train_rl

SMALL = (
    *("--run.steps", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4", "--model.device", "cpu"),
    *("--optimizer.critic_lr", "3e-3", "--ppo.critic_warmup", "1", "--store.top_logprobs", "0"),
)
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2", "--roles.lora_alpha", "4")
TOP = ("--roles.mode", "shared_backbone", "--roles.trainable_layers", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tiny_model(seed=1), tiny_tokenizer(), tmp_path_factory.mktemp("models") / "base"))


def saved(sharing: Sharing, target: Path) -> Path:
    head = ScalarHead.like_output(sharing.policy, deviation=0.1, seed=0)
    return save_model(ScalarModel(sharing.scalar_backbone(0), head, "reward"), tiny_tokenizer(), target)


def build(base: str, start: Path | str, *flags: str) -> RLParts:
    recipe = load_recipe("ppo", None, [*SMALL, "--model.path", base, "--roles.critic_init", str(start), *flags])
    return build_rl(recipe, load_policy(recipe))


def test_a_value_head_and_methods_without_a_critic_refuse_it_before_anything_is_read():
    for method, flags in (
        ("ppo", ("--roles.critic", "head")),
        ("grpo", ()),
        ("rloo", ()),
        ("reinforce", ()),
        ("sft", ("--data.train", "nowhere.jsonl")),
    ):
        with pytest.raises(ValueError, match=r"critic_init.*(critic is head|trains no critic)"):
            load_recipe(method, None, ["--roles.critic_init", "nowhere", *flags])
    load_recipe("reinforce", None, ["--roles.critic_init", "x", "--reinforce.weighting", "baselined"])


@pytest.mark.parametrize("model", [{"layers": 1, "width": 32}, {"layers": 3, "width": 96}], ids=["smaller", "larger"])
def test_a_separate_critic_may_be_of_another_size(base: str, tmp_path: Path, model: dict[str, int]):
    reward = saved(Separate(tiny_model(seed=2, **model)), tmp_path / "run" / "model")
    parts = build(base, tmp_path / "run")  # the run's folder, as for model.path
    critic = parts.roles.actor.critic
    assert isinstance(critic, ScalarModel)
    expected = ScalarModel.load(reward, torch.float32, "cpu").state_dict()
    found = critic.state_dict()
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    before = parts.learner.flat_parameters("critic")
    results = list(train_rl(parts))
    assert len(results) == 2 and results[-1].metrics["grad_norm/critic"] > 0.0
    assert not torch.equal(before, parts.learner.flat_parameters("critic"))


def test_the_plan_counts_a_critic_of_another_size(base: str, tmp_path: Path):
    saved(Separate(tiny_model(seed=2, layers=3, width=96)), tmp_path / "reward")
    parts = build(base, tmp_path / "reward")
    next(train_rl(parts))
    flags = [*SMALL, "--model.path", base, "--model.dtype", "float32"]
    machine = Machine("cpu", "a CPU", 2**34, 2e11, 3e10, "as given")

    def critic_of(*more: str):
        recipe = load_recipe("ppo", None, [*flags, *more])
        plan = make_plan(recipe, shape_of(base), Lengths.assumed(8, "as given"), machine)
        return next(role for role in plan.memory.roles if role.role == "critic"), plan

    alike, of_policy = critic_of()
    role, plan = critic_of("--roles.critic_init", str(tmp_path / "reward"))
    weights = parts.learner.groups["critic"]
    assert role.weights == pytest.approx(sum(weight.nbytes for weight in weights), rel=0.01)
    assert role.optimizer == pytest.approx(2 * role.weights, rel=0.01)
    assert role.activations > alike.activations and "own size" in role.what
    assert plan.memory.peak > of_policy.memory.peak
    assert plan.seconds["update"] > of_policy.seconds["update"]


def other_vocabulary(target: Path) -> Path:
    saved(Separate(tiny_model(seed=2)), target)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(target)
    return target


def without_tokenizer(target: Path) -> Path:
    saved(Separate(tiny_model(seed=2)), target)
    for file in target.glob("*token*"):
        file.unlink()
    return target


def wrong(kind: str, target: Path) -> Path:
    """A folder that the critic cannot start as."""
    match kind:
        case "nothing":
            return target
        case "an unfinished run":
            target.mkdir()
            return target
        case "a policy":
            return save_model(tiny_model(seed=1), tiny_tokenizer(), target)
        case "a policy's adapters":
            return save_model(Adapters(tiny_model(seed=1), 2, 4.0, "all-linear", 0).policy, tiny_tokenizer(), target)
        case "a whole model":
            return saved(Separate(tiny_model(seed=1)), target)
        case "a wider model":
            return saved(Separate(tiny_model(seed=1, width=96)), target)
        case "a deeper model":
            return saved(Tops(tiny_model(seed=1, layers=3), 1), target)
        case "adapters":
            return saved(Adapters(tiny_model(seed=1), 2, 4.0, "all-linear", 0), target)
        case "adapters of rank 3":
            return saved(Adapters(tiny_model(seed=1), 3, 4.0, "all-linear", 0), target)
        case "adapters scaled otherwise":
            return saved(Adapters(tiny_model(seed=1), 2, 32.0, "all-linear", 0), target)
        case "adapters of fewer layers":
            return saved(Adapters(tiny_model(seed=1, layers=1), 2, 4.0, "all-linear", 0), target)
        case "adapters of a wider model":
            return saved(Adapters(tiny_model(seed=1, width=96), 2, 4.0, "all-linear", 0), target)
        case "another vocabulary":
            return other_vocabulary(target)
        case _:
            return without_tokenizer(target)


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("nothing", (), "holds no saved reward model"),
        ("nothing", LORA, "holds no saved reward model"),
        ("an unfinished run", TOP, "holds no saved reward model"),
        ("a policy", (), "is not a reward model"),
        ("a policy's adapters", LORA, "is not a reward model"),
        ("a whole model", LORA, "holds a whole model, but roles.mode is lora"),
        ("a wider model", TOP, r"another model \(LlamaModel, 2 layers of width 96.*width 64"),
        ("a deeper model", TOP, "3 layers of width 64.*2 layers of width 64"),
        ("adapters", (), "holds adapters, but roles.mode is separate"),
        ("adapters", TOP, "holds adapters, but roles.mode is shared_backbone"),
        ("adapters of rank 3", LORA, "roles.lora_rank 3, but .* 2"),
        ("adapters scaled otherwise", LORA, "roles.lora_alpha 32"),
        ("adapters of fewer layers", LORA, "another model, rank or layers.*missing there"),
        ("adapters of a wider model", LORA, "another model, rank or layers"),
        ("another vocabulary", (), "the critic does not share the policy's vocabulary"),
        ("no tokenizer", (), "no tokenizer"),
    ],
)
def test_what_a_critic_cannot_start_as_is_one_sentence(
    base: str, tmp_path: Path, kind: str, flags: Sequence[str], words: str
):
    with pytest.raises(ConfigError, match=words) as raised:
        build(base, wrong(kind, tmp_path / "reward"), *flags)
    assert str(raised.value).startswith("roles.critic_init: ") and "\n" not in str(raised.value)
