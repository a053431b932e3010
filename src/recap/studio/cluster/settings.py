"""This module has the settings of a cluster of studios."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recap.errors import refuse
from recap.session.batcher import MOST_ROWS
from recap.studio.settings import StudioSettings

BOUNDS: dict[str, tuple[float, float]] = {
    "replicas": (1, 10_000),
    "most_replicas": (0, 10_000),
    "sessions": (1, 1_000),
    "batch": (1, MOST_ROWS),
    "cpus": (0.01, 1_024),
    "gpus": (0, 64),
    "queue": (0, 10_000),
    "patience_s": (0.1, 600),
    "idle_s": (1, 1e6),
    "memory_gb": (0.1, 100_000),
    "state_mb": (0, 100_000),
    "kept_sessions": (1, 1_000_000),
}
"""What each number may be."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Sets how many replicas there are, how much each may take, and when a client is refused."""

    # A folder that all machines see, or an address that fsspec knows; sessions are kept there.
    store: str
    backbone: str = "embedded"
    flow: str = "auto"
    device: str = "auto"
    precision: str = "full"
    low_memory: str = "auto"
    # Every machine has them at the same paths.
    loras: tuple[str, ...] = ()
    # With `most_replicas` above it, Ray Serve adds replicas as seats fill, and takes idle ones away.
    replicas: int = 1
    most_replicas: int = 0
    # Seats of a replica: sessions that are open on it at once.
    sessions: int = 4
    # Sessions that are generated in one forward where their memories have equal shapes; 1 generates them one by one.
    batch: int = 1
    cpus: float = 2.0
    gpus: float = 0.0
    # How many requests may wait for a seat, and how long.
    queue: int = 8
    patience_s: float = 20.0
    # A session without viewers is parked after this time.
    idle_s: float = 120.0
    # Memory that the process of a replica may use before it refuses another session.
    memory_gb: float = 64.0
    # States of the memory up to this size are kept in the store; larger ones are made again from latents.
    state_mb: float = 256.0
    kept_sessions: int = 1_000

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            if not least <= (value := getattr(self, name)) <= most:
                # Options leave out the unit of seconds.
                flag = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise refuse(flag, value, f"must be {least:g} to {most:g}", "leave it out for the default")
        if self.most_replicas and self.most_replicas < self.replicas:
            limit = f"is below --replicas, {self.replicas}"
            raise refuse("--most-replicas", self.most_replicas, limit, "leave it out, or raise it")

    def as_studio(self, own: StudioSettings) -> StudioSettings:
        """Return the settings of a studio that has the model of this cluster."""
        names = ("backbone", "flow", "device", "precision", "low_memory", "loras", "batch")
        return replace(own, **{name: getattr(self, name) for name in names})

    @property
    def seats(self) -> int:
        """Return how many sessions can be open at once."""
        return self.sessions * max(self.replicas, self.most_replicas)
