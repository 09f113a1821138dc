"""Copies of one environment, stepped in turn, and their exact state for checkpoints.

Every episode begins with `reset(seed=...)`, with a seed of its own derived from the run's. The state of an episode is
therefore its number and the actions taken in it: resuming replays them. This is exact for every environment that is
deterministic given its seed, and needs to know nothing of what is inside (MuJoCo keeps warm starts of its solver beside
positions and velocities). The replay is checked: it must end in the observation that the checkpoint holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tether.config.control_recipe import EnvironmentSettings
from tether.control.networks import NumpyPolicy
from tether.control.normalizer import ObservationNormalizer, RewardNormalizer
from tether.control.spaces import actions_of, failure, make, observations_of
from tether.seeds import derive_seed

Array = NDArray[Any]
RECENT = 100  # episodes whose mean return is reported, as in the PPO paper


@dataclass
class Episode:
    """The episode in progress of one copy."""

    number: int
    score: float = 0.0
    actions: list[Any] = field(default_factory=list[Any])  # as the environment got them


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of a stretch of steps of one copy: of an episode, or of the rollout."""

    copy: int
    step: int  # of the rollout; the last of the stretch
    truncated: bool  # by a time limit, or by the end of the rollout: the critic's value stands for the rest
    observation: NDArray[np.float32]  # after the last step


@dataclass(frozen=True)
class Trajectories:
    """`steps` steps of each of N copies; by copy, then by step."""

    observations: NDArray[np.float32]  # (N, steps, O)
    actions: Array  # (N, steps, A) float32, or (N, steps) int64
    rewards: NDArray[np.float32]  # (N, steps), normalized
    ends: list[EpisodeEnd]  # by copy, then by step; the last step of a copy always ends a stretch
    scores: list[float]  # total rewards of the episodes that ended
    lengths: list[int]  # and their lengths


class Environments:
    """N copies of an environment, with normalized observations and rewards."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        *,
        seed: int,
        gamma: float,
        bootstrap: bool,
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        """`bootstrap`: an episode that a time limit ends is truncated; otherwise it counts as ended."""
        self.name, self.seed, self.bootstrap, self.notify = settings.id, seed, bootstrap, notify
        self.copies = [make(settings) for _ in range(settings.count)]
        self.reader = observations_of(self.copies[0].observation_space, settings.id)
        self.writer = actions_of(self.copies[0].action_space, settings.id)
        self.see = ObservationNormalizer(
            self.reader.size, active=settings.normalize_observations, limit=settings.clip_observations
        )
        self.scale = RewardNormalizer(
            settings.count, active=settings.normalize_rewards, gamma=gamma, limit=settings.clip_rewards
        )
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.episodes: list[Episode] = []
        self.raw = np.zeros((settings.count, self.reader.size))  # the observations that the copies are in
        self.seen = np.zeros((settings.count, self.reader.size), dtype=np.float32)  # the same, normalized

    def begin(self) -> None:
        """Start the first episode of every copy."""
        self.episodes = [Episode(0) for _ in self.copies]
        self.raw = np.stack([self._reset(copy) for copy in range(len(self.copies))])
        self.seen = self.see(self.raw)

    def _reset(self, copy: int) -> Array:
        seed = derive_seed(self.seed, "episode", copy, self.episodes[copy].number) % 2**31  # some take 32 bits
        try:
            observation, _ = self.copies[copy].reset(seed=seed)
        except Exception as error:
            raise failure(self.name, "reset", error) from error
        return self.reader.read(observation)

    # -- sampling -----------------------------------------------------------------------------------------------------

    def rollout(self, policy: NumpyPolicy, generator: np.random.Generator, steps: int) -> Trajectories:
        """Let the policy act for `steps` steps in every copy."""
        count = len(self.copies)
        noise = policy.noise(generator, steps, count)
        observations = np.zeros((count, steps, self.reader.size), dtype=np.float32)
        actions = np.zeros((count, steps, self.writer.size), np.float32) if self.writer.continuous else np.zeros(
            (count, steps), np.int64
        )  # fmt: skip
        rewards = np.zeros((count, steps), dtype=np.float32)
        found = Trajectories(observations, actions, rewards, [], [], [])
        for step in range(steps):
            sampled = policy.sample(self.seen, noise[step])
            observations[:, step], actions[:, step] = self.seen, sampled
            rewards[:, step] = self._step(sampled, step, found)
        last = [
            EpisodeEnd(copy, steps - 1, True, self.seen[copy].copy())
            for copy in range(count)
            if (copy, steps - 1) not in {(end.copy, end.step) for end in found.ends[-count:]}
        ]
        found.ends.extend(last)
        found.ends.sort(key=lambda end: (end.copy, end.step))
        return found

    def _step(self, sampled: Array, step: int, found: Trajectories) -> list[float]:
        """Step every copy; returns the rewards, normalized."""
        rewards, over, stretches = list[float](), list[bool](), list[tuple[int, bool]]()
        for copy, (environment, episode) in enumerate(zip(self.copies, self.episodes, strict=True)):
            action = self.writer.act(sampled[copy])
            try:
                observation, reward, terminated, truncated, _ = environment.step(action)
            except Exception as error:
                raise failure(self.name, "step", error) from error
            self.raw[copy] = self.reader.read(observation)
            episode.actions.append(action)
            episode.score += float(reward)
            rewards.append(float(reward))
            over.append(bool(terminated or truncated))
            if over[-1]:
                stretches.append((copy, self.bootstrap and not terminated))
        self.seen = self.see(self.raw)
        for copy, truncated in stretches:
            episode = self.episodes[copy]
            found.ends.append(EpisodeEnd(copy, step, truncated, self.seen[copy].copy()))
            found.scores.append(episode.score)
            found.lengths.append(len(episode.actions))
            self.recent.append(episode.score)
            self._next_episode(copy)
        return self.scale(rewards, over)

    def _next_episode(self, copy: int) -> None:
        self.episodes[copy] = Episode(self.episodes[copy].number + 1)
        self.raw[copy] = self._reset(copy)
        self.seen[copy] = self.see(self.raw[copy : copy + 1])[0]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON for a checkpoint; the tensors are copies."""
        tensors = {
            "seen": torch.tensor(self.seen),
            "raw": torch.tensor(self.raw),
            "mean": torch.tensor(self.see.moments.mean),
            "variance": torch.tensor(self.see.moments.variance),
        }
        for copy, episode in enumerate(self.episodes):
            if episode.actions:
                tensors[f"actions/{copy}"] = torch.tensor(np.stack(episode.actions))
        numbers = {
            "episodes": [[episode.number, episode.score] for episode in self.episodes],
            "count": self.see.moments.count,
            "rewards": self.scale.state(),
            "recent": list(self.recent),
        }
        return tensors, numbers

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Become what `state` described, by replaying the episodes in progress."""
        self.see.moments.mean, self.see.moments.variance = tensors["mean"].numpy(), tensors["variance"].numpy()
        self.see.moments.count = float(numbers["count"])
        self.scale.restore(numbers["rewards"])
        self.recent = deque((float(score) for score in numbers["recent"]), maxlen=RECENT)
        self.raw, self.seen = tensors["raw"].numpy().copy(), tensors["seen"].numpy().copy()
        self.episodes = [Episode(int(number), float(score)) for number, score in numbers["episodes"]]
        for copy in range(len(self.copies)):
            taken = tensors.get(f"actions/{copy}")
            if not self._replay(copy, [] if taken is None else list(taken.numpy())):
                self.notify(
                    f"{self.name} gave another observation when the episode in progress was replayed, so this run "
                    "differs from an uninterrupted one: the environment draws random numbers that its seed does not "
                    "determine, or its package has another version."
                )
                self._next_episode(copy)

    def _replay(self, copy: int, actions: list[Any]) -> bool:
        """Repeat an episode up to here; whether it ends in the observation that it ended in before."""
        observation = self._reset(copy)
        for action in actions:
            given = action if self.writer.continuous else int(action)
            observation = self.reader.read(self.copies[copy].step(given)[0])
            self.episodes[copy].actions.append(given)
        return bool(np.array_equal(observation, self.raw[copy]))

    def close(self) -> None:
        """Close every copy."""
        for environment in self.copies:
            environment.close()
