"""This module has an example or two for the help of every command; a test reads each as a command line."""

from __future__ import annotations

_LINES = {
    "": (
        'recap generate "a fox on a beach by day" --seconds 10',
        'recap compare "a fox on a beach by day" --memories none,sink,recap',
    ),
    "generate": (
        'recap generate "a fox on a beach by day" --seconds 10 --memory recap',
        "recap generate --script shots.json --set memory.reinforcement=2",
        'recap generate "@fox in a forest at night" --cast fox.cast',
        "recap generate --resume runs/20261116-082017-a-fox-on-a-beach-recap",
    ),
    "compare": (
        'recap compare "a fox on a beach by day" --memories none,sink,recap --seconds 15',
        "recap compare --script shots.json --set memory.reinforcement=1 --out comparison",
    ),
    "cast save": (
        "recap cast save runs/20261116-082017-a-fox-on-a-beach-recap --at 8 --name fox",
        "recap cast save runs/20261116-082017-a-fox-on-a-beach-recap --at 8 --name fox --box 40,30,64,64",
    ),
    "cast show": ("recap cast show fox.cast --out fox.png",),
    "cast merge": ("recap cast merge fox.cast bus.cast --out both.cast",),
    "show": ("recap show runs/20261116-082017-a-fox-on-a-beach-recap --open",),
    "serve": ("recap serve", "recap serve --replicas 3 --sessions 4 --store /mnt/shared/recap --ray auto"),
    "studio": ("recap studio", "recap studio --demo", "recap studio --backbone longlive --port 9000"),
    "inspect": (
        "recap inspect holiday.mp4",
        "recap inspect holiday.mp4 --size 832x480 --set cycle_threshold_px=1",
    ),
    "list": ("recap list", "recap list memories"),
    "weights": ("recap weights raft-small", "recap weights longlive --dry-run"),
    "convert": ("recap convert self_forcing_dmd.pt converted",),
    "bench": ("recap bench", "recap bench --memory recap --blocks 30 --plot growth.svg"),
    "probe": ("recap probe embedded", "recap probe self-forcing --out self-forcing.json"),
    "verify": (
        "recap verify embedded --seconds 10",
        "recap verify self-forcing --out self-forcing",
        "recap verify longlive --random-weights --seconds 6",
    ),
    "reproduce": (
        "recap reproduce reappearance --prompts 1 --seeds 1",
        "recap reproduce main --suite vbench128 --backbone self-forcing",
    ),
    "report": ("recap report results", "recap report results results-longlive"),
    "study make": (
        "recap study make runs --pairs 24 --out study",
        "recap study make fox bus --pairs 4 --questions overall --questions 'face=Which face stays the same?'",
    ),
    "study serve": ("recap study serve study --votes votes.jsonl",),
    "study report": ("recap study report votes.jsonl votes-anna-3f09c1.jsonl --key study.key.json",),
}


def as_epilog(*lines: str) -> str:
    """Return the end of a command's help; the mark \\b makes its formatter leave the lines as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


EXAMPLES = {name: as_epilog(*lines) for name, lines in _LINES.items()}
