"""attach() on diffusers' own Helios pipelines, tiny and random: the same call, and nothing left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backbones" / "helios"))

from diffusers import HeliosPipeline, HeliosPyramidPipeline
from helios_fakes import CHUNKS, FRAMES, ROWS, call, make_pipeline, stock_latents

from recap import attach
from recap.memory.recap import RecapConfig

KINDS = ("distilled", "mid", "base")
OFF = {"none": "none", "lambda 1, no bank": RecapConfig(reinforcement=1.0, capacity_frames=0)}


def traces_of(pipeline):
    """All that could be left behind: names of instance attributes, what is called by identity, torch's hooks."""
    owners = [pipeline, pipeline.vae, pipeline.scheduler, *pipeline.transformer.modules()]
    plain = [
        {name: id(value) if callable(value) else None for name, value in vars(owner).items()}
        for owner in owners
    ]
    hooks = [
        {
            name: dict(value)
            for name, value in vars(module).items()
            if "_hooks" in name and isinstance(value, dict)
        }
        for module in pipeline.transformer.modules()
    ]
    return plain, hooks


@pytest.mark.parametrize("memory", OFF)
@pytest.mark.parametrize("kind", KINDS)
def test_off_is_the_stock_pipeline_bit_for_bit(kind, memory):
    pipeline = make_pipeline(kind)
    with attach(pipeline, OFF[memory], flow="classical") as attached:
        generated = call(pipeline, kind)
    assert torch.equal(generated, stock_latents(kind))
    assert len(attached.trace) == CHUNKS and attached.spec.grid == (4, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_first_chunk_stays_and_later_ones_change(kind):
    pipeline = make_pipeline(kind)
    with attach(pipeline, "recap", flow="classical") as attached:
        generated = call(pipeline, kind)
    assert torch.equal(generated[:, :FRAMES], stock_latents(kind)[:, :FRAMES])
    for chunk in range(1, CHUNKS):
        own = slice(chunk * FRAMES, (chunk + 1) * FRAMES)
        assert not torch.equal(generated[:, own], stock_latents(kind)[:, own])
    assert not any(attached.trace[0].shares.values())
    assert attached.trace[1].tokens["bank"] == attached.spec.frame_tokens
    assert len(attached.trace[1].stage_shares) == len(ROWS[kind].steps)
    assert 0 < attached.trace[1].shares["sink"][0] < 1
    assert torch.equal(call(pipeline, kind), stock_latents(kind))  # and all of it is gone


def test_our_loop_and_theirs_generate_the_same_with_a_memory():
    """Two roads to one model: the pipeline with a memory attached, and the backbone with the pipeline's noise."""
    from helios_fakes import make_backbone
    from test_helios_backbone import generate_chunks

    from recap.config import RunConfig
    from recap.run import build_memory

    pipeline, backbone = make_pipeline("distilled"), make_backbone("distilled")
    with attach(pipeline, "recap", flow="classical"):
        theirs = call(pipeline, "distilled")

    class Named:
        def build(self, spec, admission):
            settings = {"shots": [{"prompt": "", "seconds": 1}], "memory": "recap", "flow": "classical"}
            return build_memory(RunConfig.from_dict(settings), spec, lambda line: None)

    ours, _, _ = generate_chunks(backbone, "distilled", Named())
    assert torch.equal(theirs, ours)


def show_nothing(vae):
    """Let an autoencoder decode everything to zeros."""
    decode = vae.decode
    vae.decode = lambda z, *_, **__: tuple(torch.zeros_like(part) for part in decode(z, return_dict=False))


def test_recap_plus_looks_at_no_picture():
    """The pipeline decodes its chunks anyway; whatever they show, the memory is the same."""
    latents, admitted = [], []
    for blind in (False, True):
        pipeline = make_pipeline("distilled")
        if blind:
            show_nothing(pipeline.vae)
        with attach(pipeline, "recap-plus", admission={"name": "keys", "margin": 0.1}) as attached:
            latents.append(call(pipeline, "distilled"))
        admitted.append([line.admitted for line in attached.trace])
        assert attached.trace[1].tokens["bank"] == attached.spec.frame_tokens
    assert torch.equal(*latents) and admitted[0] == admitted[1]
    assert max(score for lines in admitted[0] for *_, score in lines[0]) > 0
    assert not torch.equal(latents[0], stock_latents("distilled"))


def test_nothing_is_left_behind():
    pipeline = make_pipeline("distilled")
    call(pipeline, "distilled", chunks=1)
    before = traces_of(pipeline)
    with attach(pipeline, "recap", flow="classical"):
        call(pipeline, "distilled", chunks=2)
        assert traces_of(pipeline) != before
    assert traces_of(pipeline) == before


@pytest.mark.parametrize("where", ["in a layer", "in a callback", "in the autoencoder", "next to it"])
def test_nothing_is_left_behind_after_an_error(where):
    pipeline = make_pipeline("distilled")
    call(pipeline, "distilled", chunks=1)
    before = traces_of(pipeline)

    def fail(*args, **kwargs):
        raise RuntimeError("no room")

    def attempt():
        with attach(pipeline, "recap", flow="classical"):
            if where == "in a layer":
                handle = pipeline.transformer.blocks[1].ffn.register_forward_pre_hook(fail)
                try:
                    call(pipeline, "distilled")
                finally:
                    handle.remove()
            elif where == "in a callback":
                call(pipeline, "distilled", callback_on_step_end=fail)
            elif where == "in the autoencoder":
                call(
                    pipeline,
                    "distilled",
                    callback_on_step_end=lambda *_: {"latents": torch.full((1,), torch.nan)},
                )
            fail()

    with pytest.raises((RuntimeError, ValueError, IndexError)):
        attempt()
    assert traces_of(pipeline) == before
    assert torch.equal(call(pipeline, "distilled"), stock_latents("distilled"))


def test_an_error_inside_does_not_spoil_the_next_call_within():
    pipeline = make_pipeline("distilled")

    def fail(*args):
        raise RuntimeError("no room")

    with attach(pipeline, "none") as attached:
        handle = pipeline.transformer.blocks[1].ffn.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no room"):
            call(pipeline, "distilled")
        handle.remove()
        assert torch.equal(call(pipeline, "distilled"), stock_latents("distilled"))
    assert [line.video for line in attached.trace] == [1] * CHUNKS


def test_every_call_is_a_video_with_a_fresh_memory():
    pipeline = make_pipeline("distilled")
    with attach(pipeline, "recap", flow="classical") as attached:
        one, other = call(pipeline, "distilled", chunks=2), call(pipeline, "distilled", chunks=2)
    assert torch.equal(one, other)
    assert [line.video for line in attached.trace] == [0, 0, 1, 1]
    assert [line.block for line in attached.trace] == [0, 1, 0, 1]


def test_an_image_is_a_sink_from_the_start():
    pipeline = make_pipeline("distilled")
    row = ROWS["distilled"]
    latents = torch.randn(1, row.latent_channels, 1, row.height // 8, row.width // 8)
    given = {"image_latents": latents, "fake_image_latents": latents.clone(), "chunks": 2}
    plain = call(pipeline, "distilled", **given)
    with attach(pipeline, "recap", flow="classical") as attached:
        generated = call(pipeline, "distilled", **given)
    assert not torch.equal(plain, generated)
    assert attached.trace[0].shares["sink"]
    assert attached.trace[0].first_frame == 1
    # The image is frame 0 and none of the video's pictures.
    assert [line.first_pictures[:2] for line in attached.trace] == [(0, 1), (33, 34)]


def test_a_pipeline_of_the_authors_own_goes_by_the_name_of_its_class():
    """Their repository has one class of this name for the pyramid too, and it is not diffusers'."""
    pipeline = make_pipeline("distilled")
    kind = type(pipeline)
    pipeline.__class__ = type("HeliosPipeline", kind.__bases__, dict(vars(kind)))
    assert not isinstance(pipeline, HeliosPyramidPipeline | HeliosPipeline)
    with attach(pipeline, "none") as attached:
        assert torch.equal(call(pipeline, "distilled"), stock_latents("distilled"))
    with attach(pipeline, "recap", flow="classical"):
        generated = call(pipeline, "distilled")
    assert len(attached.trace) == CHUNKS
    assert torch.equal(generated[:, :FRAMES], stock_latents("distilled")[:, :FRAMES])
    assert not torch.equal(generated[:, FRAMES:], stock_latents("distilled")[:, FRAMES:])


def test_what_a_callback_changes_is_what_is_remembered():
    pipeline = make_pipeline("distilled")

    def darken(pipe, step, time, given):
        return {"latents": given["latents"] * 0.5}

    with attach(pipeline, "recap", flow="classical") as attached:
        call(pipeline, "distilled", chunks=2, callback_on_step_end=darken)
    assert len(attached.trace) == 2


def test_stages_may_have_their_own_lambda():
    shares = {}
    for stages in ((), (1.0, 1.8, 5.0)):
        pipeline = make_pipeline("distilled")
        memory = {"name": "sink", "reinforcement": 5}
        with attach(pipeline, memory, stage_reinforcement=stages) as attached:
            call(pipeline, "distilled", chunks=2)
        shares[stages] = [s["sink"][0] for s in attached.trace[1].stage_shares]
    assert shares[1.0, 1.8, 5.0][0] < shares[()][0] and shares[1.0, 1.8, 5.0][1] < shares[()][1]


def test_what_cannot_be_is_refused():
    pipeline = make_pipeline("distilled")
    with attach(pipeline, "none"):
        with pytest.raises(ValueError, match="attached to it already"), attach(pipeline, "none"):
            pass
        with pytest.raises(ValueError, match="phases"), attach(pipeline, "none", phases="released"):
            pass
    with pytest.raises(ValueError, match="window_frames"), attach(pipeline, "none", window_frames=6):
        pass
    with pytest.raises(ValueError, match="none, sink or recap"), attach(pipeline, "memrope"):
        call(pipeline, "distilled", chunks=1)
    with (
        pytest.raises(ValueError, match="one value per stage"),
        attach(pipeline, "none", stage_reinforcement=(5.0,)),
    ):
        call(pipeline, "distilled", chunks=1)
