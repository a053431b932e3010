"""A cast file stores subjects for other videos: `fox.cast`, a safetensors file with a list of them in its header.

A subject is the latents of the frames in which it was seen, and which of their tokens show it. Keys and values are
not stored: any model with the same autoencoder computes them by one clean pass. In a prompt `@fox` names a subject.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from recap.contracts import Backbone
from recap.errors import refuse
from recap.io.files import write_whole
from recap.io.opening import read_opening
from recap.io.run_folder import digest_tensors
from recap.io.trace import BlockTrace
from recap.io.video import Picture
from recap.types import BackboneSpec, Block

SUFFIX = ".cast"
VERSION = "1"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_NAMED = re.compile(r"@([A-Za-z][A-Za-z0-9_-]*)")
MOST_SUBJECTS = 64
LARGEST_BYTES = 1 << 28
LONGEST_WORDS = 200
MOST_ABOUT = 32
REMEDY = "make it again with recap cast save"


def check_name(name: str) -> None:
    """Refuse a name that no subject can have."""
    if not NAME.fullmatch(name):
        limit = "must begin with a letter and have at most 40 letters, digits, - and _"
        raise refuse("name", name, limit, "for example fox")


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """Is one subject of a cast."""

    name: str
    # What stands in a prompt in place of `@name`.
    words: str
    latents: Tensor  # F C rows columns
    mask: Tensor  # F rows columns of the grid, bool: the tokens that show it
    scores: Tensor  # F rows columns, float32: how new each token was when it was seen
    thumbnail: Picture
    # Where it comes from: model, prompt, seed, second.
    about: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 0 < len(self.words.strip()) <= LONGEST_WORDS:
            limit = f"must be 1 to {LONGEST_WORDS} characters"
            raise refuse("words", self.words, limit, 'for example "a fox"')
        if not bool(self.mask.any()):
            raise refuse("subject", self.name, "no token shows it", "choose a larger box")

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())


def check_fits(subject: Subject, spec: BackboneSpec) -> None:
    """Refuse a subject of an autoencoder with other latents, or of another grid, than the backbone's."""
    wanted = (spec.latent_channels, *spec.latent_size, *spec.grid)
    found = (*subject.latents.shape[1:], *subject.mask.shape[1:])
    if wanted != found or subject.latents.shape[0] != spec.frames_per_block:
        limit = f"{spec.name} has blocks of {spec.frames_per_block} frames, latents and grid {wanted}"
        model = subject.about.get("model", "another model")
        found = (subject.latents.shape[0], *found)
        raise refuse(f"cast {subject.name}", found, limit, f"use it with {model}, from which it comes")


def write_cast(path: Path, subjects: Sequence[Subject]) -> None:
    """Write a cast file, whole or not at all."""
    check_names(subjects)
    tensors: dict[str, Tensor] = {}
    header = []
    for index, subject in enumerate(subjects):
        header.append({"name": subject.name, "words": subject.words, "about": dict(subject.about)})
        tensors |= {
            f"{index}.latents": subject.latents.detach().cpu().contiguous(),
            f"{index}.mask": subject.mask.to(torch.uint8).contiguous(),
            f"{index}.scores": subject.scores.float().contiguous(),
            f"{index}.thumbnail": torch.from_numpy(np.ascontiguousarray(subject.thumbnail)),
        }
    about = {"recap.cast": VERSION, "subjects": json.dumps(header)}
    write_whole(path, save(tensors, metadata=about))


def digest_of_cast(subjects: Sequence[Subject]) -> str:
    """Return the digest of all that a video depends on in its cast; "" without one."""
    if not subjects:
        return ""
    tensors = {
        f"{s.name}.{part}": getattr(s, part).cpu() for s in subjects for part in ("latents", "mask", "scores")
    }
    return digest_tensors(tensors, json.dumps([(s.name, s.words) for s in subjects]))


def check_names(subjects: Sequence[Subject]) -> None:
    """Refuse an empty cast, one of too many subjects, or one with a name twice."""
    names = [subject.name for subject in subjects]
    if not 1 <= len(names) <= MOST_SUBJECTS:
        raise refuse("cast", len(names), f"must have 1 to {MOST_SUBJECTS} subjects", "split it")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        limit = f"there are {names.count(twice[0])} subjects of that name"
        raise refuse("cast", twice[0], limit, "give each a name of its own with --name")


def read_cast(path: Path) -> list[Subject]:
    """Read a cast file; whatever in it is not as `write_cast` writes it is refused."""
    if not path.is_file():
        raise refuse("cast", str(path), "there is no such file", "check the path")
    if path.stat().st_size > LARGEST_BYTES:
        limit = f"is larger than {LARGEST_BYTES:,} bytes"
        raise refuse("cast", str(path), limit, "a cast has some kilobytes a subject")
    try:
        with safe_open(path, "pt") as stored:
            about = stored.metadata() or {}
            header = json.loads(about.get("subjects", "null"))
            names = set(stored.keys())
            tensors = {name: stored.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise refuse("cast", str(path), f"is not a cast file ({error})", REMEDY) from error
    if about.get("recap.cast") != VERSION:
        limit = f"is not a cast file of version {VERSION}"
        raise refuse("cast", str(path), limit, REMEDY)
    if not isinstance(header, list):
        raise refuse("cast", str(path), "its header lists no subjects", REMEDY)
    parts = ("latents", "mask", "scores", "thumbnail")
    if names != {f"{index}.{part}" for index in range(len(header)) for part in parts}:
        raise refuse("cast", str(path), "its tensors are not those of its subjects", REMEDY)
    subjects = [
        _subject(path, entry, *(tensors[f"{index}.{part}"] for part in parts))
        for index, entry in enumerate(header)
    ]
    check_names(subjects)
    return subjects


def read_cast_bytes(data: bytes) -> list[Subject]:
    """Read a cast file from its bytes."""
    with tempfile.TemporaryDirectory(prefix="recap-cast-") as folder:
        path = Path(folder) / f"upload{SUFFIX}"
        path.write_bytes(data)
        return read_cast(path)


def _subject(
    path: Path, entry: Any, latents: Tensor, mask: Tensor, scores: Tensor, thumbnail: Tensor
) -> Subject:
    """Make a subject of its parts in a file; refuses those that do not fit together."""

    def bad(what: str) -> Exception:
        return refuse("cast", str(path), what, REMEDY)

    entry = entry if isinstance(entry, dict) else {}
    name, words, about = entry.get("name"), entry.get("words"), entry.get("about")
    if not isinstance(name, str) or not isinstance(words, str) or not isinstance(about, dict):
        raise bad("a subject in its header has no name, words or origin")
    if len(about) > MOST_ABOUT or not all(map(_is_plain, about.values())):
        raise bad(f"the origin of {name!r} is not a few texts and numbers")
    if latents.ndim != 4 or not latents.is_floating_point() or not bool(torch.isfinite(latents).all()):
        raise bad(f"the latents of {name!r} are not finite numbers, frames by channels by rows by columns")
    if (
        mask.ndim != 3
        or mask.dtype != torch.uint8
        or mask.shape[0] != latents.shape[0]
        or bool((mask > 1).any())
    ):
        raise bad(f"the mask of {name!r} does not fit its latents")
    if scores.shape != mask.shape or scores.dtype != torch.float32 or not bool(torch.isfinite(scores).all()):
        raise bad(f"the scores of {name!r} do not fit its mask")
    if (
        thumbnail.ndim != 3
        or thumbnail.dtype != torch.uint8
        or thumbnail.shape[2] != 3
        or not thumbnail.numel()
    ):
        raise bad(f"the thumbnail of {name!r} is no picture")
    return Subject(name, words, latents, mask.bool(), scores, thumbnail.numpy(), about)


def _is_plain(value: object) -> bool:
    """Tell whether a value is a text or a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number or isinstance(value, str)


def named_in(prompts: Iterable[str], known: Iterable[str]) -> tuple[str, ...] | None:
    """Return the subjects that prompts name by `@name`; None where none is named, which means all."""
    known = list(known)
    found = list(dict.fromkeys(name for prompt in prompts for name in _NAMED.findall(prompt)))
    for name in found:
        if name not in known:
            raise refuse("prompt", f"@{name}", f"the cast has {', '.join(known)}", "name one of these")
    return tuple(found) if found else None


def spell_out(prompt: str, words: Mapping[str, str]) -> str:
    """Replace every `@name` of a prompt by the subject's own words; without a cast the prompt stays as it is."""
    if not words:
        return prompt
    named_in([prompt], words)
    return _NAMED.sub(lambda match: words[match[1]], prompt)


def with_cast(block: Block, words: Mapping[str, str]) -> Block:
    """Return a block whose prompts are spelled out, and which shows the subjects that they name."""
    if not words:
        return block
    plain = tuple(spell_out(prompt, words) for prompt in block.prompts)
    return replace(block, prompts=plain, subjects=named_in(block.prompts, words))


def split_name(member: str) -> tuple[str, Path]:
    """Read a member of a cast as it is named in a command: `FILE`, or `NAME=PICTURE`."""
    name, equals, path = member.partition("=")
    if not member.strip() or (equals and not path.strip()):
        raise refuse("--cast", member, "names no file", "give a cast file, or NAME=PICTURE")
    if equals and NAME.fullmatch(name):
        return name, Path(path)
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(member).stem).strip("-_0123456789") or "subject", Path(member)


def read_words(members: Sequence[str]) -> dict[str, str]:
    """Return name -> words of all subjects of a cast, before a model is loaded; a picture has its name as words."""
    found: list[tuple[str, str]] = []
    for member in members:
        name, path = split_name(member)
        if path.suffix == SUFFIX:
            found += [(subject.name, subject.words) for subject in read_cast(path)]
        else:
            found.append((name, f"a {name}"))
    words = dict(found)
    if len(words) < len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        remedy = "give a picture another one: NAME=PICTURE"
        raise refuse("--cast", twice, "two subjects have that name", remedy)
    return words


def read_members(
    members: Sequence[str], backbone: Backbone, device: str, notice: Callable[[str], None]
) -> list[Subject]:
    """Read all subjects of a cast; a picture becomes a subject of all its tokens."""
    subjects: list[Subject] = []
    spec = backbone.spec
    for member in members:
        name, path = split_name(member)
        if path.suffix == SUFFIX:
            subjects += read_cast(path)
            continue
        picture = read_opening(path, spec, notice)[:, :1]
        pictures = 1 + (spec.frames_per_block - 1) * spec.pictures_per_frame
        latents = backbone.encode(picture.expand(-1, pictures, -1, -1, -1).to(device))[0].cpu()
        mask = torch.zeros((spec.frames_per_block, *spec.grid), dtype=torch.bool)
        # The picture stands still, so one frame has all of it.
        mask[0] = True
        shown = (picture[0, 0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
        about = {"model": spec.name, "picture": path.name}
        subjects.append(Subject(name, f"a {name}", latents, mask, mask.float(), shown, about))
    for subject in subjects:
        check_fits(subject, spec)
    return subjects


def components(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Return the connected parts of a mask rows columns, the largest first; neighbours share a side or a corner."""
    left = {(int(row), int(column)) for row, column in zip(*np.nonzero(mask), strict=True)}
    parts = []
    while left:
        todo, part = [left.pop()], np.zeros_like(mask)
        while todo:
            row, column = todo.pop()
            part[row, column] = True
            near = {(row + y, column + x) for y in (-1, 0, 1) for x in (-1, 0, 1)} & left
            left -= near
            todo.extend(near)
        parts.append(part)
    return sorted(parts, key=lambda part: -int(part.sum()))


def tokens_in_box(
    box: tuple[float, float, float, float], spec: BackboneSpec, field: str = "box"
) -> NDArray[np.bool_]:
    """Return the tokens, rows columns, whose middle lies in a box (x, y, width, height) of pixels."""
    x, y, width, height = box
    side = spec.token_pixels
    rows, columns = (np.arange(size) * side + side / 2 for size in spec.grid)
    inside = ((rows >= y) & (rows < y + height))[:, None] & ((columns >= x) & (columns < x + width))
    if not inside.any():
        size = "x".join(str(pixels) for pixels in reversed(spec.picture_size))
        text = ",".join(f"{part:g}" for part in box)
        raise refuse(field, text, f"covers no token of a picture of {size}", "choose a larger one")
    return np.asarray(inside)


def new_scores(line: BlockTrace, spec: BackboneSpec, row: int = 0) -> NDArray[np.float32]:
    """Return the scores of a block's tokens that entered the bank with it, 0 elsewhere; F rows columns."""
    scores = np.zeros((spec.frames_per_block, *spec.grid), dtype=np.float32)
    for (frame, *token), score in (line.admitted[row] if line.admitted else {}).items():
        if frame >= line.first_frame:
            scores[(frame - line.first_frame, *token)] = score
    return scores


def cut_subject(picture: Picture, mask: NDArray[np.bool_]) -> Picture:
    """Cut the part of a picture Y X 3 that the tokens of a mask show; what they do not show is dimmed."""
    rows, columns = np.nonzero(mask)
    side = picture.shape[0] // mask.shape[0]
    shown = np.kron(mask, np.ones((side, side), dtype=bool))[..., None]
    whole = np.where(shown, picture, picture // 4)
    top, left = rows.min() * side, columns.min() * side
    return np.ascontiguousarray(whole[top : (rows.max() + 1) * side, left : (columns.max() + 1) * side])
