"""Measure what the embedded backbone must hold, one claim a PART, in batches through the real rollout.

    python -m training.evaluate PART [PART ...] --weights FOLDER --probe FILE --out DIR [--device cuda] [--minutes 9]

PART is autoencoder, opening, stability, lookup, retention, reappearance or speed. Each writes DIR/PART.json, with
the value of every rollout, and prints a Markdown table for the model card. Rows of a batch are rollouts; memories
are compared on the same prompts and seeds. Where time runs out, fewer whole batches are drawn and n says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.backbones.tiny.autoencoder import StreamingDecoder
from recap.backbones.tiny.colours import colour_distance, mean_colour
from recap.backbones.tiny.probe import load_probe
from recap.backbones.tiny.vocabulary import Prompt, parse_prompt, prompt_text
from recap.contracts import FlowEstimator
from recap.errors import refuse
from recap.files import write_whole
from recap.flow.classical import ClassicalFlow
from recap.flow.raft import RaftFlow, load_raft_small
from recap.memory.recap import RecapMemory
from recap.novelty.flow_novelty import FlowNoveltyConfig
from recap.plan import Plan, Shot, make_plan
from recap.rollout import rollout
from recap.types import GeneratedBlock
from training.atlas import load_atlas
from training.bench import (
    KEPT,
    LOOKUP_DRAWN,
    LOOKUP_TOLD,
    LOOKUP_VISITS,
    MEMORIES,
    PAIRS,
    SEED,
    SEGMENTS,
    SETTLING_S,
    Bench,
    Case,
    Options,
    load_models,
    make_cases,
    make_prompts,
)
from training.measures import (
    RowsDecoder,
    Series,
    ThreadedFlow,
    actor_by_row,
    as_json,
    cluster_interval,
    contrast,
    differences,
    found_shares,
    interval,
    join_rows,
    last_of_frames,
    markdown,
    mean_of,
    paired_difference,
    partners,
    percent,
    plain,
    psnr,
    sharpness,
)
from training.script import CAMERAS, ActorScript, Script
from training.staging import CAMERA_SHARES
from training.world import World, block_pictures

# The parts: each returns its numbers and the table that shows them


Answer = tuple[dict[str, Any], list[list[str]]]


def autoencoder(bench: Bench) -> Answer:
    """PSNR on unseen rendered clips; whether a stream decodes to what the whole does."""
    model, num = bench.models.autoencoder, bench.count(64)
    whole, opening, apart, cut = [], [], 0.0, 0.0
    for start in range(0, num, 8):
        clips = bench.world.sample(bench.options.seed, range(start, min(start + 8, num)))
        latents = model.encode(clips.pictures)
        made = model.decode(latents)
        whole.append(psnr(made, clips.pictures, (1, 2, 3, 4)))
        opening.append(psnr(made[:, 0], clips.pictures[:, 0], (1, 2, 3)))
        streams = []
        for frames in (1, bench.spec.frames_per_block):
            stream = StreamingDecoder(model)
            streams.append(torch.cat([stream.decode(part) for part in latents.split(frames, dim=1)], dim=1))
        apart = max(apart, float((streams[1] - made).abs().max()))
        cut = max(cut, float((streams[1] - streams[0]).abs().max()))
        bench.say(f"autoencoder: {min(start + 8, num)} of {num} clips")
    values, first = torch.cat(whole).cpu(), torch.cat(opening).cpu()
    result = {
        "n": num, "psnr_mean": mean_of(values), "psnr_5th_percentile": float(values.double().quantile(0.05)),
        "first_picture_psnr_mean": mean_of(first), "stream_to_whole_largest_difference": apart,
        "stream_cut_otherwise_largest_difference": cut, "rollouts": {"psnr": values, "first": first},
    }  # fmt: skip
    return result, [
        ["unseen clips", "PSNR mean", "5th percentile", "first picture", "stream against whole", "cut otherwise"],
        [str(num), f"{result['psnr_mean']:.1f} dB", f"{result['psnr_5th_percentile']:.1f} dB",
         f"{result['first_picture_psnr_mean']:.1f} dB", f"{apart:.1e}", f"{cut:.1e}"],
    ]  # fmt: skip


def opening(bench: Bench) -> Answer:
    """Does the opening block show who is asked for, by few steps, by many, and in rendered pictures?"""
    num = bench.count(200)
    # The claim is about one actor; two at once are measured beside it.
    casts = {1: make_prompts(num, bench.options.seed), 2: make_prompts(num // 2, bench.options.seed, 2)}
    result: dict[str, Any] = {"n": num, "guidance_of_many": bench.models.many.guidance}
    table = [["opening block", "asked for", "found", "every one found", "sharpness", "n"]]
    for number, prompts in casts.items():
        found, sharp = _open(bench, prompts)
        asked = "one actor" if number == 1 else "two actors"
        result[asked] = {"n": len(prompts), "prompts": [prompt_text(p) for p in prompts]}
        for name, shares in found.items():
            # An actor counts as shown if half the block's pictures show it.
            each = torch.tensor(shares) >= 0.5
            every, crisp = each.all(dim=1).float(), torch.cat(sharp[name])
            result[asked][name] = {
                "every": cluster_interval(every, range(len(prompts))), "found": mean_of(each.float()),
                "sharpness": mean_of(crisp), "rollouts": {"found_shares": shares, "sharpness": crisp},
            }  # fmt: skip
            told = interval(result[asked][name]["every"], percent)
            table.append(
                [name, asked, percent(mean_of(each.float())), told, f"{mean_of(crisp):.0f}", str(len(each))]
            )
        few, many = result[asked]["4 steps"], result[asked]["16 steps"]
        ratios = {n: few[n] / many[n] if many[n] else math.nan for n in ("found", "sharpness")}
        result[asked]["four_to_sixteen"] = ratios
        table.append(["4 / 16 steps", asked, f"{ratios['found']:.2f}", "", f"{ratios['sharpness']:.2f}", ""])
    return result, table


def _open(
    bench: Bench, prompts: list[Prompt]
) -> tuple[dict[str, list[list[float]]], dict[str, list[Tensor]]]:
    """Per way of drawing and prompt: the share of its pictures that show each actor, and its sharpness."""
    seconds = bench.spec.frames_per_block * bench.spec.pictures_per_frame / bench.spec.pictures_per_second
    found: dict[str, list[list[float]]] = {"4 steps": [], "16 steps": [], "rendered": []}
    sharp: dict[str, list[Tensor]] = {name: [] for name in found}
    for rows in bench.batches(len(prompts)):
        some = prompts[rows]
        plan = make_plan([[Shot(prompt_text(p), seconds)] for p in some], bench.spec)
        seeds = [bench.options.seed + row for row in range(rows.start, rows.stop)]
        scripts = [Script(p.scene, p.time, tuple(ActorScript(a) for a in p.actors)) for p in some]
        _, latents = bench.film(scripts, block_pictures(0)[1], rows.start)
        shown = {"rendered": bench.models.autoencoder.decode(latents)}
        for name, backbone in (("4 steps", bench.models.four), ("16 steps", bench.models.many)):
            decoder = RowsDecoder(backbone.decoder)
            (made,) = rollout(backbone, bench.policy("sink"), plan, seeds=seeds, decoder=decoder)
            shown[name] = made.pixels
        for name, pixels in shown.items():
            found[name] += found_shares(bench.probe.judge(pixels), [p.actors for p in some])
            sharp[name].append(sharpness(pixels).mean(dim=1).cpu())
        bench.say(f"opening: {rows.stop} of {len(prompts)} prompts of {len(some[0].actors)}")
    return found, sharp


def stability(bench: Bench) -> Answer:
    """Contrast and sharpness at the end of long rollouts against their beginning, with a plain sink."""
    seconds = bench.options.seconds or 60.0
    cases = make_cases(bench.count(50), bench.options.repeats, bench.options.seed)
    parts = bench.sweep(cases, lambda m, rows: bench.long(m, cases, rows, seconds), ["sink"])["sink"]
    series = join_rows(parts)
    edge = min(10.0, seconds / 2)
    head, tail = series.within(0, edge), series.within(float(series.seconds[-1]) - edge, math.inf)
    ratios = {
        name: (values[:, tail].mean(dim=1) / values[:, head].mean(dim=1).clamp(min=1e-9))
        for name, values in (("contrast", series.contrast), ("sharpness", series.sharpness))
    }
    # What is stable by construction must pass, or the wish would be unfair.
    control = _rendered_ratios(bench, cases[: len(series.found)], seconds, edge)
    ratios |= {f"rendered {name}": ratio for name, ratio in control.items()}
    kept = {name: ((ratio - 1).abs() <= 0.25).float() for name, ratio in ratios.items()}
    both = kept["contrast"] * kept["sharpness"]
    clusters = [case.cluster for case in cases[: len(both)]]
    result: dict[str, Any] = {"n": len(both), "both_within_25_percent": cluster_interval(both, clusters)}
    table = [["sink, last 10 s / first 10 s", "median", "5th to 95th percentile", "within 25 %"]]
    for name, ratio in ratios.items():
        low, middle, high = (
            ratio.double().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        )
        result[name] = {"median": middle, "5th": low, "95th": high, "within": mean_of(kept[name])}
        table.append([name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", percent(mean_of(kept[name]))])
    # A variance changes twice as much as the deviation it is the square of; the milder reading is noted only.
    result["sharpness_deviation_within"] = mean_of(((ratios["sharpness"].sqrt() - 1).abs() <= 0.25).float())
    table.append([f"both, n = {len(both)}", "", "", interval(result["both_within_25_percent"], percent)])
    return {**result, "rollouts": ratios}, table


def _rendered_ratios(bench: Bench, cases: Sequence[Case], seconds: float, edge: float) -> dict[str, Tensor]:
    """The same of clips that the world renders for as long, with its own cameras."""
    rate = bench.spec.pictures_per_second
    last = bench.spec.num_pictures(round(seconds * rate / bench.spec.pictures_per_frame))
    width = min(int(edge * rate), last)
    cameras = random.Random(bench.options.seed).choices(CAMERAS, CAMERA_SHARES, k=len(cases))
    found: dict[str, list[Tensor]] = {"contrast": [], "sharpness": []}
    for row, (case, camera) in enumerate(zip(cases, cameras, strict=True)):
        place = parse_prompt(case.prompt)
        script = Script(place.scene, place.time, (ActorScript(case.actor),), camera)
        ends = [
            bench.world.film([script], bench.options.seed, last, first_index=row, span=span).pictures[:, ::4]
            for span in ((0, width), (last - width, last))
        ]
        for name, measured in (("contrast", contrast), ("sharpness", sharpness)):
            head, tail = (measured(pictures).mean() for pictures in ends)
            found[name].append((tail / head).cpu())
    return {name: torch.stack(ratios) for name, ratios in found.items()}


def lookup(bench: Bench) -> Answer:
    """A true past in the memory, then the model draws the return: whose colours does the actor wear?"""
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
    """Colour error and presence of the returning actor: drawn under a memory, rendered, or drawn anew."""
    some, spec = cases[rows], bench.spec
    places = [parse_prompt(case.prompt) for case in some]
    scripts = [
        Script(place.scene, place.time, (ActorScript(case.actor, visits),))
        for place, case in zip(places, some, strict=True)
    ]
    told, last = block_pictures(LOOKUP_TOLD)[0], block_pictures(LOOKUP_TOLD + LOOKUP_DRAWN - 1)[1]
    clips, latents = bench.film(scripts, last, rows.start)
    truth = clips.colours[:, 0].cpu()
    block_s = spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    drawn_s, begin_s = LOOKUP_DRAWN * block_s, told / spec.pictures_per_second
    if how == "another instance":
        other = bench.world.film(scripts, bench.options.seed, 1, first_index=len(cases) + rows.start)
        return colour_distance(other.colours[:, 0].cpu(), truth), torch.ones(len(some))
    if how == "rendered":  # through the autoencoder: what judge and codec alone get wrong
        pixels = RowsDecoder(bench.models.four.decoder).decode(latents)[:, told:]
        shown, _ = last_of_frames(pixels, spec.pictures_per_frame)
        judged = actor_by_row(bench.probe.judge(shown), [case.actor for case in some])
        return colour_distance(mean_colour(*judged).cpu(), truth), judged[0].mean(dim=1).cpu()
    if how == "no context":
        plan, begin_s = make_plan([[Shot(case.prompt, drawn_s)] for case in some], spec), 0.0
        series = bench.watch("sink", plan, some)
    else:
        captions = [clips.captions(row)[:LOOKUP_TOLD] for row in range(len(some))]
        shots = [
            [*(Shot(text, block_s, cut=False) for text in texts), Shot(case.prompt, drawn_s, cut=False)]
            for texts, case in zip(captions, some, strict=True)
        ]
        past = latents[:, : LOOKUP_TOLD * spec.frames_per_block]  # the encoder is causal
        series = bench.watch(how, make_plan(shots, spec), some, told=past)
    error = colour_distance(series.mean_colour(begin_s, math.inf), truth)
    return error, series.presence(begin_s, math.inf)


def retention(bench: Bench) -> Answer:
    """The opening subject at a third, two thirds and the end of long rollouts against its first second."""
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
    """Empty, subject, empty, subject, the prior cleared at every cut: is it the same subject again?"""
    scale = (bench.options.seconds or 24.0) / sum(length for _, length, _ in SEGMENTS)
    cases = make_cases(bench.count(100), bench.options.repeats, bench.options.seed + 2_000_000)
    slots: dict[str, list[Tensor]] = {memory: [] for memory in bench.options.memories}

    def plan_of(some: Sequence[Case]) -> Plan:
        shots = [[Shot(c.prompt if there else c.empty, scale * s) for _, s, there in SEGMENTS] for c in some]
        return make_plan(shots, bench.spec)

    starts = [
        0,
        *(b.index for b in plan_of(cases[:1]).blocks if b.clears_prior),
        len(plan_of(cases[:1]).blocks),
    ]
    frames = [bench.spec.frames_per_block * block for block in starts]

    def draw(memory: str, rows: slice) -> Series:
        def count_slots(block: GeneratedBlock, policy: Any) -> None:
            if block.block.index == starts[3] - 1 and isinstance(policy, RecapMemory):
                source = policy.bank.held.source[..., 0]
                slots[memory].append(((source >= frames[1]) & (source < frames[2])).sum(dim=1).float().cpu())

        return bench.watch(memory, plan_of(cases[rows]), cases[rows], seen=count_slots)

    made = bench.sweep(cases, draw, bench.options.memories)
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
        held = torch.cat(slots[memory]) if slots[memory] else torch.tensor([])
        result[memory] = {
            **{name: cluster_interval(score, clusters) for name, score in scores[memory].items()},
            "other_seed_error": mean_of(other), "bank_slots_from_B": mean_of(held),
            "attention_in_D": {r: mean_of(s[:, starts[3] :].flatten()) for r, s in series.shares.items()},
            "rollouts": {**scores[memory], "before": before, "after": after, "bank_slots_from_B": held},
        }  # fmt: skip
        table.append([
            memory, *(percent(mean_of(found[name])) for name in "BCD"), percent(mean_of(verified)),
            interval(result[memory]["error"]), plain(mean_of(other)), interval(result[memory]["same"], percent),
            f"{mean_of(held):.0f}" if len(held) else "",
        ])  # fmt: skip
    compared = (("error", plain), ("error where verified", plain), ("same", percent), ("found in D", percent))
    result["n"] = len(clusters)
    result["differences"], more = differences(scores, PAIRS, clusters, compared)
    return result, [*table, [], *more]


def speed(bench: Bench) -> Answer:
    """Seconds per block of one rollout with everything in it, and what the process held at most."""
    num = max(3, round((bench.options.seconds or 9.0) / 0.75))
    plan = make_plan([[Shot("a fox and a bus on a beach at night", 0.75 * num)]], bench.spec)
    times, last = [], time.perf_counter()
    for _ in rollout(bench.models.four, bench.policy("recap, lambda 5", ClassicalFlow()), plan, seeds=[0]):
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - last)
        last = time.perf_counter()
    steady = torch.tensor(times[2:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "n": len(steady), "block_s_median": float(steady.median()), "block_s_largest": float(steady.max()),
        "minute_of_video_s": 80 * float(steady.mean()), "peak_memory_mib": peak, "threads": torch.get_num_threads(),
        "rollouts": times,
    }  # fmt: skip
    return result, [
        ["device", "threads", "s per block, median", "largest", "60 s of video", "peak memory"],
        [bench.device.type, str(torch.get_num_threads()), f"{steady.median():.2f}", f"{steady.max():.2f}",
         f"{result['minute_of_video_s']:.0f} s", f"{peak:.0f} MiB"],
    ]  # fmt: skip


PARTS: dict[str, Callable[[Bench], Answer]] = {
    "speed": speed, "autoencoder": autoencoder, "opening": opening, "lookup": lookup,
    "stability": stability, "retention": retention, "reappearance": reappearance,
}  # fmt: skip
"""In the order they run: speed first, so that its peak memory is its own."""


@torch.no_grad()
def measure(part: str, bench: Bench, out: Path, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run one part; write its JSON and print its table."""
    begin = time.monotonic()
    result, table = PARTS[part](bench)
    content: dict[str, Any] = as_json({
        "part": part, "options": asdict(bench.options), **(about or {}), "kept_under_delta_e": KEPT,
        "torch": torch.__version__, "seconds": time.monotonic() - begin, "result": result,
    })  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{part}.json", json.dumps(content).encode())
    print(f"\n### {part}\n{markdown(table)}\n", flush=True)
    return content


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--weights", type=Path, required=True, help="folder of dit, autoencoder and text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--teacher", type=Path, help="folder of the flow model that sixteen steps are drawn with"
    )
    parser.add_argument("--guidance", type=float, default=1.0, help="of the teacher")
    parser.add_argument("--probe", type=Path)
    parser.add_argument(
        "--raft", type=Path, help="weights of RAFT-small; without, classical flow on CPU threads"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the transformer"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no batch begins that would end later"
    )
    parser.add_argument("--prompts", type=int, help="fewer or more than the part's own")
    parser.add_argument("--repeats", type=int, default=2, help="seeds of each prompt")
    parser.add_argument("--seconds", type=float, help="length of rollouts, other than the part's own")
    parser.add_argument("--rows", type=int, default=50, help="rollouts in one batch")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--memories", nargs="+", choices=sorted(MEMORIES), default=list(MEMORIES))
    parser.add_argument("--cycle-threshold-px", type=float, default=FlowNoveltyConfig().cycle_threshold_px)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    given = read_arguments(words)
    options = Options(
        given.prompts, given.repeats, given.seconds, given.rows, given.seed, tuple(given.memories),
        given.cycle_threshold_px, given.dtype, "raft-small" if given.raft else "classical", given.device,
    )  # fmt: skip
    begin = time.monotonic()
    # Whole precision: a measurement should not depend on which kernels a GPU has for rounded factors.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    models = load_models(
        given.weights,
        given.device,
        getattr(torch, given.dtype),
        teacher=given.teacher,
        guidance=given.guidance,
    )
    about = {"weights": given.weights.name, "probe": given.probe and given.probe.name}
    about["load_s"] = time.monotonic() - begin
    if given.device.startswith("cuda"):
        about["gpu"] = torch.cuda.get_device_name()
    asked = set(given.parts)
    judged = asked - {"autoencoder", "speed"}
    if judged and given.probe is None:
        raise refuse(
            "--probe", None, f"{', '.join(sorted(judged))} need it", "make it with python -m training.probe"
        )

    def open_flow() -> FlowEstimator:
        if given.raft:
            return RaftFlow(load_raft_small(given.raft, given.device))
        return ThreadedFlow(os.cpu_count() or 1)

    bench = Bench(
        options,
        models,
        load_probe(given.probe, given.device) if judged else None,
        World(load_atlas(), given.device)
        if asked & {"autoencoder", "opening", "stability", "lookup"}
        else None,
        open_flow,
        given.minutes,
    )
    for part in PARTS:
        if part in asked and bench.time_left():
            measure(part, bench, given.out, about)
        elif part in asked:
            bench.say(f"out of time before {part}")


if __name__ == "__main__":
    main()
