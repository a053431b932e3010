"""Run `recap bench` where the packages of the command line are not installed: `python -m benchmarks.speed`"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from recap.fast.speed import SpeedSettings, run, table
from recap.fast.threads import use_fair_threads


def main(arguments: list[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="self-forcing" if cuda else "embedded")
    parser.add_argument("--memory", default="recap")
    parser.add_argument("--admission", default="auto", help="what fills its bank, e.g. keys")
    parser.add_argument("--decoder", default="full", help="full or tiny, for the public models")
    parser.add_argument("--blocks", type=int, default=30 if cuda else 12)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--precision", default="full", help="full, int8 or fp8: format of the weights")
    parser.add_argument("--eager", action="store_true", help="the readable path")
    parser.add_argument("--compare", action="store_true", help="readable and fast path on the same inputs")
    parser.add_argument("--profile", action="store_true", help="the parts of a bank, the longest kernels")
    parser.add_argument("--plot", type=Path, help="write the growth curve as SVG")
    values = vars(parser.parse_args(arguments))
    options = {name: values.pop(name) for name in ("compare", "profile", "plot")}
    use_fair_threads()
    try:
        result = run(SpeedSettings(**values), **options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
