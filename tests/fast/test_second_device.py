"""Decoder and flow on a second device: the same results, and refusals in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recap.admission.keys import KeyNovelty
from recap.config import RunConfig
from recap.errors import RecapError
from recap.fast.second_device import MovedAdmission, MovedDecoder, move_decoder
from recap.io.report import SILENT
from recap.plan import make_plan
from recap.rollout import rollout
from recap.run import build_backbone, build_memory, generate, resume

SHOTS = [{"prompt": "a fox on a beach by day", "seconds": 2.5}]


def config(**settings: Any) -> RunConfig:
    return RunConfig.from_dict({"shots": SHOTS, "flow": "classical", "device": "cpu", **settings})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "admission"), [("untrained", "flow"), ("untrained", "recent"), ("embedded", "flow+keys")]
)
def test_a_run_with_two_devices_is_that_with_one(tmp_path: Path, backbone: str, admission: str) -> None:
    one, two = (tmp_path / name for name in ("one", "two"))
    settings = {"backbone": backbone, "admission": admission}
    generate(config(**settings), one, reporter=SILENT)
    generate(config(**settings, decoder_device="cpu"), two, reporter=SILENT)
    assert (one / "trace.jsonl").read_bytes() == (two / "trace.jsonl").read_bytes()
    for file in ("latents.safetensors", "state.safetensors"):
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    resume(two, reporter=SILENT)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("admission", ["random", "keys"])
def test_a_gpu_generates_and_the_cpu_decodes(admission: str) -> None:
    settings = config(device="cuda", decoder_device="cpu", admission=admission, backbone="embedded")
    backbone = build_backbone(settings, SILENT.notice)
    policy = build_memory(settings, backbone.spec, SILENT.notice)
    for block in rollout(backbone, policy, make_plan([settings.shots], backbone.spec), seeds=[0]):
        assert block.latents.is_cuda and not block.pixels.is_cuda
    assert policy.state()["bank.score"].is_cuda


def test_both_parts_are_on_the_second_device() -> None:
    settings = config(decoder_device="cpu", backbone="embedded")
    backbone = build_backbone(settings, SILENT.notice)
    assert isinstance(backbone.decoder(), MovedDecoder)
    policy = build_memory(settings, backbone.spec, SILENT.notice)
    assert isinstance(policy._admission, MovedAdmission)


def test_a_rule_without_pictures_stays_where_the_keys_are() -> None:
    settings = config(decoder_device="cpu", backbone="embedded", admission="keys")
    policy = build_memory(settings, build_backbone(settings, SILENT.notice).spec, SILENT.notice)
    assert isinstance(policy._admission, KeyNovelty)


def test_a_run_without_one_has_the_settings_of_older_runs() -> None:
    assert "decoder_device" not in config().to_dict()
    told = config(decoder_device="cpu").to_dict()
    assert told["decoder_device"] == "cpu"
    assert RunConfig.from_dict(told).decoder_device == "cpu"


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(RecapError, match="decoder_device is 'tpu'"):
        config(decoder_device="tpu")


def test_a_backbone_of_another_family_is_refused() -> None:
    class Other:
        pass

    with pytest.raises(RecapError, match="only the models of the Wan family"):
        move_decoder(Other(), "cpu")  # type: ignore[arg-type]
