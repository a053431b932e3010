"""Eq. (sink): the bias, the fused path, the rotary phases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_softmax import DEVICES, ROLES, random_segments, reference, relative_error

from recap.attention.attend import Readable, attend
from recap.attention.rope import bands, frequencies, rotate, rotation
from recap.types import NO_TOKEN, Role


def test_reinforcement_five_equals_the_sink_repeated_five_times():
    query = torch.randn(2, 7, 3, 12, dtype=torch.float64)
    segments = random_segments([4, 3, 5, 7], bias=math.log(5))
    sink = segments[0]
    repeated = Readable(Role.SINK, sink.keys.repeat(1, 5, 1, 1), sink.values.repeat(1, 5, 1, 1), 0.0)
    for path in (reference, attend):
        biased, plain = path(query, segments), path(query, [repeated, *segments[1:]])
        torch.testing.assert_close(biased.output, plain.output, rtol=1e-12, atol=1e-12)
        for role in ROLES:
            torch.testing.assert_close(biased.shares[role], plain.shares[role], rtol=1e-12, atol=1e-12)


def test_share_of_the_sink_has_its_closed_form_at_equal_logits():
    query = torch.zeros(1, 2, 1, 4)
    segments = random_segments(
        [4, 3, 5, 7], batch=1, heads=1, channels=4, dtype=torch.float32, bias=math.log(5)
    )
    shares = attend(query, segments).shares
    assert shares[Role.SINK].item() == pytest.approx(5 * 4 / (5 * 4 + 3 + 5 + 7), abs=1e-6)
    assert sum(s.item() for s in shares.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("by_role", [True, False])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.tuples(*[st.integers(0, 40)] * 3, st.integers(1, 40)),
    batch=st.integers(1, 2),
    factor=st.floats(0.1, 20),
)
def test_fused_equals_reference(device, dtype, tolerance, by_role, lengths, batch, factor):
    segments = random_segments(
        lengths, batch=batch, channels=16, dtype=dtype, device=device, bias=math.log(factor)
    )
    query = torch.randn(batch, 9, 3, 16, dtype=torch.float64).to(device, dtype)
    exact = reference(
        query.double(), [s._replace(keys=s.keys.double(), values=s.values.double()) for s in segments]
    )
    fused = attend(query, segments, by_role=by_role)
    assert fused.output.dtype == dtype
    assert relative_error(fused.output, exact.output) < tolerance
    for role, share in fused.shares.items():
        torch.testing.assert_close(share.double(), exact.shares[role], rtol=0, atol=tolerance)
    # Reported are all roles, or those that have a kernel of their own.
    filled = {role for role, length in zip(ROLES, lengths, strict=True) if length}
    others = filled - {Role.SINK} if math.log(factor) else filled
    assert set(fused.shares) == (filled if by_role or len(others) == 1 else filled - others)


def test_one_token_of_one_segment():
    query = torch.randn(2, 1, 3, 12)
    segments = random_segments([0, 0, 0, 1], dtype=torch.float32)
    fused = attend(query, segments)
    torch.testing.assert_close(fused.output, segments[-1].values)
    assert fused.shares[Role.CURRENT].tolist() == [1.0, 1.0]


def test_segments_of_equal_role_and_bias_are_one_group():
    query = torch.randn(1, 5, 3, 12)
    keys, values = torch.randn(2, 1, 8, 3, 12)
    whole = attend(query, [Readable(Role.PRIOR, keys, values, 0.0)])
    halves = [
        Readable(Role.PRIOR, keys[:, half], values[:, half], 0.0) for half in (slice(0, 3), slice(3, 8))
    ]
    assert torch.equal(attend(query, halves).output, whole.output)


def test_no_keys_at_all_is_refused():
    with pytest.raises(ValueError, match="0 keys"):
        attend(torch.randn(2, 1, 3, 12), random_segments([0, 0, 0, 0], dtype=torch.float32))


def test_rotary_check_values():
    assert bands(128) == (22, 21, 21)
    time, side = frequencies(22), frequencies(21)
    expected = torch.tensor([1, 0.6579332, 0.4328761, 0.2848036], dtype=torch.float64)
    torch.testing.assert_close(time[:4], expected, rtol=0, atol=1e-7)
    assert time[-1].item() == pytest.approx(1.519911e-4, rel=1e-6)
    assert side[1].item() == pytest.approx(0.6449467, abs=1e-7)
    assert side[-1].item() == pytest.approx(1.550516e-4, rel=1e-6)
    x = torch.zeros(1, 1, 1, 128)
    x[..., 0] = 1
    turned = rotate(x, rotation(torch.tensor([[[1.0, 0.0, 0.0]]]), 128)).flatten()
    assert turned[:2].tolist() == pytest.approx([math.cos(1), math.sin(1)], abs=1e-6)
    assert turned[2:].abs().max() == 0


def test_bands_turn_with_their_own_axis():
    x = torch.randn(1, 1, 1, 128)
    for axis, touched in ((0, slice(0, 44)), (1, slice(44, 86)), (2, slice(86, 128))):
        positions = torch.zeros(1, 1, 3)
        positions[..., axis] = 0.7
        changed = rotate(x, rotation(positions, 128)) != x
        assert changed[..., touched].all()
        assert changed.sum() == touched.stop - touched.start


@given(shift=st.floats(-5000, 5000), start=st.floats(0, 3))
@settings(max_examples=20, deadline=None)
def test_scores_depend_on_phase_differences_only(shift, start):
    query, keys = torch.randn(2, 1, 6, 2, 24, dtype=torch.float64)
    positions = torch.rand(1, 6, 3, dtype=torch.float64) * 5
    positions[..., 0] += start
    moved = positions + torch.tensor([shift, 0.0, 0.0], dtype=torch.float64)

    def scores(where):
        turn = rotation(where, 24, torch.float64)
        return torch.einsum("bqhd,bkhd->bhqk", rotate(query, turn), rotate(keys, turn))

    torch.testing.assert_close(scores(moved), scores(positions), rtol=1e-9, atol=1e-9)


# --- a bias for each token ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_role", [True, False])
def test_tokens_that_are_none_are_not_seen_and_one_counted_thrice_counts_thrice(device, by_role):
    """Row 0 has an empty slot and a token of weight three, row 1 nothing but empty slots."""
    segments = random_segments([4, 3, 5, 7], dtype=torch.float32, device=device, bias=math.log(5))
    query = torch.randn(2, 7, 3, 12, device=device)
    bank = segments[1]
    bias = torch.tensor([[NO_TOKEN, math.log(3), 0.0], [NO_TOKEN] * 3], device=device)
    got = attend(query, [segments[0], bank._replace(token_bias=bias), *segments[2:]], by_role=by_role)
    for row, kept in enumerate(([1, 1, 1, 2], [])):
        rows = [
            Readable(s.role, s.keys[row : row + 1], s.values[row : row + 1], s.log_bias) for s in segments
        ]
        rows[1] = Readable(Role.BANK, rows[1].keys[:, kept], rows[1].values[:, kept], 0.0)
        want = reference(query[row : row + 1].double(), [_doubled(each) for each in rows])
        torch.testing.assert_close(got.output[row].double(), want.output[0], rtol=1e-4, atol=1e-5)
        share = want.shares.get(Role.BANK, torch.zeros(1))
        torch.testing.assert_close(got.shares[Role.BANK][row].double().cpu(), share[0].double().cpu())


def _doubled(segment):
    return segment._replace(keys=segment.keys.double(), values=segment.values.double())
