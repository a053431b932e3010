"""The crop embedding as the package carries it: saved, loaded, refused; and the boxes that it looks at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recap.backbones.tiny.vocabulary import ACTORS
from recap.eval.judges.crops import (
    SHIPPED,
    SIDE,
    CropEmbedder,
    CropNet,
    as_crops,
    boxes_of,
    build_crop_witness,
    load_crop_net,
    same_from,
    save_crop_net,
)
from recap.eval.judges.probe import NOBODY, Judged
from recap.eval.judges.subject import ProbeWitness
from recap.eval.witnesses import Box


def test_a_saved_net_comes_back_and_says_what_is_the_same(tmp_path):
    net, crops = CropNet(), torch.rand(3, 3, SIDE, SIDE)
    assert sum(weight.numel() for weight in net.parameters()) < 0.5e6
    save_crop_net(net, tmp_path / "crops.safetensors", 0.625)
    again = load_crop_net(tmp_path / "crops.safetensors")
    torch.testing.assert_close(net(crops), again(crops), atol=1e-2, rtol=0)
    assert again(crops).norm(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert same_from(tmp_path / "crops.safetensors") == 0.625


def test_what_is_no_crop_embedding_is_refused(tmp_path):
    file = tmp_path / "crops.safetensors"
    with pytest.raises(ValueError, match=r"no such file.*training\.crops"):
        load_crop_net(file)
    save_crop_net(CropNet(), file, 0.5)
    weights = load_file(file)
    for metadata in (None, {"same_from": "much"}, {"same_from": "nan"}, {"same_from": "1.5"}):
        save_file(weights, file, metadata=metadata)
        with pytest.raises(ValueError, match="from which likeness"):
            same_from(file)
    save_file({name: value for name, value in weights.items() if not name.endswith("11.bias")}, file)
    with pytest.raises(ValueError, match="1 missing"):
        load_crop_net(file)
    with pytest.raises(ValueError, match="resize them"):
        CropNet()(torch.zeros(1, 3, 32, 32))


def test_a_box_is_around_the_cells_that_show_an_actor():
    cells = torch.full((1, 3, 8, 13), NOBODY)
    fox = ACTORS.index("fox")
    cells[0, :2, 2:5, 3] = fox
    cells[0, :2, 4, 3:7] = fox
    presence = torch.zeros(1, 3, NOBODY)
    # The second picture has cells without presence, the third presence without cells.
    presence[0, 0, fox] = presence[0, 2, fox] = 1
    judged = Judged(presence, cells, torch.zeros(1, 3, NOBODY + 1, 8, 13), torch.zeros(1, 3, 8, 13, 3))
    assert boxes_of(judged, "fox") == [Box(48, 32, 112, 80), None, None]
    assert boxes_of(judged, "bus") == [None, None, None]


def test_crops_of_any_size_become_one_batch():
    small, large = np.full((20, 20, 3), 51, np.uint8), np.full((90, 90, 3), 102, np.uint8)
    crops = as_crops([small, large])
    assert crops.shape == (2, 3, SIDE, SIDE)
    torch.testing.assert_close(crops.mean((1, 2, 3)), torch.tensor([0.2, 0.4]))


def test_the_shipped_net_is_small_and_tells_colours_apart():
    assert SHIPPED.stat().st_size < 1e6
    blob = (np.hypot(*np.mgrid[-1:1:60j, -1:1:60j]) < 0.8)[..., None]
    red, blue = (
        np.where(blob, np.array(rgb, np.uint8), np.uint8(118)) for rgb in ((220, 60, 50), (50, 80, 220))
    )
    vectors = CropEmbedder().embed([red, red[:, ::-1], blue])
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > same_from() > likeness[0, 2]


def test_an_empty_picture_has_no_sighting():
    found, vectors = build_crop_witness(ProbeWitness()).look(np.zeros((2, 128, 208, 3), np.uint8), "fox")
    assert not found.any() and len(vectors) == 2
