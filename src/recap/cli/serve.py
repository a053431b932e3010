"""`recap serve` serves the studio from many machines: sessions live on replicas, and outlive them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recap.cli.console import show_notice
from recap.cli.options import Host, Loras, LowMemory, Port, Precision, Token, used
from recap.cli.settings import read_loras
from recap.io.extras import import_extra
from recap.studio.cluster.deploy import Cluster
from recap.studio.cluster.front import Front
from recap.studio.cluster.seats import ServeSeating
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.snapshots import check_store
from recap.studio.listening import bound_socket, check_packages, page_address, serve_app
from recap.studio.settings import StudioSettings
from recap.studio.studio import plain_config

DEFAULT = ClusterSettings("")


def serve_command(
    port: Port = 8765,
    host: Host = "127.0.0.1",
    token: Token = "",
    store: Annotated[
        str,
        typer.Option(help="Where sessions are kept: a folder that all machines see, or an fsspec address."),
    ] = "store",
    backbone: Annotated[
        str, typer.Option(help="Which model generates; see `recap list backbones`.")
    ] = DEFAULT.backbone,
    ray: Annotated[
        str, typer.Option(help="Address of a Ray cluster; local starts one on this machine.")
    ] = "local",
    replicas: Annotated[int, typer.Option(help="Processes that run the model.")] = DEFAULT.replicas,
    most_replicas: Annotated[
        int, typer.Option(help="Add replicas up to this number as seats fill; 0 adds none.")
    ] = DEFAULT.most_replicas,
    sessions: Annotated[int, typer.Option(help="Sessions open on a replica at once.")] = DEFAULT.sessions,
    batch: Annotated[int, typer.Option(help="Sessions generated in one forward.")] = DEFAULT.batch,
    lora: Loras = None,
    precision: Precision = None,
    low_memory: LowMemory = None,
    cpus: Annotated[float, typer.Option(help="Cores of a replica.")] = DEFAULT.cpus,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica.")] = DEFAULT.gpus,
    queue: Annotated[
        int, typer.Option(help="How many requests may wait for a seat; others are refused.")
    ] = DEFAULT.queue,
    patience_s: Annotated[
        float,
        typer.Option("--patience", help="Seconds that a request waits for a seat before it is refused."),
    ] = DEFAULT.patience_s,
    idle_s: Annotated[
        float, typer.Option("--idle", help="Seconds after which a session without viewers is parked.")
    ] = DEFAULT.idle_s,
    memory_gb: Annotated[
        float,
        typer.Option(help="A replica whose process uses more memory than this takes no further session."),
    ] = DEFAULT.memory_gb,
) -> None:
    """Serve the studio from one machine or many, with sessions that outlive the replica that generates them.

    Needs the extras studio and ray. All that was shown is in the store: when a replica or a machine dies, its
    sessions continue on another with the same bits.
    """
    check_packages("recap serve")
    import_extra("ray.serve", "recap serve", "ray")
    address = store if "://" in store else str(Path(store).expanduser().resolve())
    settings = ClusterSettings(
        address, backbone, loras=read_loras(backbone, lora), **used(precision=precision, low_memory=low_memory),
        replicas=replicas, most_replicas=most_replicas, sessions=sessions, batch=batch, cpus=cpus, gpus=gpus,
        queue=queue, patience_s=patience_s, idle_s=idle_s, memory_gb=memory_gb,
    )  # fmt: skip
    own = StudioSettings(Path(), backbone, host=host, port=port, token=token)
    # As on a CPU, since this machine need not have what replicas have.
    plain_config(replace(settings.as_studio(own), device="cpu"))
    check_store(address)
    serve(settings, own, ray)


def serve(settings: ClusterSettings, own: StudioSettings, ray: str) -> None:
    """Start the replicas, and serve their front until the process is asked to end."""
    secret = secrets.token_urlsafe(24)
    with bound_socket(own) as listening, Cluster(settings, secret, ray) as cluster:
        address = page_address(own, listening)
        show_notice(f"serve: {address} ({settings.seats} seats; end it with Ctrl-C)")
        front = Front(settings, own, ServeSeating(cluster.handle), secret)
        serve_app(front.app, own, listening)
