"""One iteration against an independent recomputation in float64, and the pieces that it is made of."""

import numpy as np
import pytest
import torch

from tether.config.control_recipe import ControlRecipe
from tether.config.load import load_settings
from tether.control.experience import Stretches
from tether.control.training import ControlTraining
from tether.train.training import seed_everything

pytest.importorskip("gymnasium", reason="the extra `control` is not installed")

GAMMA, LAM, CLIP, LR, LIMIT = 0.9, 0.8, 0.05, 0.3, 0.5


def training(environment: str, *flags: str) -> ControlTraining:
    given = [f"--environment.id={environment}", "--environment.count=2", "--rollout.steps=24", *flags]
    recipe = load_settings(ControlRecipe, None, given)
    seed_everything(recipe.run.seed)
    return ControlTraining(recipe)


def perceptron(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    for layer in (0, 2, 4):
        x = x @ weights[f"{name}.{layer}.weight"].T + weights[f"{name}.{layer}.bias"]
        x = torch.tanh(x) if layer < 4 else x
    return x


def advantages(rewards: np.ndarray, values: np.ndarray, ends: dict[tuple[int, int], float | None]) -> np.ndarray:
    """GAE, copy by copy; `ends` has the value after the last step of a stretch, None where the episode ended."""
    found = np.zeros_like(rewards)
    for copy in range(len(rewards)):
        for step in reversed(range(rewards.shape[1])):
            over = (copy, step) in ends
            following = (ends[copy, step] or 0.0) if over else values[copy, step + 1]
            delta = rewards[copy, step] + GAMMA * following - values[copy, step]
            found[copy, step] = delta + (0.0 if over else GAMMA * LAM * found[copy, step + 1])
    return found


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_two_epochs_are_those_of_an_independent_recomputation(environment: str):
    t = training(
        environment,
        *("--ppo.epochs=2", "--ppo.minibatch_size=48", f"--ppo.gamma={GAMMA}", f"--ppo.lam={LAM}"),
        *(f"--ppo.clip_range={CLIP}", "--ppo.entropy_coef=0.01", "--ppo.value_clip=null"),
        *(f"--optimizer.policy_lr={LR}", f"--optimizer.critic_lr={LR}", "--optimizer.epsilon=1.0"),
        *("--optimizer.schedule=constant", f"--optimizer.max_grad_norm={LIMIT}", "--environment.max_episode_steps=17"),
    )
    t.environments.begin()
    with torch.no_grad():  # a policy whose actions end episodes, and whose ratios the clip reaches
        t.model.policy[4].weight.mul_(100.0)
    rollout = t.environments.rollout(t.policy, t.random(0, "actions"), 24)
    weights = {name: p.detach().double().requires_grad_() for name, p in t.model.state_dict().items()}
    states, actions = torch.tensor(rollout.observations).double(), torch.tensor(rollout.actions)

    def policy() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = perceptron(weights, "policy", states)
        if "log_std" in weights:
            normal = torch.distributions.Normal(outputs, weights["log_std"].exp())
            return normal.log_prob(actions.double()).sum(-1), normal.entropy().sum(-1)
        choices = torch.distributions.Categorical(logits=outputs)
        return choices.log_prob(actions), choices.entropy()

    old = policy()[0].detach()
    values = perceptron(weights, "critic", states)[..., 0].detach().numpy()
    ends = {}
    for end in rollout.ends:
        after = float(perceptron(weights, "critic", torch.tensor(end.observation).double()[None]).detach())
        ends[end.copy, end.step] = after if end.truncated else None
    assert len(ends) > 2 and any(value is not None for value in ends.values())
    assert environment != "CartPole-v1" or None in ends.values()
    gained = torch.tensor(advantages(rollout.rewards.astype(np.float64), values, ends))
    returns, gained = gained + torch.tensor(values), (gained - gained.mean()) / (gained.var(correction=0) + 1e-8).sqrt()

    groups = [[n for n in weights if not n.startswith("critic")], [n for n in weights if n.startswith("critic")]]
    means = {name: torch.zeros_like(w) for name, w in weights.items()}
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    for epoch in (1, 2):
        new, entropy = policy()
        ratio = (new - old).exp()
        surrogate = torch.minimum(ratio * gained, ratio.clamp(1 - CLIP, 1 + CLIP) * gained)
        critic = (perceptron(weights, "critic", states)[..., 0] - returns) ** 2 / 2
        loss = (-surrogate + 0.5 * critic - 0.01 * entropy).mean()
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        for names in groups:
            norm = torch.stack([gradients[name].norm() for name in names]).norm()
            for name in names:
                g = gradients[name] * min(1.0, LIMIT / (float(norm) + 1e-6))
                means[name] = 0.9 * means[name] + 0.1 * g
                squares[name] = 0.999 * squares[name] + 0.001 * g**2
                step = means[name] / (1 - 0.9**epoch) / ((squares[name] / (1 - 0.999**epoch)).sqrt() + 1.0)
                weights[name] = (weights[name] - LR * step).detach().requires_grad_()
    start = {name: p.clone() for name, p in t.model.state_dict().items()}
    metrics = t.learn(0, rollout).values()
    assert metrics["first_approx_kl"] == 0.0 and metrics["clip_fraction"] > 0.0
    for name, p in t.model.state_dict().items():
        moved = float((p - start[name]).abs().max())
        assert moved > 1e-4, name
        np.testing.assert_allclose(p.numpy(), weights[name].detach().numpy(), rtol=0, atol=2e-3 * moved + 1e-6)


def test_moments_are_those_of_everything_seen():
    t = training("CartPole-v1")
    seen, read = [], t.environments.reader.read
    t.environments.reader = type(t.environments.reader)(4, lambda raw: seen.append(read(raw)) or seen[-1])
    t.environments.begin()
    t.iteration(0)
    np.testing.assert_allclose(t.environments.see.moments.mean, np.mean(seen, axis=0), atol=1e-5)
    np.testing.assert_allclose(t.environments.see.moments.variance, np.var(seen, axis=0), rtol=1e-3)


def test_stretches_cover_every_step_once():
    t = training("CartPole-v1")
    t.environments.begin()
    rollout = t.environments.rollout(t.policy, t.random(0, "actions"), 24)
    stretches = Stretches.of(rollout)
    assert int(stretches.mask.sum()) == 48 and len(stretches.mask) == len(rollout.ends)
    laid_out = stretches.lay_out(torch.arange(48))
    assert laid_out[stretches.mask].tolist() == list(range(48))
    assert [int(row[mask][-1]) for row, mask in zip(laid_out, stretches.mask, strict=True)] == [
        end.copy * 24 + end.step for end in rollout.ends
    ]


def test_a_time_limit_ends_an_episode_only_where_asked():
    for asked in ("true", "false"):
        t = training("Pendulum-v1", "--environment.max_episode_steps=10", f"--ppo.bootstrap_truncated={asked}")
        t.environments.begin()
        ends = t.environments.rollout(t.policy, t.random(0, "actions"), 24).ends
        assert [end.truncated for end in ends] == [asked == "true", asked == "true", True] * 2


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_trpo_keeps_its_bound(environment: str):
    t = training(environment, "--algorithm=trpo", "--rollout.steps=128")
    t.environments.begin()
    metrics = t.iteration(0)
    assert 0.0 < metrics["approx_kl_after"] <= 0.01 and metrics["surrogate_gain"] > 0.0


@pytest.mark.parametrize(
    "flags",
    [
        ["--ppo.objective=unclipped"],
        ["--ppo.objective=kl_penalty", "--ppo.penalty.adaptive=false", "--ppo.penalty.coef=3.0"],
        ["--ppo.objective=kl_penalty", "--ppo.penalty.target=0.003"],
    ],
)
def test_the_papers_other_objectives(flags: list[str]):
    t = training("Pendulum-v1", *flags)
    t.environments.begin()
    before = t.controllers.coefficients().old
    metrics = t.iteration(0)
    assert metrics["steps"] == 10 and "clip_fraction" not in metrics
    moves = "adaptive=false" not in " ".join(flags) and "unclipped" not in flags[0]
    assert (t.controllers.coefficients().old != before) == moves


@pytest.mark.parametrize("environment", ["CartPole-v1", "InvertedPendulum-v5"])
def test_it_learns(environment: str):
    if environment.startswith("Inverted"):
        pytest.importorskip("mujoco", reason="the extra `control` is not installed")
    t = training(
        environment,
        *("--environment.count=8", "--rollout.steps=128", "--ppo.minibatch_size=128", "--ppo.epochs=6"),
        *("--optimizer.policy_lr=1e-3", "--optimizer.critic_lr=1e-3", "--run.environment_steps=12000"),
    )
    scores = [outcome.metrics["score"] for outcome in t.steps(0, lambda: False, lambda words: None)]
    assert scores[0] < 30 and scores[-1] > 4 * scores[0] and scores[-1] > 100
