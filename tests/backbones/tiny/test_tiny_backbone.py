from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recap.backbones.tiny.autoencoder import Autoencoder
from recap.backbones.tiny.backbone import WordTable, build_embedded
from recap.backbones.tiny.vocabulary import TEXT_LENGTH, token_ids
from recap.backbones.wan.backbone import draw_weights
from recap.backbones.wan.model import CausalWan
from recap.backbones.wan.spec import EMBEDDED
from recap.eval.judges.probe import Probe, save_probe
from recap.memory.sink import SinkConfig
from recap.plan import Shot, make_plan
from recap.rollout import rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in the form that training saves, with random values."""
    made = tmp_path_factory.mktemp("weights")
    dit = CausalWan(EMBEDDED)
    draw_weights(dit, 0)
    save_probe(Probe(), made / "probe.safetensors")
    for name, module in (("dit", dit), ("autoencoder", Autoencoder()), ("text", WordTable())):
        state = {key: value.half().contiguous() for key, value in module.state_dict().items()}
        save_file(state, made / f"{name}.safetensors")
    return made


def test_everything_fits_into_forty_megabytes(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40e6


def test_the_row_has_the_geometry_of_the_brief() -> None:
    spec = EMBEDDED.backbone_spec()
    assert (spec.grid, spec.picture_size, spec.window_frames) == ((8, 13), (128, 208), 6)
    assert EMBEDDED.text_len == TEXT_LENGTH


def test_a_block_from_stored_weights(folder: Path) -> None:
    backbone = build_embedded(folder=folder)
    policy = SinkConfig().build(backbone.spec, lambda: pytest.fail("a sink admits nothing"))
    plan = make_plan([[Shot("a fox on a beach", 0.5)]], backbone.spec)
    (block,) = rollout(backbone, policy, plan, seeds=[0])
    assert block.pixels.shape == (1, 9, 3, 128, 208) and block.pixels.isfinite().all()
    with pytest.raises(ValueError, match="unicorn"):
        backbone.condition(("a unicorn on a beach",))


def test_words_with_slots_tell_who_is_named_first_and_words_without_do_not(
    folder: Path, tmp_path: Path
) -> None:
    one, other = "a fox and a bus on a beach", "a bus and a fox on a beach"
    table = build_embedded(folder=folder)._encode
    first, second = table(one), table(other)
    assert not torch.equal(first, second)
    stored = load_file(folder / "text.safetensors")
    slots = stored.pop("slots").float()
    named = stored["words.weight"].float()[token_ids(other, as_named=True)]
    assert torch.equal(second[0], named + slots)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "text.safetensors").unlink()
    save_file(stored, tmp_path / "text.safetensors")
    table = build_embedded(folder=tmp_path)._encode
    assert torch.equal(table(one), table(other))
    assert torch.equal(table(other)[0], stored["words.weight"].float()[token_ids(one)])


def test_faults_are_listed_by_name_and_file(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    state = load_file(folder / "autoencoder.safetensors")
    state["decoder.extra"] = state.pop("latent_std")
    state["latent_mean"] = torch.zeros(3)
    (tmp_path / "autoencoder.safetensors").unlink()
    save_file(state, tmp_path / "autoencoder.safetensors")
    with pytest.raises(ValueError, match=r"autoencoder\.safetensors") as caught:
        build_embedded(folder=tmp_path)
    for part in ("missing (latent_std)", "unknown (decoder.extra)", "latent_mean [3] for [16]"):
        assert part in str(caught.value)


def test_absent_and_broken_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dit\.safetensors.*no such file"):
        build_embedded(folder=tmp_path)
    (tmp_path / "dit.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        build_embedded(folder=tmp_path)
