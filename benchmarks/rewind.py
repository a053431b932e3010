"""What does it cost to go back? `python -m benchmarks.rewind --blocks 60`

A session keeps its latents and now and then a whole state; the memory of any other block is rebuilt from the nearest
state before it. This prints the size of a state, how many fit into the history, and the time of `rewind` by how many
blocks have to be read again; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from benchmarks.timing import print_json
from recap.config import RunConfig
from recap.plan import Shot
from recap.session import HISTORY_S, STATES_BYTES, Session

PROMPTS = {"embedded": "a fox on a beach by day"}


def main() -> None:
    """Generate, go back to every block in turn, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--memory", default="recap")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--states-mb", type=int, default=STATES_BYTES >> 20)
    options = parser.parse_args()
    shots = (Shot(PROMPTS.get(options.backbone, "a fox"), 1.0),)
    settings = {"backbone": options.backbone, "memory": options.memory, "device": options.device}
    config = RunConfig.from_dict({"shots": [{"prompt": shots[0].prompt, "seconds": 1.0}], **settings})
    session = Session(config, states_bytes=options.states_mb << 20)
    steps = []
    for block in range(options.blocks):
        began = time.perf_counter()
        session.step()
        steps.append(time.perf_counter() - began)
        print(f"block {block + 1} of {options.blocks}", file=sys.stderr)
    whole = session.snapshot()
    state = max(each.num_bytes for each in whole.states.values())
    latents = max(each.numel() * each.element_size() for each in whole.latents.values())
    kept = sorted(whole.states)
    times: dict[int, list[float]] = {}
    for block in range(1, options.blocks):
        other = session.fork()
        began = time.perf_counter()
        other.rewind(block)
        again = block - max(at for at in kept if at <= block)
        times.setdefault(again, []).append(time.perf_counter() - began)
    print("| blocks read again | times | median s | longest s |\n|---|---|---|---|")
    for again, found in sorted(times.items()):
        print(f"| {again} | {len(found)} | {statistics.median(found):.3f} | {max(found):.3f} |")
    record = {
        "backbone": options.backbone,
        "blocks": options.blocks,
        "step_s": statistics.median(steps),
        "state_mb": state / 2**20,
        "latents_mb_a_block": latents / 2**20,
        "states_at": kept,
        "history_s": HISTORY_S,
        "states_budget_mb": options.states_mb,
        "rewind_s": {again: max(found) for again, found in times.items()},
    }
    print_json("rewind", config.device, record)


if __name__ == "__main__":
    main()
