from __future__ import annotations

import torch

from recap.backbones.text import HashedWords

encode = HashedWords(text_len=4, text_dim=8)


def test_zeros_follow_the_last_word() -> None:
    slots = encode("A red fox.")
    assert slots.shape == (1, 4, 8)
    assert slots[0, :3].abs().sum(-1).min() > 0 and torch.equal(slots[0, 3], torch.zeros(8))
    assert torch.equal(encode(""), torch.zeros(1, 4, 8))


def test_words_past_the_last_slot_are_dropped() -> None:
    assert torch.equal(encode("one two three four five"), encode("one two three four"))


def test_a_word_is_the_same_wherever_it_stands_and_words_differ() -> None:
    assert torch.equal(encode("red Fox")[0, 1], encode("fox")[0, 0])
    assert not torch.equal(encode("fox"), encode("dog"))


def test_vectors_are_unit_gaussian() -> None:
    wide = HashedWords(text_len=1, text_dim=4096)("fox")
    assert abs(float(wide.mean())) < 0.1 and 0.9 < float(wide.std()) < 1.1


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    encode("a red fox")
    assert torch.equal(before, torch.random.get_rng_state())
