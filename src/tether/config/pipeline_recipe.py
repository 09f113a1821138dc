"""The recipe of `tether pipeline`: stages that run once, stages that run in every round, and the true score.

A stage that trains has the settings of its ordinary recipe. The stages defined here sample answers: to have them
rated, to keep the best of several, and to train on the best. `tether.config.load_pipeline` reads the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tether.config.base import Count, Fraction, NonNegative, Positive, PositiveFloat, Settings, check_url
from tether.config.recipes import FILLED_IN, RECIPES, Recipe, RLRecipe, SFTRecipe
from tether.config.rewards import RewardPart, check_names
from tether.config.sections import DataSettings, ModelSettings, TaskSettings

STAGE = "stage:"  # prefix of a value that stands for what a stage makes
POLICY = "policy"  # in place of a stage's name: the newest policy
PREVIOUS, FIRST, ALL = "previous", "first", "all"


class AnswerSettings(Settings):
    """Which prompts are answered, and how."""

    prompts: Positive = Field(default=64, description="Number of prompts; each round takes the next ones.")
    samples_per_prompt: int = Field(default=4, ge=2, le=64, description="Answers to each prompt.")
    max_new_tokens: Positive = Field(default=64, description="Maximum length of an answer.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sample from the most probable tokens up to this mass.")
    max_num_seqs: Positive | Literal["auto"] = Field(default="auto", description="Answers decoded at once.")


class ScoreSettings(Settings):
    """What scores an answer."""

    parts: tuple[RewardPart, ...] = Field(
        default=(), description="Parts whose weighted sum is the score; default: the task's own reward."
    )
    max_failure_rate: Fraction = Field(
        default=0.1, description="End the stage when more than this fraction of the scores is missing or not finite."
    )
    timeout_seconds: NonNegative = Field(
        default=300.0, description="Time limit for one call of Python code; 0 disables it."
    )

    @model_validator(mode="after")
    def _names(self) -> ScoreSettings:
        check_names(self.parts)
        return self


class RatingSettings(ScoreSettings):
    """A rater that ranks by a score: a rule, a reward model, a task's own reward."""

    noise: NonNegative = Field(
        default=0.0, description="P(prefer A) = sigmoid((score(A) - score(B)) / noise); 0: always the higher score."
    )
    tie: NonNegative = Field(default=0.0, description="Neighbors in the ranking whose scores differ by less are tied.")


class JudgeSettings(Settings):
    """A rater over HTTP, who sees every pair in both orders."""

    url: str = Field(
        default="",
        description="Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; with protocol choices, "
        "the URL that pairs are posted to.",
    )
    protocol: Literal["openai", "choices"] = Field(
        default="openai", description="Chat completions, or the protocol of docs/evaluation.md."
    )
    model: str = Field(default="judge", description="Name of the model on the server, for openai.")
    instruction: str = Field(
        default="Which answer is better? Reply with A, B or tie.",
        description="What the judge is asked under each pair, for openai.",
    )
    max_tokens: Positive = Field(default=8, description="Maximum length of the judge's reply, for openai.")
    token_env: str | None = Field(default=None, description="Environment variable that holds the bearer token.")
    timeout_seconds: PositiveFloat = Field(default=60.0, description="Total time limit for one request.")
    retries: Count = Field(default=2, description="Retries after a timeout, a lost connection or a 5xx status.")
    backoff_seconds: NonNegative = Field(default=0.5, description="Wait before the first retry; doubles each time.")
    concurrency: Positive = Field(default=4, description="Maximum number of simultaneous requests.")
    max_response_bytes: Positive = Field(default=1_000_000, description="Maximum size of a response.")
    max_failure_rate: Fraction = Field(
        default=0.1, description="End the stage when more than this fraction of the pairs gets no verdict."
    )

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        return check_url("judge.url", url) if url else url


class PersonSettings(Settings):
    """People who rank in Tether Studio."""

    kind: Literal["pair", "ranking"] = Field(
        default="pair", description="Show two answers at once, or all of a prompt to be ranked."
    )
    guidelines: str = Field(default="", description="What the people read above each item.")
    votes_per_item: Positive = Field(default=1, description="Votes that complete an item.")
    poll_seconds: PositiveFloat = Field(default=5.0, description="Time between two looks for new votes.")


class CollectRecipe(Settings):
    """Sample answers of a policy and have them ranked."""

    method: ClassVar[str] = "collect"

    model: ModelSettings = Field(default_factory=lambda: ModelSettings(path=f"{STAGE}{POLICY}"))
    task: TaskSettings = Field(default_factory=TaskSettings)
    answers: AnswerSettings = Field(default_factory=AnswerSettings)
    rater: Literal["reward", "judge", "person"] = Field(
        default="reward", description="The section below that applies: a score, a judge over HTTP, or people."
    )
    reward: RatingSettings = Field(default_factory=RatingSettings)
    judge: JudgeSettings = Field(default_factory=JudgeSettings)
    person: PersonSettings = Field(default_factory=PersonSettings)
    held_out: Fraction = Field(default=0.25, description="Fraction of the ranked prompts that no stage trains on.")

    @model_validator(mode="after")
    def _judge_has_an_address(self) -> CollectRecipe:
        if self.rater == "judge" and not self.judge.url:
            raise ValueError("rater is judge, and judge.url is empty: name the server")
        return self


class BestOfNRecipe(Settings):
    """Sample several answers to each prompt and keep the one with the highest score."""

    method: ClassVar[str] = "best_of_n"

    model: ModelSettings = Field(default_factory=lambda: ModelSettings(path=f"{STAGE}{POLICY}"))
    task: TaskSettings = Field(default_factory=TaskSettings)
    split: Literal["prompts", "held_out"] = Field(default="held_out", description="Which prompts of the task.")
    answers: AnswerSettings = Field(default_factory=AnswerSettings)
    reward: ScoreSettings = Field(default_factory=ScoreSettings)


class RejectionSamplingRecipe(SFTRecipe):
    """Supervised fine-tuning on the best of several answers to each prompt."""

    method: ClassVar[str] = "rejection_sampling"

    model: ModelSettings = Field(default_factory=lambda: ModelSettings(path=f"{STAGE}{POLICY}"))
    data: DataSettings = Field(default_factory=lambda: FILLED_IN)
    task: TaskSettings = Field(default_factory=TaskSettings)
    answers: AnswerSettings = Field(default_factory=AnswerSettings)
    reward: ScoreSettings = Field(default_factory=ScoreSettings)


class TruthSettings(Settings):
    """The true score: measured after every round on held-out prompts, and never trained on."""

    parts: tuple[RewardPart, ...] = Field(
        default=(), description="Parts whose weighted sum is the true score; default: the task's own reward."
    )
    prompts: Positive = Field(default=64, description="Number of held-out prompts of the pipeline's task.")
    samples: Positive = Field(default=1, description="Answers to each of them.")
    max_new_tokens: Positive = Field(default=64, description="Maximum length of an answer.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature; KL is measured at it.")
    max_num_seqs: Positive | Literal["auto"] = Field(default="auto", description="Answers decoded at once.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="Precision of the models.")
    device: str = Field(default="auto", description="auto picks CUDA, then MPS, then CPU.")
    timeout_seconds: NonNegative = Field(
        default=300.0, description="Time limit for one call of Python code; 0 disables it."
    )

    @model_validator(mode="after")
    def _names(self) -> TruthSettings:
        check_names(self.parts)
        return self


class PipelineSettings(Settings):
    """What all stages of a pipeline share."""

    method: ClassVar[str] = "pipeline"

    name: str = Field(default="pipeline", pattern=r"^[A-Za-z0-9_.-]+$", description="Name of the pipeline's folder.")
    directory: str = Field(default="runs", description="Parent folder of all runs.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random; round k adds k to it.")
    rounds: Positive = Field(default=1, description="How often the stages of each_round run.")
    policy: str | None = Field(
        default=None, description="The first policy, where no stage before the rounds makes one: a run, or a model."
    )
    task: TaskSettings = Field(default_factory=TaskSettings)
    truth: TruthSettings = Field(default_factory=TruthSettings)


STAGES: dict[str, type[Settings]] = {
    "collect": CollectRecipe,
    "best_of_n": BestOfNRecipe,
    "rejection_sampling": RejectionSamplingRecipe,
    **RECIPES,
}
"""The class of each method that a stage may have."""

Makes = Literal["policy", "reward", "ratings", "answers"]


@dataclass(frozen=True)
class Stage:
    """One stage: its name in the file, and its settings."""

    name: str
    settings: Settings

    @property
    def method(self) -> str:
        """The stage's method."""
        return str(getattr(type(self.settings), "method"))  # noqa: B009 (a class variable of every recipe)

    @property
    def makes(self) -> Makes:
        """What other stages can use of it."""
        known: dict[str, Makes] = {"collect": "ratings", "best_of_n": "answers", "reward": "reward"}
        return known.get(self.method, "policy")

    @property
    def trains(self) -> bool:
        """Whether it is a run in the store."""
        return isinstance(self.settings, Recipe)


@dataclass(frozen=True)
class Pipeline:
    """A whole pipeline."""

    settings: PipelineSettings
    stages: tuple[Stage, ...]  # once, before the rounds
    each_round: tuple[Stage, ...]
    has_truth: bool = False  # whether the file has a section truth

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stages in the order of the file."""
        return (*self.stages, *self.each_round)

    def record(self) -> dict[str, Any]:
        """The pipeline as plain data, every key resolved."""
        own = {"method": PipelineSettings.method, **self.settings.model_dump(mode="json"), "has_truth": self.has_truth}
        for key, stages in (("stages", self.stages), ("each_round", self.each_round)):
            own[key] = {
                stage.name: {"method": stage.method, **stage.settings.model_dump(mode="json")} for stage in stages
            }
        return own


def task_of(settings: Settings) -> TaskSettings | None:
    """The task of a stage that samples answers."""
    if isinstance(settings, RLRecipe | CollectRecipe | BestOfNRecipe | RejectionSamplingRecipe):
        return settings.task
    return None
