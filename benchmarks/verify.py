"""Run `recap verify` where the packages of the command line are not installed: `python -m benchmarks.verify NAME ...`

Several models are verified one after the other in one process, so that kernels are compiled once; each has a folder
of its own below `--out`, and one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.timing import describe_error
from recap.fast.threads import use_fair_threads
from recap.io.report import Reporter
from recap.show.models import ModelChoice
from recap.show.verification import VerifySettings
from recap.show.verification_page import describe, write_verification


def main(arguments: list[str] | None = None) -> int:
    usual = VerifySettings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(), help="where the folders verify-NAME are made")
    parser.add_argument("--prompt", action="append", help="repeatable")
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--memories", default=",".join(usual.memories))
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--decoder", default="full", help="of random weights: full or tiny")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further model after this time")
    for option in ("flow", "device", "dtype", "precision", "low-memory"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args(arguments)
    use_fair_threads()
    began = time.perf_counter()
    try:
        prompts, memories = tuple(options.prompt or usual.prompts), tuple(options.memories.split(","))
        settings = VerifySettings(prompts, memories, options.seconds, options.seed)
        choices = [
            ModelChoice.of(
                name, random_weights=options.random_weights, decoder=options.decoder, flow=options.flow,
                device=options.device, dtype=options.dtype, precision=options.precision, eager=options.eager,
                low_memory=options.low_memory,
            )
            for name in options.names
        ]  # fmt: skip
    except ValueError as error:
        sys.exit(f"error: {error}")
    passed = [
        verify(choice, settings, options.out)
        for choice in choices
        if time.perf_counter() - began < 60 * options.minutes
    ]
    if len(passed) < len(choices):
        print(f"left out, no time: {', '.join(options.names[len(passed) :])}")
    return 0 if all(passed) and len(passed) == len(choices) else 1


def verify(choice: ModelChoice, settings: VerifySettings, out: Path) -> bool:
    """Verify one model and print how it went, also an error."""
    began, name = time.perf_counter(), choice.config.backbone.name
    try:
        record = write_verification(choice, settings, out / f"verify-{name}", Reporter(notice=print))
        print(describe(record))
        passed = bool(record["passed"])
    except Exception as error:
        # Whatever it is, the other models have their turn.
        if not isinstance(error, ValueError):
            traceback.print_exc()
        print(f"{name}: {describe_error(error)}")
        passed = False
    # The next model needs the room.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
