"""The processor against plain statements of what it computes, on one forward of a tiny random Helios."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.models.transformers.transformer_helios import HeliosAttnProcessor, apply_rotary_emb_transposed
from helios_fakes import ROWS, make_transformer, text_of
from torch.nn.functional import scaled_dot_product_attention

from recap.attention.context import BlockContext
from recap.backbones.helios.history import clean_arguments, denoising_arguments, slices
from recap.backbones.helios.processor import MemoryProcessor, Reading, check_transformer, rotary_table
from recap.backbones.helios.spec import DISTILLED
from recap.memory.sink import SinkConfig
from recap.types import Block, Past, Role, Segment

ROW = ROWS["distilled"]
SPEC = ROW.backbone_spec()
STAGES = {0: 4, 1: 2, 2: 1}  # stage -> how much smaller than full resolution
LAMBDA = 5.0


class Remembered:
    """A context that biases the sink and adds a bank; `handed` is what a clean pass wrote."""

    def __init__(self, reinforcement=LAMBDA, slots=7):
        generator = torch.Generator().manual_seed(9)
        self.bias = math.log(reinforcement)
        size = (1, slots, ROW.heads, ROW.head_dim)
        cells = torch.randperm(SPEC.frame_tokens, generator=generator)[:slots]
        self.places = torch.stack([torch.zeros(slots), cells // SPEC.grid[1], cells % SPEC.grid[1]], dim=-1)[
            None
        ]
        self.bank = [
            Segment(
                Role.BANK,
                torch.randn(size, generator=generator),
                torch.randn(size, generator=generator),
                self.places,
            )
            for _ in range(ROW.layers if slots else 0)
        ]
        self.shares, self.handed = [], {}
        self.past, self.wants_tokens, self.foreseeable = Past(), True, True
        self.phases = torch.arange(20, 29)

    def positions(self, grid, device): ...
    def attend(self, layer, query, own): ...
    def kept(self, layer): ...

    def arranged(self, layer, own):
        from dataclasses import replace

        own = [replace(s, log_bias=self.bias) if s.role is Role.SINK else s for s in own]
        return [*self.bank[layer : layer + 1], *own]

    def hand_over(self, layer, tokens):
        self.handed[layer] = tokens

    def measured(self, shares, stage=None):
        self.shares.append((stage, shares))


class Spelled:
    """The same attention in one softmax with a mask, or with the sink's keys repeated."""

    def __init__(self, rope, context, layer, places, way):
        self.rope, self.context, self.layer, self.places, self.way = rope, context, layer, places, way

    def __call__(self, attn, hidden, text, mask, rotary, current):
        q, k, v = (
            x.unflatten(2, (attn.heads, -1))
            for x in (attn.norm_q(attn.to_q(hidden)), attn.norm_k(attn.to_k(hidden)), attn.to_v(hidden))
        )
        q, k = apply_rotary_emb_transposed(q, rotary), apply_rotary_emb_transposed(k, rotary)
        history = hidden.shape[1] - current
        sink = next(place for role, place in self.places.parts if role is Role.SINK)
        more_k, more_v = k[:, :0], v[:, :0]
        for segment in self.context.bank[self.layer : self.layer + 1]:
            table = self.rope(torch.zeros(1, 1), *SPEC.grid, k.device).flatten(2).transpose(1, 2)
            cell = (segment.positions[..., 1] * SPEC.grid[1] + segment.positions[..., 2]).long()[0]
            more_k, more_v = apply_rotary_emb_transposed(segment.keys, table[:, cell]), segment.values
        bias = torch.zeros(k.shape[1] + more_k.shape[1])
        if self.way == "mask":
            bias[sink] = self.context.bias
        else:
            copies = round(math.exp(self.context.bias)) - 1
            more_k = torch.cat([more_k, *[k[:, sink]] * copies], dim=1)
            more_v = torch.cat([more_v, *[v[:, sink]] * copies], dim=1)
            bias = torch.zeros(k.shape[1] + more_k.shape[1])
        old = _sdpa(q[:, :history], k, v, None)
        new = _sdpa(q[:, history:], torch.cat([k, more_k], 1), torch.cat([v, more_v], 1), bias)
        return attn.to_out[0](torch.cat([old, new], dim=1).flatten(2))


def _sdpa(q, k, v, bias):
    mask = None if bias is None else bias.expand(1, 1, q.shape[1], -1)
    found = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    return found.transpose(1, 2)


def some_past(seed=4):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 27, SPEC.latent_channels, *SPEC.latent_size)
    latents = torch.randn(shape, generator=generator)
    return Past(latents[:, :1], latents[:, 9:])


def forward_arguments(stage, past=None):
    past = past or some_past()
    shape = (1, SPEC.latent_channels, 9, *SPEC.latent_size)
    fixed = denoising_arguments(past, ROW.history_frames, shape, torch.float32, torch.device("cpu"))
    rows, columns = (side // STAGES[stage] for side in SPEC.latent_size)
    noisy = torch.randn(
        1, SPEC.latent_channels, 9, rows, columns, generator=torch.Generator().manual_seed(stage)
    )
    asked = {
        "hidden_states": noisy,
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": text_of("a fox"),
        **fixed,
    }
    places = slices(SPEC.grid, ROW.history_frames, 9 * rows * columns // 4, real=True)
    return asked, places


def install(model):
    reading = Reading(model.rope)
    for layer, block in enumerate(model.blocks):
        block.attn1.set_processor(MemoryProcessor(HeliosAttnProcessor(), layer, reading))
    return reading


def ours(model, asked, places, context, stage, reinforcement=None):
    reading = install(model)
    with (
        torch.no_grad(),
        reading.denoising(context, places, SPEC.grid, stage=stage, reinforcement=reinforcement),
    ):
        return model(**asked, return_dict=False)[0]


@pytest.mark.parametrize("slots", [0, 7])
@pytest.mark.parametrize("stage", STAGES)
def test_merge_mask_and_repeated_keys_agree(stage, slots):
    asked, places = forward_arguments(stage)
    merged = ours(make_transformer(), asked, places, Remembered(slots=slots), stage)
    for way in ("mask", "repeat"):
        model, context = make_transformer(), Remembered(slots=slots)
        for layer, block in enumerate(model.blocks):
            block.attn1.set_processor(Spelled(model.rope, context, layer, places, way))
        with torch.no_grad():
            spelled = model(**asked, return_dict=False)[0]
        torch.testing.assert_close(merged, spelled, rtol=0, atol=1e-5)
    with torch.no_grad():
        plain = make_transformer()(**asked, return_dict=False)[0]
    assert (merged - plain).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("text", "way", "factor", "layers"),
    [
        ("3@layers:last-half", "repeat", 3.0, range(ROW.layers // 2, ROW.layers)),
        ("3@layers:0", "repeat", 3.0, [0]),
        # What would give that share if all tokens got the same, which is how the first block is biased.
        ("share:0.3", "mask", 0.3 / 0.7 * (SPEC.window_frames - 1), range(ROW.layers)),
    ],
)
def test_a_schedule_of_the_memory_equals_repeated_keys_in_its_layers(text, way, factor, layers):
    stage = max(STAGES)
    asked, places = forward_arguments(stage)
    policy = SinkConfig(reinforcement=text).build(SPEC, lambda: None)
    phases = policy.begin(Block(1, SPEC.frames_per_block, SPEC.frames_per_block, ("",)))
    merged = ours(make_transformer(), asked, places, BlockContext(policy, phases, past=some_past()), stage)
    model = make_transformer()
    for layer, block in enumerate(model.blocks):
        context = Remembered(factor if layer in layers else 1.0, slots=0)
        block.attn1.set_processor(Spelled(model.rope, context, layer, places, way))
    with torch.no_grad():
        spelled = model(**asked, return_dict=False)[0]
    torch.testing.assert_close(merged, spelled, rtol=0, atol=1e-5)
    everywhere = ours(make_transformer(), asked, places, Remembered(factor, slots=0), stage)
    assert len(layers) == ROW.layers or (merged - everywhere).abs().max() > 1e-4


@pytest.mark.parametrize("reinforcement", [1.0, LAMBDA])
@pytest.mark.parametrize("stage", STAGES)
def test_sink_share_at_uniform_logits_is_the_closed_form(stage, reinforcement):
    asked, places = forward_arguments(stage)
    model, context = make_transformer(), Remembered(LAMBDA, slots=0)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn1.to_q.weight)
        torch.nn.init.zeros_(block.attn1.to_q.bias)
    ours(model, asked, places, context, stage, reinforcement=reinforcement)
    sink = SPEC.frame_tokens
    current = places.current.stop - places.current.start
    closed = reinforcement * sink / (reinforcement * sink + places.current.start - sink + current)
    assert len(context.shares) == ROW.layers and all(named == stage for named, _ in context.shares)
    for _, shares in context.shares:
        torch.testing.assert_close(shares[Role.SINK], torch.tensor([closed]), rtol=0, atol=1e-5)
        torch.testing.assert_close(sum(shares.values()), torch.ones(1), rtol=0, atol=1e-5)


class Rebuilding(Remembered):
    """Makes every segment again at every call: parts are known by their number, not by their tensors."""

    def arranged(self, layer, own):
        from dataclasses import replace

        return [
            replace(s, keys=s.keys.clone(), values=s.values.clone()) for s in super().arranged(layer, own)
        ]


class Forgetful(Remembered):
    """Loses the number of the sequence's parts."""

    def arranged(self, layer, own):
        return [Segment(s.role, s.keys, s.values, s.positions, s.log_bias) for s in own]


def test_parts_of_the_sequence_are_recognised_by_their_number():
    stage = max(STAGES)
    asked, places = forward_arguments(stage)
    kept, rebuilt = (
        ours(make_transformer(), asked, places, kind(slots=7), stage) for kind in (Remembered, Rebuilding)
    )
    assert torch.equal(kept, rebuilt)
    with pytest.raises(ValueError, match=r"keep the 5 parts.*dataclasses\.replace"):
        ours(make_transformer(), asked, places, Forgetful(), stage)


def test_real_layout_and_its_shares_are_those_of_the_fact_sheet():
    grid = DISTILLED.backbone_spec().grid
    shares = []
    for current in (540, 2160, 8640):
        places = slices(grid, DISTILLED.history_frames, current, real=True)
        found = [(place.start, place.stop) for _, place in places.parts]
        assert found == [(0, 240), (240, 480), (480, 1440), (1440, 2400), (2400, 2400 + current)]
        rest = 1440 + current
        shares.append([round(100 * n * 960 / (n * 960 + rest)) for n in (1, 5)])
    assert shares == [[33, 71], [21, 57], [9, 32]]


def test_zeros_in_the_first_chunk_are_no_sink():
    roles = [role for role, _ in slices(SPEC.grid, ROW.history_frames, 4, real=False).parts]
    assert Role.SINK not in roles and roles.count(Role.PRIOR) == 4


def test_bank_keys_are_turned_by_the_models_own_table_at_phase_0():
    rope = make_transformer().rope
    whole = rope(torch.zeros(1, 1), *SPEC.grid, torch.device("cpu")).flatten(2).transpose(1, 2)
    rows, columns = torch.meshgrid(*map(torch.arange, SPEC.grid), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(1, -1, 3)
    assert torch.equal(rotary_table(rope, places), whole)


def test_the_sequence_keeps_its_own_table_long_and_mid_averaged():
    """Neither reading nor settling touches the table the model made; that of long and mid is no pure rotation."""
    asked, places = forward_arguments(2)
    seen = []
    model = make_transformer()
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[3]))
    ours(model, asked, places, Remembered(), 2)
    with torch.no_grad():
        stock = make_transformer()
        stock.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[3]))
        stock(**asked, return_dict=False)
    assert torch.equal(*seen)
    cos, sin = seen[0].chunk(2, dim=-1)
    length = (cos**2 + sin**2)[0]
    assert length[: places.parts[1][1].stop].min() < 0.9
    whole = length[places.parts[2][1].start :]
    torch.testing.assert_close(whole, torch.ones_like(whole), atol=1e-5, rtol=0)


def test_clean_pass_keys_of_layer_0_are_those_the_next_chunk_computes():
    """Bit for bit: the newest frame whole as the next chunk reads it, and the opening."""
    finished = torch.randn(1, SPEC.latent_channels, 9, *SPEC.latent_size)
    before, model, context = some_past(), make_transformer(), Remembered()
    asked, _ = forward_arguments(2, before)
    reading = install(model)
    history = (*ROW.history_frames[:2], 9)
    places = slices(SPEC.grid, history, 0, real=True)
    clean = clean_arguments(asked, finished, before.opening.transpose(1, 2))
    with torch.no_grad(), reading.settled(context, places, SPEC.grid):
        model(**clean, return_dict=False)
    assert set(context.handed) == {0, 1}
    keys, values = context.handed[0].keys, context.handed[0].values
    assert keys.shape[1] == SPEC.block_tokens
    assert context.handed[0].positions[0, :, 0].unique().tolist() == list(range(20, 29))

    after = Past(before.opening, torch.cat([before.recent, finished.transpose(1, 2)], dim=1))
    taken = {}

    def take(module, args):
        taken["hidden"] = args[0]

    for stage in STAGES:
        asked, places = forward_arguments(stage, after)
        model.blocks[0].attn1.register_forward_pre_hook(take)
        with torch.no_grad():
            model(**asked, return_dict=False)
        attn = model.blocks[0].attn1
        key = attn.norm_k(attn.to_k(taken["hidden"])).unflatten(2, (attn.heads, -1))
        value = attn.to_v(taken["hidden"]).unflatten(2, (attn.heads, -1))
        assert torch.equal(key[:, places.whole], keys[:, -SPEC.frame_tokens :])
        assert torch.equal(value[:, places.whole], values[:, -SPEC.frame_tokens :])


def test_lambda_of_a_stage_stands_for_the_memorys():
    asked, places = forward_arguments(0)
    by_stage = ours(make_transformer(), asked, places, Remembered(2.0), 0, reinforcement=3.0)
    assert torch.equal(by_stage, ours(make_transformer(), asked, places, Remembered(3.0), 0))
    unbiased = ours(make_transformer(), asked, places, Remembered(1.0), 0, reinforcement=3.0)
    assert torch.equal(unbiased, ours(make_transformer(), asked, places, Remembered(1.0), 0))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.register_to_config(is_amplify_history=True), "is_amplify_history"),
        (lambda m: setattr(m, "_parallel_config", object()), "one device"),
    ],
)
def test_what_cannot_be_followed_is_refused(change, match):
    model = make_transformer()
    change(model)
    with pytest.raises(ValueError, match=match):
        check_transformer(model)
