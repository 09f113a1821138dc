"""`takes: trl`: lists in, a list out, as TRL's GRPOTrainer calls reward functions. docs/rewards.md runs this file."""


def text_of(completion):
    """A completion is a text, or a list of messages where the record's prompt was one."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def contains_answer(completions, answer, **kwargs):
    return [float(wanted in text_of(completion)) for completion, wanted in zip(completions, answer, strict=True)]


def easy_only(completions, difficulty, **kwargs):  # None: this reward does not apply to that answer
    return [1.0 if level == 1 else None for level in difficulty]
