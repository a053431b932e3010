"""The effects of a memory: recall from a rendered past, retention of the first subject, reappearance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recap.backbones.tiny.vocabulary import parse_prompt
from recap.eval.judges.colours import colour_distance, mean_colour
from recap.eval.judges.subject import KEPT
from recap.memory.recap import RecapMemory
from recap.plan import Plan, Shot, make_plan
from recap.types import GeneratedBlock
from training.bench import (
    LOOKUP_GENERATED,
    LOOKUP_PAST,
    LOOKUP_VISITS,
    PAIRS,
    SEGMENTS,
    SETTLING_S,
    Answer,
    Bench,
    Case,
    make_cases,
)
from training.measures import (
    RowsDecoder,
    Series,
    actor_by_row,
    cluster_interval,
    differences,
    interval,
    join_rows,
    last_of_frames,
    mean_of,
    paired_difference,
    partners,
    percent,
    plain,
)
from training.script import ActorScript, Script
from training.world import block_pictures


def lookup(bench: Bench) -> Answer:
    """Give the memory a rendered past, let the model generate the return, and compare the actor's colours."""
    cases = make_cases(bench.count(50), bench.options.repeats, bench.options.seed + 1_000_000)
    names = ["rendered", *bench.options.memories, "no context", "another instance"]
    result: dict[str, Any] = {}
    table = [["subject first seen", "memory", "found", "colour error, Delta E", f"under {KEPT:g}", "n"]]
    for where, visits in LOOKUP_VISITS.items():
        made = bench.sweep(cases, partial(_returning, bench, cases, visits), names)
        errors = {name: torch.cat([error for error, _ in parts]) for name, parts in made.items()}
        clusters = [case.cluster for case in cases[: len(errors["rendered"])]]
        result[where] = {"n": len(clusters)}
        for name, error in errors.items():
            present = mean_of(torch.cat([found for _, found in made[name]]))
            estimate = cluster_interval(error, clusters)
            close = mean_of(torch.where(error.isfinite(), (error < KEPT).double(), math.nan))
            result[where][name] = {
                "error": estimate, "found": present, "within": close, "rollouts": error,
                "against_another_instance": paired_difference(error, errors["another instance"], clusters),
                "against_no_context": paired_difference(error, errors["no context"], clusters),
            }  # fmt: skip
            table.append([where, name, percent(present), interval(estimate), percent(close), str(estimate.n)])
    return result, table


def _returning(
    bench: Bench, cases: list[Case], visits: tuple[Any, ...], how: str, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return colour error and presence of the returning actor: with a memory, rendered, or without a past."""
    some, spec = cases[rows], bench.spec
    prompts = [parse_prompt(case.prompt) for case in some]
    scripts = [
        Script(prompt.scene, prompt.time, (ActorScript(case.actor, visits),))
        for prompt, case in zip(prompts, some, strict=True)
    ]
    first, last = block_pictures(LOOKUP_PAST)[0], block_pictures(LOOKUP_PAST + LOOKUP_GENERATED - 1)[1]
    clips, latents = bench.film(scripts, last, rows.start)
    truth = clips.colours[:, 0].cpu()
    block_s = spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    generated_s, begin_s = LOOKUP_GENERATED * block_s, first / spec.pictures_per_second
    if how == "another instance":
        other = bench.world.film(scripts, bench.options.seed, 1, first_index=len(cases) + rows.start)
        return colour_distance(other.colours[:, 0].cpu(), truth), torch.ones(len(some))
    if how == "rendered":
        # Through the autoencoder: this is the error of the judge and the codec alone.
        pixels = RowsDecoder(bench.models.four.decoder).decode(latents)[:, first:]
        shown, _ = last_of_frames(pixels, spec.pictures_per_frame)
        judged = actor_by_row(bench.probe.judge(shown), [case.actor for case in some])
        return colour_distance(mean_colour(*judged).cpu(), truth), judged[0].mean(dim=1).cpu()
    if how == "no context":
        plan, begin_s = make_plan([[Shot(case.prompt, generated_s)] for case in some], spec), 0.0
        series = bench.watch("sink", plan, some)
    else:
        captions = [clips.captions(row)[:LOOKUP_PAST] for row in range(len(some))]
        shots = [
            [*(Shot(text, block_s, cut=False) for text in texts), Shot(case.prompt, generated_s, cut=False)]
            for texts, case in zip(captions, some, strict=True)
        ]
        # The encoder is causal, so the first latents do not depend on later pictures.
        past = latents[:, : LOOKUP_PAST * spec.frames_per_block]
        series = bench.watch(how, make_plan(shots, spec), some, past=past)
    error = colour_distance(series.mean_colour(begin_s, math.inf), truth)
    return error, series.presence(begin_s, math.inf)


def retention(bench: Bench) -> Answer:
    """Compare the first subject at a third, two thirds and the end of long rollouts with its first second."""
    seconds = bench.options.seconds or 60.0
    cases = make_cases(bench.count(50), bench.options.repeats, bench.options.seed)
    made = bench.sweep(cases, lambda m, rows: bench.long(m, cases, rows, seconds), bench.options.memories)
    marks = [round(seconds * third / 3, 2) for third in (1, 2, 3)]
    result: dict[str, Any] = {"marks_s": marks}
    scores: dict[str, dict[str, Tensor]] = {}
    table = [["memory", *(f"present at {m:g} s" for m in marks), *(f"Delta E at {m:g} s" for m in marks),
              "other seed's subject", f"kept at {marks[-1]:g} s"]]  # fmt: skip
    clusters: list[int] = []
    for memory, parts in made.items():
        series = join_rows(parts)
        clusters = [case.cluster for case in cases[: len(series.found)]]
        first = series.mean_colour(0, 1)
        ends = [(mark - 1, mark + 1) if mark < seconds else (mark - 2, math.inf) for mark in marks]
        colours = [series.mean_colour(*end) for end in ends]
        present = [series.presence(*end) for end in ends]
        errors = [colour_distance(first, colour) for colour in colours]
        kept = ((present[-1] >= 0.5) & (errors[-1] < KEPT)).float()
        other = colour_distance(first, colours[-1][partners(len(first), bench.options.repeats)])
        if bench.options.repeats == 1:
            other = torch.full_like(other, math.nan)
        names = [f"{what} at {mark:g} s" for what in ("present", "error") for mark in marks]
        scores[memory] = dict(zip(names, (*present, *errors), strict=True)) | {"kept": kept}
        result[memory] = {
            **{name: cluster_interval(score, clusters) for name, score in scores[memory].items()},
            "opening_presence": mean_of(series.presence(0, 1)), "other_seed_error": mean_of(other),
            "rgb_error_at_end": mean_of((first - colours[-1]).abs().mean(dim=-1)),
            "attention": {role: mean_of(share[:, 3:].flatten()) for role, share in series.shares.items()},
            "rollouts": {**scores[memory], "opening_colour": first, "end_colour": colours[-1]},
        }  # fmt: skip
        table.append([
            memory, *(percent(mean_of(x)) for x in present), *(plain(mean_of(x)) for x in errors),
            plain(mean_of(other)), interval(result[memory]["kept"], percent),
        ])  # fmt: skip
    compared = (
        (f"error at {marks[-1]:g} s", plain),
        ("kept", percent),
        (f"present at {marks[-1]:g} s", percent),
    )
    result["n"] = len(clusters)
    result["differences"], more = differences(scores, PAIRS, clusters, compared)
    return result, [*table, [], *more]


def reappearance(bench: Bench) -> Answer:
    """Show empty, subject, empty, subject, with the prior cleared at every cut: does the same subject return?"""
    scale = (bench.options.seconds or 24.0) / sum(length for _, length, _ in SEGMENTS)
    cases = make_cases(bench.count(100), bench.options.repeats, bench.options.seed + 2_000_000)
    slots: dict[str, list[Tensor]] = {memory: [] for memory in bench.options.memories}

    def plan_of(some: Sequence[Case]) -> Plan:
        shots = [[Shot(c.prompt if shown else c.empty, scale * s) for _, s, shown in SEGMENTS] for c in some]
        return make_plan(shots, bench.spec)

    blocks = plan_of(cases[:1]).blocks
    starts = [0, *(block.index for block in blocks if block.clears_prior), len(blocks)]
    frames = [bench.spec.frames_per_block * block for block in starts]

    def generate(memory: str, rows: slice) -> Series:
        def count_slots(block: GeneratedBlock, policy: Any) -> None:
            if block.block.index == starts[3] - 1 and isinstance(policy, RecapMemory):
                source = policy.bank.entries.source[..., 0]
                slots[memory].append(((source >= frames[1]) & (source < frames[2])).sum(dim=1).float().cpu())

        return bench.watch(memory, plan_of(cases[rows]), cases[rows], after=count_slots)

    made = bench.sweep(cases, generate, bench.options.memories)
    return _compare_visits(bench, cases, made, slots, frames)


def _compare_visits(
    bench: Bench,
    cases: list[Case],
    made: dict[str, list[Series]],
    slots: dict[str, list[Tensor]],
    frames: list[int],
) -> Answer:
    """Compare the subject in segment D with itself in B for each memory; segments begin at `frames`."""
    scale = (bench.options.seconds or 24.0) / sum(length for _, length, _ in SEGMENTS)
    last = frames[3] // bench.spec.frames_per_block
    at = [bench.spec.num_pictures(frame) / bench.spec.pictures_per_second for frame in frames]
    spans = {name: (at[i] + min(SETTLING_S, scale), at[i + 1]) for i, (name, _, _) in enumerate(SEGMENTS)}
    table = [["memory", "found in B", "in C", "in D", "verified", "Delta E B to D", "other seed's subject",
              "same subject again", "bank slots from B"]]  # fmt: skip
    result: dict[str, Any] = {"segments_s": at, "windows_s": spans}
    scores: dict[str, dict[str, Tensor]] = {}
    clusters: list[int] = []
    for memory, parts in made.items():
        series = join_rows(parts)
        clusters = [case.cluster for case in cases[: len(series.found)]]
        found = {name: series.presence(*span) for name, span in spans.items()}
        before, after = series.mean_colour(*spans["B"]), series.mean_colour(*spans["D"])
        error = colour_distance(before, after)
        verified = ((found["B"] >= 0.5) & (found["D"] >= 0.5) & (found["C"] <= 0.1)).float()
        same = ((found["B"] >= 0.5) & (found["D"] >= 0.5) & (error < KEPT)).float()
        other = colour_distance(before, after[partners(len(before), bench.options.repeats)])
        if bench.options.repeats == 1:
            other = torch.full_like(other, math.nan)
        checked = torch.where(verified > 0, error, math.nan)
        scores[memory] = {"error": error, "error where verified": checked, "same": same, "verified": verified,
                          **{f"found in {name}": share for name, share in found.items()}}  # fmt: skip
        from_b = torch.cat(slots[memory]) if slots[memory] else torch.tensor([])
        result[memory] = {
            **{name: cluster_interval(score, clusters) for name, score in scores[memory].items()},
            "other_seed_error": mean_of(other), "bank_slots_from_B": mean_of(from_b),
            "attention_in_D": {r: mean_of(s[:, last:].flatten()) for r, s in series.shares.items()},
            "rollouts": {**scores[memory], "before": before, "after": after, "bank_slots_from_B": from_b},
        }  # fmt: skip
        table.append([
            memory, *(percent(mean_of(found[name])) for name in "BCD"), percent(mean_of(verified)),
            interval(result[memory]["error"]), plain(mean_of(other)), interval(result[memory]["same"], percent),
            f"{mean_of(from_b):.0f}" if len(from_b) else "",
        ])  # fmt: skip
    compared = (("error", plain), ("error where verified", plain), ("same", percent), ("found in D", percent))
    result["n"] = len(clusters)
    result["differences"], more = differences(scores, PAIRS, clusters, compared)
    return result, [*table, [], *more]
