"""The custom block of diffusers, loaded as from the hub: it generates what an attached pipeline generates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backbones" / "helios"))

from diffusers import ModularPipelineBlocks
from diffusers.guiders import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance
from diffusers.modular_pipelines.helios import (
    HeliosAutoBlocks,
    HeliosPyramidAutoBlocks,
    HeliosPyramidDistilledAutoBlocks,
)
from helios_fakes import FRAMES, NEGATIVE, PROMPT, ROWS, call, make_pipeline, text_of

import recap
from recap import attach

FOLDER = Path(__file__).resolve().parents[3] / "integrations" / "diffusers"
STOCK = {
    "distilled": HeliosPyramidDistilledAutoBlocks,
    "mid": HeliosPyramidAutoBlocks,
    "base": HeliosAutoBlocks,
}
CHUNKS = 2
PICTURES = 1 + (FRAMES - 1) * 4
KINDS = ["distilled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mid", "base"))]


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    """Diffusers copies custom code to a folder of its own before it imports it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        for name in ("diffusers.utils.constants", "diffusers.utils.dynamic_modules_utils"):
            patch.setattr(f"{name}.HF_MODULES_CACHE", folder)
        yield


def load(**more):
    return ModularPipelineBlocks.from_pretrained(str(FOLDER), trust_remote_code=True, **more)


def make_modular(kind, blocks):
    """A modular pipeline on the parts of the tiny one, which begins from embeddings of the text."""
    blocks.sub_blocks.pop("text_encoder")
    stock = make_pipeline(kind)
    guidance = ROWS[kind].guidance
    guider = ClassifierFreeZeroStarGuidance if kind == "mid" else ClassifierFreeGuidance
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        transformer=stock.transformer,
        vae=stock.vae,
        scheduler=stock.scheduler,
        guider=guider(guidance_scale=guidance, **({"zero_init_steps": 0} if kind == "mid" else {})),
    )
    return pipeline


def generate(pipeline, kind, *, seed=3, chunks=CHUNKS, **more):
    row = ROWS[kind]
    steps = (
        {"num_inference_steps": row.steps[0]}
        if kind == "base"
        else {"pyramid_num_inference_steps_list": list(row.steps)}
    )
    amplify = {"is_amplify_first_chunk": False} if kind == "distilled" else {}
    return pipeline(
        prompt_embeds=text_of(PROMPT),
        negative_prompt_embeds=text_of(NEGATIVE),
        height=row.height,
        width=row.width,
        num_frames=PICTURES * chunks,
        generator=torch.Generator().manual_seed(seed),
        **{"output_type": "pt", "flow": "classical", **steps, **amplify, **more},
    )


@pytest.fixture(scope="module")
def remembered():
    """What the block generates with `recap`."""
    return generate(make_modular("distilled", load()), "distilled")


def test_with_a_memory_it_equals_an_attached_pipeline_bit_for_bit(remembered):
    """For mid and base, diffusers' modular and other pipelines differ by themselves, without any memory."""
    pipeline = make_pipeline("distilled")
    with attach(pipeline, "recap", flow="classical") as attached:
        latents = call(pipeline, "distilled", chunks=CHUNKS)
    made = torch.cat(remembered.get("latent_chunks"), dim=2).transpose(1, 2)
    assert torch.equal(made, latents)
    ours = [line.to_json() for line in remembered.get("memory_trace")]
    assert ours == [line.to_json() for line in attached.trace] and len(ours) == CHUNKS
    assert [line["attended_tokens"].get("bank", 0) for line in ours] == [0, 32]


def test_recap_plus_has_its_own_rule_here_too():
    state = generate(make_modular("distilled", load()), "distilled", memory="recap-plus")
    pipeline = make_pipeline("distilled")
    with attach(pipeline, "recap-plus") as attached:
        latents = call(pipeline, "distilled", chunks=CHUNKS)
        assert not attached.memory.needs_pixels
    assert torch.equal(torch.cat(state.get("latent_chunks"), dim=2).transpose(1, 2), latents)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_memory_it_is_diffusers_own_and_with_one_later_chunks_change(kind, request):
    ours = make_modular(kind, load(model=kind))
    made = generate(ours, kind, memory="none").get("videos")
    state = request.getfixturevalue("remembered") if kind == "distilled" else generate(ours, kind)
    # Made after ours, whose memory must not have come into diffusers' shared blocks.
    theirs = make_modular(kind, STOCK[kind]())
    with pytest.warns(UserWarning, match="flow"):
        expected = generate(theirs, kind).get("videos")
    # 2 x 33 pictures, up to the last that ends a latent frame.
    assert torch.equal(made, expected) and made.shape[1] == 65
    later = state.get("videos")
    assert torch.equal(later[:, :PICTURES], expected[:, :PICTURES])
    assert not torch.equal(later[:, PICTURES:], expected[:, PICTURES:])


def test_the_call_of_a_memory_leaves_the_models_as_they_were():
    pipeline = make_modular("distilled", load())
    before = [block.attn1.processor for block in pipeline.transformer.blocks]
    generate(pipeline, "distilled", memory={"name": "recap", "reinforcement": 2.0}, output="videos")
    assert [block.attn1.processor for block in pipeline.transformer.blocks] == before
    assert "decode" not in vars(pipeline.vae) and "step" not in vars(pipeline.scheduler)
    assert not pipeline.transformer._forward_hooks and not pipeline.transformer._forward_pre_hooks


def test_a_video_from_a_picture_has_its_sink_from_the_first_chunk_on():
    from PIL import Image

    row, pipeline = ROWS["distilled"], make_modular("distilled", load())
    state = generate(pipeline, "distilled", chunks=1, image=Image.new("RGB", (row.width, row.height), "red"))
    assert 0 < state.get("memory_trace")[0].shares["sink"][0] < 1


def test_what_cannot_be_is_refused():
    with pytest.raises(recap.RecapError, match="did you mean 'mid'"):
        load(model="midd")
    pipeline = make_modular("distilled", load())
    with pytest.raises(recap.RecapError, match="keep_first_frame"):
        generate(pipeline, "distilled", chunks=1, keep_first_frame=False)
    with pytest.raises(recap.RecapError, match="did you mean 'recap'"):
        generate(pipeline, "distilled", chunks=1, memory="recpa")


def test_the_folder_is_what_diffusers_would_save(tmp_path):
    load().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "modular_config.json").read_text())
    ours = json.loads((FOLDER / "modular_config.json").read_text())
    for name in ("_class_name", "auto_map"):
        assert saved[name] == ours[name]
    with pytest.raises(ValueError, match="trust_remote_code"):
        ModularPipelineBlocks.from_pretrained(str(FOLDER), trust_remote_code=False)
