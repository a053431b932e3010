"""The probe's figures are those of the attention and of the keys they speak of."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from recap.backbones.wan.family import SelfForcingConfig
from recap.backbones.wan.spec import UNTRAINED
from recap.cli.main import main
from recap.flow import ClassicalFlow
from recap.io.report import Reporter
from recap.plan import Shot, make_plan
from recap.rollout import BlockRun, block_noise
from recap.show.probing import KINDS, ProbedSink, ProbeSettings, area_under_curve, probe
from recap.types import Role


def test_shares_by_head_are_those_of_the_attention_itself(backbone):
    """Their mean over heads and layers is what the context measures in the clean pass."""
    spec = backbone.spec
    memory = ProbedSink(spec, ClassicalFlow(), change=2)
    decoder, conditioning = backbone.decoder(), backbone.condition(("a red boat",))
    for block in make_plan([[Shot("a red boat", 2.25)]], spec).blocks:
        run = BlockRun(memory, spec, block)
        latents = backbone.denoise(block_noise(spec, [0], block), conditioning, run.context)
        backbone.settle(latents, conditioning, run.clean)
        run.commit(latents, decoder.decode(latents))
        measured = run.clean.shares()
        for role in measured if block.index else ():
            heads = torch.stack([layer[role][-1] for layer in memory.shares])
            assert heads.shape == (spec.layers, spec.heads)
            torch.testing.assert_close(heads.mean(), measured[role][0], atol=1e-5, rtol=1e-4)
    assert set(measured) == {Role.SINK, Role.PRIOR, Role.CURRENT}


def test_cosines_are_to_the_nearest_token_of_the_first_frame(backbone):
    spec = backbone.spec
    memory = ProbedSink(spec, ClassicalFlow(), change=2)
    kept = []
    keep = memory.keep

    def keep_keys(block, pixels, trace):
        kept.append(memory.window.current.keys.clone())
        return keep(block, pixels, trace)

    memory.keep = keep_keys
    plan = make_plan([[Shot("a red boat", 1.5)]], spec)
    conditioning, decoder = backbone.condition(("a red boat",)), backbone.decoder()
    for block in plan.blocks:
        run = BlockRun(memory, spec, block)
        latents = backbone.denoise(block_noise(spec, [0], block), conditioning, run.context)
        backbone.settle(latents, conditioning, run.clean)
        run.commit(latents, decoder.decode(latents))
    size = spec.frame_tokens
    for layer in range(spec.layers):
        first = [token.flatten() for token in kept[0][layer, 0, :size]]
        wanted = [
            max(float(functional.cosine_similarity(token.flatten(), other, dim=0)) for other in first)
            for token in kept[0][layer, 0, size:]
        ]
        found = memory.cosines["first block"][0][layer].tolist()
        assert found == pytest.approx(wanted, abs=1e-5)
    seen = sum(len(each) for each in memory.distances["background"])
    noticed = spec.block_tokens - seen
    assert 0 <= noticed < spec.block_tokens


def test_the_area_under_the_curve_counts_pairs():
    high, low = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 2.0, 3.0])
    pairs = [float(a > b) + 0.5 * float(a == b) for a in high for b in low]
    assert area_under_curve(high, low) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(area_under_curve(high, torch.zeros(0)))


def test_a_probe_is_plain_data_of_every_layer_and_reports_progress(backbone):
    done = []
    reporter = Reporter(lambda _: None, lambda count, total, rate: done.append((count, total)))
    result = probe(backbone, ClassicalFlow(), ProbeSettings(blocks=2), reporter)
    result = json.loads(json.dumps(result, allow_nan=False))
    spec = backbone.spec
    assert len(result["layers"]) == spec.layers and done[-1] == (4, 4)
    assert set(result["tokens"]) == set(KINDS)
    for layer in result["layers"]:
        heads = layer["share_by_head"]
        assert all(len(shares) == spec.heads for shares in heads.values())
        assert [sum(own) for own in zip(*heads.values(), strict=True)] == pytest.approx(
            [1] * spec.heads, abs=1e-3
        )
        assert (
            -1
            <= layer["cosine_to_sink"]["background"]["5"]
            <= layer["cosine_to_sink"]["background"]["95"]
            <= 1
        )
    again = probe(backbone, ClassicalFlow(), ProbeSettings(blocks=2), Reporter(lambda _: None))
    assert json.loads(json.dumps(again)) == result


def test_the_threshold_is_the_one_that_the_rule_chooses(backbone):
    """The same video under `recap` with `keys`, whose bank is empty at the beginning as a sink's is."""
    from recap.admission.keys import KeyNoveltyConfig
    from recap.memory.recap import RecapConfig
    from recap.rollout import rollout

    result = probe(backbone, ClassicalFlow(), ProbeSettings(blocks=2), Reporter(lambda _: None))
    memory = RecapConfig().build(backbone.spec, lambda: KeyNoveltyConfig().build(backbone.spec, None))
    plan = make_plan([[Shot(ProbeSettings().before, 0.75)]], backbone.spec)
    list(rollout(backbone, memory, plan, seeds=[0]))
    limit = float(memory.state()["admission.limit"])
    assert result["keys_rule"]["new_beyond_distance"] == pytest.approx(limit, abs=1e-5)


@pytest.fixture
def recap(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["recap", *words])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return run


SMALL = ("--device", "cpu", "--blocks", "2", "--flow", "classical")


def test_the_command_writes_a_small_file(recap, tmp_path):
    code, out, error = recap("probe", "untrained", *SMALL)
    assert code == 0, error
    assert out.splitlines()[-1] == "probe-untrained.json" and "`keys` compares layers" in out
    # Keys of random weights are all far from each other, so that four times as far is nowhere.
    assert "That is next to nothing: with `--set admission.margin=" in out
    file = tmp_path / "probe-untrained.json"
    found = json.loads(file.read_text())
    assert found["backbone"] == "untrained" and found["flow"] == "classical"
    assert file.stat().st_size < 50_000


def test_8_bits_are_probed_too_and_the_file_says_so(recap, tmp_path):
    found = {}
    for precision in ("full", "int8", "fp8"):
        code, _, error = recap("probe", "untrained", "--precision", precision, *SMALL)
        assert code == 0, error
        found[precision] = json.loads((tmp_path / "probe-untrained.json").read_text())
        assert found[precision]["precision"] == precision
        assert (f"precision {precision}: the transformer takes" in error) == (precision != "full")
    usual = {name: [layer["usual_distance"] for layer in each["layers"]] for name, each in found.items()}
    assert usual["full"] != usual["int8"] != usual["fp8"]
    assert usual["int8"] == pytest.approx(usual["full"], rel=0.05)


def test_a_public_model_runs_without_its_weights(recap, tmp_path, monkeypatch):
    """With its row made small: at real size a CPU takes hours."""
    small = replace(UNTRAINED, name="self-forcing", in_channels=16, layers=2, latent_size=(4, 6))
    monkeypatch.setattr(SelfForcingConfig, "row", small)
    code, _, error = recap("probe", "self-forcing", "--random-weights", "--out", "sf.json", *SMALL)
    assert code == 0, error
    found = json.loads((tmp_path / "sf.json").read_text())
    assert found["weights"] == "random" and found["spec"]["layers"] == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nosuch",), "nosuch"),
        (("untrained", "--blocks", "1"), "--blocks"),
        (("untrained", "--random-weights"), "--random-weights"),
        (("helios-distilled",), "helios-distilled"),
        (("untrained", "--out", "."), "--out"),
        (("untrained", "--precision", "int4"), "precision is 'int4': no such name"),
        (("untrained", "--low-memory", ""), "low_memory is '': no such name"),
        (("untrained", "--dtype", "double"), "dtype is 'double': no such name"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(recap, words, named):
    code, _, error = recap("probe", *words, "--device", "cpu")
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and named in lines[0]
