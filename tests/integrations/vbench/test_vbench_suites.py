"""Suites have the right prompts, dimensions, names and clip lengths, and refuse the rest."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from vbench_standin import full_info

from recap_vbench.scores import QUALITY, SEMANTIC
from recap_vbench.suites import (
    GROUPS_OF_128,
    SUITES,
    check_dimensions,
    clip_seconds,
    digest,
    find_suite,
    find_videos,
    for_static_filter,
    load_entries,
    missing_videos,
)


@pytest.fixture
def info(tmp_path):
    path = tmp_path / "VBench_full_info.json"
    path.write_text(json.dumps(full_info()))
    return str(path)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "moviegen.txt"
    texts = [f"a prompt {number}" for number in range(126)] + ["word " * 60, "half a/b"]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_whole_list(info):
    suite = find_suite("vbench946")
    entries = load_entries(suite, None, info)
    assert len(entries) == 946 and len({entry.stem for entry in entries}) == 944
    counts = Counter(name for entry in entries for name in entry.dimensions)
    assert counts["aesthetic_quality"] == 93 and counts["temporal_flickering"] == 75
    assert len(missing_videos(suite, entries, "human_action", [])) == 500


def test_clip_length_is_the_longest_of_a_prompts_dimensions(info):
    """This is VBench's standard mode: aesthetic quality has clips of 10 s, and a text of two groups the longer."""
    suite = find_suite("vbench946")
    seconds = clip_seconds(suite, load_entries(suite, None, info))
    count = Counter((name, value) for (_, name), value in seconds.items())
    assert count["aesthetic_quality", 10] == 93 and ("aesthetic_quality", 2) not in count
    assert count["appearance_style", 10] == 2 and count["appearance_style", 2] == 88
    assert count["human_action", 10] == 100 and count["subject_consistency", 2] == 72


def test_128_of_the_list(info):
    suite = find_suite("vbench128")
    entries = load_entries(suite, None, info)
    assert sum(GROUPS_OF_128.values()) == 128 == len({entry.text for entry in entries})
    counts = Counter(name for entry in entries for name in entry.dimensions)
    assert all(counts[name] == 128 for name in QUALITY)
    assert {name: counts[name] for name in SEMANTIC} == {name: GROUPS_OF_128[name] for name in SEMANTIC}
    assert digest(entries) == digest(load_entries(suite, None, info))
    seconds = clip_seconds(suite, entries)
    assert {value for (_, name), value in seconds.items() if name in QUALITY} == {2}
    assert {value for (_, name), value in seconds.items() if name == "human_action"} == {10}
    filtered = for_static_filter(entries)
    assert sum("temporal_flickering" in entry.dimensions for entry in filtered) == 10


def test_own_128_must_be_of_the_list(info, tmp_path):
    chosen = tmp_path / "chosen.txt"
    texts = sorted({row["prompt_en"] for row in full_info()})[:128]
    chosen.write_text("\n".join(texts))
    assert [entry.text for entry in load_entries(find_suite("vbench128"), chosen, info)] == texts
    chosen.write_text("\n".join([*texts[1:], "somebody else's"]))
    with pytest.raises(ValueError, match="not one of VBench's own"):
        load_entries(find_suite("vbench128"), chosen, info)
    with pytest.raises(ValueError, match="has VBench's own list"):
        load_entries(find_suite("vbench946"), chosen, info)


def test_moviegen_stems_are_valid_file_names(lines):
    suite = find_suite("moviegen128")
    entries = load_entries(suite, lines, "")
    assert entries[0].stem == "a prompt 0" and [e.stem for e in entries[-2:]] == ["line-127", "line-128"]
    assert entries[-1].text == "half a/b"
    assert set(clip_seconds(suite, entries).values()) == {2}


def test_moviegen_by_a_map_of_names(tmp_path):
    path = tmp_path / "names.json"
    path.write_text(json.dumps({f"p{number}": f"prompt/{number}" for number in range(128)}))
    assert load_entries(find_suite("moviegen128"), path, "")[3].stem == "p3"
    path.write_text(json.dumps({f"p/{number}": "x" for number in range(128)}))
    with pytest.raises(ValueError, match="cannot have a /"):
        load_entries(find_suite("moviegen128"), path, "")
    # 250 bytes, and 6 of "-4.mp4".
    for odd in ("", "é" * 125):
        path.write_text(json.dumps({odd: "x", **{f"p{number}": "x" for number in range(127)}}))
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            load_entries(find_suite("moviegen128"), path, "")
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not an object"):
        load_entries(find_suite("moviegen128"), path, "")


def test_lists_of_another_length_are_refused(tmp_path, lines):
    with pytest.raises(ValueError, match="needs the file of its 128 prompts"):
        load_entries(find_suite("moviegen128"), None, "")
    lines.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="has 128 prompts, and this list has 2"):
        load_entries(find_suite("moviegen128"), lines, "")
    lines.write_text("one\n" * 128)
    with pytest.raises(ValueError, match="in the list twice"):
        load_entries(find_suite("moviegen128"), lines, "")
    broken = tmp_path / "info.json"
    broken.write_text('[{"prompt": 1}]')
    with pytest.raises(ValueError, match="recap vbench setup"):
        load_entries(find_suite("vbench946"), None, str(broken))


def test_unknown_and_unfit_names_are_refused():
    with pytest.raises(ValueError, match="did you mean 'vbench128'"):
        find_suite("vbench-128")
    movie = SUITES["moviegen128"]
    assert check_dimensions(movie, (), False) == (*QUALITY, "overall_consistency")
    with pytest.raises(ValueError, match="did you mean 'scene'"):
        check_dimensions(movie, ("scenes",), False)
    with pytest.raises(ValueError, match=r"moviegen128 cannot be scored in it.*labels"):
        check_dimensions(movie, ("object_class",), False)
    with pytest.raises(ValueError, match="moviegen128 cannot be scored in it"):
        check_dimensions(movie, ("temporal_style",), False)
    with pytest.raises(ValueError, match="--static-filter"):
        check_dimensions(movie, (), True)
    assert check_dimensions(SUITES["vbench946"], ("scene", "color"), True) == ("color", "scene")


def test_files_that_belong_to_no_prompt_are_refused(lines, tmp_path):
    suite = find_suite("moviegen128")
    entries = load_entries(suite, lines, "")
    stems = {entry.stem for entry in entries}
    videos = tmp_path / "videos"
    with pytest.raises(ValueError, match="no such folder"):
        find_videos(videos, suite, stems)
    videos.mkdir()
    with pytest.raises(ValueError, match=r"no \.mp4 file"):
        find_videos(videos, suite, stems)
    (videos / "a prompt 0-0.mp4").touch()
    (videos / "a prompt 0-4.mp4").touch()
    (videos / "notes.txt").touch()
    found = find_videos(videos, suite, stems)
    assert sorted(found) == [("a prompt 0", 0), ("a prompt 0", 4)]
    assert len(missing_videos(suite, entries, "dynamic_degree", found)) == 638
    for name in ("a prompt 0.mp4", "other-0.mp4", "a prompt 0-5.mp4", "a prompt 0-00.mp4"):
        (videos / name).touch()
        with pytest.raises(ValueError, match=name):
            find_videos(videos, suite, stems)
        (videos / name).unlink()
