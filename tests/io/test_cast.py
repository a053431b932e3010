"""Cast files: what is written is read back, and whatever else is there is refused in words."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recap.io.cast import (
    Subject,
    check_fits,
    components,
    cut_subject,
    named_in,
    read_cast,
    read_words,
    spell_out,
    with_cast,
    write_cast,
)
from recap.types import Block


def subject_of(spec, name="fox", **changes):
    mask = torch.zeros(spec.frames_per_block, *spec.grid, dtype=torch.bool)
    mask[0, 0, :2] = True
    values = {
        "name": name,
        "words": f"a {name}",
        "latents": torch.randn(spec.frames_per_block, spec.latent_channels, *spec.latent_size),
        "mask": mask,
        "scores": mask.float(),
        "thumbnail": np.full((4, 5, 3), 7, dtype=np.uint8),
        "about": {"model": spec.name, "seed": 3, "second": 1.5},
    }
    return Subject(**{**values, **changes})


def test_what_is_written_is_read_back(spec, tmp_path):
    cast = [subject_of(spec), subject_of(spec, "bus")]
    write_cast(tmp_path / "two.cast", cast)
    for found, wanted in zip(read_cast(tmp_path / "two.cast"), cast, strict=True):
        assert (found.name, found.words, dict(found.about)) == (wanted.name, wanted.words, dict(wanted.about))
        for part in ("latents", "mask", "scores"):
            assert torch.equal(getattr(found, part), getattr(wanted, part))
        assert np.array_equal(found.thumbnail, wanted.thumbnail)
        check_fits(found, spec)
    assert read_words([str(tmp_path / "two.cast"), "dog=photo.png"]) == {
        "fox": "a fox",
        "bus": "a bus",
        "dog": "a dog",
    }


def test_a_subject_of_another_autoencoder_is_refused(spec):
    with pytest.raises(ValueError, match="use it with paper, from which it comes"):
        check_fits(subject_of(spec), replace(spec, latent_channels=5))
    with pytest.raises(ValueError, match="blocks of 2 frames"):
        check_fits(subject_of(spec), replace(spec, frames_per_block=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../fox"}, "must begin with a letter"),
        ({"name": ""}, "must begin with a letter"),
        ({"words": " "}, "must be 1 to 200 characters"),
        ({"mask": torch.zeros(3, 2, 3, dtype=torch.bool)}, "no token shows it"),
    ],
)
def test_a_bad_subject_is_refused(spec, change, message):
    with pytest.raises(ValueError, match=message):
        subject_of(spec, **change)


def test_two_subjects_of_one_name_are_refused(spec, tmp_path):
    with pytest.raises(ValueError, match="there are 2 subjects of that name"):
        write_cast(tmp_path / "x.cast", [subject_of(spec), subject_of(spec)])
    assert not (tmp_path / "x.cast").exists()
    write_cast(tmp_path / "x.cast", [subject_of(spec)])
    with pytest.raises(ValueError, match="two subjects have that name"):
        read_words([str(tmp_path / "x.cast"), "fox=photo.png"])


HEADER = [{"name": "fox", "words": "a fox", "about": {}}]
TENSORS = {
    "0.latents": torch.zeros(3, 4, 4, 6),
    "0.mask": torch.ones(3, 2, 3, dtype=torch.uint8),
    "0.scores": torch.zeros(3, 2, 3),
    "0.thumbnail": torch.zeros(2, 2, 3, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("tensors", "about", "message"),
    [
        ({}, {"recap.cast": "2"}, "not a cast file of version 1"),
        ({}, {"subjects": "{"}, "is not a cast file"),
        ({}, {"subjects": "[]"}, "are not those of its subjects"),
        ({}, {"subjects": '[{"name": 3}]'}, "no name, words or origin"),
        (
            {},
            {"subjects": '[{"name": "fox", "words": "a fox", "about": {"x": [1]}}]'},
            "few texts and numbers",
        ),
        ({}, {"subjects": '[{"name": "a/b", "words": "a fox", "about": {}}]'}, "must begin with a letter"),
        ({"0.latents": torch.full((3, 4, 4, 6), torch.nan)}, {}, "are not finite"),
        ({"0.latents": torch.zeros(3, 4)}, {}, "are not finite numbers, frames by"),
        ({"0.mask": torch.full((3, 2, 3), 2, dtype=torch.uint8)}, {}, "does not fit its latents"),
        ({"0.mask": torch.ones(2, 2, 3, dtype=torch.uint8)}, {}, "does not fit its latents"),
        ({"0.scores": torch.zeros(3, 2, 4)}, {}, "do not fit its mask"),
        ({"0.thumbnail": torch.zeros(2, 2, dtype=torch.uint8)}, {}, "is no picture"),
        ({"0.more": torch.zeros(1)}, {}, "are not those of its subjects"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, tensors, about, message):
    good = {"recap.cast": "1", "subjects": json.dumps(HEADER)}
    save_file({**TENSORS, **tensors}, tmp_path / "x.cast", metadata={**good, **about})
    with pytest.raises(ValueError, match=message):
        read_cast(tmp_path / "x.cast")
    save_file(TENSORS, tmp_path / "x.cast", metadata=good)
    assert len(read_cast(tmp_path / "x.cast")) == 1


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_cast(tmp_path / "none.cast")
    (tmp_path / "text.cast").write_text("hello")
    with pytest.raises(ValueError, match="is not a cast file"):
        read_cast(tmp_path / "text.cast")


def test_a_prompt_names_subjects():
    words = {"rusty": "a fox", "bus": "a bus"}
    assert spell_out("@rusty on a beach", words) == "a fox on a beach"
    assert spell_out("me@home on a beach", {}) == "me@home on a beach"
    assert named_in(["a fox on a beach"], words) is None
    block = with_cast(Block(0, 0, 3, ("@bus and @rusty", "@rusty alone")), words)
    assert block.prompts == ("a bus and a fox", "a fox alone") and block.subjects == ("bus", "rusty")
    assert with_cast(Block(0, 0, 3, ("a bus",)), words).subjects is None
    with pytest.raises(ValueError, match="the cast has rusty, bus"):
        spell_out("@wolf", words)


def test_parts_of_a_mask_and_their_cut_outs():
    mask = np.array([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1]], dtype=bool)
    largest, other = components(mask)
    assert largest.sum() == 3 and largest[:, 3].all()
    assert other.sum() == 2 and other[0, 0] and other[1, 1]
    picture = np.full((12, 16, 3), 200, dtype=np.uint8)
    cut = cut_subject(picture, other)
    assert cut.shape == (8, 8, 3)
    assert (cut[:4, :4] == 200).all() and (cut[:4, 4:] == 50).all()
