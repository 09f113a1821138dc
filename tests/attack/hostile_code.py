"""Rewards and tasks that do what no reward should; each function is one case of test_user_code.py."""

# ruff: noqa: PTH103, PTH106, PTH109, PTH123, SIM105, SIM115

import asyncio
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import torch

from tether.types import Prompt, Score


def fair(rollouts):
    return [len(rollout.completion) / 10 for rollout in rollouts]


# -- ways to end a run --------------------------------------------------------------------------------------------


def exit_0(rollouts):
    sys.exit(0)


def exit_text(prompt, completion):
    sys.exit(0)


def exit_trl(completions, **columns):
    sys.exit()


async def exit_awaited(prompt, completion):
    sys.exit(0)


def exit_at_once(rollouts):
    os._exit(0)


def exit_in_a_thread(rollouts):
    thread = threading.Thread(target=lambda: os._exit(0))
    thread.start()
    thread.join()
    return fair(rollouts)


def exit_quietly(rollouts):
    quit()


def another_program(rollouts):
    os.execv("/bin/true", ["true"])


def another_program_by_name(rollouts):
    os.execvp("true", ["true"])


def interrupt(rollouts):
    raise KeyboardInterrupt


def generator_exit(rollouts):
    raise GeneratorExit


def cancelled(rollouts):
    raise asyncio.CancelledError


def stop_iteration(rollouts):
    raise StopIteration


class OwnError(BaseException):
    pass


def own_base_error(rollouts):
    raise OwnError("mine")


class NoWordsError(Exception):
    def __str__(self):
        raise ValueError("no words")


def error_without_words(rollouts):
    raise NoWordsError


def exits_on_iteration(rollouts):
    def later():
        sys.exit(0)
        yield 1.0

    return later()


class ExitingNumber:
    def __float__(self):
        sys.exit(0)


def exits_as_number(rollouts):
    return [ExitingNumber() for _ in rollouts]


class ExitingScore:
    parts, valid = {}, True

    @property
    def value(self):
        sys.exit(0)


def exits_as_score(rollouts):
    return [ExitingScore() for _ in rollouts]


class ExitingWords:
    def __repr__(self):
        sys.exit(0)


def exits_when_shown(rollouts):
    return [ExitingWords() for _ in rollouts]


def deep_recursion(rollouts):
    return deep_recursion(rollouts)


def out_of_memory(rollouts):
    raise MemoryError


def kill_by_alarm(rollouts):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(1)


# -- wrong things to give -----------------------------------------------------------------------------------------


def gives_dict(rollouts):
    return {rollout.prompt.id: 1.0 for rollout in rollouts}


def gives_set(rollouts):
    return {1.0, 2.0, 3.0, 4.0}


def gives_text(rollouts):
    return "1234"


def gives_bytes(rollouts):
    return b"1234"


def gives_none(rollouts):
    return None


def gives_number(rollouts):
    return 1.0


def gives_nones(rollouts):
    return [None for _ in rollouts]


def gives_nan(rollouts):
    return [float("nan") for _ in rollouts]


def gives_infinity(rollouts):
    return [float("inf") for _ in rollouts]


def gives_huge(rollouts):
    return [10**400 for _ in rollouts]


def gives_complex(rollouts):
    return [1 + 1j for _ in rollouts]


def gives_texts(rollouts):
    return ["1.0" for _ in rollouts]


def gives_lists(rollouts):
    return [[1.0, 2.0] for _ in rollouts]


def gives_too_few(rollouts):
    return fair(rollouts)[:-1]


def gives_too_many(rollouts):
    return [*fair(rollouts), 1.0]


def gives_for_ever(rollouts):
    while True:
        yield 1.0


def gives_nothing(rollouts):
    return []


def gives_scalar_tensor(rollouts):
    return torch.tensor(1.0)


def gives_wide_tensor(rollouts):
    return torch.ones(len(rollouts), 2)


def gives_nan_score(rollouts):
    return [Score(float("nan")) for _ in rollouts]


def gives_text_score(rollouts):
    return [Score("1.0") for _ in rollouts]


def gives_score_with_text_parts(rollouts):
    return [Score(1.0, {"part": "x"}) for _ in rollouts]


def gives_function(rollouts):
    return fair


# -- what is read all the same ------------------------------------------------------------------------------------


def gives_generator(rollouts):
    return (value for value in fair(rollouts))


def gives_array(rollouts):
    return np.array(fair(rollouts))


def gives_tensor(rollouts):
    return torch.tensor(fair(rollouts), dtype=torch.float64, requires_grad=True)


def gives_tuple(rollouts):
    return tuple(fair(rollouts))


def gives_scores(rollouts):
    return [Score(value) for value in fair(rollouts)]


# -- changes of what is not theirs --------------------------------------------------------------------------------


def sorts(rollouts):
    values = fair(rollouts)
    rollouts.sort(key=lambda rollout: rollout.completion)
    rollouts.reverse()
    return values


def empties(rollouts):
    values = fair(rollouts)
    rollouts.clear()
    return values


def edits_messages(rollouts):
    for rollout in rollouts:
        rollout.prompt.messages[0]["content"] = "something else"
        rollout.prompt.meta["new"] = 1
    return fair(rollouts)


def edits_tokens(rollouts):
    for rollout in rollouts:
        rollout.token_ids.zero_()
        rollout.response_mask.zero_()
        rollout.behavior_logprobs.fill_(5.0)
        rollout.untruncated_logprobs.fill_(5.0)
    return fair(rollouts)


def replaces_fields(rollouts):
    for rollout in rollouts:
        object.__setattr__(rollout, "completion", "")
        object.__setattr__(rollout.prompt, "id", "other")
    return [0.1 * place for place in range(len(rollouts))] if False else fair_of_tokens(rollouts)


def fair_of_tokens(rollouts):
    return [float(rollout.response_mask.sum()) for rollout in rollouts]


KEPT = []


def keeps_references(rollouts):
    for rollout in KEPT:
        rollout.token_ids.zero_()
        rollout.prompt.messages[0]["content"] = "later"
    KEPT.extend(rollouts)
    return fair(rollouts)


def changes_folder(rollouts):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return fair(rollouts)


def removes_its_folder(rollouts):
    os.makedirs("gone", exist_ok=True)
    os.chdir("gone")
    os.rmdir(os.getcwd())
    return fair(rollouts)


def changes_environment(rollouts):
    os.environ["HOME"] = "/nowhere"
    os.environ["TETHER_STORE"] = "/nowhere/tether.db"
    os.environ.pop("PATH", None)
    return fair(rollouts)


def clears_environment(rollouts):
    os.environ.clear()
    return fair(rollouts)


def changes_seeds(rollouts):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return fair(rollouts)


def changes_threads(rollouts):
    torch.set_num_threads(2)
    return fair(rollouts)


def changes_dtype(rollouts):
    torch.set_default_dtype(torch.float64)
    return fair(rollouts)


def changes_device(rollouts):
    torch.set_default_device("meta")
    return fair(rollouts)


def stops_gradients(rollouts):
    torch.set_grad_enabled(False)
    return fair(rollouts)


def changes_determinism(rollouts):
    torch.use_deterministic_algorithms(True)
    return fair(rollouts)


def changes_recursion(rollouts):
    sys.setrecursionlimit(120)
    return fair(rollouts)


def closes_the_door(rollouts):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return fair(rollouts)


def takes_output(rollouts):
    sys.stdout = sys.stderr = open(os.devnull, "w")
    print("into nothing")
    return fair(rollouts)


def prints(rollouts):
    print("this is no line of JSON")
    return fair(rollouts)


def masks_files(rollouts):
    os.umask(0o777)
    return fair(rollouts)


# -- never ending -------------------------------------------------------------------------------------------------


def loops(rollouts):
    while True:
        pass


def sleeps(rollouts):
    time.sleep(10_000)


def loops_text(prompt, completion):
    while True:
        pass


async def sleeps_awaited(prompt, completion):
    await asyncio.sleep(10_000)


async def blocks_awaited(prompt, completion):
    time.sleep(10_000)


def loops_on_errors(rollouts):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def bad_pattern(rollouts):
    import re

    return [1.0 if re.match(r"(a+)+$", "a" * 60 + "b") else 0.0 for _ in rollouts]


# -- tasks --------------------------------------------------------------------------------------------------------


class GoodTask:
    def prompts(self):
        return [Prompt.from_text(f"p{place}", f"{place} lower:") for place in range(8)]

    def held_out(self):
        return []

    def reward(self):
        return fair


def exiting_factory():
    sys.exit(0)


class ExitingPrompts(GoodTask):
    def prompts(self):
        sys.exit(0)


class ExitingHeldOut(GoodTask):
    def held_out(self):
        raise KeyboardInterrupt


class ExitingReward(GoodTask):
    def reward(self):
        os._exit(0)


class RewardExits(GoodTask):
    def reward(self):
        return exit_0


class RewardEndsAtOnce(GoodTask):
    def reward(self):
        return exit_at_once


class RewardGivesDict(GoodTask):
    def reward(self):
        return gives_dict


class RewardIsNone(GoodTask):
    def reward(self):
        return 3


class PromptsAreTexts(GoodTask):
    def prompts(self):
        return ["a", "b"]


class NoPrompts(GoodTask):
    def prompts(self):
        return []


class MovingTask(GoodTask):
    def prompts(self):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        return super().prompts()


class SortingTask(GoodTask):
    def reward(self):
        return sorts
