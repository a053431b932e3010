"""`recap cast` saves subjects of a run for other videos, shows casts and merges them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from recap.cli.examples import EXAMPLES
from recap.cli.options import TrustCode
from recap.config import read_record
from recap.errors import refuse
from recap.io.cast import (
    SUFFIX,
    Subject,
    components,
    cut_subject,
    new_scores,
    read_cast,
    tokens_in_box,
    write_cast,
)
from recap.io.run_folder import LATENTS
from recap.io.trace import BlockTrace, pictures_of_frames
from recap.io.video import Picture, open_clip
from recap.io.weights import open_tensors
from recap.registry import JUDGES
from recap.run import read_spec
from recap.show.result import Run
from recap.show.sheet import bar, lay_out, write_png

SMALLEST_TOKENS = 2
"""A part of the picture with fewer new tokens is noise rather than a subject."""

AGAIN = "put the file back, or generate the run again"

app = typer.Typer(no_args_is_help=True, help="Keep subjects for other videos.", rich_markup_mode=None)


@app.command("save", epilog=EXAMPLES["cast save"])
def save_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    name: Annotated[str, typer.Option(help="Name of the subject, @NAME in prompts.")],
    at: Annotated[float, typer.Option(help="A second at which it is seen.")],
    box: Annotated[
        str | None,
        typer.Option(help="Where it is then, in pixels: x,y,width,height [default: is found]."),
    ] = None,
    pick: Annotated[int | None, typer.Option(help="Number of the cut-out that shows it.")] = None,
    words: Annotated[str | None, typer.Option(help='What prompts say for @NAME [default: "a NAME"].')] = None,
    row: Annotated[int, typer.Option(help="Row of the batch.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The cast file [default: NAME.cast].")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Save a subject of a run as a cast file.

    Without a box there are numbered cut-outs to pick from: the subjects that the model's judge finds then or, where
    there is no judge, what the memory found to be new.
    """
    if box is not None and pick is not None:
        raise refuse("--pick", pick, "--box says already what to take", "use one of the two")
    seen = _Moment(run, at, row, trust_code)
    if box is not None:
        mask = seen.box(box)
    else:
        parts = seen.parts()
        if pick is None and len(parts) > 1:
            sheet = run / "cast.png"
            write_png(sheet, _numbered([cut_subject(seen.picture, _flat(part)) for part in parts]))
            typer.echo(f"there are {len(parts)} cut-outs: look at {sheet}, and add --pick with a number")
            return
        number = 1 if pick is None else pick
        if not 1 <= number <= len(parts):
            raise refuse("--pick", number, f"there are cut-outs 1 to {len(parts)}", "see cast.png in the run")
        mask = parts[number - 1]
    subject = seen.subject(name, words or f"a {name}", mask)
    path = out or Path(f"{name}{SUFFIX}")
    write_cast(path, [subject])
    typer.echo(path)


@app.command("show", epilog=EXAMPLES["cast show"])
def show_command(
    casts: Annotated[list[Path], typer.Argument(help="Cast files.")],
    out: Annotated[Path | None, typer.Option(help="Write a picture of all subjects here, as PNG.")] = None,
) -> None:
    """List who is in a cast, and where they come from."""
    subjects = [subject for path in casts for subject in read_cast(path)]
    for subject in subjects:
        origin = ", ".join(f"{key} {value}" for key, value in subject.about.items())
        typer.echo(f"@{subject.name}: {subject.words}; {subject.num_tokens} tokens; {origin}")
    if out is not None:
        write_png(out, _numbered([subject.thumbnail for subject in subjects], [s.name for s in subjects]))
        typer.echo(out)


@app.command("merge", epilog=EXAMPLES["cast merge"])
def merge_command(
    casts: Annotated[list[Path], typer.Argument(help="Cast files.")],
    out: Annotated[Path, typer.Option(help="The new cast file.")],
) -> None:
    """Put the subjects of several casts into one file."""
    write_cast(out, [subject for path in casts for subject in read_cast(path)])
    typer.echo(out)


class _Moment:
    """Holds what a run shows at some second: the block, its latents, and the picture."""

    def __init__(self, folder: Path, second: float, row: int, trust_code: bool) -> None:
        about = read_record(folder, trust_code=trust_code)
        self.spec = read_spec(about)
        self.run = Run(folder, trust_code=trust_code)
        rows = len(self.run.config.seeds)
        if not 0 <= row < rows:
            raise refuse("--row", row, f"the run has rows 0 to {rows - 1}", "0 is the first")
        self.row, self.second = row, second
        trace = self.run.trace
        spans = pictures_of_frames(trace)
        if not spans:
            raise refuse("run", str(folder), "its trace.jsonl is missing or empty", AGAIN)
        rate, last = self.spec.pictures_per_second, max(span.stop for span in spans.values())
        index = round(second * rate) if np.isfinite(second) else -1
        if not 0 <= index < last:
            raise refuse("--at", second, f"the video is {last / rate:.4g} s long", "name a second of it")
        self.frame = next(frame for frame, span in spans.items() if index in span)
        self.line: BlockTrace = next(line for line in reversed(trace) if line.first_frame <= self.frame)
        self.first = self.line.first_frame
        self.picture: Picture = next(islice(open_clip(self.run.videos[row]).pictures(), index, None))

    def box(self, text: str) -> NDArray[np.bool_]:
        """Return the tokens of the moment's frame whose middle lies in a box of pixels; F rows columns."""
        try:
            x, y, width, height = (float(part) for part in text.split(","))
        except ValueError:
            limit = "must be x,y,width,height in pixels"
            raise refuse("--box", text, limit, "for example 40,30,64,64") from None
        return self._in_frame(tokens_in_box((x, y, width, height), self.spec, "--box"))

    def _in_frame(self, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
        mask = np.zeros((self.spec.frames_per_block, *self.spec.grid), dtype=bool)
        mask[self.frame - self.first] = tokens
        return mask

    def parts(self) -> list[NDArray[np.bool_]]:
        """Return the tokens of each part that may be a subject, F rows columns, the largest first.

        These are the subjects that the model's judge finds in the picture; without a judge, or where it finds none,
        what entered the bank with the block.
        """
        judge = JUDGES.get(self.run.config.backbone.name)
        judged = None if judge is None else judge().subjects(torch.from_numpy(self.picture))
        if judged is not None and bool(judged.any()):
            return [self._in_frame(part) for part in components(judged.bool().numpy())]
        mask = new_scores(self.line, self.spec, self.row) > 0
        found = [mask & part for part in components(_flat(mask)) if part.sum() >= SMALLEST_TOKENS]
        if not found:
            limit = "nothing new entered the bank around that second"
            raise refuse("--at", self.second, limit, "name another second, or say where it is with --box")
        return found

    def subject(self, name: str, words: str, mask: NDArray[np.bool_]) -> Subject:
        """Return the subject that these tokens show."""
        frames = self.spec.frames_per_block
        latents = open_tensors(self.run.folder / LATENTS, "latents", AGAIN)["latents"].read()[self.row]
        own = latents[self.first : self.first + frames]
        if len(own) < frames or self.line.num_pictures < frames:
            limit = f"the opening's first block there has fewer than {frames} frames"
            raise refuse("--at", self.second, limit, "name a later second")
        about: dict[str, str | int | float] = {
            "model": self.spec.name,
            "prompt": self.line.prompts[self.row],
            "seed": self.run.config.seeds[self.row],
            "second": round(self.second, 3),
        }
        return Subject(
            name,
            words,
            own,
            torch.from_numpy(mask),
            torch.from_numpy(new_scores(self.line, self.spec, self.row)),
            cut_subject(self.picture, _flat(mask)),
            about,
        )


def _numbered(pictures: Sequence[Picture], labels: Sequence[str] | None = None) -> Picture:
    """Lay out pictures of any size, each under its number or label."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    width = max(width, 48)
    tiles = []
    for number, picture in enumerate(pictures, 1):
        tile = np.full((height, width, 3), 17, dtype=np.uint8)
        tile[: picture.shape[0], : picture.shape[1]] = picture
        tiles.append(np.concatenate([bar(labels[number - 1] if labels else str(number), (22, width)), tile]))
    return lay_out(tiles, min(6, len(tiles)), gap_px=6)


def _flat(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where a mask F rows columns has a token in any frame."""
    return np.asarray(mask.any(axis=0))
