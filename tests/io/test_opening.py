"""Videos that continue from a clip or a picture."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recap.config import RunConfig
from recap.io.opening import read_opening
from recap.io.report import SILENT, Reporter
from recap.io.trace import read_trace
from recap.io.video import ClipWriter, open_clip
from recap.registry import load_backbone
from recap.run import generate, resume
from recap.show.sheet import write_png

SHOTS = [{"prompt": "a fox on a beach by day", "seconds": 1.5}]


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def spec():
    return load_backbone("embedded").spec


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A second of a square that slides over a gradient, at the backbone's size and rate: 18 pictures."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with ClipWriter(path, (128, 208), 16) as writer:
        for index in range(18):
            picture = torch.linspace(0.3, 0.8, 208).expand(3, 128, 208).clone()
            picture[0, 40:72, 20 + 4 * index : 52 + 4 * index] = 0.9
            writer.write(picture[None])
    return path


def pictures_of(path):
    return np.stack([np.array(picture) for picture in open_clip(path).pictures()])


@pytest.mark.slow
def test_a_video_continues_from_a_clip(tmp_path, clip, spec):
    notices: list[str] = []
    config = RunConfig.from_dict({"shots": SHOTS, "opening": str(clip), "flow": "classical"})
    record = generate(config, tmp_path / "run", reporter=Reporter(notices.append))
    assert any("1 pictures fill no whole frame" in line for line in notices)
    shown, wanted = pictures_of(record.videos[0]), pictures_of(clip)
    # 17 pictures are 5 frames, encoded as blocks of 2 and 3; then 1.5 s are generated.
    assert record.num_pictures == len(shown) == 17 + 24 and record.num_blocks == 4
    error = np.square(shown[:17].astype(float) - wanted[:17]).mean()
    assert 10 * np.log10(255**2 / error) > 25  # through the autoencoder and two codecs
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    assert [line.shares["current"] is None for line in trace] == [True, True, False, False]
    assert trace[2].tokens["sink"] == spec.frame_tokens and trace[2].admitted[0]


def test_it_resumes_when_the_clip_is_gone(tmp_path, clip):
    own = tmp_path / "own.mp4"
    own.write_bytes(clip.read_bytes())
    config = RunConfig.from_dict({"shots": SHOTS, "opening": str(own), "memory": "sink"})
    whole = generate(config, tmp_path / "whole", reporter=SILENT)

    class Stop(Exception):
        pass

    def stop(done, total, rate):
        if done == 3 and rate:
            raise Stop

    with pytest.raises(Stop):
        generate(config, tmp_path / "run", reporter=Reporter(quiet, stop))
    own.unlink()
    resume(tmp_path / "run", reporter=SILENT)
    one, two = (
        load_file(folder / "latents.safetensors")["latents"] for folder in (whole.folder, tmp_path / "run")
    )
    assert torch.equal(one, two)


@pytest.mark.slow
def test_a_single_picture_is_the_sink(tmp_path, spec):
    picture = np.zeros((256, 512, 3), np.uint8)
    picture[:, :, 2] = 200
    write_png(tmp_path / "blue.png", picture)
    notices: list[str] = []
    pixels = read_opening(tmp_path / "blue.png", spec, notices.append)
    assert pixels.shape == (1, 1, 3, 128, 208) and notices == [
        "opening: rescaled from 512x256 and cropped to 208x128"
    ]
    settings = {"shots": SHOTS, "opening": str(tmp_path / "blue.png"), "memory": "sink", "seeds": [0, 1]}
    record = generate(RunConfig.from_dict(settings), tmp_path / "run", reporter=SILENT)
    assert record.num_pictures == 1 + 24 and len(record.videos) == 2
    for video in record.videos:
        first = pictures_of(video)[0]
        assert first[..., 2].mean() > 120 and first[..., 0].mean() < 70


def test_a_clip_of_another_rate_is_read_at_ours(tmp_path, spec):
    with ClipWriter(tmp_path / "fast.mp4", (128, 208), 32) as writer:
        for index in range(33):
            writer.write(torch.full((1, 3, 128, 208), index / 40))
    pixels = read_opening(tmp_path / "fast.mp4", spec, quiet)
    shades = pixels.mean(dim=(0, 2, 3, 4)) * 40
    assert pixels.shape[1] == 17
    torch.testing.assert_close(shades, torch.arange(0, 33, 2.0), atol=0.6, rtol=0)


def test_openings_that_cannot_be_are_refused_before_anything_is_made(tmp_path, clip):
    for settings, words in (
        ({"opening": str(tmp_path / "none.mp4")}, "no such file"),
        ({"opening": str(clip), "backbone": "untrained"}, "cannot read pictures"),
    ):
        config = RunConfig.from_dict({"shots": SHOTS, **settings})
        with pytest.raises(ValueError, match=words):
            generate(config, tmp_path / "run", reporter=SILENT)
        assert not (tmp_path / "run").exists()
    assert json.loads(json.dumps(config.to_dict()))["opening"] == str(clip)
