"""What was answered once is not asked again, unless the tensor was written to or is gone."""

from __future__ import annotations

import gc
import weakref

import torch

from tether.device_transfer import tensor_cached


def test_a_question_is_asked_once_of_each_tensor():
    asked = []
    count = tensor_cached(lambda mask: asked.append(1) or int(mask.sum()))
    ones, more = torch.ones(3), torch.ones(3)
    assert [count(ones), count(ones), count(more)] == [3, 3, 3]
    assert len(asked) == 2  # equal tensors are still two


def test_a_tensor_that_was_written_to_is_asked_again():
    count = tensor_cached(lambda mask: int(mask.sum()))
    mask = torch.ones(3)
    assert count(mask) == 3
    mask[0] = 0
    assert count(mask) == 2


def test_an_answer_that_is_known_is_given():
    count = tensor_cached(lambda mask: int(mask.sum()))
    mask = torch.ones(3)
    count.set(mask, 7)
    assert count(mask) == 7


def test_answers_go_with_what_they_are_about():
    answer = tensor_cached(lambda mask: torch.zeros(2))
    mask = torch.ones(3)
    found = weakref.ref(answer(mask))
    assert found() is not None
    del mask
    gc.collect()
    assert found() is None
