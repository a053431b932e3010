"""This module has what a reader must know of a table before its numbers."""

from __future__ import annotations

NOTES = {
    "main": "Of VBench's sixteen dimensions, the four that need no foreign weights; no Q, Sem or Total from them. "
    "`--suite vbench128` gives all, of VBench's own prompts.",
    "admission": "The paper's row without a bank has lambda 1; the fair control has lambda 5, as all others.",
    "capacity": "The paper sweeps VBench's Q, Sem and Total alone (Total: 79.3 to 79.8), which need VBench's "
    "weights.",
    "lambda": "The paper sweeps VBench's Q, Sem and Total (Total: 78.6 to 79.7, best at 5), which need VBench's "
    "weights.",
    "length": "All lengths are cut from one rollout: a prefix of a causal video is a valid video. They are counted "
    "in whole clips of 2 s, so 5 s are 4. In the paper ours is higher by 0.101 at 60 s.",
    "identity": "In the paper ours wins 76 % of the pairs by whole frames and 64 % by crops of the subject.",
    "reappearance": "Segment A is empty, B shows the subject, C is empty, D asks for it again. The prior is cleared "
    "at every cut and the sink is an empty scene: only a bank can carry the subject. In the paper ours "
    "wins 73 % of the pairs by whole frames and 66 % by crops of the subject.",
    "reappearance-all": "The prior is cleared at every cut and the opening is an empty scene: what else a memory "
    "kept must do it.",
    "entering": "One shot of a minute: a second subject enters after 15 to 25 s, leaves after 8 to 12 more, and "
    "returns after 10 to 15. Return subject is of videos that show it both times: read it with late found on return.",
    "recurrence": "Schedules of 2 and 5 minutes in shots of 15 s with a cut between: subjects come, are away for 0 "
    "to 90 s, and return. The gate comes first: likeness is of returns whose subject is found before and after, and "
    "not in between; kept is the share of all returns, of subjects that were there before, that are the same again.",
    "time": "Nothing runs next to these, or the times mean nothing. `recap bench` measures the parts.",
    "motion": "Drift tail: the share of videos with more than twice the median flow of their own row, of baseline: "
    "of that row. The paper counts 37 and 24 videos; shares are of 128, which is inferred.",
}
