"""The measurements: statistics on known cases, and every part from end to end at a tiny size."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recap.backbones.tiny.autoencoder import Autoencoder, AutoencoderSpec
from recap.backbones.tiny.backbone import WEIGHTS, WordTable
from recap.backbones.tiny.vocabulary import parse_prompt
from recap.backbones.wan.backbone import WanBackbone, draw_weights
from recap.backbones.wan.decoder import UpsampleDecoder
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED, UNTRAINED
from recap.eval.judges.probe import CELL, NOBODY, Judged, Probe
from recap.eval.metrics.drift import contrast, sharpness
from recap.flow import ClassicalFlow
from recap.memory.sink import SinkConfig
from recap.plan import Shot, make_plan
from recap.rollout import Resume, rollout
from training.bench import (
    Bench,
    Models,
    Options,
    join_many,
    join_parts,
    load_models,
    make_cases,
    make_prompts,
)
from training.evaluate import PARTS, choose_flow, main, measure, read_arguments
from training.measures import (
    RowsDecoder,
    cluster_interval,
    markdown,
    paired_difference,
    partners,
)
from training.sampling import open_with

SMALL = replace(EMBEDDED, name="small", dim=64, ffn_dim=64, heads=1, layers=2, freq_dim=32, steps=(1000, 500))
SMALL_AUTOENCODER = AutoencoderSpec(16, 4, widths=(8, 16, 16), depths=(1, 1, 1), remembered=(4, 4))
NAN = float("nan")


class Checkered(Probe):
    """A judge that finds every actor in every picture, each in some cells, in the colours of these cells."""

    def judge(self, pictures: Tensor, at_once: int = 256) -> Judged:
        colours = functional.avg_pool2d(pictures.flatten(0, 1), CELL).unflatten(0, pictures.shape[:2])
        rows, columns = colours.shape[-2:]
        cells = (
            (torch.arange(rows * columns) % NOBODY).view(rows, columns).expand(*pictures.shape[:2], -1, -1)
        )
        shares = functional.one_hot(cells, NOBODY + 1).movedim(-1, 2).float()
        return Judged(torch.ones(*pictures.shape[:2], NOBODY), cells, shares, colours.movedim(2, -1))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model, autoencoder, text = CausalWan(SMALL), Autoencoder(SMALL_AUTOENCODER), WordTable(SMALL)
    draw_weights(model, 0)
    autoencoder.eval().requires_grad_(False)
    text.requires_grad_(False)
    four = join_parts(WanBackbone, model, text, autoencoder)
    return Models(four, join_many(model, text, autoencoder, guidance=2.0), autoencoder)


@pytest.fixture(scope="module")
def bench(models, world):
    memories = ("none", "sink", "recap, lambda 5")
    options = Options(prompts=2, repeats=1, seconds=2.25, rows=1, memories=memories)
    return Bench(options, models, Checkered((16, 16, 16, 16)), world)


# Statistics


def test_the_interval_of_equal_values_is_a_point():
    estimate = cluster_interval(torch.full((12,), 3.0), [i // 3 for i in range(12)])
    assert estimate == (3.0, 3.0, 3.0, 12, 4)


def test_the_interval_of_independent_values_is_the_normal_one():
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)) + 2
    estimate = cluster_interval(values, range(400))
    half = 1.96 * float(values.std(correction=0)) / 20
    assert estimate.mean == pytest.approx(float(values.mean()), abs=1e-6)
    assert (estimate.high - estimate.low) / 2 == pytest.approx(half, rel=0.05)
    assert estimate == cluster_interval(values, range(400))


def test_copies_within_a_cluster_do_not_narrow_the_interval():
    values = torch.randn(50, generator=torch.Generator().manual_seed(2))
    once = cluster_interval(values, range(50))
    copied = cluster_interval(values.repeat_interleave(8), [i // 8 for i in range(400)])
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))
    assert (copied.n, copied.clusters) == (400, 50)


def test_paired_differences_use_complete_pairs_only():
    ours, theirs = torch.tensor([1.0, NAN, 5.0, 2.0]), torch.tensor([3.0, 1.0, NAN, 4.0])
    assert paired_difference(ours, theirs, range(4)) == (-2.0, -2.0, -2.0, 2, 2)
    nothing = paired_difference(ours[1:3], theirs[1:3], range(2))
    assert nothing.n == 0 and math.isnan(nothing.mean)


def test_partners_are_the_next_repeat_of_the_same_prompt():
    assert partners(6, 3) == [1, 2, 0, 4, 5, 3]
    assert partners(4, 1) == [0, 1, 2, 3]


# Pictures


def test_contrast_and_sharpness_of_known_pictures():
    board = (torch.arange(8)[:, None] + torch.arange(10)) % 2
    pictures = torch.stack([torch.full((8, 10), 0.3), board.float()])[:, None].expand(-1, 3, -1, -1)
    torch.testing.assert_close(contrast(pictures), torch.tensor([0.0, 0.5]), atol=1e-6, rtol=0)
    # On a chessboard the Laplacian alternates between 4 x 255 and its negative.
    torch.testing.assert_close(
        sharpness(pictures), torch.tensor([0.0, (4 * 255.0) ** 2]), atol=1e-2, rtol=1e-5
    )


def test_an_empty_line_begins_another_table():
    assert markdown([["a", "b"], ["1", "2"], [], ["c"], ["3"]]).splitlines() == [
        "| a | b |", "|---|---|", "| 1 | 2 |", "", "| c |", "|---|", "| 3 |",
    ]  # fmt: skip


# Measuring a rollout


def test_rows_decoded_separately_equal_rows_decoded_together(models):
    latents = torch.randn(3, 6, 16, 16, 26, generator=torch.Generator().manual_seed(3))
    together, separate = models.four.decoder(), RowsDecoder(models.four.decoder, at_once=2)
    for part in latents.split(3, dim=1):
        torch.testing.assert_close(separate.decode(part), together.decode(part))


@pytest.mark.parametrize("memory", ["sink", "recap, lambda 5"])
def test_a_given_past_leaves_the_same_memory_as_a_generated_one(bench, memory):
    plan = make_plan([[Shot("a fox in a city", 2.25)], [Shot("a bus on a beach", 2.25)]], bench.spec)
    generated, resumed = bench.policy(memory), bench.policy(memory)
    made = list(rollout(bench.models.four, generated, plan, seeds=[1, 2]))
    past = torch.cat([block.latents for block in made[:2]], dim=1)
    again = list(rollout(bench.models.four, resumed, plan, seeds=[1, 2], resume=Resume(opening_latents=past)))
    # After two given blocks, the third is generated as before.
    assert torch.equal(again[2].latents, made[2].latents)
    wanted = generated.state()
    assert set(wanted) == set(resumed.state()) and len(wanted) > 3
    for name, value in resumed.state().items():
        assert torch.equal(value, wanted[name]), name


# The parts


def test_prompts_differ_and_cycle_through_the_cast():
    prompts = make_prompts(30, 7, actors=2)
    assert len(set(prompts)) == 30 and len({prompt.actors[0] for prompt in prompts}) == 24
    assert make_prompts(30, 7, actors=2) == prompts
    cases = make_cases(3, 2, 7)
    assert [case.cluster for case in cases] == [0, 0, 1, 1, 2, 2]
    assert len({case.seed for case in cases}) == 6
    assert parse_prompt(cases[0].prompt).actors == (cases[0].actor,)
    assert parse_prompt(cases[0].empty).actors == ()


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_runs_and_writes_its_numbers(part, bench, tmp_path, capsys):
    measure(part, bench, tmp_path)
    written = json.loads((tmp_path / f"{part}.json").read_text())
    assert written["part"] == part and written["options"]["prompts"] == 2
    result = written["result"]
    lookups = [result[where]["n"] for where in result] if part == "lookup" else [result["n"]]
    assert set(lookups) == ({1} if part == "speed" else {2})
    compared = {"lookup": ("after it", "sink", "error"), "retention": ("sink", "error at 2.25 s"),
                "reappearance": ("recap, lambda 5", "error")}.get(part, ())  # fmt: skip
    for name in compared:
        result = result[name]
    assert not compared or (result["n"] == 2 and result["low"] <= result["mean"] <= result["high"])
    printed = capsys.readouterr().out
    assert f"### {part}\n| " in printed and "|---|" in printed


def test_reappearance_counts_slots_and_clears_at_three_cuts(bench, tmp_path):
    result = measure("reappearance", bench, tmp_path)["result"]
    assert len(result["segments_s"]) == 5 and result["segments_s"][0] == 0
    assert 0 <= result["recap, lambda 5"]["bank_slots_from_B"] <= 104
    assert "recap, lambda 5 - sink" in result["differences"]
    assert result["recap, lambda 5"]["attention_in_D"]["bank"] > 0


def test_motion_tells_the_teachers_videos_from_the_models(bench, tmp_path):
    result = measure("motion", bench, tmp_path)["result"]
    begun = (
        f"{begun} by the teacher, from step 2 on by the model" for begun in ("opened", "every block begun")
    )
    opened = ("opened by the teacher", *begun)
    assert {name: len(rows) for name, rows in result["rollouts"].items()} == dict.fromkeys(
        ("generated", "teacher", *opened, "rendered", "rendered, known camera"), 2
    )
    assert result["rollouts"]["teacher"] != result["rollouts"]["generated"]
    paths = [row[2] for row in result["rollouts"]["rendered, known camera"]]
    assert result["rendered, known camera"]["camera_moves"] == sum(path > 0.02 for path in paths) / 2


def test_a_video_opens_with_another_models_block_and_goes_on_as_ones_own(models):
    plan = make_plan([[Shot("a fox on a beach", 1.5)]], SMALL.backbone_spec())

    def generate(backbone):
        made = rollout(backbone, SinkConfig().build(backbone.spec, pytest.fail), plan, seeds=[3])
        return [block.latents for block in made]

    four, many = generate(models.four), generate(models.many)
    # Opened by itself, to its last step, it is the same video.
    assert all(map(torch.equal, generate(open_with(models.four, 2, models.four)), four))
    whole, noised = (generate(open_with(models.many, first, models.four)) for first in (2, 1))
    assert torch.equal(whole[0], many[0]) and not torch.equal(whole[1], many[1])
    assert not torch.equal(noised[0], many[0]) and not torch.equal(noised[0], four[0])
    always = generate(open_with(models.many, 1, models.four, always=True))
    assert torch.equal(always[0], noised[0]) and not torch.equal(always[1], noised[1])
    assert all(map(torch.equal, generate(open_with(models.many, 2, models.four, always=True)), many))


def test_a_real_judge_that_finds_nobody_gives_no_colours(models, world, bench, tmp_path):
    torch.manual_seed(0)
    strict = Bench(replace(bench.options, memories=("sink",)), models, Probe((16, 24, 32, 48)).eval(), world)
    result = measure("retention", strict, tmp_path)["result"]["sink"]
    assert result["kept"]["mean"] == 0 and result["error at 2.25 s"]["mean"] is None


def test_out_of_time_leaves_whole_batches(models, world, bench, tmp_path):
    short = Bench(bench.options, models, bench.probe, world, minutes=0)
    assert measure("stability", short, tmp_path)["result"]["n"] == 1
    opened = measure("opening", short, tmp_path)["result"]
    assert opened["n"] == opened["two actors"]["n"] == len(opened["kinds"]) == 1
    assert not short.time_left()


def test_the_command_measures_the_shipped_weights(tmp_path):
    main(["speed", "--weights", str(WEIGHTS), "--out", str(tmp_path), "--device", "cpu", "--seconds", "2.25"])
    result = json.loads((tmp_path / "speed.json").read_text())["result"]
    assert result["block_s_median"] > 0 and result["peak_memory_mib"] > 100


def test_a_teacher_takes_as_many_steps_as_are_asked_for(tmp_path):
    # Its weights do not matter here.
    assert len(load_models(WEIGHTS, teacher=WEIGHTS, teacher_steps=8).many._sigmas) == 8
    for wrong in ("0", "1001"):
        with pytest.raises(ValueError, match="--teacher-steps"):
            main(["motion", "--weights", str(WEIGHTS), "--out", str(tmp_path), "--teacher-steps", wrong])


def test_a_part_without_its_judge_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"training\.probe"):
        main(["opening", "--weights", str(WEIGHTS), "--out", str(tmp_path), "--device", "cpu"])


def test_rows_decoded_separately_resume_from_their_state() -> None:
    spec = UNTRAINED.backbone_spec()
    latents = torch.randn(5, 6, spec.latent_channels, *spec.latent_size)
    straight, first, second = (RowsDecoder(lambda: UpsampleDecoder(spec), at_once=2) for _ in range(3))
    whole = torch.cat([straight.decode(latents[:, :3]), straight.decode(latents[:, 3:])], dim=1)
    head = first.decode(latents[:, :3])
    second.load_state(first.state())
    assert torch.equal(torch.cat([head, second.decode(latents[:, 3:])], dim=1), whole)


def test_the_flow_is_that_of_a_run_unless_one_is_named(tmp_path, monkeypatch, random_raft, capsys):
    needed = ["speed", "--weights", "w", "--out", "o"]
    on_a_gpu = [*needed, "--device", "cuda"]
    assert choose_flow(read_arguments([*needed, "--device", "cpu"])) == "world-flow"
    assert choose_flow(read_arguments(on_a_gpu)) == "classical"
    assert capsys.readouterr().out.count("flow: classical") == 1
    assert choose_flow(read_arguments([*needed, "--raft", "file"])) == "raft-small"
    for other in ("classical", "world-flow"):
        with pytest.raises(ValueError, match=f"not for {other}"):
            choose_flow(read_arguments([*needed, "--raft", "file", "--flow", other]))
    monkeypatch.setenv("RECAP_HOME", str(random_raft))
    assert choose_flow(read_arguments(on_a_gpu)) == "raft-small"
    assert choose_flow(read_arguments([*needed, "--flow", "classical"])) == "classical"


def test_speed_uses_the_recorded_flow(models, bench, monkeypatch, tmp_path):
    opened = []

    def open_flow():
        opened.append(True)
        return ClassicalFlow()

    measure("speed", Bench(bench.options, models, open_flow=open_flow), tmp_path)
    assert opened == [True]
