from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wan_fakes import ONE_LAYER, fresh, noise_of, random_model, turn

from recap.backbones.wan.layers import RMSNorm, sinusoid
from recap.backbones.wan.model import TextConditioning
from recap.backbones.wan.spec import UNTRAINED, WanSpec
from recap.types import Role

DOUBLE = torch.float64
State = dict[str, Tensor]


def text_rows(rows: int, spec: WanSpec = UNTRAINED) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, spec.text_len, spec.text_dim, generator=generator, dtype=DOUBLE)


# --- a second writing of the forward pass, one step at a time, from the description of the architecture ---


def linear(x: Tensor, state: State, name: str) -> Tensor:
    return torch.einsum("...i,oi->...o", x, state[f"{name}.weight"]) + state[f"{name}.bias"]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(x: Tensor, source: Tensor, state: State, name: str, spec: WanSpec, at: Tensor | None) -> Tensor:
    query = rms(linear(x, state, f"{name}.q"), state[f"{name}.norm_q.weight"], spec.eps)
    keys = rms(linear(source, state, f"{name}.k"), state[f"{name}.norm_k.weight"], spec.eps)
    values = linear(source, state, f"{name}.v")
    read = torch.zeros_like(query)
    for head in range(spec.heads):
        mine = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        q, k = query[..., mine], keys[..., mine]
        if at is not None:
            q, k = turn(q.unsqueeze(2), at).squeeze(2), turn(k.unsqueeze(2), at).squeeze(2)
        logits = torch.einsum("bnd,bmd->bnm", q, k) / spec.head_dim**0.5
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        read[..., mine] = torch.einsum("bnm,bmd->bnd", weights, values[..., mine])
    return linear(read, state, f"{name}.o")


def patches(latents: Tensor, state: State, spec: WanSpec) -> Tensor:
    frames = []
    for f in range(latents.shape[1]):
        for y in range(0, spec.latent_size[0], 2):
            for x in range(0, spec.latent_size[1], 2):
                square = latents[:, f, :, y : y + 2, x : x + 2]
                frames.append(torch.einsum("bcyx,mcyx->bm", square, state["patch_embedding.weight"][:, :, 0]))
    return torch.stack(frames, 1) + state["patch_embedding.bias"]


def reference(
    latents: Tensor, times: Tensor, text: Tensor, phases: Tensor, state: State, spec: WanSpec
) -> Tensor:
    rows, columns = spec.grid
    tokens = [(float(t), y, x) for t in phases for y in range(rows) for x in range(columns)]
    at = torch.tensor([tokens], dtype=DOUBLE)
    x = patches(latents, state, spec)
    each = spec.freq_dim // 2
    frequencies = torch.tensor([10000 ** (-j / each) for j in range(each)], dtype=DOUBLE)
    angles = times.to(DOUBLE)[..., None] * frequencies
    wave = torch.cat((angles.cos(), angles.sin()), -1)
    e = linear(silu(linear(wave, state, "time_embedding.0")), state, "time_embedding.2")
    e0 = linear(silu(e), state, "time_projection.1").view(*times.shape, 6, spec.dim)
    prompt = linear(gelu(linear(text, state, "text_embedding.0")), state, "text_embedding.2")
    per_token = [e0[:, :, i].repeat_interleave(rows * columns, 1) for i in range(6)]
    for layer in range(spec.layers):
        name = f"blocks.{layer}"
        s1, c1, g1, s2, c2, g2 = (state[f"{name}.modulation"][0, i] + per_token[i] for i in range(6))
        own = layer_norm(x, spec.eps) * (1 + c1) + s1
        x = x + g1 * attention(own, own, state, f"{name}.self_attn", spec, at)
        asked = layer_norm(x, spec.eps) * state[f"{name}.norm3.weight"] + state[f"{name}.norm3.bias"]
        x = x + attention(asked, prompt, state, f"{name}.cross_attn", spec, None)
        inner = gelu(linear(layer_norm(x, spec.eps) * (1 + c2) + s2, state, f"{name}.ffn.0"))
        x = x + g2 * linear(inner, state, f"{name}.ffn.2")
    shift, scale = (state["head.modulation"][0, i] + e.repeat_interleave(rows * columns, 1) for i in range(2))
    flat = linear(layer_norm(x, spec.eps) * (1 + scale) + shift, state, "head.head")
    out = torch.zeros_like(latents)
    for n, (f, y, x0) in enumerate(
        (f, y, x0) for f in range(latents.shape[1]) for y in range(rows) for x0 in range(columns)
    ):
        for place in range(4):
            channels = flat[:, n, place * spec.out_channels : (place + 1) * spec.out_channels]
            out[:, f, :, 2 * y + place // 2, 2 * x0 + place % 2] = channels
    return out


@pytest.mark.parametrize("layers", [1, 2])
def test_forward_agrees_with_the_step_by_step_reference(layers: int) -> None:
    spec = replace(ONE_LAYER, layers=layers)
    model = random_model(spec)
    latents, text = noise_of(1, rows=2, dtype=DOUBLE)(), text_rows(2)
    times = torch.tensor([[937.5, 0.0, 12.25], [625.0, 833.25, 1000.0]], dtype=DOUBLE)
    context = fresh(spec, first=3)
    flow = model(latents, times, model.condition(text), context)
    expected = reference(latents, times, text, context.phases, dict(model.state_dict()), spec)
    assert (flow - expected).abs().max() < 1e-10
    assert flow.std() > 0.1


def test_sinusoid_at_a_warped_time() -> None:
    wave = sinusoid(torch.tensor(937.5), 256)
    assert wave.dtype == DOUBLE and wave.shape == (256,)
    expected = [0.26230, 0.58049, 0.25722, 0.99493, 0.96499, -0.81427, 0.96635, 0.10057]
    assert wave[[0, 1, 2, 127, 128, 129, 130, 255]].tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_rms_norm_multiplies_its_weight_after_rounding_back(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(96, 1e-6).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(96, generator=generator))
    x = torch.randn(5, 96, generator=generator).to(dtype)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    expected = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype) * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_unpatchify_takes_channels_fastest_then_columns_then_rows() -> None:
    model = random_model(ONE_LAYER)
    rows, columns = ONE_LAYER.grid
    flat = torch.arange(3 * rows * columns * 64, dtype=DOUBLE).view(1, 3, rows * columns, 64)
    out = model.unpatchify(flat)
    assert out.shape == (1, 3, 16, *ONE_LAYER.latent_size)
    for f, token_y, token_x, y, x, c in [(0, 0, 0, 0, 0, 5), (1, 2, 3, 0, 1, 0), (2, 3, 5, 1, 0, 15)]:
        inside = (y * 2 + x) * 16 + c
        assert (
            out[0, f, c, 2 * token_y + y, 2 * token_x + x] == flat[0, f, token_y * columns + token_x, inside]
        )


def test_one_time_for_all_equals_that_time_per_frame() -> None:
    model = random_model(UNTRAINED)
    latents, conditioning = noise_of(1, rows=2, dtype=DOUBLE)(), model.condition(text_rows(2))
    one = model(latents, 937.5, conditioning, fresh())
    each = model(latents, torch.full((2, 3), 937.5), conditioning, fresh())
    torch.testing.assert_close(one, each, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(one, model(latents, 625.0, conditioning, fresh()))


def test_rows_of_a_batch_do_not_mix() -> None:
    model = random_model(UNTRAINED)
    latents, text = noise_of(1, rows=3, dtype=DOUBLE)(), text_rows(3)
    batch = model(latents, 625.0, model.condition(text), fresh())
    for row in range(3):
        alone = model(latents[row : row + 1], 625.0, model.condition(text[row : row + 1]), fresh())
        torch.testing.assert_close(batch[row : row + 1], alone, atol=1e-12, rtol=1e-12)


def test_cross_attention_has_no_gate_and_reads_norm3() -> None:
    """Both gates shut, a block adds the prompt's part alone, and a dead norm3 makes that blind to x."""
    model = random_model(ONE_LAYER)
    model.state_dict()["blocks.0.modulation"][:, [2, 5]] = 0
    conditioning = model.condition(text_rows(1))
    block = next(iter(model.blocks))
    x = torch.randn(1, 3, 24, 96, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    time = torch.zeros(1, 1, 6, 96, dtype=DOUBLE)
    context = fresh(ONE_LAYER)
    positions = context.positions(ONE_LAYER.grid, x.device)
    text = (conditioning.keys[0], conditioning.values[0])
    assert (block(x, time, text, positions, context) - x).abs().max() > 0.01
    model.state_dict()["blocks.0.norm3.weight"].zero_()
    added = block(x, time, text, positions, context) - x
    torch.testing.assert_close(added, added[:, :1, :1].expand_as(added), atol=1e-10, rtol=0)


def test_empty_text_slots_take_part() -> None:
    model = random_model(UNTRAINED)
    text = text_rows(1)
    text[:, 4:] = 0
    conditioning = model.condition(text)
    latents = noise_of(1, dtype=DOUBLE)()
    masked = TextConditioning(
        tuple(k[:, :4] for k in conditioning.keys), tuple(v[:, :4] for v in conditioning.values)
    )
    assert not torch.allclose(
        model(latents, 625.0, conditioning, fresh()), model(latents, 625.0, masked, fresh()), atol=1e-6
    )


def test_every_layer_hands_over_unrotated_tokens_at_one_set_of_positions() -> None:
    model = random_model(UNTRAINED)
    conditioning, latents = model.condition(text_rows(1)), noise_of(1, dtype=DOUBLE)()
    early, late = fresh(first=0), fresh(first=3)
    model(latents, 625.0, conditioning, early)
    model(latents, 625.0, conditioning, late)
    assert [layer for layer, _, _ in early.seen] == [0, 1, 2]
    assert len({id(own.positions) for _, _, own in early.seen}) == 1
    _, query, own = early.seen[0]
    assert own.role is Role.CURRENT
    assert query.shape == own.keys.shape == own.values.shape == (1, 72, 4, 24)
    # Layer 0 sees the same input at any phase, so unrotated queries and keys cannot differ.
    assert torch.equal(query, late.seen[0][1]) and torch.equal(own.keys, late.seen[0][2].keys)


def test_a_settled_block_shows_the_context_what_a_forward_does() -> None:
    model = random_model(UNTRAINED)
    conditioning, latents = model.condition(text_rows(2)), noise_of(2, rows=2, dtype=DOUBLE)()
    forward, settled = fresh(), fresh()
    model(latents, 0.0, conditioning, forward)
    model.settle(latents, 0.0, conditioning, settled)
    assert len(settled.seen) == len(forward.seen) == UNTRAINED.layers
    for (layer, query, own), (other, asked, wanted) in zip(settled.seen, forward.seen, strict=True):
        assert layer == other and torch.equal(query, asked)
        assert torch.equal(own.keys, wanted.keys) and torch.equal(own.values, wanted.values)


def test_a_settled_block_is_not_computed_to_its_end(monkeypatch) -> None:
    model = random_model(UNTRAINED)
    conditioning, latents = model.condition(text_rows(1)), noise_of(1, dtype=DOUBLE)()
    for part in (model.blocks[-1].cross_attn, model.blocks[-1].ffn, model.head):
        monkeypatch.setattr(part, "forward", lambda *_: pytest.fail("nobody reads it"))
    model.settle(latents, 0.0, conditioning, fresh())


def test_only_differences_of_phases_matter() -> None:
    model = random_model(UNTRAINED)
    conditioning, latents = model.condition(text_rows(1)), noise_of(1, dtype=DOUBLE)()
    one, other = (model(latents, 625.0, conditioning, fresh(first=first)) for first in (0, 40))
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_wrong_shapes_are_refused_by_name() -> None:
    model = random_model(ONE_LAYER)
    conditioning, latents = model.condition(text_rows(1)), noise_of(1, dtype=DOUBLE)()
    with pytest.raises(ValueError, match=r"latents\.shape"):
        model(latents[:, :, :8], 0.0, conditioning, fresh())
    with pytest.raises(ValueError, match=r"context\.phases"):
        model(latents[:, :2], 0.0, conditioning, fresh())
    with pytest.raises(ValueError, match=r"conditioning\.rows"):
        model(latents.expand(2, -1, -1, -1, -1), 0.0, conditioning, fresh())
    with pytest.raises(ValueError, match=r"timestep\.shape"):
        model(latents, torch.zeros(3), conditioning, fresh())
    with pytest.raises(ValueError, match=r"embeddings\.shape"):
        model.condition(text_rows(1)[:, :4])
