"""What a run takes of a card is planned before anything is loaded: on pretend cards from 6 to 80 GB."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from recap.backbones.wan.backbone import WanBackbone, build_untrained
from recap.backbones.wan.family import SelfForcingConfig
from recap.backbones.wan.model import empty_model
from recap.backbones.wan.spec import UNTRAINED, WAN_1_3B
from recap.backbones.wan.taehv import Taehv
from recap.config import Choice, RunConfig, choose
from recap.fast import fitting
from recap.fast.backbone import FastWanBackbone
from recap.fast.fitting import CardSetting, Demand, describe_plan, what_to_add
from recap.fast.vae import FastVae
from recap.flow.raft import RaftSmall
from recap.io import devices
from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.run import build_memory, generate
from recap.session import Session
from recap.types import GeneratedBlock

GB = 1e9
WAN = Demand(WAN_1_3B, frames=7)
CARDS = (6, 8, 10, 12, 16, 24, 32, 48, 80)
# A card "of 8 GB" has 8 GiB, and some of it is not free: a screen, and CUDA's context.
TAKEN = 0.4 * GB


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the weights are there."""
    monkeypatch.setattr(SelfForcingConfig, "check_files", lambda self: None)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a card has so many bytes free, and that CUDA is there."""

    def pretend(free: float) -> None:
        monkeypatch.setattr("recap.config.check_device", lambda *_: None)
        monkeypatch.setattr(fitting, "can_fuse", lambda *_: True)
        for module in (fitting, devices):
            monkeypatch.setattr(module, "free_on", lambda device: free)

    return pretend


def public_run(**changes: object) -> RunConfig:
    settings = SelfForcingConfig(decoder=str(changes.pop("decoder", "full")))
    usual = {"shots": (Shot("a fox", 3.0),), "backbone": Choice("self-forcing", settings), "device": "cuda"}
    return RunConfig(**{**usual, **changes})  # type: ignore[arg-type]


def test_the_parts_are_what_they_count() -> None:
    plan = WAN.plan(CardSetting("fast", "full"))
    parameters = sum(p.numel() for p in empty_model(WAN_1_3B).parameters())
    assert plan.parts["transformer"] == 2 * parameters
    tokens = 7 * 30 * 52
    assert plan.parts["memory"] == plan.parts["window"] == 2 * 2 * 30 * tokens * 1536
    assert plan.total == sum(plan.parts.values())
    assert sum(p.numel() for p in Taehv().parameters()) == fitting.TINY_PARAMETERS
    assert sum(p.numel() for p in RaftSmall().parameters()) == fitting.FLOW_PARAMETERS


def test_the_parts_are_what_a_small_model_really_takes() -> None:
    """Weights, the memory's stores, the window as it is read and the decoder's past, from the objects themselves."""
    plain = build_untrained()
    fast, policy = FastWanBackbone(plain), RecapConfig().build(plain.spec, lambda: recent(plain))
    made = rollout(fast, policy, make_plan([[Shot("a red boat", 3.0)]], plain.spec), seeds=[0])
    assert len(list(made)) > 2
    plan = Demand(UNTRAINED, frames=7, itemsize=4).plan(CardSetting("fast", "full"))
    assert plan.parts["transformer"] == sum(p.nbytes for p in plain.model.parameters())
    stores = (policy.window.current, policy.window.sink, policy.window.prior, policy.bank._store)
    assert plan.parts["memory"] == sum(part.nbytes for s in stores for part in (s.keys, s.values))
    assert plan.parts["window"] == fast._room.nbytes
    assert fast._text is not None
    assert plan.parts["text"] == 2 * sum(part.nbytes for part in (*fast._text.keys, *fast._text.values))


def recent(plain: WanBackbone):  # type: ignore[no-untyped-def]
    return choose("admission", "recent").settings.build(plain.spec, lambda pictures: None)


def test_what_is_left_out_makes_it_smaller() -> None:
    sizes = {
        setting: WAN.plan(setting).total
        for setting in (
            CardSetting("fast", "full"),
            CardSetting("fast", "tiny"),
            CardSetting("readable", "tiny"),
            CardSetting("readable", "tiny", "int8"),
        )
    }
    assert all(one > other for one, other in pairwise(sizes.values()))
    assert WAN.plan(CardSetting("fast", "tiny", "int8")).total < WAN.plan(CardSetting("fast", "tiny")).total
    for changes in ({"rows": 2}, {"frames": 17.0}, {"itemsize": 4}, {"fused": False}):
        assert replace(WAN, **changes).plan(CardSetting()).total > WAN.plan(CardSetting()).total  # type: ignore[arg-type]


@pytest.mark.parametrize("gigabytes", CARDS)
@pytest.mark.parametrize("decoder", ["full", "tiny"])
def test_auto_takes_the_quickest_path_that_fits(gigabytes: int, decoder: str) -> None:
    free = gigabytes * 2**30 - TAKEN
    asked = CardSetting("fast", decoder)
    found = fitting.choose(WAN, asked, "auto", free)
    plans = [WAN.plan(replace(asked, path=path)) for path in fitting.PATHS]
    smallest = min(plans, key=lambda plan: plan.total)
    assert found == next((plan for plan in plans if plan.fits(free)), smallest)
    assert found.setting.decoder == decoder and found.setting.precision == "full"
    assert fitting.choose(WAN, asked, "off", free).setting == asked
    assert fitting.choose(WAN, asked, "on", free) == smallest


@pytest.mark.parametrize("gigabytes", CARDS)
def test_the_plan_says_what_fits_or_what_to_add(gigabytes: int) -> None:
    free = gigabytes * 2**30 - TAKEN
    setting = fitting.choose(WAN, CardSetting(), "auto", free).setting
    first, verdict = describe_plan(WAN, setting, "auto", free)
    assert f"about {WAN.plan(setting).total / GB:.1f} GB" in first and "transformer 2.84" in first
    if WAN.plan(setting).fits(free):
        assert verdict.startswith(f"memory: fits into the {free / GB:.1f} GB that are free and the 0.5 GB")
        return
    added = what_to_add(WAN, CardSetting(), "auto", free)
    assert added is not None, "the smallest card needs all options, and then fits"
    options, plan = added
    assert f"fits with {options} ({plan.setting}" in verdict and plan.fits(free)


def test_the_context_is_not_counted_twice() -> None:
    """It is there before free memory is asked for: 5.5 GB of a card of 6 GB are enough for what takes 5.9 in all."""
    plan = WAN.plan(CardSetting("readable", "tiny", "int8"))
    assert 5.5 * GB < plan.total < 5.9 * GB and plan.fits(5.5 * GB)
    assert not plan.fits(plan.total - fitting.CONTEXT - 1) and 0 < fitting.CONTEXT < fitting.DRIVER
    found = what_to_add(WAN, CardSetting(), "auto", 5.5 * GB)
    assert found == ("--decoder tiny --precision int8", plan)
    assert "no option makes it fit" not in describe_plan(WAN, CardSetting(), "auto", 5.5 * GB)[1]


def test_nothing_helps_on_a_card_that_is_too_small_for_all() -> None:
    assert what_to_add(WAN, CardSetting(), "auto", 2 * GB) is None
    assert "no option makes it fit" in describe_plan(WAN, CardSetting(), "auto", 2 * GB)[1]
    # Whoever has 8 bits already is not told to take 8 bits.
    assert what_to_add(WAN, CardSetting("readable", "tiny", "fp8"), "auto", 5 * GB) is None


def test_a_card_of_12_gigabytes_is_told_to_use_the_tiny_decoder() -> None:
    assert (
        "fits with --decoder tiny (fast path, tiny decoder"
        in describe_plan(WAN, CardSetting(), "auto", 11.5 * GB)[1]
    )


def test_a_run_is_fitted_to_its_card(on_card) -> None:
    notices: list[str] = []
    on_card(80 * GB)
    config = public_run(decoder="tiny")
    assert fitting.fit_card(config, notices.append) is config and not notices
    assert "tiny decoder, int8 weights" in fitting.describe_fit(replace(config, precision="int8"))[0]
    assert fitting.describe_fit(config)[1] == (
        "memory: fits into the 80.0 GB that are free and the 0.5 GB that CUDA has taken already"
    )
    assert fitting.describe_fit(config)[2].endswith("the text encoder alone: about 11.4 GB on cuda")
    assert len(fitting.describe_fit(config, random_weights=True)) == 2
    on_card(8 * GB)
    assert "11.4 GB on the CPU, since it does not fit into the 8.0 GB" in fitting.describe_fit(config)[-1]
    assert fitting.fit_card(config, notices.append) == replace(config, eager=True)
    assert "the readable path is used" in notices[0] and "8.0 GB that are free" in notices[0]
    off = replace(config, low_memory="off")
    assert fitting.fit_card(off, notices.append) is off
    on_card(80 * GB)
    low = fitting.fit_card(replace(config, low_memory="on"), notices.append)
    assert low.eager and low.backbone.settings.text_device == "cpu"  # type: ignore[attr-defined]
    assert RunConfig.from_dict(low.to_dict()) == low and "low_memory" not in config.to_dict()


def test_two_devices_and_other_families_are_not_planned(on_card) -> None:
    on_card(6 * GB)
    for config in (
        public_run(decoder_device="cuda:1"),
        RunConfig(shots=(Shot("a fox", 1.0),), device="cuda"),
    ):
        assert fitting.fit_card(config, print) is config and fitting.describe_fit(config) == []


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"low_memory is 'atuo'.*did you mean 'auto'"):
        public_run(device="cpu", low_memory="atuo")


def test_the_text_encoder_is_on_the_card_only_if_it_fits(on_card, tmp_path: Path) -> None:
    file, notices = tmp_path / "encoder", list[str]()
    file.touch()
    cuda = torch.device("cuda")
    on_card(devices.SPARE_BYTES)
    assert devices.place_encoder([file], cuda, notices.append) == cuda and not notices
    on_card(devices.SPARE_BYTES - 1)
    assert devices.place_encoder([file], cuda, notices.append) == torch.device("cpu")
    assert "do not fit" in notices[0]


def test_the_users_own_setting_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", said.append, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    for name in devices.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    devices.let_segments_grow("cpu")
    assert not said
    devices.let_segments_grow("cuda:0")
    assert said == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    devices.let_segments_grow("cuda:0")
    assert len(said) == 1


def test_the_cpu_has_no_card() -> None:
    assert devices.free_on("cpu") is None
    config = public_run(device="cpu", low_memory="on")
    assert fitting.fit_card(config, print) is config
    assert len(fitting.describe_fit(config)) == 2
    assert fitting.describe_fit(config)[1].endswith("11.4 GB on cpu")


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", ["on", "off"])
def test_the_embedded_model_generates_the_same_bits(low_memory: str) -> None:
    """So its tables are the same, too."""
    backbone = load_backbone("embedded")

    def generated(choice: str) -> list[GeneratedBlock]:
        config = RunConfig(shots=(Shot("a fox on a beach by day", 1.5),), device="cpu", low_memory=choice)
        fitted = fitting.fit_card(config, print)
        policy, plan = build_memory(fitted, backbone.spec), make_plan([config.shots], backbone.spec)
        return list(rollout(backbone, policy, plan, seeds=[0]))

    for one, other in zip(generated("auto"), generated(low_memory), strict=True):
        assert torch.equal(one.latents, other.latents) and torch.equal(one.pixels, other.pixels)


def test_a_run_records_what_low_memory_meant(on_card, tmp_path: Path) -> None:
    config = RunConfig(
        shots=(Shot("a fox", 0.8),), backbone=choose("backbone", "untrained"), memory=choose("memory", "sink"),
        device="cpu", low_memory="on",
    )  # fmt: skip
    generate(config, tmp_path / "run")
    text = (tmp_path / "run" / "run.json").read_text()
    assert '"low_memory": "on"' in text


def test_a_setting_that_is_gone_is_left_out_where_it_was_as_usual() -> None:
    assert choose("memory", {"name": "recap", "bank_on_host": False}) == choose("memory", "recap")
    with pytest.raises(ValueError, match=r"memory\.bank_on_host is True: there is no such setting any more"):
        choose("memory", {"name": "recap", "bank_on_host": True})


def test_the_decoders_past_is_counted() -> None:
    vae = FastVae(fitting.PUBLIC_WIDTH, 16)
    past = sum(2 * torch.Size(shape).numel() for shape in vae.pasts((1, 60, 104)))
    weights = 2 * (fitting.AUTOENCODER_PARAMETERS + sum(p.numel() for p in vae.parameters()))
    assert WAN.plan(CardSetting()).parts["decoder"] == past + weights


def test_a_session_is_fitted_to_its_card_unless_it_shares_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap.session.fit_card", lambda config, notice: replace(config, eager=True))
    config = RunConfig(
        shots=(Shot("a boat", 0.8),), backbone=choose("backbone", "untrained"), memory=choose("memory", "sink"),
        device="cpu",
    )  # fmt: skip
    own = Session(config)
    assert own.config.eager and not Session(config, backbone=own.backbone).config.eager
