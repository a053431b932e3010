# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton evaluates annotations and knows none but its own.
"""Computes the steps of novelty by flow, which `recap.admission.flow_steps` defines, in few launches.

A canvas moves by whole pixels, so each of its pixels is a pixel of one picture or of the canvas before the block.
Which one is found by walking back through the camera's steps. So no canvas is made between two pictures of a block:
one kernel reads all pairs' surroundings and one writes the canvas that is left at the end. Only claims are carried
picture by picture, because each reads what its neighbours became in the last.

Positions are rounded as torch rounds them, so kernels with positions are compiled without fused multiply-add.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel.
import torch
from torch import Tensor

from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_steps import Evidence
from recap.admission.surroundings import AT_REST_PX, CUT_SHARE, SEEN, Surroundings, margins
from recap.contracts import Flow
from recap.fast.median_kernels import median
from recap.fast.triton_import import tl, triton

# Pixels per program.
TILE = 512


@triton.jit
def _index(position, to_unit, size):
    # What `reading_grid` and, after it, grid_sample make of a position, with their rounding.
    return ((position * to_unit - 1.0) + 1.0) * 0.5 * (size - 1)


@triton.jit
def _clipped(position, to_unit, size):
    # Beyond the border, the nearest border pixel.
    return tl.minimum(tl.maximum(_index(position, to_unit, size), 0.0), size - 1.0)


@triton.jit
def _bilinear(plane, x, y, live, height, width):
    # x and y are inside the plane; what is to the right of the last column or below the last row weighs nothing.
    left, top = tl.floor(x), tl.floor(y)
    to_right, to_bottom = x - left, y - top
    to_left, to_top = (left + 1.0) - x, (top + 1.0) - y
    column, line = left.to(tl.int32), top.to(tl.int32)
    first = plane + line * width + column
    right, below = live & (column + 1 < width), live & (line + 1 < height)
    value = tl.load(first, mask=live, other=0.0) * (to_left * to_top)
    value += tl.load(first + 1, mask=right, other=0.0) * (to_right * to_top)
    value += tl.load(first + width, mask=below, other=0.0) * (to_left * to_bottom)
    return value + tl.load(first + width + 1, mask=right & below, other=0.0) * (to_right * to_bottom)


@triton.jit
def _inside(x, y, height, width):
    return (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)


@triton.jit
def _compare(
    stream, forward, backward, at, novelty, flagged, traced, lost, pairs, height, width, to_unit_x, to_unit_y,
    cycle_threshold, photometric_threshold, photometric_weight, CARRIED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    area = height * width
    pixel = tile * TILE + tl.arange(0, TILE)
    live = pixel < area
    of_pair = entry * 2 * area + pixel
    flow_x = tl.load(backward + of_pair, mask=live, other=0.0)
    flow_y = tl.load(backward + of_pair + area, mask=live, other=0.0)
    x, y = flow_x + (pixel % width).to(tl.float32), flow_y + (pixel // width).to(tl.float32)
    tl.store(at + of_pair, x, mask=live)
    tl.store(at + of_pair + area, y, mask=live)
    within = live & _inside(x, y, height, width)
    x, y = _clipped(x, to_unit_x, width), _clipped(y, to_unit_y, height)
    there = forward + entry * 2 * area
    cycle_x = flow_x + _bilinear(there, x, y, within, height, width)
    cycle_y = flow_y + _bilinear(there + area, x, y, within, height, width)
    cycle = tl.sqrt_rn(cycle_x * cycle_x + cycle_y * cycle_y)
    # A row of the batch has one picture more than pairs.
    before = stream + (entry + entry // pairs) * 3 * area
    differs = tl.zeros((TILE,), tl.float32)
    for colour in tl.static_range(3):
        now = tl.load(before + (3 + colour) * area + pixel, mask=live, other=0.0)
        differs += tl.abs(now - _bilinear(before + colour * area, x, y, within, height, width))
    photometric = differs * (1.0 / 3.0)
    apart = within & (cycle > cycle_threshold)
    flags = (within == 0) | apart | (photometric > photometric_threshold)
    of_picture = entry * area + pixel
    value = cycle + photometric_weight * photometric
    tl.store(novelty + of_picture, tl.where(flags, value, 0.0), mask=live)
    tl.store(flagged + of_picture, flags.to(tl.int8), mask=live)
    holds = within & (cycle <= cycle_threshold)
    if CARRIED:
        holds = within
    tl.store(traced + of_picture, holds.to(tl.int8), mask=live)
    tl.store(lost + entry * tl.num_programs(0) + tile, tl.sum(apart.to(tl.int32), 0))


@triton.jit
def _plan(
    steps, lost, offset, offsets, whole, cut, pairs, area, tiles, at_rest, cut_share, TILES: tl.constexpr
):
    # One program plans a row's camera: what is left over before every pair and after the last, and whole pixels.
    row = tl.program_id(0)
    axis, tile = tl.arange(0, 2), tl.arange(0, TILES)
    left_over = tl.load(offset + 2 * row + axis)
    for pair in range(pairs):
        entry = row * pairs + pair
        tl.store(offsets + 2 * (row * (pairs + 1) + pair) + axis, left_over)
        step = tl.load(steps + 2 * entry + axis)
        due = tl.where(tl.abs(step) < at_rest, 0.0, step) - left_over
        # torch rounds halves to the even neighbour.
        lower = tl.floor(due)
        part, odd = due - lower, lower - 2.0 * tl.floor(lower * 0.5)
        nearest = tl.where((part > 0.5) | ((part == 0.5) & (odd > 0.5)), lower + 1.0, lower)
        left_over = nearest - due
        # Far beyond any canvas; an extreme flow must not overflow the integers.
        bounded = tl.minimum(tl.maximum(nearest, -1048576.0), 1048576.0)
        tl.store(whole + 2 * entry + axis, bounded.to(tl.int32))
        count = tl.sum(tl.load(lost + entry * tiles + tile, mask=tile < tiles, other=0), 0)
        tl.store(cut + entry, (count.to(tl.float32) > cut_share * area).to(tl.int32))
    tl.store(offsets + 2 * (row * (pairs + 1) + pairs) + axis, left_over)


@triton.jit
def _walk(x, y, live, whole, cut, row, newest, pairs, height, width, across, down):
    # Find what the canvas shows at whole positions x and y when picture `newest` lies on it. The source is a picture
    # after the first, -1 for the canvas before the block, or -2 for nothing; x and y are then places in the source,
    # counted on the canvas, and it has been seen if no cut came since.
    tall, wide = height + 2 * down, width + 2 * across
    there = live & (x >= 0) & (x < wide) & (y >= 0) & (y < tall)
    source = tl.where(there, -1, -2)
    seen = tl.where(there, 1.0, 0.0)
    for back in range(newest):
        picture = newest - back
        centre = (x >= across) & (x < across + width) & (y >= down) & (y < down + height)
        source = tl.where((source == -1) & centre, picture, source)
        pair = row * pairs + picture - 1
        x = tl.where(source == -1, x + tl.load(whole + 2 * pair), x)
        y = tl.where(source == -1, y + tl.load(whole + 2 * pair + 1), y)
        outside = (x < 0) | (x >= wide) | (y < 0) | (y >= tall)
        source = tl.where((source == -1) & outside, -2, source)
        kept = 1.0 - tl.load(cut + pair).to(tl.float32)
        seen = tl.where(source == -1, seen * kept, seen)
    return source, x, y, seen


@triton.jit
def _show(colour: tl.constexpr, stream, canvas, source, x, y, row, pairs, height, width, across, down):
    # Read a colour from where `_walk` ended.
    tall, wide = height + 2 * down, width + 2 * across
    picture = row.to(tl.int64) * (pairs + 1) + source
    of_picture = (picture * 3 + colour) * height * width + (y - down) * width + (x - across)
    of_canvas = (row.to(tl.int64) * 4 + colour) * tall * wide + y * wide + x
    shown = tl.load(stream + of_picture, mask=source > 0, other=0.0)
    return shown + tl.load(canvas + of_canvas, mask=source == -1, other=0.0)


@triton.jit
def _seen(canvas, source, x, y, seen, row, height, width, across, down):
    # Read the same place's mark; all of a picture has been seen.
    tall, wide = height + 2 * down, width + 2 * across
    of_canvas = (row.to(tl.int64) * 4 + 3) * tall * wide + y * wide + x
    mark = tl.load(canvas + of_canvas, mask=source == -1, other=0.0)
    return seen * tl.where(source > 0, 1.0, mark)


@triton.jit
def _recognise(
    stream, canvas, at, offsets, whole, cut, novelty, flagged, pairs, height, width, across, down,
    to_unit_x, to_unit_y, tolerance, all_seen, TILE: tl.constexpr,
):  # fmt: skip
    tile, entry = tl.program_id(0), tl.program_id(1)
    row, pair = entry // pairs, entry % pairs
    area = height * width
    pixel = tile * TILE + tl.arange(0, TILE)
    live = pixel < area
    of_pair = entry.to(tl.int64) * 2 * area + pixel
    x = tl.load(at + of_pair, mask=live, other=0.0)
    y = tl.load(at + of_pair + area, mask=live, other=0.0)
    enters = live & (_inside(x, y, height, width) == 0)
    # Most tiles have no such pixel.
    if tl.sum(enters.to(tl.int32), 0) > 0:
        now = offsets + 2 * (row * (pairs + 1) + pair)
        x = _index(x + (across - tl.load(now)), to_unit_x, width + 2 * across)
        y = _index(y + (down - tl.load(now + 1)), to_unit_y, height + 2 * down)
        # Beyond these bounds everything read is outside; an extreme flow must not overflow the integers below.
        x = tl.minimum(tl.maximum(x, -2.0), width + 2.0 * across + 1.0)
        y = tl.minimum(tl.maximum(y, -2.0), height + 2.0 * down + 1.0)
        left, top = tl.floor(x), tl.floor(y)
        red, green = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        blue, seen = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for lower in tl.static_range(2):
            for right in tl.static_range(2):
                weight_x = right * (x - left) + (1 - right) * ((left + 1.0) - x)
                weight_y = lower * (y - top) + (1 - lower) * ((top + 1.0) - y)
                source, column, line, mark = _walk(
                    left.to(tl.int32) + right, top.to(tl.int32) + lower, enters, whole, cut, row, pair, pairs,
                    height, width, across, down,
                )  # fmt: skip
                weight = weight_x * weight_y
                red += weight * _show(
                    0, stream, canvas, source, column, line, row, pairs, height, width, across, down
                )
                green += weight * _show(
                    1, stream, canvas, source, column, line, row, pairs, height, width, across, down
                )
                blue += weight * _show(
                    2, stream, canvas, source, column, line, row, pairs, height, width, across, down
                )
                seen += weight * _seen(canvas, source, column, line, mark, row, height, width, across, down)
        seen *= 1.0 - tl.load(cut + entry).to(tl.float32)
        here = stream + (entry + row + 1).to(tl.int64) * 3 * area + pixel
        differs = tl.abs(tl.load(here, mask=enters, other=0.0) - red)
        differs += tl.abs(tl.load(here + area, mask=enters, other=0.0) - green)
        differs += tl.abs(tl.load(here + 2 * area, mask=enters, other=0.0) - blue)
        known = enters & (seen > all_seen) & (differs * (1.0 / 3.0) <= tolerance)
        of_picture = entry.to(tl.int64) * area + pixel
        tl.store(novelty + of_picture, tl.zeros((TILE,), tl.float32), mask=known)
        tl.store(flagged + of_picture, tl.zeros((TILE,), tl.int8), mask=known)


@triton.jit
def _extend(stream, canvas, whole, cut, after, pairs, height, width, across, down, TILE: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1)
    tall, wide = height + 2 * down, width + 2 * across
    pixel = tile * TILE + tl.arange(0, TILE)
    live = pixel < tall * wide
    source, x, y, seen = _walk(
        pixel % wide, pixel // wide, live, whole, cut, row, pairs, pairs, height, width, across, down
    )
    to = after + row.to(tl.int64) * 4 * tall * wide + pixel
    for colour in tl.static_range(3):
        shown = _show(colour, stream, canvas, source, x, y, row, pairs, height, width, across, down)
        tl.store(to + colour * tall * wide, shown, mask=live)
    seen = _seen(canvas, source, x, y, seen, row, height, width, across, down)
    tl.store(to + 3 * tall * wide, seen, mask=live)


@triton.jit
def _claim(
    claimed, novelty, flagged, traced, origin, fired, after, picture, pairs, height, width, to_unit_x, to_unit_y,
    TILE: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    area = height * width
    pixel = tile * TILE + tl.arange(0, TILE)
    live = pixel < area
    entry = row * pairs + picture
    x = tl.load(origin + entry * 2 * area + pixel, mask=live, other=0.0)
    y = tl.load(origin + (entry * 2 + 1) * area + pixel, mask=live, other=0.0)
    holds = live & (tl.load(traced + entry * area + pixel, mask=live, other=0) != 0)
    flags = live & (tl.load(flagged + entry * area + pixel, mask=live, other=0) != 0)
    x, y = _clipped(x, to_unit_x, width), _clipped(y, to_unit_y, height)
    carried = _bilinear(claimed + row * area, x, y, holds, height, width)
    fires = flags & (carried < 0.5)
    value = tl.load(novelty + entry * area + pixel, mask=fires, other=0.0)
    tl.store(fired + entry * area + pixel, value, mask=live)
    tl.store(after + row * area + pixel, tl.where(fires, 1.0, carried), mask=live)


def _tiles(area: int) -> int:
    return -(-area // TILE)


def _to_unit(size: int) -> float:
    """Return what a position is multiplied by in `reading_grid`."""
    return 2 / max(size - 1, 1)


def find_evidence(
    stream: Tensor, flow: Flow, config: FlowNoveltyConfig, surroundings: Surroundings
) -> Evidence:
    stream, forward, backward = (each.float().contiguous() for each in (stream, *flow))
    rows, pairs, _, height, width = backward.shape
    novelty = torch.empty((rows, pairs, height, width), dtype=torch.float32, device=stream.device)
    flagged, traced = (torch.empty_like(novelty, dtype=torch.bool) for _ in range(2))
    at, tiles = torch.empty_like(backward), _tiles(height * width)
    lost = torch.empty((rows * pairs, tiles), dtype=torch.int32, device=stream.device)
    evidence = Evidence(novelty, flagged, traced, at)
    # A kernel is compiled again for whole numbers, which settings may be.
    limits = float(config.cycle_threshold_px), float(config.photometric_threshold)
    # Triton launches on the current device; pictures may be on a second one.
    with torch.cuda.device_of(stream):
        _compare[(tiles, rows * pairs)](
            stream, forward, backward, at, novelty, flagged.view(torch.int8), traced.view(torch.int8), lost, pairs,
            height, width, _to_unit(width), _to_unit(height), *limits, float(config.photometric_weight),
            CARRIED=config.claims == "carried", TILE=TILE, enable_fp_fusion=False,
        )  # fmt: skip
        if config.borders == "seen":
            _pass_over_known(stream, backward, lost, evidence, limits[1], surroundings)
    return evidence


def _pass_over_known(
    stream: Tensor,
    backward: Tensor,
    lost: Tensor,
    evidence: Evidence,
    tolerance: float,
    surroundings: Surroundings,
) -> None:
    """Take from the evidence, in place, what enters and has been seen before; the surroundings move along."""
    rows, pairs, _, height, width = backward.shape
    across, down = margins((height, width))
    tall, wide, tiles = height + 2 * down, width + 2 * across, lost.shape[1]
    canvas, offset = (each.contiguous() for each in surroundings.begin(stream[:, 0]))
    offsets = torch.empty((rows, pairs + 1, 2), dtype=torch.float32, device=stream.device)
    whole = torch.empty((rows, pairs, 2), dtype=torch.int32, device=stream.device)
    cut = torch.empty((rows, pairs), dtype=torch.int32, device=stream.device)
    _plan[(rows,)](
        median(backward.flatten(3)), lost, offset, offsets, whole, cut, pairs, height * width, tiles, AT_REST_PX,
        CUT_SHARE, TILES=int(triton.next_power_of_2(tiles)), enable_fp_fusion=False,
    )  # fmt: skip
    sizes = (pairs, height, width, across, down)
    _recognise[(tiles, rows * pairs)](
        stream, canvas, evidence.origin, offsets, whole, cut, evidence.novelty, evidence.flagged.view(torch.int8),
        *sizes, _to_unit(wide), _to_unit(tall), tolerance, SEEN, TILE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
    after = torch.empty_like(canvas)
    _extend[(_tiles(tall * wide), rows)](stream, canvas, whole, cut, after, *sizes, TILE=TILE)
    surroundings.keep(after, offsets[:, -1])


def claim(evidence: Evidence, claimed: Tensor) -> tuple[Tensor, Tensor]:
    novelty, flagged, traced, origin = (each.contiguous() for each in evidence)
    rows, pairs, height, width = novelty.shape
    fired = torch.empty_like(novelty)
    # Neighbours still read what the last picture left, so two maps take turns; the one given is left as it is.
    maps = torch.empty((2, *claimed.shape), dtype=claimed.dtype, device=claimed.device)
    before = claimed.contiguous()
    flags, holds = flagged.view(torch.int8), traced.view(torch.int8)
    sizes = (pairs, height, width, _to_unit(width), _to_unit(height))
    with torch.cuda.device_of(claimed):
        for picture in range(pairs):
            after = maps[picture % 2]
            _claim[(_tiles(height * width), rows)](
                before, novelty, flags, holds, origin, fired, after, picture, *sizes, TILE=TILE,
                enable_fp_fusion=False,
            )  # fmt: skip
            before = after
    return fired, before
