"""The quality of the embedded model itself: autoencoder, stability over a minute, speed."""

from __future__ import annotations

import copy
import math
import random
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recap.backbones.tiny.autoencoder import StreamingDecoder
from recap.backbones.tiny.vocabulary import parse_prompt
from recap.backbones.wan.backbone import WanBackbone
from recap.eval.judges.subject import ProbeWitness
from recap.eval.metrics.drift import contrast, sharpness
from recap.eval.metrics.subject_motion import camera_motion, camera_steps, subject_motion
from recap.eval.sampling import PER_SECOND, InMemoryClip, Sampled, sample_clip
from recap.eval.scores import Floats
from recap.flow.classical import ClassicalFlow
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from training.bench import Answer, Bench, Case, make_cases
from training.measures import (
    cluster_interval,
    interval,
    join_rows,
    mean_of,
    percent,
    psnr,
)
from training.sampling import open_from_each, open_with
from training.script import CAMERAS, ActorScript, Script
from training.staging import CAMERA_SHARES
from training.world import Clips

MOVES = 0.02
"""The path in picture widths a second above which a camera is counted as moving; a still one has 0.000."""


def autoencoder(bench: Bench) -> Answer:
    """Measure PSNR on unseen rendered clips, and whether decoding as a stream equals decoding at once."""
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


def stability(bench: Bench) -> Answer:
    """Compare contrast and sharpness at the end of long rollouts with their beginning, with a plain sink."""
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
    # Rendered clips are stable by construction and must pass.
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
    # A variance changes twice as much as its deviation; the milder criterion is only recorded.
    result["sharpness_deviation_within"] = mean_of(((ratios["sharpness"].sqrt() - 1).abs() <= 0.25).float())
    table.append([f"both, n = {len(both)}", "", "", interval(result["both_within_25_percent"], percent)])
    return {**result, "rollouts": ratios}, table


def motion(bench: Bench) -> Answer:
    """Compare how far subjects and cameras travel with a plain sink with rendered clips of the same prompts.

    Rendered clips are encoded and decoded as well. Their camera is known, so it also says how well it is measured.
    With a teacher its videos are measured, too: what it has and the model lacks was lost in distillation. So are
    videos that the teacher opens and the model continues, from each of its steps on, and those in which the teacher
    begins every block: they tell by which.
    """
    seconds = bench.options.seconds or 20.0
    cases = make_cases(bench.count(20), bench.options.repeats, bench.options.seed)
    cameras = random.Random(bench.options.seed).choices(CAMERAS, CAMERA_SHARES, k=len(cases))
    rendered, known, num = [], [], bench.spec.num_pictures(round(4 * seconds))
    for row, (case, camera) in enumerate(zip(cases, cameras, strict=True)):
        prompt = parse_prompt(case.prompt)
        script = Script(prompt.scene, prompt.time, (ActorScript(case.actor),), camera)
        model = bench.models.autoencoder
        clip = bench.world.film([script], bench.options.seed, num, first_index=row, flow=True)
        decoded = model.decode(model.encode(clip.pictures))[0]
        rendered.append(_travelled(bench, case, decoded))
        known.append(_travelled(bench, case, decoded, scene_steps(clip)))

    samplers: dict[str, WanBackbone] = {"generated": bench.models.four}
    if bench.models.many is not None:
        samplers["teacher"] = bench.models.many
        samplers |= open_from_each(bench.models.many, bench.models.four)
        samplers |= open_from_each(bench.models.many, bench.models.four, always=True)
        samplers["opened by the teacher"] = open_with(
            bench.models.many, bench.spec.num_steps, bench.models.four
        )

    def generate(sampler: str, rows: slice) -> list[list[float]]:
        some = cases[rows]
        plan = make_plan([[Shot(case.prompt, seconds)] for case in some], bench.spec)
        blocks = rollout(samplers[sampler], bench.policy("sink"), plan, seeds=[case.seed for case in some])
        pictures = torch.cat([made.pixels.cpu() for made in blocks], dim=1)
        return [_travelled(bench, case, row) for case, row in zip(some, pictures, strict=True)]

    swept = bench.sweep(cases, generate, list(samplers))
    found = {name: [values for part in parts for values in part] for name, parts in swept.items()}
    generated = found["generated"]
    found |= {"rendered": rendered, "rendered, known camera": known}
    clusters = [case.cluster for case in cases]
    result: dict[str, Any] = {"n": len(generated), "seconds": seconds, "rollouts": found}
    names = ("path", "shape_change", "camera_path")
    header = ["", "path of the subject, picture widths/s", "change of its outline", "path of the camera"]
    table = [[*header, "it moves in"]]
    for name, rows in found.items():
        values = torch.tensor(rows, dtype=torch.float64).T
        estimates = [cluster_interval(each, clusters[: len(each)]) for each in values]
        moves = (values[2][values[2].isfinite()] > MOVES).double().mean()
        result[name] = dict(zip(names, estimates, strict=True)) | {"camera_moves": float(moves)}
        listed = [interval(each, lambda x: f"{x:.3f}") for each in estimates]
        table.append([name, *listed, percent(float(moves))])
    by_kind = _outlines_by_kind(
        [case.actor for case in cases], {"generated": generated, "rendered": rendered}
    )
    result["shape_change_by_kind"] = by_kind
    listed = [f"{kind} {each['generated']:.2f} ({each['rendered']:.2f})" for kind, each in by_kind.items()]
    table.append(["outlines by kind, generated (rendered)", ", ".join(listed), "", "", ""])
    return result, table


def scene_steps(clip: Clips) -> Tensor:
    """Return the steps of the scene from picture to picture of the first clip, T - 1 of (down, right) in pixels."""
    assert clip.forward_flow is not None
    steps = []
    for flow, instances in zip(clip.forward_flow[0], clip.instances[0], strict=False):
        across, down = (part[instances == 0].median() for part in flow)
        steps.append(torch.stack((down, across)))
    return torch.stack(steps)


def _travelled(bench: Bench, case: Case, pictures: Tensor, scene: Tensor | None = None) -> list[float]:
    """Return the path and the change of outline of the subject of pictures T 3 Y X, and the path of the camera.

    They are nan where the subject is not found. `scene` replaces the steps of the camera that a judge would find.
    """
    rate = bench.spec.pictures_per_second
    levels = pictures.clamp(0, 1).mul(255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    sampled = sample_clip(InMemoryClip(levels, rate), PER_SECOND)
    # Judges of tables work on a CPU.
    witness = ProbeWitness(copy.deepcopy(bench.probe).cpu())
    shares = witness.where(sampled.pictures, case.actor)
    if scene is None:
        camera = camera_steps(sampled, ClassicalFlow().forward, shares)
    else:
        camera = _sum_steps(scene, sampled, rate)
    scores = [
        *subject_motion(sampled, shares, camera, (witness.backend, "dis")),
        *camera_motion(sampled, camera, "dis"),
    ]
    return [math.nan if score.value is None else score.value for score in scores]


def _sum_steps(scene: Tensor, sampled: Sampled, rate: float) -> Floats:
    """Return the steps between the sampled pictures."""
    at = (torch.as_tensor(sampled.seconds) * rate).round().long()
    summed = torch.cat((scene.new_zeros(1, 2), scene.double().cumsum(0)))
    return (summed[at[1:]] - summed[at[:-1]]).cpu().numpy()


def _outlines_by_kind(
    kinds: Sequence[str], found: dict[str, list[list[float]]]
) -> dict[str, dict[str, float]]:
    """Return the mean change of outline of every kind, the least first where it was rendered."""
    means: dict[str, dict[str, float]] = {}
    for name, rows in found.items():
        own: dict[str, list[float]] = {}
        for kind, (_, change, _) in zip(kinds, rows, strict=False):
            if not math.isnan(change):
                own.setdefault(kind, []).append(change)
        for kind, changes in own.items():
            means.setdefault(kind, {})[name] = sum(changes) / len(changes)
    whole = {kind: each for kind, each in means.items() if len(each) == len(found)}
    return dict(sorted(whole.items(), key=lambda item: item[1]["rendered"]))


def _rendered_ratios(bench: Bench, cases: Sequence[Case], seconds: float, edge: float) -> dict[str, Tensor]:
    """Measure the same ratios on rendered clips of that length, with the world's cameras."""
    rate = bench.spec.pictures_per_second
    last = bench.spec.num_pictures(round(seconds * rate / bench.spec.pictures_per_frame))
    width = min(int(edge * rate), last)
    cameras = random.Random(bench.options.seed).choices(CAMERAS, CAMERA_SHARES, k=len(cases))
    found: dict[str, list[Tensor]] = {"contrast": [], "sharpness": []}
    for row, (case, camera) in enumerate(zip(cases, cameras, strict=True)):
        prompt = parse_prompt(case.prompt)
        script = Script(prompt.scene, prompt.time, (ActorScript(case.actor),), camera)
        ends = [
            bench.world.film([script], bench.options.seed, last, first_index=row, span=span).pictures[:, ::4]
            for span in ((0, width), (last - width, last))
        ]
        for name, measured in (("contrast", contrast), ("sharpness", sharpness)):
            head, tail = (measured(pictures).mean() for pictures in ends)
            found[name].append((tail / head).cpu())
    return {name: torch.stack(ratios) for name, ratios in found.items()}


def speed(bench: Bench) -> Answer:
    """Measure the seconds per block of one complete rollout, and the peak memory of the process."""
    num = max(3, round((bench.options.seconds or 9.0) / 0.75))
    plan = make_plan([[Shot("a fox and a bus on a beach at night", 0.75 * num)]], bench.spec)
    times, last = [], time.perf_counter()
    for _ in rollout(bench.models.four, bench.policy("recap, lambda 5", bench.flow), plan, seeds=[0]):
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
