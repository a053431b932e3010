"""Intervals, wins and embedders."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from recap.eval import embedders, scores
from recap.eval.embedders import HsvEmbedder, Looked, Remembering, build_embedder
from recap.eval.metrics.bank import uniform_distance
from recap.eval.sampling import sample_clip
from recap.eval.scores import (
    Score,
    cluster_interval,
    corrected_p,
    one_backend,
    paired_interval,
    sign_flip_p,
    win_share,
)
from recap.io.video import ClipWriter, open_clip


def test_intervals_depend_on_the_number_of_clusters():
    """Five seeds of a prompt with equal values count once."""
    by_prompt = np.repeat(np.random.default_rng(0).normal(size=20), 5)
    prompts = [i // 5 for i in range(100)]
    apart = cluster_interval(list(by_prompt), list(range(100)))
    together = cluster_interval(list(by_prompt), prompts)
    assert together.mean == pytest.approx(apart.mean) and (together.n, together.clusters) == (100, 20)
    assert together.high - together.low > 1.8 * (apart.high - apart.low)


def test_p_corrected_for_looks_equals_counting_over_every_choice_of_signs():
    generator = np.random.default_rng(3)
    gaps = {f"row {i}": dict(zip("abcdef", generator.normal(0.3 * i, 1, 6), strict=True)) for i in range(4)}
    far = {row: [] for row in gaps}
    for signs in product((1, -1), repeat=6):
        for row, own in gaps.items():
            total = sum(sign * gap for sign, gap in zip(signs, own.values(), strict=True))
            far[row].append(abs(total) / math.sqrt(sum(gap**2 for gap in own.values())))
    largest = [max(values) for values in zip(*far.values(), strict=True)]
    wanted = {row: np.mean([each >= values[0] - 1e-9 for each in largest]) for row, values in far.items()}
    assert corrected_p(gaps) == pytest.approx(wanted)
    # One row is one look; more looks never make a row more certain.
    for row, own in gaps.items():
        alone = corrected_p({row: own})[row]
        assert alone == sign_flip_p(list(own.values()), [0.0] * 6, list(own)) <= corrected_p(gaps)[row]
    assert all(math.isnan(p) for p in corrected_p({"row": dict.fromkeys("abcd", 1.0)}).values())


def test_of_rows_that_are_all_alike_few_tables_have_one_that_differs():
    """Twelve rows, three hundred tables: one at a time about half of the tables would have such a row."""
    generator, found, naive = np.random.default_rng(0), 0, 0
    for _ in range(300):
        gaps = {f"{row}": dict(enumerate(generator.normal(size=8))) for row in range(12)}
        found += min(corrected_p(gaps).values()) < 0.05
        naive += min(corrected_p({row: own})[row] for row, own in gaps.items()) < 0.05
    assert found <= 27 and naive > 90


def test_unknown_values_are_left_out_in_pairs():
    found = paired_interval([1.0, None, 3.0], [0.5, 1.0, None], "abc")
    assert (found.mean, found.n) == (0.5, 1)
    assert math.isnan(cluster_interval([None], ["a"]).mean)


def test_a_handful_of_prompts_gives_no_interval():
    few, enough = (cluster_interval([0.1 * i for i in range(n)], range(n)) for n in (4, 5))
    assert math.isnan(few.low) and few.mean == pytest.approx(0.15)
    assert enough.low < enough.mean < enough.high


def test_clusters_must_fit():
    with pytest.raises(ValueError, match="2 values"):
        cluster_interval([1.0, 2.0], ["a"])


def test_a_tie_is_half_a_win_and_pairs_without_two_values_do_not_count():
    assert win_share([1.0] * 76 + [0.0] * 24, [0.5] * 100) == 0.76
    assert win_share([1.0, 2.0, None], [1.0, 1.0, 1.0]) == 0.75
    assert math.isnan(win_share([None], [1.0]))


def test_p_of_known_cases():
    """Of six prompts that all favour ours, only the two extreme choices of signs of 64 are as far from 0."""
    prompts = [f"prompt {i // 5}" for i in range(30)]
    ours = [1.0 + i % 3 for i in range(30)]
    nothing = [0.0] * 30
    assert sign_flip_p(ours, nothing, prompts) == sign_flip_p(nothing, ours, prompts) == 2 / 64
    assert sign_flip_p(ours, ours, prompts) == 1
    # Prompts -1, 1, 1, 1, 1: the sum 3 is reached by all the same (2 ways) and all but one (10 ways) of 32.
    assert sign_flip_p([-1.0, 1, 1, 1, 1], [0.0] * 5, range(5)) == 12 / 32
    # A pair without a value says nothing.
    assert sign_flip_p([None, *ours], [1.0, *nothing], ["other", *prompts]) == 2 / 64
    assert math.isnan(sign_flip_p(ours[:20], nothing[:20], prompts[:20]))


def test_p_of_many_prompts_is_drawn_and_agrees_with_the_exact_one(monkeypatch):
    gaps = np.random.default_rng(3).normal(0.4, 1, 20)
    exact = sign_flip_p(list(gaps), [0.0] * 20, range(20))
    monkeypatch.setattr(scores, "EXACT_CLUSTERS", 10)
    drawn = sign_flip_p(list(gaps), [0.0] * 20, range(20))
    assert 0.01 < exact < 0.5 and drawn == pytest.approx(exact, abs=0.01)
    assert drawn == sign_flip_p(list(gaps), [0.0] * 20, range(20))
    # It never claims to be impossible.
    assert 0 < sign_flip_p([1.0] * 40, [0.0] * 40, range(40)) < 1e-4


def simulated_p(by_prompt: bool) -> np.ndarray:
    """300 tables without a difference: 12 prompts of 5 seeds that share most of their gap."""
    generator = np.random.default_rng(5)
    found = []
    for _ in range(300):
        gaps = np.repeat(generator.normal(size=12), 5) + 0.3 * generator.normal(size=60)
        labels = np.repeat(range(12), 5) if by_prompt else range(60)
        found.append(sign_flip_p(list(gaps), [0.0] * 60, labels))
    return np.array(found)


def test_p_is_uniform_where_nothing_differs_and_a_test_that_ignores_prompts_is_not(monkeypatch):
    monkeypatch.setattr(scores, "NUM_DRAWS", 500)
    right, naive = simulated_p(by_prompt=True), simulated_p(by_prompt=False)
    # The Kolmogorov-Smirnov distance of 300 uniform values exceeds 0.094 in one of a hundred cases.
    assert uniform_distance(right.tolist()) < 0.094
    assert (right <= 0.05).mean() == pytest.approx(0.05, abs=0.03)
    assert uniform_distance(naive.tolist()) > 0.2 and (naive <= 0.05).mean() > 0.25


def test_columns_with_two_judges_are_refused():
    assert one_backend([Score("a", 1.0, "x"), Score("a", 0.5, "x")]) == "x"
    with pytest.raises(ValueError, match="one judge"):
        one_backend([Score("a", 1.0, "x"), Score("a", 0.5, "y")])


def pictures():
    generator = np.random.default_rng(0)
    small = [generator.integers(0, 255, (4, 6, 3)) for _ in range(5)]
    return [np.kron(each, np.ones((16, 16, 1))).astype(np.uint8) for each in small]


def check_embedder(embedder):
    shown = pictures()
    vectors = embedder.embed(shown)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    again = embedder.embed([p[:, ::-1] for p in shown])
    alike = again @ vectors.T
    assert (alike.argmax(axis=1) == np.arange(5)).all()


def test_colours_recognise_a_mirrored_picture():
    check_embedder(HsvEmbedder())
    red = np.full((4, 4, 3), (255, 0, 0), np.uint8)
    blue = np.full((4, 4, 3), (0, 0, 255), np.uint8)
    one, other, grey = HsvEmbedder().embed([red, blue, np.full((4, 4, 3), 90, np.uint8)])
    assert one @ other == 0 and one @ one == pytest.approx(1) and grey @ one == 0


def test_mobilenet_if_its_weights_are_installed(installed_home, shared_data):
    files = (installed_home / "mobilenetv2.pt", shared_data / "mobilenetv2.pt")
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip("python -m recap.eval.embedders fetches the weights")
    check_embedder(build_embedder(f"mobilenetv2={file}"))


def test_missing_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RECAP_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"mobilenetv2.*recap\.eval\.embedders fetches"):
        build_embedder("mobilenetv2")
    (tmp_path / "fake.pt").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="not the file that this embedder was checked with"):
        build_embedder(f"mobilenetv2={tmp_path / 'fake.pt'}")
    with pytest.raises(ValueError, match="did you mean 'dinov2'"):
        build_embedder("dino")


def test_transformers_embedders_read_a_folder_and_never_the_network(tmp_path):
    """The models are tiny and random, in the format of the real ones."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="hf download"):
        build_embedder(f"dinov2={tmp_path / 'nothing'}")
    made = transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=224)
    )
    made.save_pretrained(tmp_path / "dino")
    transformers.BitImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}
    ).save_pretrained(tmp_path / "dino")
    embedder = build_embedder(f"dinov2={tmp_path / 'dino'}")
    vectors = embedder.embed(pictures())
    assert vectors.shape == (5, 24) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.backend.startswith("dinov2:")
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        vision_config=dict(**small, image_size=224, patch_size=32, projection_dim=16),
        text_config=small,
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    transformers.CLIPImageProcessor().save_pretrained(tmp_path / "clip")
    assert build_embedder(f"clip={tmp_path / 'clip'}").embed(pictures()).shape == (5, 16)


def test_a_picture_is_embedded_once():
    class Counting(HsvEmbedder):
        seen = 0

        def embed(self, pictures):
            self.seen += len(pictures)
            return super().embed(pictures)

    shown, counting = pictures(), Counting()
    remembering = Remembering(counting)
    twice = remembering.embed([*shown, *shown[:2]]), remembering.embed(shown[::-1])
    assert counting.seen == 5 and remembering.backend == counting.backend
    plain = HsvEmbedder().embed(shown)
    assert np.array_equal(twice[0][:5], plain) and np.array_equal(twice[1], plain[::-1])
    assert np.array_equal(Looked("x", shown, plain).embed(shown[3:]), plain[3:])


def test_sampling_a_clip(tmp_path: Path):
    import torch

    with ClipWriter(tmp_path / "a.mp4", (32, 32), 16) as clip:
        clip.write(torch.linspace(0, 1, 81)[:, None, None, None].expand(-1, 3, 32, 32))
    few = sample_clip(open_clip(tmp_path / "a.mp4"), 2)
    assert few.seconds.tolist() == [i / 2 for i in range(11)] and few.duration_s == 81 / 16
    assert np.diff(few.pictures.astype(float).mean(axis=(1, 2, 3))).min() > 15


def test_mobilenet_takes_files_with_and_without_counters(tmp_path, monkeypatch):
    file, state = tmp_path / "mobilenetv2.pt", embedders.MobileNetV2().state_dict()
    loaded = []
    for kept in (state, {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}):
        torch.save(kept, file)
        known = replace(embedders.MOBILENET, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        monkeypatch.setattr(embedders, "MOBILENET", known)
        loaded.append(embedders.load_mobilenet(file).state_dict())
    assert all(torch.equal(state[name], found[name]) for found in loaded for name in state)
    torch.save({name: t for name, t in state.items() if name != "features.0.0.weight"}, file)
    known = replace(embedders.MOBILENET, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(embedders, "MOBILENET", known)
    with pytest.raises(ValueError, match=r"1 missing \(features\.0\.0\.weight\)"):
        embedders.load_mobilenet(file)
