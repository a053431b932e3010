"""Damages good files and gives them to their readers: by bytes, by values of JSON, and in the head of safetensors.

Only a refusal in our words (RecapError) or the system's (OSError) may come out of a reader; any other error, or more
than ten seconds, is a failure.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recap.errors import RecapError

FEW, MANY = 12, 900
LONGEST_S = 10.0
ODD = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf,
     math.nan, "", "x", "recap", "../../etc/passwd", "\x00", "\ud800", "<b>", "9" * 5000, [], {}, [[]], [None],
     [[[[]]]], [-1], ["x"], {"name": "x"}, {"": None}, [1e400], ["a"] * 300]
)  # fmt: skip


@st.composite
def edits_of_bytes(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of bytes: flipped, cut, cut out, doubled or overwritten."""
    kinds = st.sampled_from(["flip", "cut", "remove", "double", "zero", "write"])
    where = st.floats(0, 1, exclude_max=True)
    changes = draw(
        st.lists(st.tuples(kinds, where, st.integers(1, 64), st.binary(max_size=16)), min_size=1, max_size=4)
    )

    def change(data: bytes) -> bytes:
        for kind, share, length, new in changes:
            at = int(share * len(data))
            part = data[at : at + length]
            replaced = {
                "flip": bytes(byte ^ length for byte in part[:1]) + part[1:],
                "cut": b"",
                "remove": b"",
                "double": part + part,
                "zero": bytes(len(part)),
                "write": new,
            }[kind]
            data = data[:at] + replaced + (b"" if kind == "cut" else data[at + length :])
        return data

    return change


@st.composite
def edits_of_values(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of JSON, or of lines of JSON: a value replaced, removed, doubled or put one level deeper."""
    steps = st.lists(st.integers(0, 30), min_size=1, max_size=7)
    kinds = st.sampled_from(["replace", "replace", "replace", "remove", "double", "nest", "swap"])
    changes = draw(st.lists(st.tuples(steps, kinds, ODD), min_size=1, max_size=3))

    def change(data: bytes) -> bytes:
        text = data.decode()
        whole = text.count("\n{") > 0 and text.startswith("{") and not text.startswith("{\n")
        found = [json.loads(line) for line in text.splitlines()] if whole else json.loads(text)
        box = [found]
        for path, kind, odd in changes:
            _change_at(box, [0, *path], kind, copy.deepcopy(odd))
        if not box:
            return b""
        if whole and isinstance(box[0], list):
            return "".join(json.dumps(line) + "\n" for line in box[0]).encode()
        return json.dumps(box[0]).encode()

    return change


def _change_at(node: Any, path: list[int], kind: str, odd: Any) -> None:
    """Follow a path of numbers, each modulo the size of its node, and change what is there."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = keys[path[0] % len(keys)]
        path = path[1:]
        if not path or not isinstance(node[key], dict | list) or not node[key]:
            break
        node = node[key]
    if kind == "remove":
        del node[key]
    elif kind == "nest":
        node[key] = [node[key]]
    elif kind == "double" and isinstance(node, list):
        node.append(node[key])
    elif kind == "swap":
        other = keys[-1]
        node[key], node[other] = node[other], node[key]
    else:
        node[key] = odd


@st.composite
def edits_of_heads(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of the JSON with which a safetensors file begins: names, kinds, shapes, places, metadata."""
    inner = draw(st.one_of(edits_of_values(), edits_of_bytes()))

    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        head = inner(data[8 : 8 + size])
        return len(head).to_bytes(8, "little") + head + data[8 + size :]

    return change


@st.composite
def edits_of_words(draw: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """Draw a few changes of a text with signs between its words: words replaced by others, removed, doubled."""
    odd = st.sampled_from(
        ["", "nan", "-inf", "1e999", "0", "-1", "9" * 400, "1-", "\x00", "٣", "_1", " ", "\udcff"]
    )
    where = st.integers(0, 10_000)
    kinds = st.sampled_from(["swap", "remove", "double", "odd"])
    changes = draw(st.lists(st.tuples(kinds, where, where, odd), min_size=1, max_size=6))

    def change(data: bytes) -> bytes:
        words = re.split(r"([@:,=\n-])", data.decode())
        for kind, first, second, new in changes:
            here, there = first % len(words), second % len(words)
            replaced = {"swap": words[there], "remove": "", "double": words[here] * 2, "odd": new}
            words[here] = replaced[kind]
        return "".join(words).encode("utf-8", "surrogateescape")

    return change


WORDS = (edits_of_words, edits_of_bytes)
JSON_LIKE, BYTES, HEADS = (edits_of_values, edits_of_bytes), (edits_of_bytes,), (edits_of_heads,)
Reader = tuple[str, Callable[[Path], object], tuple[Any, ...]]
"""A good file, what reads it, and how it is changed."""


def attack(reader: Reader, good: Path, place: Path, cases: int) -> None:
    """Try so many damaged files on one reader."""
    source, read, kinds = reader
    original = (good / source).read_bytes()
    folder = place / "files"
    folder.mkdir()
    if "/" in source:
        for file in (good / source).parent.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    file = folder / Path(source).name
    slowest = 0.0

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(*(kind() for kind in kinds)))
    def one_case(change: Callable[[bytes], bytes]) -> None:
        nonlocal slowest
        try:
            data = change(original)
        except UnicodeEncodeError:
            return
        file.write_bytes(data)
        began = time.monotonic()
        with suppress(RecapError, OSError):
            read(file)
        slowest = max(slowest, time.monotonic() - began)

    one_case()
    assert slowest < LONGEST_S
