"""This module makes the folder of a study, which raters open, and its key, which stays outside.

The folder holds index.html with its scripts and styles, study.json (what the page asks and shows) and videos/ under
names without a meaning. Nothing in it says which memory a video is of.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from recap.errors import refuse, unknown_name
from recap.eval.study.design import IDENTICAL, MOST_PAIRS, PAIR, Key, PairFacts, Study, choose_pairs, lay_out
from recap.io.files import read_json, staged_folder, write_whole
from recap.io.record import versions
from recap.io.report import Progress, Reporter, no_progress
from recap.io.run_folder import digest_file
from recap.io.video import join_clips, open_clip
from recap.show.study_page import study_files
from recap.tables.study.videos import StudyVideo, find_videos

STUDY, VIDEOS = "study.json", "videos"
OURS = "recap"
QUESTIONS = {
    "consistency": "In which video do the subjects and the scene stay more the same, from beginning to end?",
    "motion": "Which video moves better: livelier, smoother, more natural?",
    "overall": "Which video do you prefer overall?",
}
"""The three questions of the paper; it does not print their words."""
MOST_QUESTIONS, LONGEST_QUESTION = 10, 300
SHORTEST_S = 0.2


@dataclass(frozen=True, slots=True)
class StudyAsk:
    """Says what a study shall be; None chooses what suits the number of pairs."""

    pairs: int = 24
    questions: Mapping[str, str] | None = None
    ours: str = OURS
    repeats: int | None = None
    identical: int | None = None
    title: str = "Which video is better?"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise refuse("--pairs", self.pairs, f"must be 1 to {MOST_PAIRS}", "the paper has 24")
        if not 0 <= self.num_repeats <= self.pairs // 2:
            limit = f"must be 0 to {self.pairs // 2}, half of the pairs"
            raise refuse("--repeats", self.num_repeats, limit, "leave it out")
        if not 0 <= self.num_identical <= self.pairs:
            limit = f"must be 0 to {self.pairs}, as many as pairs"
            raise refuse("--identical", self.num_identical, limit, "leave it out")
        if not self.title.strip() or len(self.title) > LONGEST_QUESTION:
            raise refuse("--title", self.title, f"must be 1 to {LONGEST_QUESTION} characters", "leave it out")

    @property
    def num_repeats(self) -> int:
        return min(max(2, self.pairs // 8), self.pairs // 2) if self.repeats is None else self.repeats

    @property
    def num_identical(self) -> int:
        return min(max(2, self.pairs // 8), self.pairs) if self.identical is None else self.identical


class _Shown(NamedTuple):
    """Holds a pair to be shown: its two videos in the order of its files."""

    kind: str
    videos: tuple[StudyVideo, StudyVideo]
    files: tuple[str, str]


def read_questions(words: Sequence[str]) -> dict[str, str]:
    """Read questions from options: names of known ones with commas between them, or NAME=TEXT."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        own = {name.strip(): text.strip()} if equals else {each.strip(): "" for each in word.split(",")}
        for name, text in own.items():
            if not text and name not in QUESTIONS:
                raise unknown_name("question", name, [*QUESTIONS, "NAME=TEXT"])
            if not name.isidentifier() or name in found:
                limit = "a question's name must be a word that stands once"
                remedy = "for example --questions likeness='Which cat looks more alike?'"
                raise refuse("--questions", name, limit, remedy)
            found[name] = text or QUESTIONS[name]
            if len(found[name]) > LONGEST_QUESTION:
                limit = f"has more than {LONGEST_QUESTION} characters"
                raise refuse("--questions", name, limit, "ask more briefly")
    if len(found) > MOST_QUESTIONS:
        raise refuse("--questions", len(found), f"at most {MOST_QUESTIONS} can be asked", "ask fewer")
    return found or dict(QUESTIONS)


def make_study(
    folders: Sequence[Path], out: Path, key: Path, ask: StudyAsk, progress: Progress = no_progress
) -> Key:
    """Make a study of the videos in folders of runs: the folder `out`, and the file `key` outside of it."""
    if key.resolve().is_relative_to(out.resolve()):
        raise refuse("--key", str(key), f"lies in {out}, which raters get", "choose a place outside of it")
    if key.exists():
        remedy = "choose another --key or --out, or delete it if its folder was never finished"
        raise refuse("--key", str(key), "is there already, and votes may need it", remedy)
    if out.is_dir() and any(out.iterdir()):
        raise refuse("--out", str(out), "holds something, and votes may be about it", "choose another --out")
    # The seed chooses the pairs; nobody can compute their sides and names.
    groups = _pairs_of(find_videos(folders), ask)
    shown = _shown(groups, ask)
    made = _key(shown, list(groups), ask)
    try:
        return _write(made, shown, out, key, progress)
    except BaseException:
        # It was not there before, and without its folder it would only be in the way.
        key.unlink(missing_ok=True)
        raise


def _write(made: Key, shown: Mapping[str, _Shown], out: Path, key: Path, progress: Progress) -> Key:
    advance = Reporter(progress=progress).counter(2 * len(shown))
    with staged_folder(out, ()) as staged:
        (staged / VIDEOS).mkdir()
        digests = {}
        for pair in shown.values():
            for video, file in zip(pair.videos, pair.files, strict=True):
                # Copied packet by packet: metadata of the file, which may name its origin, stays behind.
                join_clips([video.path], staged / VIDEOS / file)
                digests[file] = digest_file(staged / VIDEOS / file)
                advance(1)
        # The order of names tells nothing; nor shall the times.
        for path in (staged / VIDEOS).iterdir():
            os.utime(path, (0, 0))
        made = Key(made.study, made.ours, made.pairs, {**made.made, "sha256": digests})
        page = {
            "digest": made.study.digest,
            **made.study.as_dict(),
            "questions": list(made.study.questions.items()),
        }
        files = study_files(made.study.title, page)
        files[STUDY] = json.dumps(made.study.as_dict()).encode()
        for name, data in files.items():
            (staged / name).write_bytes(data)
        write_whole(key, json.dumps(made.as_dict(), indent=1).encode())
    return made


def _pairs_of(videos: Sequence[StudyVideo], ask: StudyAsk) -> dict[str, list[tuple[StudyVideo, StudyVideo]]]:
    """Pair ours with every rival, and choose as many pairs as are wanted; refuses videos without a partner."""
    methods = list(dict.fromkeys(video.method for video in videos))
    if ask.ours not in methods:
        raise unknown_name("--ours", ask.ours, methods)
    if len(methods) < 2:
        remedy = "add runs of another one, with the same prompts and seeds"
        raise refuse("runs", ask.ours, "all are of this one memory", remedy)
    places: dict[str, dict[str, StudyVideo]] = {}
    for video in videos:
        places.setdefault(video.match, {})[video.method] = video
    for video in videos:
        own = places[video.match]
        if ask.ours not in own or len(own) < 2:
            other = "any other memory" if video.method == ask.ours else ask.ours
            same = f"prompt ({video.prompt[:60]!r}), length, model and seed ({video.seed})"
            limit = f"there is no video of {other} with the same {same}"
            raise refuse("video", str(video.path), limit, "generate that one, or leave this one out")
    rivals = [method for method in methods if method != ask.ours]
    available = {
        rival: [(own[rival].prompt, match) for match, own in places.items() if rival in own]
        for rival in rivals
    }
    chosen = choose_pairs(available, ask.pairs, random.Random(ask.seed))
    pairs = {
        rival: [(places[match][ask.ours], places[match][rival]) for _, match in own]
        for rival, own in chosen.items()
    }
    for ours, theirs in (pair for group in pairs.values() for pair in group):
        _check_alike(ours, theirs)
    return pairs


def _check_alike(ours: StudyVideo, theirs: StudyVideo) -> None:
    """Refuse two videos that a rater could tell apart by their size, rate or length."""
    first, second = (open_clip(video.path) for video in (ours, theirs))
    facts = [(clip.width, clip.height, round(clip.fps, 3), clip.num_pictures) for clip in (first, second)]
    if facts[0] != facts[1]:
        about = "its width, height, rate and pictures"
        limit = f"{about} are {facts[1]}, and those of {ours.path} are {facts[0]}"
        raise refuse("video", str(theirs.path), limit, "generate both with the same settings")
    if (first.num_pictures or 0) < SHORTEST_S * first.fps:
        raise refuse("video", str(ours.path), f"is shorter than {SHORTEST_S} s", "generate longer videos")


def _shown(groups: Mapping[str, Sequence[tuple[StudyVideo, StudyVideo]]], ask: StudyAsk) -> dict[str, _Shown]:
    """Give all pairs and files names without a meaning, in an order without a meaning."""
    pairs = [(PAIR, pair) for own in groups.values() for pair in own]
    # Of as many prompts as there are, and of all memories alike.
    single = [video for _, pair in pairs for video in pair]
    random.Random(ask.seed).shuffle(single)
    by_prompt: dict[str, list[StudyVideo]] = {}
    for video in single:
        by_prompt.setdefault(video.prompt, []).append(video)
    rounds = [own[number] for number in range(len(single)) for own in by_prompt.values() if number < len(own)]
    pairs += [(IDENTICAL, (video, video)) for video in rounds[: ask.num_identical]]
    named = {}
    for kind, pair in pairs:
        both = pair if secrets.randbelow(2) else pair[::-1]
        files = (f"{secrets.token_hex(10)}.mp4", f"{secrets.token_hex(10)}.mp4")
        named[secrets.token_hex(6)] = _Shown(kind, (both[0], both[1]), files)
    return dict(sorted(named.items()))


def _key(shown: Mapping[str, _Shown], rivals: Sequence[str], ask: StudyAsk) -> Key:
    ours = ask.ours
    facts = {
        name: PairFacts(
            pair.kind,
            pair.videos[0].prompt,
            pair.videos[0].seed,
            (pair.videos[0].method, pair.videos[1].method),
        )
        for name, pair in shown.items()
    }
    groups: dict[str, list[str]] = {rival: [] for rival in rivals}
    for name, pair in shown.items():
        if pair.kind == PAIR:
            rival = next(video.method for video in pair.videos if video.method != ours)
            groups[rival].append(name)
    identical = [name for name, pair in shown.items() if pair.kind == IDENTICAL]
    ours_first = {name: own.methods[0] == ours for name, own in facts.items()}
    sheets = lay_out(list(groups.values()), ours_first, identical, ask.num_repeats, random.SystemRandom())
    files = {name: pair.files for name, pair in shown.items()}
    study = Study(ask.title, dict(ask.questions or QUESTIONS), files, sheets)
    made = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recap": versions()["recap"],
        "methods": [ours, *groups],
        "repeats": ask.num_repeats,
        "seed": ask.seed,
        "sources": {
            file: str(v.path)
            for pair in shown.values()
            for v, file in zip(pair.videos, pair.files, strict=True)
        },
    }
    return Key(study, ours, facts, made)


def read_study(folder: Path) -> Study:
    """Read the folder of a study, as its server does; refuses one that lacks a video."""
    if not (folder / STUDY).is_file():
        raise refuse("study", str(folder), f"holds no {STUDY}", "name a folder that `recap study make` wrote")
    study = Study.from_dict(read_json(folder / STUDY), str(folder / STUDY))
    for file in (file for files in study.pairs.values() for file in files):
        if not (folder / VIDEOS / file).is_file():
            limit = "a video of the study is missing"
            raise refuse("study", str(folder / VIDEOS / file), limit, "copy the whole folder again")
    return study
