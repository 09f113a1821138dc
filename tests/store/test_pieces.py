"""The pieces of a row, joined, are its text."""

from hypothesis import given
from hypothesis import strategies as st

from tether.hub.tiny_model import END_ID, tiny_tokenizer
from tether.store.tokens import token_pieces

TOKENIZER = tiny_tokenizer()
PIECES = token_pieces(TOKENIZER)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_joined_they_are_the_text(text):
    tokens = TOKENIZER.encode(text)
    pieces = PIECES(tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == text


@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_at_all_give_a_piece_each_and_decode_as_the_tokenizer_does(tokens):
    pieces = PIECES(tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == TOKENIZER.decode(tokens)


def test_a_character_of_several_tokens_stands_with_its_last():
    assert PIECES(TOKENIZER.encode("a€")) == ["a", "", "", "€"]


def test_half_a_character_at_the_end_is_shown_as_a_sign():
    assert PIECES(TOKENIZER.encode("€")[:2]) == ["", "\ufffd"]


def test_special_tokens_are_spelled_out():
    assert PIECES([END_ID]) == ["<|end|>"] and PIECES([]) == []


class Sentencepiece:
    """As Llama 2 spells its tokens."""

    spelled = ("▁Hello", "▁world", "<0xE2>", "<0x82>", "<0xAC>", "s")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.spelled[token]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.spelled[token] for token in tokens)


def test_sentencepiece_spaces_and_bytes_are_read_as_what_they_stand_for():
    assert token_pieces(Sentencepiece())(range(6)) == [" Hello", " world", "", "", "€", "s"]
