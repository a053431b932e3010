from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_dit import SMALL, small_world

from training.distill import Options, Trainer, _mean
from training.records import load_weights
from training.rollouts import judged_layouts, rollout_layouts
from training.teacher_forcing import Layout
from training.train_dit import TextAndFlow, save_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    model = TextAndFlow(SMALL)
    torch.nn.init.normal_(model.dit.head.head.weight, std=0.1)
    save_model(model, folder)
    return folder


def trainer_of(teacher: Path, out: Path, **changes) -> Trainer:
    sizes = {"batch": 6, "blocks": 3, "longest": 5, "uses": 2, "num_captions": 24, "openings": 2}
    settings = {**sizes, "head_start": 0, "sample_blocks": 0, "compile": False}
    options = replace(Options(0.02, teacher, Path("none"), out, reserve_s=0.0), **{**settings, **changes})
    return Trainer(options, small_world, "cpu", SMALL)


def test_the_parallel_pass_repeats_the_rollout(teacher: Path, tmp_path: Path) -> None:
    """The last step of a rollout, repeated in one pass with the rollout as past, gives the rollout itself."""
    trainer = trainer_of(teacher, tmp_path)
    drawn, _ = trainer.draws.next()
    assert drawn.counts.all()
    sigma = trainer.sigmas[-1].expand(drawn.clean.shape[:2])
    flow = trainer._flow(trainer.generator, drawn.inputs[:, :, -1], sigma, drawn, trainer.layouts)
    estimate = drawn.inputs[:, :, -1] - sigma[..., None, None, None, None] * flow
    torch.testing.assert_close(estimate, drawn.clean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_steps_move_generator_and_fake_and_nothing_else(
    teacher: Path, tmp_path: Path, guidance: float
) -> None:
    trainer = trainer_of(teacher, tmp_path, guidance=guidance)
    models = (trainer.teacher, trainer.generator, trainer.fake)
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    trainer.clock.apply(trainer.optimisers)
    # At first teacher and fake agree and the generator does not move; after one step they differ.
    draws = trainer.draws.next()
    losses = torch.stack([trainer.step(index, drawn) for index, drawn in enumerate(draws)])
    assert losses.isfinite().all()
    moved = [
        any(not torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))
        for kept, model in zip(before, models, strict=True)
    ]
    assert moved == [False, True, True]
    for name, shared in trainer.runner.state_dict().items():
        assert torch.equal(shared, trainer.generator.dit.state_dict()[name])


def test_guidance_acts_below_a_noise_level(teacher: Path, tmp_path: Path) -> None:
    """In the first update the fake score is the teacher, so that the loss is guidance alone."""
    drawn = trainer_of(teacher, tmp_path).draws.next()[0]

    def loss_of(**changes: float) -> float:
        trainer = trainer_of(teacher, tmp_path, **changes)
        trainer.clock.apply(trainer.optimisers)
        torch.manual_seed(3)
        with torch.no_grad():
            # New weights do not listen to the prompt.
            for parameter in trainer.teacher.dit.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        trainer.fake.dit.load_state_dict(trainer.teacher.dit.state_dict())
        return float(trainer.step(0, drawn)[0])

    everywhere, below, nowhere = (loss_of(guided_below=level) for level in (1.0, 0.8, 0.0))
    assert everywhere > below > nowhere
    assert nowhere == loss_of(guidance=1.0, later_guidance=1.0) < 1e-9


def test_led_steps_come_to_end_where_the_teacher_does(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts and noise are the same, the error of led steps falls; the teacher stays as it is."""
    trainer = trainer_of(teacher, tmp_path, generator_rate=2e-3, warmup_s=0.0, minutes=60.0)
    with torch.no_grad():
        for parameter in trainer.generator.dit.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    before = [parameter.detach().clone() for parameter in trainer.teacher.parameters()]
    drawn = trainer.draws.next()[0]
    drawn = drawn._replace(text=drawn.text[:, :1].expand_as(drawn.text))
    trainer.clock.apply(trainer.optimisers)
    text = drawn.text[:, 0].repeat_interleave(trainer.options.openings, dim=0)
    opened = trainer.leader.begin(trainer.runner, text)
    monkeypatch.setattr(trainer.leader, "begin", lambda model, text: opened)
    led = torch.stack([trainer.step(index, drawn)[3:] for index in range(8)])
    assert led.shape == (8, 2) and (led[-1] < 0.7 * led[0]).all()
    assert all(map(torch.equal, before, trainer.teacher.parameters()))


def test_openings_are_judged_by_their_last_steps_alone(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, levels = trainer_of(teacher, tmp_path), []
    predict = trainer._predict
    monkeypatch.setattr(
        trainer,
        "_predict",
        lambda model, batch, layouts: (levels.append(batch), predict(model, batch, layouts))[1],
    )
    for drawn in trainer.draws.next() * 6:
        trainer._generate(drawn)
    first = torch.cat([batch.sigma[:, 0] for batch in levels])
    assert set(first.tolist()) == set(trainer.sigmas[2:].tolist())
    assert set(torch.cat([batch.sigma[:, 1] for batch in levels]).tolist()) == set(trainer.sigmas.tolist())
    assert all(batch.extra_sigma.tolist() == [trainer.sigmas[:2].tolist() * 2] * 6 for batch in levels)


def test_halved_passes_do_the_same_in_bf16(teacher: Path, tmp_path: Path) -> None:
    whole, half = trainer_of(teacher, tmp_path), trainer_of(teacher, tmp_path, half=True, warmup_s=0.0)
    text = whole.draws.next()[0].text[:, 0]
    inputs = whole.leader.open(whole.runner, text)
    torch.testing.assert_close(
        half.leader.lead(inputs, text), whole.leader.lead(inputs, text), atol=0.1, rtol=0.1
    )
    half.clock.apply(half.optimisers)
    for index, drawn in enumerate(half.draws.next()):
        assert half.step(index, drawn).isfinite().all()
    for ours, theirs in zip(half.runner.parameters(), half.generator.dit.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), "the next rollout is of the model as it is now"


def test_a_run_writes_what_the_next_one_resumes_from(teacher: Path, tmp_path: Path) -> None:
    trainer_of(teacher, tmp_path / "a").run()
    resumed = trainer_of(teacher, tmp_path / "b", resume=tmp_path / "a")
    for name, model in (("fake", resumed.fake.dit), ("dit", resumed.generator.dit)):
        saved = load_weights(tmp_path / "a" / f"{name}.safetensors")
        assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def test_a_resumed_generator_uses_the_words_of_its_new_teacher(teacher: Path, tmp_path: Path) -> None:
    trainer_of(teacher, tmp_path / "a").run()
    torch.manual_seed(1)
    save_model(TextAndFlow(SMALL), tmp_path / "other")
    resumed = trainer_of(tmp_path / "other", tmp_path / "b", resume=tmp_path / "a")
    words = load_weights(tmp_path / "other" / "text.safetensors")
    assert all(torch.equal(value, words[key]) for key, value in resumed.generator.text.state_dict().items())


@pytest.mark.parametrize(("steady", "same"), [(1.0, True), (0.0, False)])
def test_steady_rollouts_keep_the_caption_of_their_opening(
    teacher: Path, tmp_path: Path, steady: float, same: bool
) -> None:
    text = trainer_of(teacher, tmp_path, steady=steady).draws.next()[0].text
    assert torch.equal(text, text[:, :1].expand_as(text)) is same


def test_the_end_of_a_long_rollout_is_repeated_except_the_block_without_its_past(
    teacher: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(teacher, tmp_path, ending=0.0)
    first, drawn = trainer.draws.next()[1], trainer.draws.next()[1]
    dense = torch.tensor([layout.dense for layout in trainer.layouts for _ in range(layout.rows)])
    continued = drawn.rows(~dense)
    assert torch.equal(first.rows(~dense).clean[:, 0], continued.clean[:, 0]), "the same rollout continues"
    assert not torch.equal(first.rows(~dense).clean[:, 1], continued.clean[:, 1])
    assert continued.counts.tolist() == [[1.0, 0.0, 1.0]] * len(continued.counts)
    assert dense.any() and drawn.rows(dense).counts.all(), "a rollout with all of its past begins again"
    assert not torch.equal(first.rows(dense).clean[:, 0], drawn.rows(dense).clean[:, 0])
    sigma = trainer.sigmas[-1].expand(drawn.clean.shape[:2])
    flow = trainer._flow(trainer.generator, drawn.inputs[:, :, -1], sigma, drawn, trainer.layouts)
    off = (drawn.inputs[:, :, -1] - sigma[..., None, None, None, None] * flow - drawn.clean).abs()
    by_row = off.flatten(2).amax(dim=2)
    # Blocks after it read it, so a little of its error reaches them.
    opening, pastless, last = by_row[~dense].unbind(1)
    assert (opening < 1e-4).all() and (last < 0.3 * pastless.max()).all()
    assert (by_row[dense] < 1e-4).all()


@pytest.mark.parametrize("batch", [4, 6, 16])
def test_rollouts_have_windows_of_whole_frames_unless_banks_are_requested(batch: int) -> None:
    layouts = rollout_layouts(batch, 6)
    assert sum(layout.rows for layout in layouts) == batch
    assert {replace(layout, rows=1) for layout in layouts} == {
        Layout(1), Layout(1, sink=False), Layout(1, cut=True), Layout(1, dense=True),
    }  # fmt: skip
    banked = rollout_layouts(batch, 6, bank_rows=True)
    assert sum(layout.rows for layout in banked) == batch and any(layout.bank for layout in banked)


def test_a_rollout_ends_at_its_longest(teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(teacher, tmp_path, ending=0.0)
    begins = [bool(trainer.draws.next()[0].counts.all()) for _ in range(4)]
    assert begins == [True, False, True, False], "three blocks, five, then a new one"


def test_judges_see_half_of_the_rows_with_a_past_without_it() -> None:
    layouts = rollout_layouts(16, 6)
    judged = judged_layouts(layouts, 0.5)
    assert sum(layout.rows for layout in judged) == 16
    alone = sum(layout.rows for layout in judged if layout.cut)
    alone -= sum(layout.rows for layout in layouts if layout.cut)
    assert alone == sum(layout.rows // 2 for layout in layouts if layout.sink and not layout.cut)
    assert [layout for layout in judged if not layout.sink] == [x for x in layouts if not x.sink]


def test_the_first_block_weighs_more(teacher: Path, tmp_path: Path) -> None:
    weights = trainer_of(teacher, tmp_path, opening_weight=4.0).weights
    square = torch.tensor([6.0, 1.0, 2.0])[None, :, None, None, None, None].expand(2, -1, 1, 2, 3, 3)
    torch.testing.assert_close(_mean(square, weights.expand(2, -1)), torch.tensor((4 * 6.0 + 1 + 2) / 6))


@pytest.mark.parametrize(
    "wrong",
    [
        {"led": 0},
        {"led": 4},
        {"led_weight": math.nan},
        {"openings": 0},
        {"euler_steps": 6},
        {"euler_steps": 0},
        {"guided_below": 1.5},
        {"steady": 1.5},
        {"steady": math.nan},
        {"alone": -0.1},
        {"opening_weight": 0.0},
        {"opening_weight": math.inf},
        {"blocks": 1},
        {"blocks": 8},
        {"batch": 3},
        {"uses": 0},
        {"num_captions": 0},
        {"ending": math.nan},
        {"minutes": math.nan},
    ],
)
def test_settings_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        Options(**{"minutes": 1.0, **wrong}, teacher=Path("t"), autoencoder=Path("a"), out=Path("out"))


def test_weights_that_are_cut_off_are_refused(teacher: Path, tmp_path: Path) -> None:
    for part in teacher.glob("dit*"):
        (tmp_path / part.name).write_bytes(part.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read"):
        load_weights(tmp_path / "dit.safetensors")
