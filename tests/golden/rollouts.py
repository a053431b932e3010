"""What a seed generates: latents, trace and memory of a short rollout for every memory and admission rule.

`python -m tests.golden.rollouts write` makes golden.json, `check` compares hashes bit for bit. Floats differ
between processors, so the test in test_golden.py compares rounded figures and the trace; a refactor runs `check`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recap.config import RunConfig
from recap.io.trace import BlockTrace
from recap.plan import make_plan
from recap.rollout import rollout
from recap.run import build_backbone, build_memory

GOLDEN = Path(__file__).with_name("golden.json")
SEED = 3
MEMORIES = ("none", "sink", "recap", "deep-forcing", "memrope", "relax-forcing", "rolling-sink")
RULES = ("random", "recent", "diversity-keys", "flow-texture")
CASES: dict[str, dict[str, Any]] = {
    **{f"untrained {name}": {"backbone": "untrained", "memory": name} for name in MEMORIES},
    **{
        f"untrained recap {rule}": {"backbone": "untrained", "memory": "recap", "admission": rule}
        for rule in RULES
    },
    "untrained recap old rules": {
        "backbone": "untrained",
        "memory": "recap",
        "admission": {"name": "flow", "claims": "carried", "borders": "literal"},
    },
    "embedded recap": {"backbone": "embedded", "memory": "recap", "seconds": 3.0},
    "embedded sink": {"backbone": "embedded", "memory": "sink", "seconds": 3.0},
}


def generate(case: dict[str, Any]) -> dict[str, Any]:
    """One case's rollout as hashes (exact), figures (rounded) and trace."""
    seconds = case.get("seconds", 6.0)
    prompts = ("a fox on a beach by day", "an empty beach by day")
    config = RunConfig.from_dict(
        {
            "shots": [{"prompt": prompt, "seconds": seconds} for prompt in prompts],
            "flow": "classical",
            "seeds": [SEED],
            **{key: value for key, value in case.items() if key != "seconds"},
        }
    )
    backbone = build_backbone(config)
    policy = build_memory(config, backbone.spec, lambda _: None)
    latents, trace, figures = hashlib.sha256(), [], []
    for block in rollout(backbone, policy, make_plan([config.shots], backbone.spec), seeds=[SEED]):
        latents.update(block.latents.numpy().tobytes())
        figures.append([round(float(block.latents.mean()), 4), round(float(block.latents.std()), 4)])
        line = BlockTrace.of(block).to_json()
        # The golden file is older than the count of pictures.
        assert line.pop("num_pictures") == block.pixels.shape[1]
        trace.append(line)
    memory = hashlib.sha256()
    for tensor in tensors(policy.state()):
        memory.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "latents": latents.hexdigest(),
        "memory": memory.hexdigest(),
        "trace": hashlib.sha256(json.dumps(trace, sort_keys=True).encode()).hexdigest(),
        "figures": figures,
        "admitted": [[token[:3] for row in line.get("admitted", []) for token in row] for line in trace],
    }


def tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor of a nested state, in order of its keys."""
    if isinstance(state, Tensor):
        yield state.reshape(-1) if state.dim() else state.reshape(1)
    elif isinstance(state, dict):
        for key in sorted(state):
            yield from tensors(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from tensors(each)


def main() -> None:
    torch.set_num_threads(1)
    made = {name: generate(case) for name, case in CASES.items()}
    if sys.argv[1:] == ["write"]:
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
        return
    golden = json.loads(GOLDEN.read_text())
    for name, now in made.items():
        differ = [key for key in ("latents", "memory", "trace") if now[key] != golden[name][key]]
        print(f"{name}: {'equal' if not differ else 'differs in ' + ', '.join(differ)}")
    sys.exit(
        any(made[name][key] != golden[name][key] for name in made for key in ("latents", "memory", "trace"))
    )


if __name__ == "__main__":
    main()
