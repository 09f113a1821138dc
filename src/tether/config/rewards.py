"""The parts of a reward: one small settings class per `kind`. docs/rewards.md has an example of each."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tether.config.base import Count, NonNegative, Positive, PositiveFloat, Settings, check_url

Extract = Literal["auto", "whole", "last_line", "marker", "last_number", "boxed"]


class Part(Settings):
    """Settings that every part has."""

    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_.-]+$", description="Name of the part in metrics; defaults to its kind."
    )
    weight: float = Field(default=1.0, description="Weight of the part in the sum; may be negative.")

    @property
    def label(self) -> str:
        """The name, or the kind where none is given."""
        return self.name or getattr(self, "kind", "")


class TaskPart(Part):
    """The task's own reward, to combine with others."""

    kind: Literal["task"]


class ModelPart(Part):
    """The score of a reward model; its tokenizer may differ from the policy's."""

    kind: Literal["model"]
    path: str = Field(
        description="The folder of a saved reward model, such as runs/reward/model, or a Hugging Face id: any "
        "classifier with one label and safetensors."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of its weights; auto as for model.dtype, on its own device."
    )
    device: str = Field(default="auto", description="auto uses the policy's device; or name one, such as cuda:1.")
    micro_batch_tokens: Positive = Field(default=8192, description="Padded tokens in one forward pass.")
    shared: bool = Field(
        default=False,
        description="With roles.mode lora or shared_backbone: run on the backbone that the roles share, with the "
        "policy's dtype and device.",
    )


class FunctionPart(Part):
    """A Python function of yours."""

    kind: Literal["function"]
    function: str = Field(
        pattern=r"^[^:\s]+:[^:\s]+$", description="package.module:name, or file.py:name in the working folder."
    )
    takes: Literal["auto", "text", "trl", "rollouts"] = Field(
        default="auto",
        description="text: f(prompt, completion, **columns) returns one number; trl: f(completions, **columns) returns "
        "a list of numbers, as in TRL; rollouts: f(rollouts) returns a number or Score for each; auto: chosen by the "
        "parameter names.",
    )
    timeout_seconds: PositiveFloat | None = Field(
        default=None,
        description="Time limit for one call. The function then runs in its own process, which is killed at the limit. "
        "null: it runs in the training process, under reward.timeout_seconds.",
    )
    workers: Count = Field(
        default=0, description="Number of processes that run the function; 0 runs it in the training process."
    )
    batch_size: Positive | None = Field(
        default=None, description="For trl and rollouts: answers per call; null passes all answers of a step."
    )


class ObjectPart(Part):
    """A function that a Python program passes to `tether.ppo` and its like. A recipe file cannot hold one."""

    kind: Literal["object"]


class LengthPart(Part):
    """1 within the limits, falling linearly to 0 at `falloff` beyond them."""

    kind: Literal["length"]
    unit: Literal["words", "characters"] = Field(default="words", description="Words are split at white space.")
    target: Count | None = Field(default=None, description="The best length, in place of min and max.")
    min: Count | None = Field(default=None, description="Smallest length with value 1; defaults to 0.")
    max: Count | None = Field(default=None, description="Largest length with value 1; by default there is no limit.")
    falloff: Positive = Field(default=10, description="Distance from the limits, in units, at which the value is 0.")

    @model_validator(mode="after")
    def _limits(self) -> LengthPart:
        if (self.target is None) == (self.min is None and self.max is None):
            raise ValueError("length needs target, or min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"length has min {self.min} above max {self.max}")
        return self


class RegexPart(Part):
    """1 where the pattern matches, else 0."""

    kind: Literal["regex"]
    pattern: str = Field(description="A Python regular expression.")
    match: Literal["partial", "full"] = Field(
        default="partial", description="partial: anywhere in the completion; full: all of it, white space stripped."
    )
    ignore_case: bool = Field(default=False, description="Ignore case.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
        return pattern


class JSONPart(Part):
    """1 where the completion is valid JSON with the required keys, else 0."""

    kind: Literal["json"]
    keys: tuple[str, ...] = Field(default=(), description="Keys that the JSON object must have.")
    fenced: bool = Field(default=False, description="Also accept JSON inside a ``` fence.")


class ExactPart(Part):
    """1 where the answer equals the prompt's, both normalized, else 0."""

    kind: Literal["exact"]
    extract: Extract = Field(default="whole", description="Which part of the completion is the answer.")
    ignore_case: bool = Field(default=True, description="Ignore case.")


class NumericPart(Part):
    """1 where the last number in the completion equals the prompt's answer, else 0."""

    kind: Literal["numeric"]
    tolerance: NonNegative = Field(
        default=1e-8,
        description="Relative tolerance: this times |answer|. Whole numbers must match exactly.",
    )


class MathPart(Part):
    """1 where the final answer is mathematically equal to the prompt's, else 0."""

    kind: Literal["math"]
    tolerance: NonNegative = Field(
        default=1e-8,
        description="Relative tolerance: this times |answer|. Whole numbers must match exactly.",
    )


class MathVerifyPart(Part):
    """1 where the package math-verify finds the final answer equal to the prompt's, else 0."""

    kind: Literal["math_verify"]
    timeout_seconds: PositiveFloat = Field(
        default=10.0, description="Time limit for one answer; an answer that exceeds it gets no score."
    )
    workers: Positive = Field(default=1, description="Number of processes that compare answers.")


class EndedPart(Part):
    """1 where the answer ended by itself, 0 where it was cut off."""

    kind: Literal["ended"]


class RemotePart(Part):
    """The score of a reward model behind HTTP."""

    kind: Literal["remote"]
    url: str = Field(description="URL to post to, such as http://127.0.0.1:8421/score.")
    timeout_seconds: PositiveFloat = Field(default=30.0, description="Total time limit for one request.")
    retries: Count = Field(default=2, description="Retries after a timeout, a lost connection or a 5xx status.")
    backoff_seconds: NonNegative = Field(default=0.5, description="Wait before the first retry; doubles each time.")
    batch_size: Positive = Field(default=32, description="Answers per request.")
    concurrency: Positive = Field(default=4, description="Maximum number of simultaneous requests.")
    token_env: str | None = Field(default=None, description="Environment variable that holds the bearer token.")
    max_response_bytes: Positive = Field(default=1_000_000, description="Maximum size of a response.")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        return check_url("url", url)


RewardPart = Annotated[
    TaskPart
    | ModelPart
    | FunctionPart
    | ObjectPart
    | LengthPart
    | RegexPart
    | JSONPart
    | ExactPart
    | NumericPart
    | MathPart
    | MathVerifyPart
    | EndedPart
    | RemotePart,
    Field(discriminator="kind"),
]


def check_names(parts: tuple[Part, ...]) -> None:
    """Raise where two parts have the same name, because metrics are keyed by it."""
    names = [part.label for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parts has {', '.join(twice)} more than once: give each its own name")
