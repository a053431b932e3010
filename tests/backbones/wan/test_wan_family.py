"""A public model at the size of a thumbnail, in the published files, through the normal loader to a video."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from checkpoint_fakes import make_state
from safetensors.torch import load_file, save_file
from umt5_fakes import TEXT_DIM, TEXT_LEN, make_encoder, make_tokenizer, wan_tensors

from recap.backbones.wan import family
from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.checkpoint import load_checkpoint
from recap.backbones.wan.convert import convert
from recap.backbones.wan.family import WanConfig, released_memory
from recap.backbones.wan.lora import read_choice
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.published import PublicFile, WeightSet
from recap.backbones.wan.spec import RELEASED, UNTRAINED
from recap.backbones.wan.taehv import Taehv, load_taehv
from recap.backbones.wan.vae import published_name
from recap.cli.main import main
from recap.cli.settings import Generation, full_config
from recap.config import Choice, RunConfig
from recap.io.report import SILENT, Reporter
from recap.plan import Shot
from recap.run import build_backbone, generate, resume
from recap.types import Role

MINI = replace(
    UNTRAINED, name="longlive", dim=48, heads=2, layers=2, ffn_dim=64, text_dim=TEXT_DIM, text_len=TEXT_LEN
)
PROMPT = "a red fox walks on a beach"


@dataclass(frozen=True, slots=True)
class MiniConfig(WanConfig):
    """LongLive in small."""

    row = MINI


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from diffusers import AutoencoderKLWan

    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    model = CausalWan(MINI)
    draw_weights(model, 0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"generator": state, "step": 3}, folder / "base.pt")
    torch.save(wan_tensors(make_encoder()), folder / "umt5.pth")
    vae = AutoencoderKLWan(base_dim=4).eval()
    named = {published_name(name): tensor for name, tensor in vae.state_dict().items()}
    torch.save(named, folder / "Wan2.1_VAE.pth")
    save_file(Taehv().state_dict(), folder / "taew2_1.safetensors")
    return {
        "checkpoint": str(folder / "base.pt"),
        "text_encoder": str(folder / "umt5.pth"),
        "tokenizer": str(make_tokenizer(folder / "tokenizer")),
        "autoencoder": str(folder / "Wan2.1_VAE.pth"),
        "tiny_decoder": str(folder / "taew2_1.safetensors"),
    }


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECAP_HOME", str(tmp_path / "home"))


def config_of(files: dict[str, str], **changes) -> RunConfig:
    settings = MiniConfig(**{**files, **changes})
    shots = (Shot(PROMPT, 2.25), Shot("a boat sails on the sea", 0.75, cut=False))
    return RunConfig(shots=shots, backbone=Choice("mini", settings), flow="classical")


def quiet(_: str) -> None:
    pass


def test_it_generates_from_the_published_files_and_reads_the_encoder_once(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    config = config_of(files)
    backbone = build_backbone(config, notices.append)
    assert sum("memory: " in line for line in notices) == 2
    pixels = torch.rand(1, 9, 3, *backbone.spec.picture_size)
    assert backbone.encode(pixels).shape == (1, 3, 16, *MINI.latent_size)
    # The prompts are on disk now: the encoder must not be needed again.
    monkeypatch.setattr("recap.backbones.text.load_umt5", None)
    named = {"name": f"{__name__}:MiniConfig", **files}
    config = RunConfig.from_dict({**config.to_dict(), "backbone": named})
    record = generate(config, tmp_path / "run", reporter=SILENT)
    assert record.num_blocks == 4 and record.num_pictures == 45
    latents = load_file(tmp_path / "run" / "latents.safetensors")["latents"]
    assert latents.shape == (1, 12, 16, *MINI.latent_size) and latents.std() > 0.1


def test_the_tiny_decoder_makes_other_pixels_of_the_same_latents(files: dict[str, str]) -> None:
    full, tiny = (build_backbone(config_of(files, decoder=kind), quiet) for kind in ("full", "tiny"))
    latents = torch.randn(1, 3, 16, *MINI.latent_size)
    one, other = full.decoder().decode(latents), tiny.decoder().decode(latents)
    assert one.shape == other.shape == (1, 9, 3, *full.spec.picture_size) and not torch.allclose(one, other)
    assert all(
        torch.equal(a, b) for a, b in zip(full.model.parameters(), tiny.model.parameters(), strict=True)
    )


def test_prompt_embeds_stand_in_for_the_encoder(files: dict[str, str], tmp_path: Path) -> None:
    embeds = torch.randn(1, TEXT_LEN - 2, TEXT_DIM)
    torch.save({"prompt_embeds": embeds}, tmp_path / "embeds.pt")
    without = {name: path for name, path in files.items() if name not in ("text_encoder", "tokenizer")}
    backbone = build_backbone(config_of(without, prompt_embeds=str(tmp_path / "embeds.pt")), quiet)
    padded = torch.nn.functional.pad(embeds, (0, 0, 0, 2))
    expected = backbone.model.condition(padded)
    assert torch.equal(backbone.condition(("anything",)).keys[1], expected.keys[1])
    torch.save(torch.randn(2, 3, TEXT_DIM), tmp_path / "embeds.pt")
    with pytest.raises(ValueError, match="2 rows"):
        build_backbone(config_of(without, prompt_embeds=str(tmp_path / "embeds.pt")), quiet)


def test_as_released_has_the_window_the_phases_and_the_sink_of_the_public_code(files: dict[str, str]) -> None:
    spec = build_backbone(config_of(files, as_released=True), quiet).spec
    assert (spec.window_frames, spec.phases) == (12, "absolute")
    assert released_memory("longlive") == {"name": "sink", "sink_frames": 3}
    assert released_memory("infinite-forcing") == {"name": "sink", "sink_frames": 1}
    assert released_memory("self-forcing") == {"name": "none"}
    assert MiniConfig(**files).spec.window_frames == 6 and MiniConfig(**files).spec.phases == "window"
    # Sink and prior under the released window: three sink frames, six of the past, three of their own.
    config = RunConfig.from_dict(
        {"shots": [{"prompt": "", "seconds": 1}], "memory": released_memory("longlive")}
    )
    window = config.memory.settings.build(spec, lambda: None).window
    assert (window.sink_frames, window.prior_frames) == (3, 6) and Role.SINK


def lora_of(state: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("blocks.") and tensor.dim() == 2:
            module = name.removesuffix(".weight")
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, tensor.shape[1])
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(tensor.shape[0], rank)
    return tensors


def test_a_lora_is_merged(files: dict[str, str], tmp_path: Path) -> None:
    tensors = lora_of(make_state(MINI), rank=4)
    torch.save({"generator_lora": tensors}, tmp_path / "lora.pt")
    plain, tuned = (
        build_backbone(config_of(files, lora=lora, lora_alpha=8.0), quiet).model.state_dict()
        for lora in ("", str(tmp_path / "lora.pt"))
    )
    name = "blocks.1.ffn.0"
    down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(tuned[f"{name}.weight"], plain[f"{name}.weight"] + 2 * up @ down)
    with pytest.raises(ValueError, match=r"its alpha is not known.*backbone\.lora_alpha"):
        build_backbone(config_of(files, lora=str(tmp_path / "lora.pt")), quiet)


@pytest.mark.slow
def test_loras_of_ones_own_are_merged_recorded_and_watched(files: dict[str, str], tmp_path: Path) -> None:
    """Two runs with the LoRA at a strength and with the same change in the checkpoint are equal to the bit."""
    path = tmp_path / "style.safetensors"
    few = {name: tensor for name, tensor in lora_of(make_state(MINI), rank=4).items() if "ffn" in name}
    save_file({name.replace("base_model.model", "diffusion_model"): t for name, t in few.items()}, path)
    choice = f"{path}:0.5:alpha=2"
    convert(Path(files["checkpoint"]), tmp_path / "out", dtype=torch.float32, loras=[read_choice(choice)])
    notices: list[str] = []
    latents = []
    for name, changes in (("run", {"loras": (choice,)}), ("merged", {"checkpoint": str(tmp_path / "out")})):
        config = config_of(files, **changes).to_dict()
        config["backbone"]["name"] = f"{__name__}:MiniConfig"
        generate(RunConfig.from_dict(config), tmp_path / name, reporter=Reporter(notices.append))
        latents.append(load_file(tmp_path / name / "latents.safetensors")["latents"])
    assert torch.equal(*latents)
    assert (
        "lora: style.safetensors (ComfyUI names) changes 4 layers, rank 4, alpha 2.0, strength 0.5" in notices
    )
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["config"]["backbone"]["loras"] == [choice]
    assert about["added"] == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    assert json.loads((tmp_path / "merged" / "run.json").read_text())["added"] == {}
    resume(tmp_path / "run", reporter=SILENT, trust_code=True)
    save_file({name.replace("base_model.model", "diffusion_model"): 2 * t for name, t in few.items()}, path)
    with pytest.raises(ValueError, match=r"style\.safetensors.* not the file that the run began with"):
        resume(tmp_path / "run", reporter=SILENT, trust_code=True)


def test_loras_are_an_option_of_the_wan_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = Generation(prompt="a fox", backbone="self-forcing", lora=["a.pt:0.5", "b.pt:alpha=8"])
    config = full_config(options.values(), [])
    here = tmp_path.resolve()
    assert config.backbone.settings.loras == (f"{here}/a.pt:0.5", f"{here}/b.pt:1.0:alpha=8.0")
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for backbone, words in (
        (
            "embedded",
            r"--lora is .*a\.pt.*: embedded has no such setting; leave it out, or choose self-forcing, ",
        ),
        ("helios-mid", r"--lora is .*: helios-mid has no such setting"),
        (None, "--lora is .*name one with --backbone"),
        ("selfforcing", "backbone is 'selfforcing': no such name"),
    ):
        with pytest.raises(ValueError, match=words):
            full_config(Generation(prompt="a fox", backbone=backbone, lora=["a.pt"]).values(), [])
    for loras in ([3], ["a.pt:0"]):
        with pytest.raises(ValueError, match=r"backbone\.loras is "):
            RunConfig.from_dict({"shots": [], "backbone": {"name": "longlive", "loras": loras}})


def test_the_installed_lora_is_merged_with_its_authors_alpha(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = lora_of(make_state(MINI), rank=4)
    checkpoint, lora = (PublicFile("published", name, 0) for name in ("base.pt", "lora.pt"))
    installed = WeightSet(checkpoint, ema=False, licence="", lora=lora, lora_alpha=8.0)
    checkpoint.path.parent.mkdir(parents=True)
    checkpoint.path.write_bytes(Path(files["checkpoint"]).read_bytes())
    torch.save({"generator_lora": tensors}, lora.path)
    monkeypatch.setattr("recap.backbones.wan.family.find_weights", lambda name: installed)
    plain = build_backbone(config_of(files), quiet).model.state_dict()
    parts = {**files, "checkpoint": ""}
    tuned = build_backbone(config_of(parts), quiet).model.state_dict()
    name = "blocks.0.self_attn.q"
    down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(tuned[f"{name}.weight"], plain[f"{name}.weight"] + 2 * up @ down)
    with pytest.raises(ValueError, match=r"backbone\.lora_alpha is 4.0: its authors .* with 8.0"):
        build_backbone(config_of(parts, lora_alpha=4.0), quiet)


def test_what_is_missing_is_named_with_the_command_that_fetches_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def error_of(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["recap", "generate", "a fox", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and not (tmp_path / "runs").exists()
        return capsys.readouterr().err

    for row in RELEASED:
        assert f"recap weights {row}" in error_of("--backbone", row)
    for arguments, words in (
        (("--backbone", "embedded", "--decoder", "tiny"), "decoder"),
        (("--decoder", "tiny"), "--backbone"),
        (
            ("--backbone", "embedded", "--as-released"),
            "embedded has no such setting; leave it out, or choose self-",
        ),
        (("--backbone", "longlive", "--decoder", "huge"), "full"),
    ):
        assert words in error_of(*arguments)


@dataclass(frozen=True, slots=True)
class ByFrameConfig(MiniConfig):
    """A frame-wise model in small."""

    row = replace(MINI, name="causal-forcing-2step", frames_per_block=1, steps=(1000, 500))


@pytest.mark.slow
def test_a_model_that_generates_frame_by_frame(files: dict[str, str], tmp_path: Path) -> None:
    """From the published layout to a video, with the row's steps, with others, and as released."""
    results = {}
    for name, changes in (("own", {}), ("one", {"steps": [1000]}), ("released", {"as_released": True})):
        settings = {"name": f"{__name__}:ByFrameConfig", **files, "decoder": "tiny", **changes}
        shots = [{"prompt": PROMPT, "seconds": 2.0}]
        config = RunConfig.from_dict({"shots": shots, "backbone": settings, "flow": "classical"})
        record = generate(config, tmp_path / name, reporter=SILENT)
        assert (record.num_blocks, record.num_pictures) == (8, 29)
        results[name] = load_file(tmp_path / name / "latents.safetensors")["latents"]
        assert results[name].shape[1] == 8 and results[name].isfinite().all()
    # The window has not slid yet: only the number of steps tells them apart.
    assert not torch.equal(results["own"][:, :1], results["one"][:, :1])
    assert torch.equal(results["own"][:, :1], results["released"][:, :1])
    assert released_memory("causal-forcing-2step") == {"name": "none"}
    for steps in ([500], [1000, 2000], ["1000"], [1000, 0.5]):
        with pytest.raises(ValueError, match=r"WanSpec\.steps is "):
            ByFrameConfig(**files, steps=tuple(steps))


@pytest.mark.parametrize("text_device", ["", "cuda:1"])
def test_the_text_encoder_is_never_next_to_the_transformer(
    files: dict[str, str], text_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the card for itself before the transformer comes, and runs elsewhere from then on."""
    events: list[str] = []

    def place(encoder_files: object, device: torch.device, notice: object) -> torch.device:
        events.append(f"text on {device}")
        return torch.device("cpu")

    def on_cpu(load):  # type: ignore[no-untyped-def]
        def loaded(*given, device="cuda", **more):  # type: ignore[no-untyped-def]
            events.append(f"transformer on {device}")
            return load(*given, device="cpu", **more)

        return loaded

    monkeypatch.setattr("recap.backbones.text.place_encoder", place)
    monkeypatch.setattr(family, "load_checkpoint", on_cpu(load_checkpoint))
    monkeypatch.setattr(family, "load_taehv", lambda path, device, dtype: load_taehv(path, "cpu", dtype))
    settings = MiniConfig(**files, decoder="tiny", text_device=text_device)
    made = settings.build(device="cuda", dtype=torch.float32, prompts=[PROMPT], notice=print)
    made.condition((PROMPT,))
    assert events == [f"text on {text_device or 'cuda'}", "transformer on cuda"]
    made.condition(("a boat sails on the sea",))
    assert events[2:] == [f"text on {text_device or 'cpu'}"]
