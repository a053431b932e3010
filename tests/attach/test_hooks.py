"""attach() puts on what it needs, takes all of it off again, and refuses what it does not know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import upstream_wan as wan
from pipelines import AS_RELEASED, KINDS, generate, generate_interrupted, layers_of, make, noise_of

from recap import attach
from recap.attach.session import AttachedSession, Pictures

# --- pictures ---


def test_nothing_is_decoded_twice():
    pipeline = make("infinite-forcing")
    with attach(pipeline, "recap", flow="classical"):
        generate(pipeline)
        assert pipeline.vae.model.frames_decoded == 18
        other = pipeline.vae.decode_to_pixel(noise_of(6))
    assert torch.equal(other, wan.WanVAEWrapper().decode_to_pixel(noise_of(6)))
    with attach(pipeline, "recap", flow="classical", reuse_pictures=False):
        before = vars(pipeline.vae).get("decode_to_pixel")
        video, latents = generate(pipeline)
    assert before is None and pipeline.vae.model.frames_decoded == 18 + 18 + 36
    assert torch.equal(video, (wan.WanVAEWrapper().decode_to_pixel(latents) * 0.5 + 0.5).clamp(0, 1))


def test_latents_changed_since_are_decoded_again():
    vae, latents = wan.WanVAEWrapper(), noise_of(2)
    pictures = Pictures(vae, None, keep=True)
    pictures.restart()
    for block in latents.split(3, dim=1):
        pictures.decode(block)
    assert torch.equal(pictures.decode_to_pixel(latents + 1), vae.decode_to_pixel(latents + 1))
    decoded = vae.model.frames_decoded
    assert torch.equal(pictures.decode_to_pixel(latents), wan.WanVAEWrapper().decode_to_pixel(latents))
    assert vae.model.frames_decoded == decoded


# --- on and off ---


def touched(pipeline):
    """Every object with attributes that could be patched, classes and modules too."""
    modules = [*pipeline.generator.modules(), *pipeline.vae.modules(), pipeline.vae.model, pipeline]
    classes = {kind for module in modules for kind in type(module).__mro__ if kind.__module__ != "builtins"}
    return [*modules, *classes, *(kind[0] for kind in KINDS.values()), wan]


def snapshot(pipeline):
    return [(owner, dict(vars(owner))) for owner in touched(pipeline)]


def assert_untouched(before, may_change=("kv_cache1", "crossattn_cache", "last", "frames_decoded")):
    for owner, attributes in before:
        now = vars(owner)
        assert now.keys() == attributes.keys(), owner
        changed = [name for name in now if now[name] is not attributes[name] and name not in may_change]
        assert not changed, (owner, changed)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_is_put_back(kind, lora):
    pipeline = make(kind, lora=lora)
    generate(pipeline, blocks=1)  # upstream sets attributes of its own in its first run
    mine = layers_of(pipeline)[1].forward
    vars(layers_of(pipeline)[1])["forward"] = mine  # somebody's own patch stays theirs
    before = snapshot(pipeline)
    with attach(pipeline, "recap", flow="classical"):
        generate(pipeline, blocks=2)
        assert all(vars(layer)["forward"] is not mine for layer in layers_of(pipeline))
        assert {"forward"} <= vars(pipeline.generator).keys()
    assert_untouched(before)
    assert vars(layers_of(pipeline)[1])["forward"] is mine


def test_put_back_after_an_error_and_usable_again():
    pipeline = make("longlive-1.0")
    _, latents = generate(pipeline, blocks=3)
    before = snapshot(pipeline)
    with pytest.raises(KeyboardInterrupt), attach(pipeline, "recap", flow="classical"):
        generate_interrupted(pipeline, at=7)
    assert_untouched(before)
    assert torch.equal(generate(pipeline, blocks=3)[1], latents)
    with attach(pipeline, AS_RELEASED["longlive-1.0"], phases="released"):
        assert torch.equal(generate(pipeline, blocks=3)[1], latents)


def test_put_back_when_attaching_fails_halfway(monkeypatch):
    pipeline = make("self-forcing")
    before = snapshot(pipeline)
    monkeypatch.setattr(AttachedSession, "_hook_attention", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), attach(pipeline, "none"):
        raise AssertionError("not reached")
    monkeypatch.undo()
    assert_untouched(before)


def test_nesting_is_refused_and_harms_nothing():
    pipeline = make("infinite-forcing")
    before = snapshot(pipeline)
    with attach(pipeline, "none"):
        with pytest.raises(ValueError, match=r"attached to it already; leave"), attach(pipeline, "sink"):
            raise AssertionError("not reached")
        generate(pipeline, blocks=2)
    assert_untouched(before)


def test_calls_without_a_cache_are_upstreams_own():
    pipeline = make("self-forcing")
    (layer, _), grid = layers_of(pipeline), torch.tensor([[3, 2, 3]])
    x, freqs = torch.randn(1, 18, wan.DIM), pipeline.generator.model.freqs
    expected = layer(x, None, grid, freqs, None)
    with attach(pipeline, "recap", flow="classical"):
        assert torch.equal(layer(x, None, grid, freqs, None), expected)


def test_the_page_about_attaching_works_as_printed(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "attach.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) >= 2
    for snippet in snippets:
        names = {"pipeline": make("longlive-1.0"), "noise": noise_of(2), "prompts": ["a red boat"]}
        exec(compile(snippet, "docs/attach.md", "exec"), names)
        assert names["video"].shape == (1, 21, 3, 32, 48)


# --- refusals ---


def test_a_video_under_way_is_refused():
    pipeline = make("self-forcing")
    conditional, noise = pipeline.text_encoder(["a"]), noise_of(1)
    pipeline._prepare_caches(noise)
    pipeline._clean(noise, 0, conditional)
    attach_first = r"current_start frame is 3: .*attach before the pipeline begins"
    with attach(pipeline, "none"), pytest.raises(ValueError, match=attach_first):
        pipeline._generate(noise, conditional, torch.zeros(1, 3), 3)


def test_a_first_block_of_one_frame_is_refused():
    pipeline = make("self-forcing")
    conditional, noise = pipeline.text_encoder(["a"]), noise_of(1)
    pipeline._prepare_caches(noise)
    with attach(pipeline, "none"), pytest.raises(ValueError, match="independent_first_frame"):
        pipeline._clean(noise, 0, conditional, frames=1)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (lambda p: p, "generator"), (lambda p: p, "vae"), (lambda p: p, "args"), (lambda p: p, "frame_seq_length"),
        (lambda p: p, "num_frame_per_block"), (lambda p: p.args, "context_noise"), (lambda p: p.generator, "model"),
        (lambda p: p.generator.model, "blocks"), (lambda p: p.generator.model, "freqs"),
        (lambda p: p.generator.model.blocks[1], "self_attn"), (lambda p: layers_of(p)[0], "norm_k"),
        (lambda p: layers_of(p)[0], "sink_size"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(owner, name):
    pipeline = make("self-forcing")
    delattr(owner(pipeline), name)
    with pytest.raises(ValueError, match=f"no attribute '{name}' was found on"), attach(pipeline):
        raise AssertionError("not reached")


def test_longlive_2_and_strangers_are_refused(monkeypatch):
    pipeline = make("self-forcing")
    kind = type(layers_of(pipeline)[0])
    monkeypatch.setattr(kind, "__module__", "wan_5b.modules.causal_model")
    with pytest.raises(ValueError, match=r"LongLive 2\.0 .*attach to Self-Forcing"), attach(pipeline):
        raise AssertionError("not reached")
    monkeypatch.undo()
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    with pytest.raises(ValueError, match="takes no 'kv_cache'"), attach(pipeline):
        raise AssertionError("not reached")
    monkeypatch.undo()
    monkeypatch.delattr(KINDS["self-forcing"][0], "attention")
    with (
        pytest.raises(ValueError, match="no attribute 'attention' was found on upstream_sf"),
        attach(pipeline),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        ("recup", {}, "did you mean 'recap'"),
        ({"name": "recap", "reinforcment": 2}, {}, "did you mean 'reinforcement'"),
        ("none", {"phases": "absolute"}, "known: released, window"),
        ("none", {"window_frames": 2}, "a block of 3 frames must fit"),
        ("recap", {"flow": "farneback"}, "flow is 'farneback'"),
    ],
)
def test_settings_are_refused_as_a_run_refuses_them(memory, options, message):
    pipeline = make("self-forcing")
    before = snapshot(pipeline)
    with pytest.raises(ValueError, match=message), attach(pipeline, memory, **options):
        generate(pipeline)
    assert_untouched(before)


def test_another_picture_size_than_the_checkouts_is_refused():
    pipeline = make("self-forcing")
    pipeline.frame_seq_length = 5
    with pytest.raises(ValueError, match="the pipeline counts 5 tokens a frame"), attach(pipeline):
        generate(pipeline)
