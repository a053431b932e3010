"""The public rows: from a folder in diffusers' layout to a video, their memory, what is fetched and refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from helios_fakes import PROMPT, ROWS, SeededAdmission, make_backbone, make_pipeline, text_of
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from recap.backbones.helios.checkpoint import load_transformer
from recap.backbones.helios.family import (
    HeliosBaseConfig,
    HeliosConfig,
    HeliosDistilledConfig,
    plan_memory,
)
from recap.backbones.helios.spec import BASE, DISTILLED
from recap.backbones.helios.spec import ROWS as PUBLIC
from recap.backbones.wan.family import describe_memory
from recap.cli.main import app
from recap.config import RunConfig
from recap.io.report import SILENT, Reporter
from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.registry import BACKBONES
from recap.rollout import rollout
from recap.run import generate, resume


@dataclass(frozen=True, slots=True)
class TinyConfig(HeliosConfig):
    row = ROWS["distilled"]


@dataclass(frozen=True, slots=True)
class TinyBaseConfig(HeliosConfig):
    row = ROWS["base"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("helios")
    for kind in ("distilled", "base"):
        pipeline = make_pipeline(kind)
        for part in ("transformer", "vae", "scheduler"):
            getattr(pipeline, part).save_pretrained(made / kind / part)
        rows = [text_of(PROMPT), *([text_of("")] if kind == "base" else [])]
        torch.save(torch.cat(rows), made / kind / "embeds.pt")
    return made


def built(kind, folder, dtype=torch.float32, notices=None, **more):
    config = {"distilled": TinyConfig, "base": TinyBaseConfig}[kind]
    where = {"folder": str(folder / kind), "prompt_embeds": str(folder / kind / "embeds.pt")}
    notice = [].append if notices is None else notices.append
    return config(**where, **more).build(device="cpu", dtype=dtype, prompts=[PROMPT], notice=notice)


def video(backbone):
    spec = backbone.spec
    policy = RecapConfig().build(spec, lambda: SeededAdmission(spec))
    plan = make_plan([[Shot(PROMPT, 2 * 33 / 24)]], spec)
    return torch.cat([made.latents for made in rollout(backbone, policy, plan, seeds=[0])], dim=1)


@pytest.mark.parametrize("kind", ["distilled", "base"])
def test_a_folder_in_diffusers_layout_generates_what_its_parts_do(kind, folder):
    notices = []
    backbone, parts = built(kind, folder, notices=notices), make_backbone(kind)
    mine, yours = backbone.transformer.state_dict(), parts.transformer.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in yours.items())
    assert torch.equal(backbone.transformer.rope.freqs_base_t, parts.transformer.rope.freqs_base_t)
    # Tensors of a file lie otherwise in memory, and products round otherwise.
    torch.testing.assert_close(video(backbone), video(parts), rtol=0, atol=1e-4)
    assert any("transformer" in line for line in notices) and "about" in notices[-1]


def test_half_precision_generates_and_keeps_what_must_be_whole(folder):
    backbone = built("distilled", folder, torch.bfloat16)
    model = backbone.transformer
    assert model.dtype == torch.bfloat16 and backbone.vae.dtype == torch.float32
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    latents = video(backbone)
    assert latents.isfinite().all()


def test_the_plan_is_that_of_the_fact_sheet():
    """14,312,427,584 parameters; 0.73 GiB of keys and values a frame, 6.6 GiB a chunk."""
    from diffusers import HeliosTransformer3DModel

    with torch.device("meta"):
        model = HeliosTransformer3DModel()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 14_312_427_584 and len(model.state_dict()) == 1101
    plan = plan_memory(DISTILLED, count, torch.bfloat16)
    transformer, _, bank, chunk = plan.values()
    assert transformer / 2**30 == pytest.approx(26.66, abs=0.01)
    assert bank / 2 / 2**30 == pytest.approx(0.73, abs=0.01) and chunk / 2**30 == pytest.approx(
        6.59, abs=0.01
    )
    kept = describe_memory(plan, text=True)
    away = describe_memory(plan, text=False, on_host=transformer)
    assert "37.8 GB" in kept[-1] and "text encoder" in kept[-1]
    assert "9.2 GB" in away[-1] and "28.6 GB on the host" in away[-1]  # the rest of 24 GB is for activations


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_are_registered_and_sized_as_published(name):
    spec = PUBLIC[name].backbone_spec()
    assert BACKBONES[name].row is PUBLIC[name]
    assert spec.grid == (24, 40) and spec.frame_tokens == 960 and spec.window_frames == 29
    assert spec.picture_size == (384, 640) and spec.latent_size == (48, 80)
    assert [spec.num_pictures(frames) for frames in (0, 1, 9, 10, 18, 396)] == [0, 1, 33, 34, 66, 1452]
    assert len(make_plan([[Shot("", 60.0)]], spec).blocks) == 44  # a minute, by the fact sheet


def test_settings_survive_a_file():
    settings = {"name": "helios-distilled", "steps": [1, 1, 1], "stage_reinforcement": [1.0, 1.8, 5.0]}
    config = RunConfig.from_dict({"shots": [{"prompt": "", "seconds": 1}], "backbone": settings})
    assert config.backbone.settings.spec.steps == (1, 1, 1)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (HeliosDistilledConfig, {"height": 480, "width": 832}, "multiples of 64"),
        (HeliosBaseConfig, {"width": 100}, "multiples of 16"),
        (HeliosDistilledConfig, {"steps": (2, 2)}, "3 stages"),
        (HeliosDistilledConfig, {"steps": (2, 0, 2)}, "1 step or more"),
        (HeliosDistilledConfig, {"stage_reinforcement": (5.0,)}, "3 stages"),
        (HeliosDistilledConfig, {"offload": "groups"}, "did you mean 'group'"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind, settings, match):
    with pytest.raises(ValueError, match=match):
        kind(**settings)
    assert HeliosBaseConfig(height=480, width=832).spec.backbone_spec().frame_tokens == 30 * 52


def test_folders_that_are_not_whole_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="has no transformer/"):
        TinyConfig(folder=str(tmp_path)).build(device="cpu", dtype=torch.float32, prompts=[], notice=print)
    with pytest.raises(ValueError, match="has no text_encoder/"):
        TinyConfig(folder=str(folder / "distilled")).build(
            device="cpu", dtype=torch.float32, prompts=[], notice=print
        )
    with pytest.raises(ValueError, match="recap weights helios-mid"):
        BACKBONES["helios-mid"]().build(device="cpu", dtype=torch.float32, prompts=[], notice=print)
    embeds = str(folder / "base" / "embeds.pt")
    with pytest.raises(ValueError, match="holds 2 rows"):
        TinyConfig(folder=str(folder / "distilled"), prompt_embeds=embeds).build(
            device="cpu", dtype=torch.float32, prompts=[], notice=print
        )


def test_weights_that_do_not_fit_are_named(folder, tmp_path):
    place = tmp_path / "transformer"
    shutil.copytree(folder / "distilled" / "transformer", place)
    file = place / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("patch_short.weight")
    for change, match in (
        ({}, r"1 missing \(patch_short\.weight\)"),
        ({"patch_short.weight": weight[:1]}, r"1 misshapen \(patch_short\.weight \[1, 16"),
        ({"patch_short.weight": weight, "lora": weight.clone()}, r"1 unknown \(lora\)"),
    ):
        save_file({**tensors, **change}, file)
        with pytest.raises(ValueError, match=match):
            load_transformer(place, ROWS["distilled"], torch.float32)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        load_transformer(place, ROWS["distilled"], torch.float32)
    with pytest.raises(ValueError, match="not those of helios-base"):
        load_transformer(place, BASE, torch.float32)


def test_fetching_skips_what_nothing_reads(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    monkeypatch.delenv("RECAP_OFFLINE")
    monkeypatch.setattr("recap.backbones.helios.checkpoint.ABOUT_GB", 0)
    plan = CliRunner().invoke(app, ["weights", "helios-distilled", "--dry-run"])
    assert plan.exit_code == 0 and "transformer_ode" in plan.output and "Apache-2.0" in plan.output
    asked = {}

    def fetch(repository, *, allow_patterns, local_dir):
        asked.update(repository=repository, patterns=allow_patterns)
        for part in ("transformer", "text_encoder", "tokenizer", "vae", "scheduler"):
            (local_dir / part).mkdir(parents=True)
        for part, file in (
            ("transformer", "diffusion_pytorch_model.safetensors"),
            ("vae", "diffusion_pytorch_model.safetensors"),
            ("text_encoder", "model.safetensors"),
        ):
            (local_dir / part / file).touch()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    done = CliRunner().invoke(app, ["weights", "helios-distilled"])
    assert done.exit_code == 0, done.output
    assert asked["repository"] == "BestWishYsh/Helios-Distilled"
    assert "transformer/*" in asked["patterns"] and not any("_ode" in name for name in asked["patterns"])
    (tmp_path / "helios/BestWishYsh/Helios-Distilled/vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match="vae"):
        BACKBONES["helios-distilled"]().build(device="cpu", dtype=torch.float32, prompts=[], notice=print)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(folder, tmp_path):
    settings = {
        "shots": [{"prompt": PROMPT, "seconds": 4 * 33 / 24}],
        "backbone": {
            "name": "test_helios_family:TinyConfig",
            "folder": str(folder / "distilled"),
            "prompt_embeds": str(folder / "distilled" / "embeds.pt"),
        },
        "flow": "classical",
    }
    config = RunConfig.from_dict(settings)
    record = generate(config, tmp_path / "whole", reporter=SILENT)
    assert record.num_blocks == 4 and record.num_pictures == 132

    def kill(done, total, rate):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(config, tmp_path / "killed", reporter=Reporter(SILENT.notice, kill))
    # Its backbone is a class of this file, which a run folder names as code.
    resume(tmp_path / "killed", reporter=SILENT, trust_code=True)
    for name in ("latents.safetensors", "state.safetensors"):
        one, other = (load_file(tmp_path / run / name) for run in ("whole", "killed"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    lines = [(tmp_path / run / "trace.jsonl").read_text() for run in ("whole", "killed")]
    assert lines[0] == lines[1] and "attention_share_by_stage" in lines[0]
