"""A real cluster on this machine, and people who watch its sessions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from recap.config import RunConfig
from recap.session import Session
from recap.session.batcher import Batcher, rows_at
from recap.studio.cluster.front import Front
from recap.studio.cluster.shared import SharedFolder
from recap.studio.cluster.snapshots import open_store
from recap.studio.listening import bound_socket
from recap.studio.settings import StudioSettings

TOKEN = "only for this test"
REPLICA = """
import sys, time
from recap.studio.cluster.replica import Replica
from recap.studio.cluster.settings import ClusterSettings
settings = ClusterSettings(sys.argv[1], backbone="untrained", flow="classical", cpus=1)
replica = Replica(settings, sys.argv[2], "127.0.0.1")
print(replica.address, flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(settings, seating):
    """A front on a free port, in a thread; yields it with its address."""
    import uvicorn

    front = Front(settings, StudioSettings(Path(), port=0), seating, TOKEN)
    with bound_socket(front.own) as listening:
        config = uvicorn.Config(front.app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            ask(address, "/healthz")
            yield front, address
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


class Full(Exception):
    """As Ray Serve says that too many wait."""


class Processes:
    """Gives seats on replicas that are processes of this test."""

    def __init__(self, store, number, seats, queue):
        self.seats, self.queue, self.waiting = seats, queue, 0
        self.taken = {}
        command = [sys.executable, "-c", REPLICA, store, TOKEN]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.processes = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
            )
            for _ in range(number)
        ]
        self.addresses = [process.stdout.readline().strip() for process in self.processes]

    def alive(self, number):
        return self.processes[number].poll() is None

    def ask(self):
        return Request(self)

    def is_refusal(self, error):
        return isinstance(error, Full)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stdin.close()


class Request:
    def __init__(self, owner):
        self.owner, self.number = owner, None
        self.cancelled = False

    async def __anext__(self):
        owner = self.owner
        if self.number is not None:
            while owner.alive(self.number) and not self.cancelled:
                await asyncio.sleep(0.01)
            raise ConnectionError
        if owner.waiting >= owner.queue and not self.free():
            raise Full
        owner.waiting += 1
        try:
            while not (free := self.free()):
                await asyncio.sleep(0.01)
        finally:
            owner.waiting -= 1
        self.number = min(free, key=lambda number: len(owner.taken.get(number, ())))
        owner.taken.setdefault(self.number, set()).add(self)
        return {"address": owner.addresses[self.number]}

    def free(self):
        numbers = range(len(self.owner.processes))
        return [
            n for n in numbers if self.owner.alive(n) and len(self.owner.taken.get(n, ())) < self.owner.seats
        ]

    def cancel(self):
        self.cancelled = True
        if self.number is not None:
            self.owner.taken[self.number].discard(self)


class RayNodes:
    """Several nodes of Ray on this machine; each has room for one replica."""

    def __init__(self, nodes):
        import ray
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ["RAY_DEDUP_LOGS"] = "1"
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.workers = [self.add() for _ in range(nodes)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")

    def add(self):
        return self.cluster.add_node(num_cpus=1)

    def lose(self, number):
        """Kill a node with all that is on it, and add another one, as whoever runs a cluster does."""
        self.cluster.remove_node(self.workers[number], allow_graceful=False)
        self.workers[number] = self.add()

    def close(self):
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def running_replicas():
    """How many replicas Ray Serve says can be asked."""
    from ray import serve

    states = serve.status().applications["recap"].deployments["replica"].replica_states
    return sum(count for state, count in states.items() if str(state).endswith("RUNNING"))


def seats_taken(address):
    """How many seats the replicas say are taken."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("recap_seats_taken{"))


def kill(process):
    os.kill(process, signal.SIGKILL)


def ask(address, path, body=None, method=None):
    """Send a request; returns status and JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


class Watcher:
    """Watches one session as a page does, a block every `pace_s`, through one stream."""

    def __init__(self, address, session, pace_s, orders=()):
        self.address, self.session, self.pace_s = address, session, pace_s
        # (block, message) that it sends when it has seen the block.
        self.orders = list(orders)
        self.media, self.pauses, self.hellos, self.errors = {}, [], 0, []
        self.seen = -1
        self.there = []
        self._asked = None

    @property
    def ahead(self):
        return [one for one in self.there if one["index"] > self.seen]

    async def watch(self, until):
        """Watch until `until` is set and all orders were given."""
        from websockets.asyncio.client import connect

        place = self.address.replace("http", "ws") + f"/v1/sessions/{self.session}/stream"
        async with connect(place, max_size=None) as socket:
            hearing = asyncio.create_task(self._hear(socket))
            while not (until.is_set() and not self.orders and self._asked is None):
                if hearing.done():
                    hearing.result()
                    raise AssertionError(f"the stream ended: {socket.close_code}")
                await self._step(socket)
                await asyncio.sleep(self.pace_s)
            await socket.send(json.dumps({"v": 1, "type": "pause", "id": "end"}))
            await asyncio.sleep(0.5)
            hearing.cancel()

    async def _step(self, socket):
        if ahead := self.ahead:
            self.seen = ahead[0]["index"]
            second = ahead[0]["start_s"] + 0.01
            await socket.send(json.dumps({"v": 1, "type": "playhead", "second": second}))
        if self.orders and self.seen >= self.orders[0][0] and self._asked is None:
            self._asked = self.orders[0][1]
            await socket.send(json.dumps({"v": 1, "id": f"order-{len(self.orders)}", **self._asked}))

    async def _hear(self, socket):
        lost = None
        async for message in socket:
            if isinstance(message, bytes):
                size = struct.unpack_from(">I", message)[0]
                header = json.loads(message[4 : 4 + size])
                if header["kind"] == "media":
                    self.media[header["block"]] = hash_of(message[4 + size :])
                continue
            event = json.loads(message)
            if event["type"] == "hello":
                assert event["session"] == self.session
                self.hellos += 1
                self.there = [{"index": b["index"], "start_s": b["start_s"]} for b in event["blocks"]["main"]]
            elif event["type"] == "block":
                if lost is not None:
                    self.pauses.append(time.monotonic() - lost)
                    lost = None
                self.there = [*self.ahead, {"index": event["index"], "start_s": event["start_s"]}]
            elif event["type"] == "dropped":
                first = event["from_block"]
                self.there = [one for one in self.there if one["index"] < first]
                self.media = {block: digest for block, digest in self.media.items() if block < first}
            elif event["type"] == "status" and "moves to another" in event["message"]:
                lost = lost or time.monotonic()
            elif event["type"] in ("done", "error") and event["id"].startswith("order-"):
                # Whoever is told that it may not have happened asks again.
                if event["type"] == "done":
                    self.orders.pop(0)
                else:
                    assert "lost" in event["text"], event["text"]
                    self.errors.append(event["text"])
                self._asked = None
            elif event["type"] == "error":
                self.errors.append(event["text"])


def hash_of(data):
    return hashlib.sha256(data).hexdigest()


def kept(store, name, place):
    """The files of a session as they are in the store."""
    folder = SharedFolder(place, 2**40, open_store(store), 0)
    try:
        return folder.load(name)
    finally:
        folder.close()


def undisturbed(session, backbone):
    """Generate what a record says in one go; returns latents, trace and bank of its blocks, and the session."""
    record = session.record
    twin = Session(RunConfig.from_dict(record.tracks["main"]), backbone=backbone)
    branch = record.branches[record.current]
    plain = twin.snapshot()
    twin.restore(replace(plain, cues=dict(branch.cues)))
    blocks = session.count("main", record.current)
    made = []
    for block in range(blocks):
        for change in branch.changes:
            if change["at"] == block:
                assert change["kind"] == "set"
                twin.set(reinforcement=change["reinforcement"])
        twin.batcher = Batcher(rows_at(branch.rows, block))
        made.append(twin.step())
    return twin, made


def check_same(session, backbone):
    """A kept session is bit for bit what an undisturbed one generates: latents, trace and bank of every block."""
    from recap.io.trace import BlockTrace

    twin, made = undisturbed(session, backbone)
    known = session.read_latents("main", session.record.current, range(len(made)))
    for block, one in enumerate(made):
        assert torch.equal(known[block], one.latents.cpu()), f"latents of block {block}"
        told = session.read_info("main", session.record.current, block)
        trace = json.loads(json.dumps(BlockTrace.of(one).to_json()))
        assert told["trace"] == trace, f"trace of block {block}"
        if block == len(made) - 1:
            bank = [(s["slot"], s["frame"], s["row"], s["column"], s["score"]) for s in told["bank"]]
            assert bank == [(s.number, *s.source, round(s.score, 4)) for s in twin.bank]
    return len(made)
