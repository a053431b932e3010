"""Judges one video in which a subject appears, is gone and is asked back: is it the same one, and does it move?

The measures are those of the tables `reappearance` and `entering`; here they become a verdict on a single video.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recap.eval.judged import MotionJudge
from recap.eval.judges.subject import FARTHEST, KEPT, ProbeWitness
from recap.eval.metrics.presence import Stretch, presence, stretches
from recap.eval.metrics.reappearance import ABSENT, PRESENT, SETTLING_S, reappearance
from recap.eval.metrics.subject_motion import camera_steps, subject_motion
from recap.eval.sampling import PER_SECOND, Footage, Sampled, sample_clip
from recap.io.trace import BlockTrace

SAME, ANOTHER, STAYED, MISSING, NEVER = "the same", "another", "never left", "not found", "never shown"


@dataclass(frozen=True, slots=True)
class Return:
    """Holds what was measured of a subject's first visit, of the time without it and of its return.

    Shares are of sampled pictures. `likeness` is None where it was seen too rarely to compare; `path` is the way of
    its centroid after the return, in picture widths per second.
    """

    likeness: float | None
    found_first: float
    found_gone: float
    found_again: float
    path: float | None

    @property
    def colour_error(self) -> float | None:
        """Return the mean Delta E of its colours on return to those of the first visit."""
        return None if self.likeness is None else FARTHEST * (1 - self.likeness)

    @property
    def verdict(self) -> str:
        """Say in a word whether the subject came back."""
        # A share of no pictures is nan, which proves nothing.
        if not self.found_first >= PRESENT:
            return NEVER
        if not self.found_gone <= ABSENT:
            return STAYED
        if not self.found_again >= PRESENT or self.colour_error is None:
            return MISSING
        return SAME if self.colour_error < KEPT else ANOTHER


def judge_return(
    clip: Footage, trace: Sequence[BlockTrace], subject: str, witness: ProbeWitness, motion: MotionJudge
) -> tuple[Return, list[Stretch]]:
    """Judge a video of four stretches (without the subject, with it, without it, with it), and return those too."""
    sampled = sample_clip(clip, PER_SECOND)
    parts = stretches(trace, clip.fps, sampled.duration_s)
    score = reappearance(sampled, witness, subject, [part.span.start for part in parts])
    shares = score.details["found_share"]
    _, _, gone, back = parts
    found, _ = witness.look(sampled.pictures, subject)
    absent = presence(sampled, found, [gone.without_leaving(trace)], "gone", witness.backend)
    inside = sampled.within(back.without_first(SETTLING_S))
    after = Sampled(sampled.seconds[inside], sampled.pictures[inside], sampled.duration_s)
    cells = witness.where(after.pictures, subject)
    camera = camera_steps(after, motion.flow, cells)
    path, _ = subject_motion(after, cells, camera, (witness.backend, motion.backend))
    seen = Return(score.value, shares["B"], absent.value or 0.0, shares["D"], path.value)
    return seen, parts


def headline(subject: str, returns: Mapping[str, Sequence[Return]]) -> str:
    """Count in how many videos of each memory the same subject came back, the most successful memories first."""
    counts = {name: sum(each.verdict == SAME for each in group) for name, group in returns.items()}
    most = {name: len(group) for name, group in returns.items()}
    by_count: dict[tuple[int, int], list[str]] = {}
    for name in sorted(counts, key=lambda name: -counts[name]):
        by_count.setdefault((counts[name], most[name]), []).append(name)
    parts = [f"in {count} of {of} with {_listed(names)}" for (count, of), names in by_count.items()]
    return f"The same {subject} came back {', '.join(parts)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
