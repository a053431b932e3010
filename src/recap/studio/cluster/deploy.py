"""This module runs the replicas of a cluster on Ray Serve."""

from __future__ import annotations

import logging
import math
from types import TracebackType
from typing import Any

from recap.errors import refuse
from recap.io.extras import import_extra
from recap.studio.cluster.replica import Replica
from recap.studio.cluster.settings import ClusterSettings

NAME = "recap"
DRAIN_S = 2.0
"""How long a replica that is to end may take; its sessions are in the store, so there is nothing to wait for."""


def deployment_options(settings: ClusterSettings) -> dict[str, Any]:
    """Return how Ray Serve runs the replicas: how many, with how many seats, and when it adds or ends some."""
    options: dict[str, Any] = {
        "name": "replica",
        "max_ongoing_requests": settings.sessions,
        "max_queued_requests": settings.queue,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 20.0,
        "graceful_shutdown_wait_loop_s": DRAIN_S,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "ray_actor_options": {"num_cpus": settings.cpus, "num_gpus": settings.gpus},
    }
    if settings.most_replicas > settings.replicas:
        options["autoscaling_config"] = {
            "min_replicas": settings.replicas,
            "max_replicas": settings.most_replicas,
            # A new replica needs its time to load the model, so it is asked for before the last seat is taken.
            "target_ongoing_requests": max(1.0, 0.75 * settings.sessions),
            "upscale_delay_s": 5.0,
            "downscale_delay_s": 300.0,
        }
    else:
        options["num_replicas"] = settings.replicas
    return options


class Cluster:
    """Runs replicas on Ray Serve as long as it is entered."""

    def __init__(self, settings: ClusterSettings, token: str, address: str = "local") -> None:
        self._ray = import_extra("ray", "recap serve", "ray")
        self._serve = import_extra("ray.serve", "recap serve", "ray")
        self._settings = settings
        self._token = token
        self._address = address
        self._ours = False
        self.handle: Any = None

    def __enter__(self) -> Cluster:
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            # The front has a server of its own, so Ray Serve opens no port.
            self._serve.start(proxy_location="Disabled")
            made = self._serve.deployment(Replica, **deployment_options(self._settings))
            # On one machine the replicas listen on loopback; on many, on the address that the cluster knows.
            host = "127.0.0.1" if self._address == "local" else ""
            bound = made.bind(self._settings, self._token, host)
            self.handle = self._serve.run(bound, name=NAME, route_prefix=None)
        except RuntimeError as error:
            self.__exit__(None, None, None)
            limit = f"they did not start ({error})"
            remedy = "see Ray's logs; are there enough cores?"
            raise refuse("replicas", self._settings.replicas, limit, remedy) from error
        return self

    def _connect(self) -> None:
        local = self._address == "local"
        # A cluster of our own listens on this machine alone.
        more: dict[str, Any] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if local else {}
        if local:
            cores = self._settings.cpus * max(self._settings.replicas, self._settings.most_replicas)
            more |= {"num_cpus": math.ceil(cores) + 1}
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="warning", **more)
        except (ConnectionError, RuntimeError, ValueError) as error:
            limit = f"no cluster answers there ({error})"
            remedy = "start one with `ray start --head`, give this machine its token, or leave it out"
            raise refuse("--ray", self._address, limit, remedy) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serve.delete(NAME)
        if self._ours:
            self._serve.shutdown()
            self._ray.shutdown()
