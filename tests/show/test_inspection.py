"""Inspecting clips whose every motion is known."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.scenes import Rendered, half, make_scene, render
from recap.admission.flow import FlowNoveltyConfig
from recap.flow.exact import ExactFlow
from recap.io.report import Reporter
from recap.io.video import Clip, ClipWriter, Picture, open_clip
from recap.show.inspection import inspect_clip

SIZE, FILES = (64, 96), ["bank.png", "index.html", "inspect.json", "overlay.mp4", "scores.npz"]


def film(path: Path, scene: str = "entering", count: int = 41, size: tuple[int, int] = SIZE) -> Rendered:
    clip = render(make_scene(scene, size, count))
    with ClipWriter(path, size, 16) as writer:
        writer.write(clip.pictures)
    return clip


def exact(clip: Rendered) -> ExactFlow:
    return ExactFlow(half(clip.forward[None]), half(clip.backward[None]))


def still(count: int, size: tuple[int, int]) -> ExactFlow:
    nothing = torch.zeros(1, count - 1, 2, size[0] // 2, size[1] // 2)
    return ExactFlow(nothing, nothing)


def inspect(
    tmp_path: Path, scene: str = "entering", count: int = 41, capacity_frames: float = 1.0
) -> SimpleNamespace:
    clip = film(tmp_path / "clip.mp4", scene, count)
    page = inspect_clip(
        tmp_path / "clip.mp4",
        tmp_path / "out",
        flow=exact(clip),
        config=FlowNoveltyConfig(),
        capacity_frames=capacity_frames,
    )
    return summary_of(page)


def summary_of(page: Path) -> SimpleNamespace:
    """The figures of inspect.json, which lies next to the page."""
    return SimpleNamespace(**json.loads((page.parent / "inspect.json").read_text())["summary"])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_results_are_complete_and_agree(tmp_path: Path) -> None:
    summary = inspect(tmp_path)
    out = tmp_path / "out"
    assert names(out) == FILES and names(tmp_path) == ["clip.mp4", "out"]
    tokens, frames = 4 * 6, 11
    with np.load(out / "scores.npz") as scores:
        arrays = {name: scores[name] for name in scores.files}
    settings = json.loads(str(arrays.pop("settings")))
    assert settings["cycle_threshold_px"] == 2.0 and settings["flow"] == "ExactFlow"
    assert {array.shape for array in arrays.values()} == {(frames * tokens,)}
    assert arrays["picture"].tolist() == [4 * frame for frame in range(frames) for _ in range(tokens)]
    assert arrays["block"].tolist() == [frame // 3 for frame in range(frames) for _ in range(tokens)]
    assert arrays["row"].max() == 3 and arrays["column"].max() == 5
    assert ((arrays["score"] > 0) == (arrays["raw"] > 0)).all() and (arrays["raw"][:tokens] == 0).all()
    fired = arrays["raw"] > 0
    assert summary.fired_tokens == fired.sum() > 0
    late = arrays["picture"] - arrays["appeared"]
    assert ((late >= 0) & (late < 4)).all()
    overlay = open_clip(out / "overlay.mp4")
    assert overlay.num_pictures == 41 and (overlay.height, overlay.width) == SIZE and overlay.fps == 16
    about = json.loads((out / "inspect.json").read_text())
    assert about["summary"]["fired_tokens"] == summary.fired_tokens and about["versions"]["torch"]


def test_nothing_is_new_where_nothing_moves(tmp_path: Path) -> None:
    summary = inspect(tmp_path, "static")
    assert summary.fired_tokens == summary.bank_new == 0 and names(tmp_path / "out") == FILES
    pairs = zip(open_clip(tmp_path / "clip.mp4").pictures(), open_clip(tmp_path / "out/overlay.mp4").pictures(),
                strict=True)  # fmt: skip
    assert max(np.abs(seen.astype(int) - shown).mean() for seen, shown in pairs) < 3


def test_what_enters_is_marked_where_it_enters(tmp_path: Path) -> None:
    inspect(tmp_path)
    with np.load(tmp_path / "out/scores.npz") as scores:
        fired = scores["raw"] > 0
        first = scores["picture"][fired].min()
        assert set(scores["column"][fired & (scores["picture"] == first)]) == {0}
        appeared = int(scores["appeared"][fired].min())
    shown = list(open_clip(tmp_path / "out/overlay.mp4").pictures())[appeared][:, :16].astype(int)
    seen = list(open_clip(tmp_path / "clip.mp4").pictures())[appeared][:, :16].astype(int)
    assert (shown - seen)[..., 1].max() > 20  # greener


def test_a_bank_smaller_than_the_news_keeps_the_best(tmp_path: Path) -> None:
    summary = inspect(tmp_path, "pan", capacity_frames=0.5)
    assert summary.bank_capacity == summary.bank_new == 12 and summary.bank_cutoff > 0
    with np.load(tmp_path / "out/scores.npz") as scores:
        best = np.sort(scores["score"])[::-1][:12]
    assert summary.bank_cutoff == pytest.approx(best[-1])
    page = (tmp_path / "out/index.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    patches = data["methods"][0]["bank"]["patches"]
    assert sorted((patch[4] for patch in patches), reverse=True) == pytest.approx(best.tolist(), abs=1e-3)
    assert [patch[0] for patch in patches] == sorted(patch[0] for patch in patches)
    columns = [patch[3] for patch in patches]
    last = summary.grid[1] - 1
    assert summary.bank_edge_share == pytest.approx(
        sum(c in (0, last) for c in columns) / len(columns), abs=1e-6
    )
    assert "of them lie in the first or last column" in page


def test_the_page_has_a_timeline_of_what_was_new_and_of_the_bank(tmp_path: Path) -> None:
    summary = inspect(tmp_path, "pan", capacity_frames=0.5)
    page = (tmp_path / "out/index.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    ((_, _, (rates, slots, cutoffs)),) = data["cards"]
    seconds = 41 / 16
    assert data["duration"] == pytest.approx(seconds, abs=1e-3) and len(rates["starts_s"]) == 11
    assert sum(rates["values"][0]) * seconds / 11 == pytest.approx(summary.fired_tokens, rel=1e-3)
    # The opening block, of nine pictures, and one block after the other.
    assert slots["starts_s"] == cutoffs["starts_s"] == [0, 9 / 16, 21 / 16, 33 / 16, 41 / 16]
    assert slots["values"][0][0] == 0 and slots["values"][0][-1] == slots["top"] == summary.bank_new
    assert cutoffs["values"][0][-1] == pytest.approx(summary.bank_cutoff, abs=1e-4)


@pytest.mark.parametrize(("count", "scored"), [(5, 5), (8, 5), (9, 9), (12, 9), (13, 13), (22, 21), (24, 21)])
def test_the_rest_that_fills_no_frame_is_left_and_reported(tmp_path: Path, count: int, scored: int) -> None:
    summary = inspect(tmp_path, "pan", count)
    assert (summary.num_pictures, summary.num_scored_pictures) == (count, scored)
    assert open_clip(tmp_path / "out/overlay.mp4").num_pictures == count
    assert bool(summary.notices) == (count != scored)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_too_few_pictures(tmp_path: Path, count: int) -> None:
    with ClipWriter(tmp_path / "clip.mp4", SIZE, 16) as writer:
        writer.write(torch.rand(count, 3, *SIZE))
    with pytest.raises(ValueError, match="longer clip"):
        inspect_clip(tmp_path / "clip.mp4", tmp_path / "out", flow=still(9, SIZE), config=FlowNoveltyConfig())
    assert names(tmp_path) == ["clip.mp4"]


def test_sizes_between_tokens_are_cropped_and_reported(tmp_path: Path) -> None:
    film(tmp_path / "clip.mp4", count=9, size=(70, 98))
    config = FlowNoveltyConfig()
    page = inspect_clip(tmp_path / "clip.mp4", tmp_path / "out", flow=still(9, SIZE), config=config)
    summary = summary_of(page)
    assert tuple(summary.size) == SIZE and any("98x70 to 96x64" in line for line in summary.notices)


def test_size_rescales(tmp_path: Path) -> None:
    film(tmp_path / "clip.mp4", count=9, size=(96, 144))
    config = FlowNoveltyConfig()
    page = inspect_clip(
        tmp_path / "clip.mp4", tmp_path / "out", flow=still(9, SIZE), config=config, size=SIZE
    )
    summary = summary_of(page)
    assert tuple(summary.size) == SIZE and summary.grid == [4, 6] and not summary.notices


@pytest.mark.parametrize(
    ("size", "word"), [((65, 96), "even"), ((64, 97), "--size"), ((16, 96), "32 to"), ((64, 20000), "8192")]
)
def test_impossible_sizes(tmp_path: Path, size: tuple[int, int], word: str) -> None:
    film(tmp_path / "clip.mp4", count=9)
    config = FlowNoveltyConfig()
    with pytest.raises(ValueError, match=word):
        inspect_clip(tmp_path / "clip.mp4", tmp_path / "out", flow=still(9, SIZE), config=config, size=size)
    assert names(tmp_path) == ["clip.mp4"]


@pytest.mark.parametrize("capacity", [0, -1, float("nan"), float("inf")])
def test_impossible_capacities(tmp_path: Path, capacity: float) -> None:
    with pytest.raises(ValueError, match="capacity_frames"):
        inspect(tmp_path, count=9, capacity_frames=capacity)


def test_a_clip_that_breaks_off_leaves_the_old_result(tmp_path: Path) -> None:
    inspect(tmp_path)
    before = (tmp_path / "out/inspect.json").read_bytes()
    whole = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "clip.mp4").write_bytes(whole[: len(whole) * 7 // 10])
    with pytest.raises(ValueError, match="readable pictures"):
        inspect_clip(
            tmp_path / "clip.mp4", tmp_path / "out", flow=still(41, SIZE), config=FlowNoveltyConfig()
        )
    assert (tmp_path / "out/inspect.json").read_bytes() == before
    assert names(tmp_path) == ["clip.mp4", "out"] and names(tmp_path / "out") == FILES


def test_few_pictures_are_in_memory_however_long_the_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, alive, most = 201, 0, 0
    film(tmp_path / "clip.mp4", "static", count)
    plain = Clip.pictures

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(clip: Clip) -> Iterator[Picture]:
        nonlocal alive, most
        for picture in plain(clip):
            alive += 1
            most = max(most, alive)
            weakref.finalize(picture, gone)
            yield picture

    monkeypatch.setattr(Clip, "pictures", counted)
    steps: list[tuple[int, int | None]] = []
    inspect_clip(
        tmp_path / "clip.mp4", tmp_path / "out", flow=still(count, SIZE), config=FlowNoveltyConfig(),
        reporter=Reporter(progress=lambda done, total, rate: steps.append((done, total))),
    )  # fmt: skip
    assert most <= 26  # two blocks and a picture at either end
    assert steps[0] == (9, count) and steps[-1] == (count, count)
