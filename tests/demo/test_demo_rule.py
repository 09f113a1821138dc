"""The demo's true rule against a person's judgement: answers to shipped prompts, and which of two is better."""

import pytest
import torch

from tether.demo.rule import PARTS, parts_of, read_prompts, rule_score, rule_value, split_close
from tether.types import Rollout

PROMPTS = {prompt.id: prompt for name in ("prompts.jsonl", "held_out.jsonl") for prompt in read_prompts(name)}

GARLIC, DOUGH, LETTUCE = "cooking-held-01", "cooking-held-03", "gardening-held-01"
SEAT, SLEEP, BIG_TEST = "travel-held-01", "sleep-01", "study-held-06"
SCAM, CAT, TORNADO = "money-held-05", "pets-held-02", "weather-held-03"
CHORUS, SALT, GROUT = "music-held-02", "health-held-04", "home-repair-held-05"
SPAM, SECRET, CRATERS, HERO = "technology-held-02", "friendship-held-02", "science-held-03", "books-held-06"

HELPFUL = [  # short, finished, and they answer the question
    (GARLIC, "Crush each clove with the flat side of a knife, and the skin slips off."),
    (GARLIC, "Shake the cloves hard in a jar with a lid. Enjoy your cooking!"),
    (DOUGH, "Kneading builds gluten, which makes the dough elastic and lets it rise."),
    (LETTUCE, "Cut the outer leaves first and leave the center to grow. Happy gardening!"),
    (SEAT, "Choose an aisle seat for room, or a window seat in front of the wing for the view."),
    (SLEEP, "Most adults need seven to nine hours a night."),
    (BIG_TEST, "Review your notes briefly, pack your bag and go to bed early. Good luck!"),
    (SCAM, "Be careful when a stranger uses pressure, wants you to pay fast or promises too much."),
    (CAT, "Check for a collar and a tag, and ask a vet to look for a chip."),
    (TORNADO, "Go to a basement or an inner room on the lowest floor, away from windows. Stay safe!"),
    (CHORUS, "It is the part of a song that repeats between the verses, often with the main melody."),
    (SALT, "Too much sodium raises blood pressure, which strains the heart."),
    (GROUT, "Grout fills the gaps between tiles. Scrub it with baking soda and an old toothbrush."),
    (SPAM, "Mark them as junk, block the sender and unsubscribe from lists you never read."),
    (SECRET, "Tell your friend calmly how you feel, and talk about trust. It will work out well!"),
    (CRATERS, "Rocks from space hit the moon, and without air nothing wears the marks away."),
    (HERO, "The main character is called the protagonist."),
]
USELESS = [  # off topic, evasive, repetitive, broken, or only an echo of the question
    (GARLIC, "You can try one of your favorite garlic shops!"),
    (GARLIC, "Garlic is a lot of fun to peel. Enjoy your meal!"),
    (GARLIC, "The fastest way to peel a lot of garlic is to peel a lot of garlic fast."),
    (GARLIC, "Garlic clove knife crush garlic skin press jar bowl shake lid garlic."),
    (GARLIC, "Crush the clove. Crush the clove. Crush the clove."),
    (DOUGH, "A warm week provides plenty of time for your family to love your home!"),
    (DOUGH, "That is a great question! Bread is wonderful."),
    (LETTUCE, "It depends."),
    (LETTUCE, "I am not sure, but I hope it grows well for you!"),
    (SEAT, "Have a great trip!"),
    (SEAT, "What kind of airplane will you be on?"),
    (SLEEP, "Sleep sleep sleep sleep sleep."),
    (SLEEP, "There are many answers to that, and every adult is different."),
    (BIG_TEST, "Enjoy the fun! Enjoy the fun! Enjoy the fun! Enjoy the fun!"),
    (SCAM, "Money is a part of life, and everyone can learn to love it."),
    (CAT, "<|im_start|>user: Check the collar and the tag."),
    (TORNADO, "As an AI, I cannot help with a tornado."),
    (CHORUS, "Yes."),
    (SALT, "Xkcd zzzt salt brrrng blood qwrtp."),
    (GROUT, ""),
    (SPAM, "Let me know if you would like some tips!"),
    (SECRET, "One of the best movies of the year is about a secret garden."),
    (CRATERS, "The moon is beautiful tonight, and it is fun to look at!"),
    (HERO, "The main character of a story is a story with a main character."),
]
BETTER_THAN = [  # (prompt, better, worse), both of some use
    (GARLIC, "Crush each clove with a knife. Enjoy your meal!", "Crush each clove with a knife."),  # warm
    (GARLIC, "Crush each clove with a knife.", "Use a knife for the garlic."),  # says more
    (SALT, "Salt raises blood pressure.", "Salt is bad for the body in many ways."),  # answers
    (SLEEP, "Adults need seven to nine hours of sleep.", "Seven."),  # a sentence
    (CAT, "Check its collar and call a shelter.", "Look at the cat for a while."),
]


def answer(prompt: str, text: str, finish: str = "stop") -> Rollout:
    empty = torch.zeros(2)
    return Rollout(PROMPTS[prompt], 0, 0, empty.long(), empty.bool(), empty, empty, text, finish)


def score(prompt: str, text: str, finish: str = "stop") -> float:
    return rule_score(answer(prompt, text, finish)).value


def test_every_helpful_answer_is_above_every_useless_one():
    assert len(HELPFUL) + len(USELESS) >= 40
    good = {text: score(prompt, text) for prompt, text in HELPFUL}
    bad = {text: score(prompt, text) for prompt, text in USELESS}
    assert {text: value for text, value in good.items() if value < 0.75} == {}
    assert {text: value for text, value in bad.items() if value > 0.3} == {}


@pytest.mark.parametrize(("prompt", "better", "worse"), BETTER_THAN)
def test_the_better_of_two_useful_answers_scores_higher(prompt: str, better: str, worse: str):
    assert score(prompt, better) > score(prompt, worse)


@pytest.mark.parametrize(("prompt", "text"), HELPFUL)
def test_an_answer_that_was_cut_off_or_drawn_out_scores_lower(prompt: str, text: str):
    whole = score(prompt, text)
    assert score(prompt, text[: len(text) * 2 // 3].rsplit(" ", 1)[0], "length") < whole - 0.2
    padding = " It matters to read that more than once, since people often hear it said in other ways by other people."
    assert score(prompt, split_close(text)[0] + padding + padding.replace("people", "others")) < whole


def test_an_answer_belongs_to_its_question():
    """The same good text under another question is worth little: the rule is about the pair of them."""
    own = [score(prompt, text) for prompt, text in HELPFUL]
    moved = [score(HELPFUL[place - 5][0], text) for place, (_, text) in enumerate(HELPFUL)]
    assert min(own) >= 0.75
    assert sorted(moved)[len(moved) // 2] <= 0.25 and sum(moved) / len(moved) <= 0.3, moved


def test_the_parts_multiply_so_that_style_alone_is_worth_nothing():
    parts = dict.fromkeys(PARTS, 1.0)
    assert rule_value(parts) == pytest.approx(1.0)
    for name in ("on_point", "sound", "direct"):
        assert rule_value(parts | {name: 0.0}) == 0.0
    assert rule_value(parts | {"warm": 0.0}) == pytest.approx(0.8)
    assert rule_value(parts | {"finished": 0.0}) == pytest.approx(0.1)


def test_words_of_the_close_answer_nothing_and_the_close_is_short_and_kind():
    parts = parts_of(
        "It is fun. Enjoy the knife and clove!", ended=True, keywords=["garlic"], expected=["clove", "knife"]
    )
    assert parts["on_point"] == 0.0
    assert split_close("Cut it. Enjoy!") == ("Cut it.", "Enjoy!") and split_close("Enjoy!") == ("Enjoy!", "")
    for text, warm in (("Cut it. Enjoy!", 1.0), ("Cut it. Beware of the dog!", 0.0), ("Cut it.", 0.0), ("Enjoy!", 0.0)):
        assert parts_of(text, ended=True, keywords=())["warm"] == warm, text
