"""Turn a record, in any shape that docs/data.md lists, into a prompt and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tether.config.base import ReadSettings
from tether.data.records import Record, SampledIds, common_prefix, from_marked_text, sampled_ids
from tether.errors import DataError
from tether.types import Message, Prompt

Answer = str | tuple[Message, ...]
"""What follows a prompt: the text of one assistant turn, or several turns (with tools) up to the final answer."""

IMPLIED = "preference, prompt implied"
NOT_META = ("id", "prompt", "answer", "messages")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to learn."""

    prompt: Prompt
    answer: Answer
    field: str  # the record's field that holds the answer
    shape: str
    good: bool = True  # False where the record's label says so
    ended: bool = True  # False where the answer was cut off: it gets no end token
    sampled: SampledIds | None = None  # token ids of prompt and answer, where the record holds them


@dataclass(frozen=True)
class Preference:
    """Answers to one prompt and their ranks: 0 is best, equal ranks tie."""

    prompt: Prompt
    answers: tuple[Answer, ...]
    ranks: tuple[int, ...]
    ended: tuple[bool, ...]
    field: str
    shape: str
    sampled: SampledIds | None = None


# -- prompts ------------------------------------------------------------------------------------------------------


def prompt_of(record: Record, settings: ReadSettings, index: int) -> tuple[Prompt, str]:
    """The prompt of a record and the shape of the record. In a conversation it is everything up to the last answer.

    That answer becomes `meta["completion"]`; the record's other columns are kept in `meta` under their own names.
    """
    meta = {name: value for name, value in record.fields.items() if name not in NOT_META}
    messages, answer, shape = _asked(record)
    if answer is not None:
        meta.setdefault("completion", answer)
    reference = record.value("answer")
    identity = str(record.value("id")) if record.has("id") else str(index)
    found = replace(
        _prompt(record, settings, messages, identity),
        answer=None if reference is None else str(reference),
        meta=meta,
        as_messages=any(
            isinstance(record.value(field), list) for field in ("prompt", "messages", "conversations", "chosen")
        ),
    )
    return found, shape


def _asked(record: Record) -> tuple[tuple[Message, ...], str | None, str]:
    """(messages of the prompt, the answer where the shape has one, the shape)."""
    if record.has("prompt"):
        return prompt_messages(record), None, "prompt"
    for field in ("messages", "conversations"):
        if record.has(field):
            before, last = split_answer(record, field)
            return before, last[-1]["content"] if last else None, field
    if record.has("instruction"):
        output = record.value("output")
        return instruction_messages(record), output if isinstance(output, str) else None, "instruction"
    if record.has("chosen") and record.has("rejected"):
        prompt, _, shape = _pair(record)
        return prompt, None, shape
    if record.has("text"):
        raise DataError(
            f"{record.place}: field {record.column('text')!r} is plain text with no prompt in it: where the text is "
            "the prompt, set data.columns {prompt: text}"
        )
    return prompt_messages(record), None, "prompt"  # its error names the missing field


def prompt_messages(record: Record) -> tuple[Message, ...]:
    """The `prompt` field: a list of messages, or a text, which may use the Human/Assistant markers of HH."""
    try:
        value = record.required("prompt")
    except DataError as error:
        raise DataError(f"{error}{_hint(record)}") from None
    if isinstance(value, list):
        return record.messages("prompt")
    text = record.text("prompt")
    turns = from_marked_text(text)
    if turns is not None and len(turns) > 1 and not turns[-1]["content"]:
        return turns[:-1]  # "... \n\nAssistant:" is where the answer begins
    return turns if turns is not None and all(turn["content"] for turn in turns) else (_user(text),)


def _hint(record: Record) -> str:
    """Suggest the column that was probably meant."""
    known = ("question", "query", "problem", "input", "text", "content", "instruction")
    likely = next((name for name in known if isinstance(record.fields.get(name), str)), None)
    return f": set data.columns, such as {{prompt: {likely}}}" if likely else ""


def instruction_messages(record: Record) -> tuple[Message, ...]:
    """Alpaca's `instruction`, followed by its `input` where there is one."""
    text = record.text("instruction")
    further = record.value("input")
    return (_user(f"{text}\n\n{further}" if isinstance(further, str) and further.strip() else text),)


def split_answer(record: Record, field: str) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """(prompt, answer): the answer is the turns after the last user turn, if the assistant has the last turn."""
    turns = record.messages(field)
    if turns[-1]["role"] != "assistant":
        return turns, ()
    before, last = turns[:-1], turns[-1:]
    if not before:
        raise DataError(f"{record.place}: field {record.column(field)!r} holds an answer and no question")
    return before, last


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _prompt(record: Record, settings: ReadSettings, messages: Sequence[Message], identity: str) -> Prompt:
    """Add the system message, the tools and the template options."""
    system = (
        record.text("system")
        if record.has("system") and str(record.value("system")).strip()
        else settings.system_prompt
    )
    if system and messages[0]["role"] != "system":
        messages = (Message(role="system", content=system), *messages)
    return Prompt(identity, tuple(messages), tools=record.tools(), template_kwargs=dict(settings.chat_template_kwargs))


# -- demonstrations -----------------------------------------------------------------------------------------------


def demonstration_of(record: Record, settings: ReadSettings) -> Demonstration:
    """A prompt and its answer, from `messages`, `conversations`, `prompt` and `completion`, or Alpaca's columns."""
    for field in ("messages", "conversations"):
        if record.has(field):
            before, last = split_answer(record, field)
            if not last:
                raise DataError(
                    f"{record.place}: field {record.column(field)!r} must end with an answer of role assistant"
                )
            answer = _answer(last)
            prompt = _prompt(record, settings, before, record.place)
            said = (_good(record), record.flag("ended"), sampled_ids(record, 1))
            return Demonstration(prompt, answer, field, field, *said)
    if record.has("instruction"):
        asked, field, shape = instruction_messages(record), "output", "instruction"
        answer: Answer = record.text(field)
    elif not record.has("completion") and record.has("chosen") and record.has("rejected"):
        raise DataError(
            f"{record.place}: these are preferences, which SFT does not read: to learn what was chosen, set "
            f"data.columns {{{'messages' if isinstance(record.value('chosen'), list) else 'completion'}: chosen}}"
        )
    else:
        asked, field, shape = prompt_messages(record), "completion", "prompt and completion"
        answer = _answers(record, field)
        shape = "unpaired preference" if is_labelled(record) else shape
    prompt = _prompt(record, settings, asked, record.place)
    return Demonstration(prompt, answer, field, shape, _good(record), record.flag("ended"), sampled_ids(record, 1))


def _good(record: Record) -> bool:
    """Whether a label says that the answer is good; a label that is not true or false is an unrelated column."""
    return record.label() if is_labelled(record) else True


def is_labelled(record: Record) -> bool:
    """Whether the record is one answer with a label, good or bad (KTO's shape)."""
    value = record.value("label")
    return record.has("completion") and (isinstance(value, bool) or str(value).strip().lower() in ("true", "false"))


def _answers(record: Record, field: str) -> Answer:
    """The answer in a field: a text, or the turns of a conversation that follow the prompt."""
    if isinstance(record.required(field), list):
        return _answer(record.messages(field))
    return record.text(field)


def _answer(turns: tuple[Message, ...]) -> Answer:
    """The answer of some turns: just the text, where it is one plain turn."""
    plain = len(turns) == 1 and turns[0]["role"] == "assistant" and set(turns[0]) == {"role", "content"}
    return turns[0]["content"] if plain else turns


# -- preferences --------------------------------------------------------------------------------------------------


def preference_of(record: Record, settings: ReadSettings) -> Preference | None:
    """Ranked answers from `chosen` and `rejected`, or `answers` and optional `ranks`; None where both are equal."""
    if record.has("answers"):
        return _ranking(record, settings)
    messages, (chosen, rejected), shape = _pair(record)
    if chosen == rejected:
        return None
    longer = "chosen" if len(str(chosen)) > len(str(rejected)) else "rejected"
    ended = (record.flag("chosen_ended"), record.flag("rejected_ended"))
    prompt = _prompt(record, settings, messages, record.place)
    return Preference(prompt, (chosen, rejected), (0, 1), ended, longer, shape, sampled_ids(record, 2))


def _pair(record: Record) -> tuple[tuple[Message, ...], tuple[Answer, Answer], str]:
    """(prompt, (chosen, rejected), shape); without a prompt field, the prompt is the beginning that both share."""
    if not record.has("chosen") and not record.has("rejected") and not record.has("prompt"):
        record.required("prompt")
    both = [record.required(field) for field in ("chosen", "rejected")]
    if all(isinstance(value, list) for value in both):
        return _conversational_pair(record)
    chosen, rejected = record.text("chosen"), record.text("rejected")
    if record.has("prompt"):
        return prompt_messages(record), (chosen, rejected), "preference"
    marked = from_marked_text(chosen), from_marked_text(rejected)
    if marked[0] and marked[1]:
        prompt, answers = _apart(record, marked[0], marked[1])
        return prompt, answers, IMPLIED
    shared = common_prefix(chosen, rejected)
    if not chosen[:shared].strip():
        raise DataError(
            f"{record.place}: field 'prompt' is missing, and chosen and rejected have no beginning in common that "
            "could be the prompt"
        )
    return (_user(chosen[:shared]),), (chosen[shared:], rejected[shared:]), IMPLIED


def _conversational_pair(record: Record) -> tuple[tuple[Message, ...], tuple[Answer, Answer], str]:
    chosen, rejected = record.messages("chosen"), record.messages("rejected")
    explicit = prompt_messages(record) if record.has("prompt") else ()
    if explicit and chosen[0]["role"] == "assistant":
        return explicit, (_answer(chosen), _answer(rejected)), "preference"
    prompt, answers = _apart(record, chosen, rejected)
    return prompt, answers, "preference" if explicit else IMPLIED


def _apart(
    record: Record, chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Answer, Answer]]:
    """Split two conversations into the turns that both begin with, and the rest of each, an assistant turn first."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared or any(turns[shared]["role"] != "assistant" for turns in (chosen, rejected)):
        raise DataError(
            f"{record.place}: chosen and rejected must begin with the same turns and then differ in an assistant's turn"
        )
    return chosen[:shared], (_answer(chosen[shared:]), _answer(rejected[shared:]))


def _ranking(record: Record, settings: ReadSettings) -> Preference:
    answers = record.texts("answers")
    if len(answers) < 2:
        raise DataError(f"{record.place}: field 'answers' needs at least two answers to rank")
    ranks = record.value("ranks") if record.has("ranks") else list(range(len(answers)))
    if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(type(rank) is int for rank in ranks):
        raise DataError(f"{record.place}: field 'ranks' must be a list of {len(answers)} whole numbers, 0 for the best")
    if len(set(ranks)) < 2:
        raise DataError(f"{record.place}: field 'ranks' says that all answers tie: there is nothing to learn from it")
    ended = record.value("ended") if record.has("ended") else [True] * len(answers)
    if not isinstance(ended, list) or len(ended) != len(answers) or not all(type(end) is bool for end in ended):
        raise DataError(f"{record.place}: field 'ended' must be a list of {len(answers)} times true or false")
    prompt = _prompt(record, settings, prompt_messages(record), record.place)
    sampled = sampled_ids(record, len(answers))
    return Preference(prompt, tuple(answers), tuple(ranks), tuple(ended), "answers", "ranking", sampled)


def grouped_by_prompt(demonstrations: Sequence[Demonstration]) -> list[Preference]:
    """Turn answers labeled good or bad into rankings, for the prompts that have both."""
    groups: dict[str, list[Demonstration]] = {}
    for each in demonstrations:
        groups.setdefault(repr((each.prompt.messages, each.prompt.tools)), []).append(each)
    return [
        Preference(
            several[0].prompt,
            tuple(each.answer for each in several),
            tuple(int(not each.good) for each in several),
            tuple(each.ended for each in several),
            "completion",
            "unpaired preference",
        )
        for several in groups.values()
        if len({each.good for each in several}) == 2
    ]
