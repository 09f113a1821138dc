"""An engine that samples in a thread of its own, from a copy of the weights at the time of asking."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tether.models.load import LoadedModel
from tether.protocols import RolloutEngine
from tether.rollout.native import NativeEngine


class ThreadedEngine(RolloutEngine):
    """`before_sampling` is called in the thread, with the version that it is about to sample with."""

    def __init__(self, policy: LoadedModel) -> None:
        self.policy, self.here = policy, NativeEngine(policy)
        self.apart = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
        self.there = NativeEngine(self.apart)
        self.thread = ThreadPoolExecutor(1)
        self.asked: list[int] = []
        self.before_sampling: Callable[[int], object] = lambda version: None

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.here.policy_version = self.policy_version
        return self.here.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def submit(self, prompts, sampling, *, samples_per_prompt, seed):
        version = self.policy_version
        weights = {name: value.clone() for name, value in self.policy.model.state_dict().items()}
        self.asked.append(version)

        def sample():
            self.before_sampling(version)
            self.apart.model.load_state_dict(weights)
            self.there.policy_version = version
            return self.there.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

        return self.thread.submit(sample).result
