"""Novelty by keys: it equals a comparison token by token, and calls new what nothing kept resembles."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from recap.admission.keys import KeyNoveltyConfig
from recap.attention.likeness import distances, spread_layers, usual_distance
from recap.memory.bank import NoveltyBank
from recap.types import Block


def block_of(index):
    return Block(index, 3 * index, 3, ("",))


def keys_like(looks, spec, noise=0.02):
    """Keys L 1 N H D of a block whose tokens look like these, up to noise; a look is H D."""
    keys = torch.stack(looks)[None, None].expand(spec.layers, 1, -1, -1, -1)
    return keys + noise * torch.randn(keys.shape)


def feed(admission, bank, index, keys):
    admission.read_keys(keys)
    offered = admission.propose(block_of(index), torch.zeros(len(keys[0]), 1))
    bank.admit(offered, keys, keys, admission.retain)
    return offered.score


@pytest.fixture
def looks(spec):
    """Two dozen looks that have nothing in common."""
    return list(torch.randn(24, spec.heads, spec.head_dim))


def test_what_was_seen_is_not_new_and_a_new_look_counts_once(spec, looks):
    admission, bank = KeyNoveltyConfig().build(spec, None), NoveltyBank(8, spec.layers)
    frame = [looks[n // 2] for n in range(spec.frame_tokens)]
    assert not feed(admission, bank, 0, keys_like(frame * 3, spec)).any()
    assert not feed(admission, bank, 1, keys_like(frame * 3, spec)).any()
    stranger = [looks[20], *frame[1:]]
    scores = feed(admission, bank, 2, keys_like([*frame, *stranger, *stranger], spec))
    assert scores.nonzero()[:, 1].tolist() == [spec.frame_tokens] and scores.max() > 0.5
    # It is in the bank now.
    assert not feed(admission, bank, 3, keys_like(stranger * 3, spec)).any()
    assert feed(admission, bank, 4, keys_like([looks[21], *frame[1:]] * 3, spec)).count_nonzero() == 1


def test_what_only_fills_the_bank_is_no_example(spec, looks):
    """A slot that was filled by a token of score 0 must not hide the return of what looks like it."""
    admission = KeyNoveltyConfig(margin=50.0).build(spec, None)
    bank, frame = NoveltyBank(40, spec.layers), [looks[n] for n in range(spec.frame_tokens)]
    feed(admission, bank, 0, keys_like(frame * 3, spec))
    assert bank.count and not admission.state()["descriptor"].any()


def naive(blocks, spec, layers, margin, capacity):
    """The same by loops over tokens: scores of every block, and what a bank of highest scores then holds."""

    def look(keys, token):
        return [functional.normalize(keys[layer, 0, token].flatten(), dim=0) for layer in layers]

    def cosine(one, other):
        return sum(float(a @ b) for a, b in zip(one, other, strict=True)) / len(layers)

    size, bank, first, limit, found = spec.frame_tokens, [], [], 0.0, []
    for index, keys in enumerate(blocks):
        tokens = [look(keys, token) for token in range(3 * size)]
        if not first:
            first = tokens[:size]
            nearest = sorted(1 - max(cosine(t, o) for o in first if o is not t) for t in first)
            place = 0.75 * (size - 1)
            low, share = int(place), place - int(place)
            limit = margin * (nearest[low] + share * (nearest[min(low + 1, size - 1)] - nearest[low]))
        known = first + [token for score, _, token in bank if score > 0]
        scores = []
        for frame in range(3):
            own = tokens[frame * size : (frame + 1) * size]
            distances = [1 - max(0.0, max(cosine(token, other) for other in known)) for token in own]
            scores += [distance if distance > limit else 0.0 for distance in distances]
            known = known + [t for t, score in zip(own, scores[-size:], strict=True) if score > 0]
        found.append(scores)
        bank += [(score, (index, n), tokens[n]) for n, score in enumerate(scores)]
        bank = sorted(bank, key=lambda entry: (-entry[0], entry[1]))[:capacity]
    return found, bank


def test_it_equals_a_comparison_token_by_token(spec, looks):
    torch.manual_seed(2)
    config, capacity = KeyNoveltyConfig(num_layers=2, margin=1.5), 7
    admission, bank = config.build(spec, None), NoveltyBank(capacity, spec.layers)
    frame = [looks[n // 2] for n in range(spec.frame_tokens)]
    blocks = [keys_like(frame * 3, spec, 0.3)]
    for _ in range(6):
        shown = [look if torch.rand(()) > 0.1 else looks[int(torch.randint(24, ()))] for look in frame * 3]
        blocks.append(keys_like(shown, spec, 0.3))
    wanted, kept = naive(blocks, spec, spread_layers(2, spec.layers), 1.5, capacity)
    assert any(any(scores) for scores in wanted[1:])
    for index, (keys, scores) in enumerate(zip(blocks, wanted, strict=True)):
        torch.testing.assert_close(
            feed(admission, bank, index, keys)[0], torch.tensor(scores), atol=1e-5, rtol=0
        )
    held = sorted(score for score, _, _ in kept)
    assert bank.entries.score[0].sort().values.tolist() == pytest.approx(held, abs=1e-5)


def test_rows_of_a_batch_have_their_own_opening(spec, looks):
    frame = [looks[n // 2] for n in range(spec.frame_tokens)]
    rows = [
        keys_like(frame * 3, spec),
        keys_like([looks[20 + n % 4] for n in range(spec.frame_tokens)] * 3, spec),
    ]
    together, alone = (
        KeyNoveltyConfig().build(spec, None),
        [KeyNoveltyConfig().build(spec, None) for _ in rows],
    )
    for index in range(2):
        later = rows if not index else rows[::-1]
        together.read_keys(torch.cat(later, dim=1))
        both = together.propose(block_of(index), torch.zeros(2, 1)).score
        for row, (one, keys) in enumerate(zip(alone, later, strict=True)):
            one.read_keys(keys)
            own = one.propose(block_of(index), torch.zeros(1, 1)).score[0]
            torch.testing.assert_close(both[row], own, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("number", "layers", "chosen"), [(3, 30, [5, 15, 25]), (3, 6, [1, 3, 5]), (9, 2, [0, 1])]
)
def test_layers_are_spread_evenly(number, layers, chosen):
    assert spread_layers(number, layers) == chosen


def test_the_usual_distance_leaves_out_the_strangest_quarter():
    """Eighty tokens, each a step of 0.01 from the next, and twenty that are far from all."""
    angle = torch.cat([0.01 * torch.arange(80), 1.2 + 0.1 * torch.arange(20)]).double()
    tokens = torch.stack([angle.cos(), angle.sin()], dim=-1)[None]
    assert float(usual_distance(tokens)) == pytest.approx(1 - math.cos(0.01), rel=1e-6)


def test_rounded_as_on_a_gpu_a_saved_state_continues_bit_for_bit(spec, looks, monkeypatch):
    for module in ("admission.keys", "attention.likeness"):
        monkeypatch.setattr(f"recap.{module}.for_products", torch.Tensor.half)
    frame = [looks[n // 2] for n in range(spec.frame_tokens)]
    shown = [frame, *([looks[20 + index], *frame[1:]] for index in range(3))]
    blocks = [keys_like(each * 3, spec) for each in shown]
    one, bank = KeyNoveltyConfig().build(spec, None), NoveltyBank(8, spec.layers)
    for index in range(3):
        feed(one, bank, index, blocks[index])
    saved = one.state()
    assert {value.dtype for name, value in saved.items() if name != "place"} == {torch.float32}
    other, other_bank = KeyNoveltyConfig().build(spec, None), NoveltyBank(8, spec.layers)
    other.load_state(saved)
    other_bank.take_over(bank)
    scores = [feed(rule, kept, 3, blocks[3]) for rule, kept in ((one, bank), (other, other_bank))]
    assert scores[0].any() and torch.equal(*scores)
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


@pytest.mark.parametrize("apart", [0.0, 0.03, 0.3, 3.0])
def test_half_precision_is_off_by_little_near_and_far(apart):
    """Distances as a GPU computes them, at the size of 1.3B: three layers of 12 heads of 128 channels."""
    tokens = functional.normalize(torch.randn(2, 40, 4608), dim=-1)
    near = functional.normalize(tokens + apart * torch.randn(tokens.shape) / 4608**0.5, dim=-1)
    known = torch.cat([near, torch.zeros(2, 1, 4608)], dim=1)
    exact = 1 - tokens.double() @ known.double().transpose(1, 2)
    torch.testing.assert_close(distances(tokens, known).double(), exact, atol=1e-6, rtol=0)
    half = distances(tokens.half(), known.half())
    torch.testing.assert_close(half.double(), exact, atol=3e-5, rtol=5e-4)
    # A zero is like nothing, whatever the precision.
    assert (half[..., -1] == 1).all()


@pytest.mark.parametrize("settings", [{"num_layers": 0}, {"margin": -1.0}, {"margin": math.nan}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        KeyNoveltyConfig(**settings)


def test_a_memory_without_keys_is_refused(spec):
    with pytest.raises(ValueError, match="passes no keys"):
        KeyNoveltyConfig().build(spec, None).propose(block_of(0), torch.zeros(1, 1))
