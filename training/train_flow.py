"""Train world-flow, the small flow network, on the exact flow of rendered clips, for a fixed time.

    python -m training.train_flow --minutes 5 --autoencoder FILE --out DIR [--resume DIR] [--teacher raft-small.pth]

It writes to DIR, every minute and at the end: world-flow.safetensors (running mean, fp16) and record.json with
errors on unseen clips and how well novelty works with it. It needs the atlas (training.atlas). With a teacher it
learns RAFT-small's flow of the same clips instead of the exact one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recap.contracts import Flow, FlowEstimator
from recap.flow.classical import ClassicalFlow
from recap.flow.network import pair_indices, select
from recap.flow.raft import RaftFlow, load_raft_small
from recap.flow.world import COARSE, FINE, WorldFlow, WorldFlowNet, enlarge
from training.flow_clips import FlowClips, FlowPool, FlowWorld, Recode, load_recode, open_flow_world
from training.flow_quality import judge
from training.optimisers import Clock, Muon, RunningMean, split_parameters
from training.options import choose_device, read_options
from training.records import Record, load_weights, save_weights
from training.train_autoencoder import UNSEEN_SEED, plain_settings

FILE_NAME = "world-flow.safetensors"


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    minutes: float
    autoencoder: Path
    out: Path
    resume: Path | None = None
    teacher: Path | None = None
    seed: int = 0
    batch: int = 96  # pairs, each of which is learnt both ways
    muon_rate: float = 3e-3
    adam_rate: float = 2e-3
    head_rate: float = 2e-4  # of what makes corrections: there a hundredth is a tenth of a pixel everywhere
    mean_decay: float = 0.999
    actor_weight: float = 4.0  # how much more the error counts on actors: they are a tenth of the picture
    early_weight: float = 0.4  # of each flow before the last
    decoded_share: float = 0.8  # of the clips; an estimator sees decoded pictures, clean ones keep it general
    latent_noise: float = 0.15  # most noise that a decoded clip's latents meet, in standard deviations
    pixel_noise: float = 0.03  # most noise on pixels
    pool: int = 2400
    start_pool: int = 480
    fresh: int = 24
    fresh_every: int = 40
    eval_clips: int = 16
    eval_every_s: float = 60.0
    warmup_s: float = 5.0
    floor: float = 0.01
    reserve_s: float = 15.0


def vary(clips: FlowClips, pixel_noise: float) -> FlowClips:
    """Change the light of pairs and perhaps mirror them, which must not matter to an estimator."""
    rows, device = len(clips.pictures), clips.pictures.device

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(rows, *shape, 1, 1, device=device)

    contrast, tint = between(0.7, 1.3, 1, 1), between(0.85, 1.15, 1, 3)
    # Both pictures share their light except for slight flicker, as decoders produce it.
    shade = between(-0.1, 0.1, 1, 1) + between(-0.01, 0.01, 2, 1)
    pictures = ((clips.pictures - 0.5) * contrast + 0.5) * tint + shade
    pictures = pictures + pixel_noise * between(0, 1, 1, 1) * torch.randn_like(pictures)
    mirrored = torch.rand(rows, 1, 1, 1, 1, device=device) < 0.5
    turn = torch.tensor([-1.0, 1.0], device=device).view(2, 1, 1)
    return FlowClips(
        torch.where(mirrored, pictures.flip(-1), pictures).clamp(0, 1),
        torch.where(mirrored, turn * clips.forward.flip(-1), clips.forward),
        torch.where(mirrored, turn * clips.backward.flip(-1), clips.backward),
        torch.where(mirrored[:, 0], clips.instances.flip(-1), clips.instances),
    )


def distance(found: Tensor, true: Tensor) -> Tensor:
    """Return the error of flow N 2 Y X in pixels, N Y X; it is smooth near zero."""
    return ((found - true).square().sum(dim=1) + 1e-3**2).sqrt()


def actor_weights(instances: Tensor, most: float) -> Tensor:
    """Return weights 2B Y X of mean 1 from instances B 2 Y X: of flow from the first pictures, then the second."""
    weight = 1 + most * (instances.transpose(0, 1).flatten(0, 1) > 0)
    return weight / weight.mean()


def flow_loss(model: WorldFlowNet, clips: FlowClips, options: Options) -> tuple[Tensor, Tensor]:
    """Return the training loss of pairs and the plain mean error of the last flow in pixels."""
    source, target = pair_indices(clips.pictures, clips.pictures.device, both=True)
    encoded = model.encode(clips.pictures.flatten(0, 1) * 2 - 1)
    estimate = model.estimate(select(encoded, source), select(encoded, target))
    true = torch.cat((clips.forward.flatten(0, 1), clips.backward.flatten(0, 1)))
    weight = actor_weights(clips.instances, options.actor_weight)
    last = distance(model.sharpen(estimate), true)
    loss = (weight * last).mean()
    for flow, factor in ((estimate.coarse, COARSE), (estimate.middle, FINE)):
        loss = loss + options.early_weight * (weight * distance(enlarge(flow, factor), true)).mean()
    return loss, last.detach().mean()


def make_optimisers(model: WorldFlowNet, options: Options) -> list[torch.optim.Optimizer]:
    heads = [parameter for name, parameter in model.named_parameters() if ".correct." in name]
    separate = {id(parameter) for parameter in heads}
    matrices, rest = ([p for p in part if id(p) not in separate] for part in split_parameters(model, ""))
    groups = [{"params": rest, "lr": options.adam_rate}, {"params": heads, "lr": options.head_rate}]
    return [
        Muon(matrices, options.muon_rate),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def still_flow(pictures: Tensor) -> Flow:
    """Return no motion at all: a baseline, since in a static scene it still finds what enters."""
    still = torch.zeros_like(pictures[:, 1:, :2])
    return Flow(still, still)


class Trainer:
    def __init__(self, options: Options, world: FlowWorld, recode: Recode, device: str) -> None:
        self.options = options
        self.clock = Clock(
            options.minutes, reserve_s=options.reserve_s, warmup_s=options.warmup_s, floor=options.floor
        )
        self.record = Record(options.out, plain_settings(asdict(options)))
        torch.manual_seed(options.seed)
        self.device = device
        self.model = WorldFlowNet().to(device, memory_format=torch.channels_last)
        if options.resume is not None:
            self.model.load_state_dict(load_weights(options.resume / FILE_NAME))
        self.mean = RunningMean(self.model, options.mean_decay)
        self.optimisers = make_optimisers(self.model, options)
        teacher = options.teacher
        self.teacher = None if teacher is None else RaftFlow(load_raft_small(teacher, device))
        unseen = world(options.eval_clips, UNSEEN_SEED)
        self.unseen = replace(unseen, pictures=recode(unseen.pictures))
        # A resumed run must not see the clips of the run before it again in the same order.
        first = int(torch.randint(UNSEEN_SEED // 2, ()).item()) if options.resume else 0
        self.pool = FlowPool(
            world, recode, capacity=options.pool, fresh=options.fresh, every=options.fresh_every,
            decoded_share=options.decoded_share, seed=first,
        )  # fmt: skip
        self.pool.fill(options.start_pool)
        for name, estimate in (("still", still_flow), ("classical", ClassicalFlow())):
            self.record.add("reference", name=name, **self.measure(estimate))
        self.record.add("ready", parameters=sum(p.numel() for p in self.model.parameters()))

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def run(self) -> dict[str, float]:
        """Train until the time is used up; return the last measurements on unseen clips."""
        steps, shown = 0, self.clock.elapsed_s
        losses: list[Tensor] = []
        while not self.clock.finished:
            rate = self.clock.apply(self.optimisers)
            losses.append(self.step())
            steps += 1
            if self.clock.elapsed_s - shown >= self.options.eval_every_s:
                shown = self.clock.elapsed_s
                self._note(steps, rate, losses)
                losses = []
                self.evaluate()
        if losses:
            self._note(steps, 0.0, losses)
        return self.evaluate()

    def step(self) -> Tensor:
        """Make one update; return loss and error in pixels, still on the device."""
        clips = vary(self.pool.draw(self.options.batch), self.options.pixel_noise)
        if self.teacher is not None:
            forward, backward = self.teacher(clips.pictures)
            clips = replace(clips, forward=forward, backward=backward)
        with self.autocast():
            loss, error = flow_loss(self.model, clips, self.options)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.mean.update()
        return torch.stack((loss.detach(), error))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the running mean, as it is shipped, on unseen clips; write weights and record."""
        self.mean.swap()
        save_weights(self.options.out / FILE_NAME, self.model.state_dict())
        shipped = WorldFlowNet()
        shipped.load_state_dict(load_weights(self.options.out / FILE_NAME))
        measured = self.measure(WorldFlow(shipped.to(self.device)))
        self.record.add("eval", **measured)
        self.record.write()
        self.mean.swap()
        return measured

    def measure(self, estimate: FlowEstimator) -> dict[str, float]:
        return judge(estimate, self.unseen)

    def _note(self, steps: int, rate: float, losses: list[Tensor]) -> None:
        loss, error = torch.stack(losses).mean(dim=0).tolist()
        self.record.add("train", steps=steps, loss=loss, error_px=error, rate=rate)


def main() -> None:
    options, device = read_options(Options, __doc__), choose_device()
    recode = load_recode(options.autoencoder, device, noise=options.latent_noise)
    Trainer(options, open_flow_world(device), recode, device).run()


if __name__ == "__main__":
    main()
