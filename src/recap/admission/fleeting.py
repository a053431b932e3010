"""What does not stay: telling rain, spray and ripples from things that enter.

Three questions about the pixels of a block, on the grid of the flow. Nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recap.contracts import Flow
from recap.flow.warp import inside, pixel_grid, sample


def vanishing(
    stream: Tensor, flow: Flow, *, horizon: int, cycle_threshold_px: float, photometric_threshold: float
) -> Tensor:
    """B P y x: what each pixel of pictures 1 to P shows is lost again within `horizon` pictures.

    It is followed along the forward flow and must stay reliable and keep the colour it came with. What leaves
    the picture is not lost, and of the last picture nothing is known yet. stream B P+1 3 y x.
    """
    batch, pairs = flow.forward.shape[:2]
    size = (stream.shape[-2], stream.shape[-1])
    at = pixel_grid(size, stream).expand(batch, pairs, -1, -1, -1).clone()
    lost = torch.zeros(batch, pairs, *size, dtype=torch.bool, device=stream.device)
    for later in range(1, min(horizon, pairs - 1) + 1):
        known = pairs - later  # pictures that have one so much later
        here = at[:, :known].flatten(0, 1)
        step = sample(flow.forward[:, later : later + known].flatten(0, 1), here)
        there = here + step
        target = torch.cat([flow.backward[:, later:], stream[:, later + 1 :]], dim=2).flatten(0, 1)
        found = sample(target, there)
        cycle = torch.linalg.vector_norm(step + found[:, :2], dim=1)
        photometric = (found[:, 2:] - stream[:, 1 : known + 1].flatten(0, 1)).abs().mean(dim=1)
        broken = (cycle > cycle_threshold_px) | (photometric > photometric_threshold)
        lost[:, :known] |= (broken & inside(there, size)).unflatten(0, (batch, known))
        at[:, :known] = there.unflatten(0, (batch, known))
    return lost


def settled(stream: Tensor) -> Tensor:
    """Pictures 1 to P with each pixel the median of three in time: a drop of one picture is not in them.

    stream B P+1 3 y x -> B P 3 y x; the last picture, which has no successor, gets its predecessor's.
    """
    if stream.shape[1] < 3:
        return stream[:, 1:]
    three = torch.stack([stream[:, :-2], stream[:, 1:-1], stream[:, 2:]])
    middle = three.sum(dim=0) - three.amax(dim=0) - three.amin(dim=0)
    return torch.cat([middle, middle[:, -1:]], dim=1)


def crowding(marked: Tensor, window: int) -> Tensor:
    """B P y x: the share of marked pixels around each, in three pictures and `window` rows and columns.

    What enters does so in all three; two drops in one square do not. Outside the clip or picture nothing counts.
    """
    here = functional.avg_pool2d(
        marked.float(), window, stride=1, padding=window // 2, count_include_pad=False
    )
    total, count = here.clone(), torch.ones_like(here[:1, :, :1, :1])
    total[:, 1:] += here[:, :-1]
    total[:, :-1] += here[:, 1:]
    count[:, 1:] += 1
    count[:, :-1] += 1
    return total / count


def colour_slots(pictures: Tensor, levels: int, side: int) -> Tensor:
    """B P*y*x: for every pixel its entry in a table of squares, `side` pixels wide, and colours."""
    height, width = pictures.shape[-2:]
    red, green, blue = (pictures * levels).long().clamp(0, levels - 1).unbind(2)
    rows = torch.arange(height, device=pictures.device)[:, None] // side
    square = rows * (width // side) + torch.arange(width, device=pictures.device) // side
    return (((square * levels + red) * levels + green) * levels + blue).flatten(1)


def count_colours(slots: Tensor, grid: tuple[int, int], levels: int) -> Tensor:
    """B squares levels^3: how many pixels of the block showed each colour in each square."""
    table = torch.zeros(
        slots.shape[0], grid[0] * grid[1] * levels**3, dtype=torch.float32, device=slots.device
    )
    # Sums of ones are exact in any order, so this is the same on every device.
    table.scatter_add_(1, slots, torch.ones_like(slots, dtype=torch.float32))
    counts: Tensor = table.unflatten(1, (grid[0] * grid[1], levels**3))
    return counts


def familiar_colours(seen: Tensor, grid: tuple[int, int], levels: int, share: float) -> Tensor:
    """B squares*levels^3, bool: colours, or neighbours of colours, that make up `share` of what a square and the
    squares around it have shown. seen B squares levels^3."""
    batch, (rows, columns) = seen.shape[0], grid
    table = seen.unflatten(1, grid).permute(0, 3, 1, 2)
    around = functional.avg_pool2d(table, 3, stride=1, padding=1, count_include_pad=False)
    around = around.permute(0, 2, 3, 1).reshape(batch * rows * columns, 1, levels, levels, levels)
    most = functional.max_pool3d(around, 3, stride=1, padding=1).flatten(1)
    return (most >= share * around.flatten(1).sum(dim=1, keepdim=True)).reshape(batch, -1)
