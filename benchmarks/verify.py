"""Run `recap verify` where the packages of the command line are not installed: `python -m benchmarks.verify NAME`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recap.fast.threads import use_fair_threads
from recap.show.models import ModelChoice
from recap.show.verification import VerifySettings
from recap.show.verification_page import describe, write_verification


def main(arguments: list[str] | None = None) -> int:
    usual = VerifySettings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompt", action="append", help="repeatable")
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--memories", default=",".join(usual.memories))
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--decoder", default="full", help="of random weights: full or tiny")
    parser.add_argument("--flow")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args(arguments)
    use_fair_threads()
    try:
        settings = VerifySettings(
            tuple(given.prompt or usual.prompts), tuple(given.memories.split(",")), given.seconds, given.seed
        )
        choice = ModelChoice.of(
            given.name, given.device, given.dtype, given.flow,
            random_weights=given.random_weights, decoder=given.decoder, eager=given.eager,
        )  # fmt: skip
        record = write_verification(choice, settings, given.out or Path(f"verify-{given.name}"))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(describe(record))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
