"""Make contact sheets of a transformer's samples: real rollouts with many Euler steps and with its own few.

    python -m training.sampling --weights training/checkpoint --out DIR [--blocks 9]

It writes samples-16.png and samples-4.png to DIR. Sample i has the i-th prompt and seed i.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from recap.backbones.tiny.autoencoder import StreamingDecoder
from recap.backbones.tiny.backbone import WEIGHTS, WordTable
from recap.backbones.wan.backbone import WanBackbone
from recap.backbones.wan.model import CausalWan, TextConditioning
from recap.backbones.wan.schedule import renoise, warp
from recap.backbones.wan.spec import EMBEDDED, NUM_TRAIN_STEPS
from recap.contracts import Admission, Context, Noise
from recap.memory.sink import SinkConfig
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from training.records import Record, load_autoencoder, load_weights, write_sheet

PROMPTS = (
    "a fox on a beach by day",
    "a bus in a city at night",
    "a whale under the sea by day",
    "an elephant in the mountains in the evening",
    "a fox and a bus on a beach by day",
    "a bus and a fox on a beach by day",
    "a dog and a penguin in the snow in the evening",
    "a boat and a turtle under the sea at night",
)
NUM_COLUMNS = 9
MANY_STEPS = 16


class EulerBackbone(WanBackbone):
    """A flow model sampled as an ordinary differential equation, which needs no distilled weights."""

    guidance = 1.0
    """The strength of classifier-free guidance; 1 means none."""

    no_text: Tensor | None = None
    """The empty prompt, 1 L text_dim, which guidance needs."""

    @torch.no_grad()
    def denoise(self, noise: Noise, conditioning: TextConditioning, context: Context) -> Tensor:
        """Generate one block, B F C rows columns; this calls `noise` once."""
        x = self._next(noise)
        unprompted = None
        if self.no_text is not None:
            unprompted = self.model.condition(self.no_text.expand(len(x), -1, -1))
        for sigma, following in zip(self._sigmas, (*self._sigmas[1:], 0.0), strict=True):
            flow = self.model(x, NUM_TRAIN_STEPS * sigma, conditioning, context)
            if unprompted is not None:
                plain = self.model(x, NUM_TRAIN_STEPS * sigma, unprompted, context)
                flow = torch.lerp(plain, flow, self.guidance)
            x = x + (following - sigma) * flow
        return x


class OpenedBackbone(WanBackbone):
    """A distilled model whose first block, or with `always` every block, another model begins.

    It is noised again to the step of number `first`, and finished from there; after the last step it stays as it is.
    What the model's own videos lack and these have was lost in the steps before.
    """

    opener: WanBackbone
    first: int
    always: bool

    def condition(self, prompts: tuple[str, ...]) -> TextConditioning:
        """Encode one prompt per row."""
        self._prompts = prompts
        return super().condition(prompts)

    @torch.no_grad()
    def denoise(self, noise: Noise, conditioning: TextConditioning, context: Context) -> Tensor:
        """Generate one block, B F C rows columns."""
        if context.past.opening is not None and not self.always:
            return super().denoise(noise, conditioning, context)
        clean = self.opener.denoise(noise, self.opener.condition(self._prompts), context)
        for sigma in self._sigmas[self.first :]:
            clean = self._estimate(renoise(clean, self._next(noise), sigma), sigma, conditioning, context)
        return clean


def open_with(opener: WanBackbone, first: int, later: WanBackbone, *, always: bool = False) -> OpenedBackbone:
    """Make a backbone whose first block, or with `always` every block, is the opener's up to one of its own steps."""
    opened = OpenedBackbone(later.model, later._encode, later.open_decoder)
    opened.opener, opened.first, opened.always = opener, first, always
    return opened


def open_from_each(
    opener: WanBackbone, later: WanBackbone, *, always: bool = False
) -> dict[str, WanBackbone]:
    """Make backbones whose first block is the opener's up to each of the later one's steps but the first."""
    begun = "every block begun" if always else "opened"
    return {
        f"{begun} by the teacher, from step {first + 1} on by the model": open_with(
            opener, first, later, always=always
        )
        for first in range(1, later.spec.num_steps)
    }


def write_samples(
    model: CausalWan,
    text: WordTable,
    autoencoder_file: Path,
    folder: Path,
    num_blocks: int,
    record: Record,
    *,
    many: bool = True,
) -> None:
    """Write samples-4.png and, if `many`, samples-16.png: a line per prompt with pictures evenly spaced in time."""
    autoencoder = load_autoencoder(autoencoder_file, model.device)
    # A copy, because a backbone freezes its model, and training of this one may continue.
    spec = replace(model.spec, name="sampled")
    copy = CausalWan(spec).to(model.device)
    copy.load_state_dict(model.state_dict())

    for steps in (MANY_STEPS, len(spec.steps)) if many else (len(spec.steps),):
        euler = steps == MANY_STEPS
        kind = EulerBackbone if euler else WanBackbone
        backbone = kind(copy, text.encode, lambda: StreamingDecoder(autoencoder))
        if euler:
            backbone._sigmas = euler_sigmas(steps, spec.shift)
        latents, pixels = sample(backbone, num_blocks)
        thirds = [float(f"{part.std().item():.3g}") for part in latents.chunk(3, dim=1)]
        record.add("samples", steps=steps, latent_std_by_third=thirds)
        shown = torch.linspace(0, pixels.shape[1] - 1, NUM_COLUMNS).long()
        write_sheet(folder / f"samples-{steps}.png", pixels[:, shown])


def euler_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Return evenly spaced noise levels, shifted as the model's schedule is."""
    return warp(tuple(round(NUM_TRAIN_STEPS * (1 - i / steps)) for i in range(steps)), shift)


def sample(backbone: WanBackbone, num_blocks: int, prompts: Sequence[str] = PROMPTS) -> tuple[Tensor, Tensor]:
    """Generate latents and pixels of all prompts, the i-th with seed i, with a plain sink."""
    spec = backbone.spec
    seconds = num_blocks * spec.frames_per_block * spec.pictures_per_frame / spec.pictures_per_second
    plan = make_plan([[Shot(prompt, seconds)] for prompt in prompts], spec)
    policy = SinkConfig().build(spec, admit_nothing)
    made = list(rollout(backbone, policy, plan, seeds=range(len(prompts))))
    return torch.cat([block.latents for block in made], 1), torch.cat([block.pixels for block in made], 1)


def admit_nothing() -> Admission:
    """Stand in for the rule of a memory that has no bank."""
    raise AssertionError("this memory has no bank to admit to")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--weights", type=Path, required=True, help="folder of dit.safetensors and text.safetensors"
    )
    parser.add_argument("--autoencoder", type=Path, default=WEIGHTS / "autoencoder.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=9)
    words = parser.parse_args()
    model, text = CausalWan(EMBEDDED), WordTable()
    model.load_state_dict(load_weights(words.weights / "dit.safetensors"))
    text.load_state_dict(load_weights(words.weights / "text.safetensors"))
    record = Record(words.out, {"weights": str(words.weights), "blocks": words.blocks})
    write_samples(model, text, words.autoencoder, words.out, words.blocks, record)
    record.write()


if __name__ == "__main__":
    main()
