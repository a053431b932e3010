"""This module writes the page of a verified model, to be published, and its record next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recap.io.files import staged_folder, write_whole
from recap.io.report import Reporter
from recap.io.video import Picture
from recap.show.clips import EMBED_LIMIT, embed, write_side_by_side
from recap.show.models import ModelChoice
from recap.show.page import Measured, Section, build_results_page
from recap.show.sheet import pictures_sheet, png_bytes
from recap.show.verification import VerifySettings, clip_name, spread, verify

PAGE, RECORD = "index.html", "verify.json"
JUDGE = "this command, without a model of its own"


def write_verification(
    choice: ModelChoice,
    settings: VerifySettings,
    out: Path,
    reporter: Reporter = Reporter(),
    hashing: Reporter = Reporter(),
) -> dict[str, Any]:
    """Verify a model and write the folder `out`: page, record and videos, whole or not at all; returns the record.

    Videos are left out where PyAV is not installed, and where weights are random: noise makes large files.
    """
    why_none = _why_no_videos(choice)
    videos = not why_none
    numbers = range(1, len(settings.prompts) + 1)
    clips = {number: {name: clip_name(number, name) for name in settings.memories} for number in numbers}
    names = [name for each in clips.values() for name in each.values()]
    with staged_folder(out, {PAGE, RECORD, *names, *map(_joined_name, numbers)}) as folder:
        if why_none:
            reporter.notice(why_none)
        record, shown = verify(choice, settings, folder, reporter=reporter, hashing=hashing, videos=videos)
        if videos:
            for number, own in clips.items():
                joined = {memory: folder / name for memory, name in own.items()}
                write_side_by_side(folder / _joined_name(number), joined)
        write_whole(folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())
        sections = [_first_section(record, shown[""])]
        sections += [
            _prompt_section(record, prompt, shown[prompt], why_none or folder / _joined_name(number))
            for number, prompt in enumerate(settings.prompts, start=1)
        ]
        write_whole(folder / PAGE, _page(record, sections).encode())
    return record


def _why_no_videos(choice: ModelChoice) -> str:
    """Return why no videos are written; "" where they are."""
    if choice.random_weights:
        return "No videos are written, only stills: the weights are random, and noise makes large files."
    if find_spec("av") is None:
        return "No videos are written, only stills: PyAV is not installed (pip install av)."
    return ""


def _joined_name(number: int) -> str:
    """Name the video of all memories next to each other, of a prompt counted from 1."""
    return f"prompt-{number}.mp4"


def _page(record: Mapping[str, Any], sections: Sequence[Section]) -> str:
    asked = record["asked"]
    words = "; weights are random, so pictures mean nothing" if record["weights"] == "random" else ""
    subtitle = f"{verdict(record)}: {record['device']}, {numbers(record)}, {record['date']}{words}"
    names = ("backbone", "weights", "path", "flow", "device", "dtype", "precision", "date")
    about = {
        **{name: record[name] for name in names},
        "seconds of every video": asked["seconds"],
        "seed": asked["seed"],
        "versions": record["versions"],
        "the same as data": RECORD,
    }
    return build_results_page(f"{record['backbone']}, verified", subtitle, sections, about)


def numbers(record: Mapping[str, Any]) -> str:
    """Return the dtype that the model computes in, and the precision of its weights if that differs."""
    full = record["precision"] == "full"
    return str(record["dtype"]) if full else f"{record['dtype']}, {record['precision']} weights"


def verdict(record: Mapping[str, Any]) -> str:
    """Return the result in a few words."""
    judged = [passed for passed in record["checks"].values() if passed is not None]
    left = len(record["checks"]) - len(judged)
    count = f"{sum(judged)} of {len(judged)} checks passed" + (f", {left} not judged" if left else "")
    return count if record["passed"] else f"FAILED, {count}"


def _first_section(record: Mapping[str, Any], shown: Sequence[Sequence[Picture]]) -> Section:
    opening = record["first_block"]
    checks = [
        (
            name,
            _number(check["value"]),
            _number(check.get("at_least")),
            {True: "passed", False: "FAILED", None: "not judged"}[check["passed"]],
        )
        for name, check in opening["checks"].items()
    ]
    files = [(f["file"], f"{f['bytes']:,}", f["sha256"], f["verdict"]) for f in record["files"]]
    measured = [Measured("The first block", JUDGE, ("check", "value", "at least", ""), checks, "")]
    if files:
        measured.insert(0, Measured("Files", "SHA-256", ("file", "bytes", "hash", ""), files, ""))
    latents = opening["latents"]
    remarks = [
        f"Loaded in {record['load_s']:.1f} s. Prompt: {opening['prompt']}; seed {opening['seed']}; latents with "
        f"mean {latents['mean']:.4f} and deviation {latents['std']:.4f}, SHA-256 {latents['sha256'][:16]}.",
        "" if files else "There are no files: the weights are made from a seed.",
    ]
    moments = [f"picture {picture + 1}" for picture in spread(opening["pictures"])]
    sheet = png_bytes(pictures_sheet({"sink": shown[0]}, moments))
    return Section(
        "Files and first block", remarks, measured, (), sheet=sheet, sheet_about="The first pictures."
    )


def _prompt_section(
    record: Mapping[str, Any], prompt: str, shown: Sequence[Sequence[Picture]], video: Path | str
) -> Section:
    """Make the section of a prompt; `video` shows all memories next to each other, or says why there is none."""
    runs = [run for run in record["runs"] if run["prompt"] == prompt]
    head = (
        "memory", "ms a block", "p90", "pictures/s", "peak GB", "to the first", "contrast, first and last",
        "colours like the opening", "motion", "share of the sink", "bank",
    )  # fmt: skip
    rows = [
        (
            run["memory"],
            f"{run['block_ms']['median']:.1f}",
            f"{run['block_ms']['p90']:.1f}",
            f"{run['pictures_per_second']:.1f}",
            _number(run["peak_gb"]),
            f"{record['overhead'][run['memory']]:.3f}",
            f"{run['contrast']['first']:.3f}, {run['contrast']['last']:.3f}",
            _number(run["colours_like_the_opening"]),
            _number(run["motion"]),
            _number(run["sink_share"]),
            str(run["bank_tokens"]),
        )
        for run in runs
    ]
    names = {run["memory"]: list(pictures) for run, pictures in zip(runs, shown, strict=True)}
    moments = [f"block {block + 1}" for block in spread(runs[0]["blocks"])]
    limit = EMBED_LIMIT // len(record["asked"]["prompts"])
    source, remark = embed(video, limit) if isinstance(video, Path) else ("", video)
    return Section(
        prompt,
        [
            "Times are from one block's pictures to the next one's, looked at in between; "
            f"`to the first` is a block's median over all prompts relative to {runs[0]['memory']}.",
            remark,
        ],
        [Measured("With every memory", JUDGE, head, rows, "recap")],
        (),
        source,
        f"{', '.join(names)}: the same seed." if isinstance(video, Path) else "",
        png_bytes(pictures_sheet(names, moments)),
        "From the beginning to the end.",
    )


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(record: Mapping[str, Any]) -> str:
    """Return the record in a few lines for a terminal."""
    lines = [f"{record['backbone']} ({record['weights']} weights), {record['device']}, {numbers(record)}"]
    lines += [f"{file['file']}: {file['verdict']}" for file in record["files"]]
    for name, check in record["first_block"]["checks"].items():
        passed = {True: "passed", False: "FAILED", None: "not judged"}[check["passed"]]
        lines.append(f"first block, {name}: {_number(check['value'])}, {passed}")
    for run in record["runs"]:
        peak = f", peak {run['peak_gb']:.1f} GB" if run["peak_gb"] is not None else ""
        lines.append(
            f"{run['memory']}: {run['block_ms']['median']:.1f} ms a block, {run['pictures_per_second']:.1f} "
            f"pictures/s{peak}, contrast {run['contrast']['first']:.3f} to {run['contrast']['last']:.3f}"
        )
    return "\n".join([*lines, verdict(record)])
