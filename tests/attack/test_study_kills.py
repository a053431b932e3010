"""A study that is killed: votes that were acknowledged stay, and what was made is whole or was not made."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from recap.cli import main as cli
from recap.errors import RecapError
from recap.eval.study.design import Key, Study
from recap.eval.study.votes import ANSWERS, read_ballots
from recap.io.files import read_json
from recap.io.run_folder import digest_file
from recap.tables.study.folder import StudyAsk, make_study, read_study
from tests.study.conftest import Writer, session_of, write_table

RATERS = 3
CHANGES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.utime", "os.truncate"})
"""What Python tells its auditors before it asks the system for a change of files."""


def serve(folder: Path, votes: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the real server; returns it and its address."""
    words = ["study", "serve", str(folder), "--no-open", "--port", "0", "--votes", str(votes)]
    server = subprocess.Popen([sys.executable, "-m", "recap", *words], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    said = server.stderr.readline()
    found = re.search(r"http://\S+", said)
    assert found is not None, said + server.stderr.read()
    return server, found[0]


def send(address: str, rater: Writer) -> int:
    """Send all lines of a rater, as the page does; returns how many the server says it keeps."""
    with urllib.request.urlopen(f"{address}v1/votes", data=rater.data, timeout=30) as answer:
        return int(json.load(answer)["kept"])


def vote_until_it_dies(address: str, rater: Writer, study: Study, kept: dict[str, int], chance) -> None:
    """Answer trials one by one, until the server does not answer any more."""
    while True:
        trial = chance.randrange(study.trials)
        if len(rater.lines) < 20 * study.trials:
            rater.vote(trial, {question: chance.choice(ANSWERS) for question in study.questions})
        try:
            kept[rater.session] = send(address, rater)
        except (urllib.error.URLError, OSError, ValueError):
            # Refused, cut off, or cut off in the middle of the answer.
            return


def attack_server(folder: Path, study: Study, votes: Path, kills: int) -> list[int]:
    """Kill the server so many times while raters vote; returns how many lines each kill left unacknowledged."""
    chance = random.Random(kills)
    raters = [Writer(study, session_of(n + 1), f"rater {n}") for n in range(RATERS)]
    kept: dict[str, int] = {}
    ahead = []
    for _ in range(kills):
        server, address = serve(folder, votes)
        threads = [
            threading.Thread(
                target=vote_until_it_dies, args=(address, rater, study, kept, random.Random(chance.random()))
            )
            for rater in raters
        ]
        # The first answer comes when the server has started.
        for rater in raters:
            kept[rater.session] = send(address, rater)
        for thread in threads:
            thread.start()
        threads[0].join(chance.uniform(0, 0.3))
        server.kill()
        server.communicate()
        for thread in threads:
            thread.join()
        data = votes.read_bytes()
        there = [line for line in data.split(b"\n") if line]
        more = 0
        for rater in raters:
            own = [line for line in there if rater.session.encode() in line]
            assert own[: kept[rater.session]] == rater.lines[: kept[rater.session]]
            # What was written and not acknowledged is the rater's own next line, whole or in part.
            assert b"\n".join(rater.lines).startswith(b"\n".join(own))
            more += len(own) - kept[rater.session]
        ahead.append(more)
        if chance.random() < 0.5:
            # A machine that loses power leaves less than a line.
            whole = data[: data.rfind(b"\n") + 1]
            votes.write_bytes(whole + there[-1][: chance.randrange(1, len(there[-1]))])
    server, address = serve(folder, votes)
    try:
        assert [send(address, rater) for rater in raters] == [len(rater.lines) for rater in raters]
    finally:
        server.kill()
        server.communicate()
    ballots = read_ballots([votes], study)
    assert sorted(ballot.rater for ballot in ballots) == [f"rater {n}" for n in range(RATERS)]
    assert sorted(votes.read_bytes().split(b"\n")) == sorted([b"", *(x for r in raters for x in r.lines)])
    return ahead


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_votes_that_were_acknowledged_outlive_the_server(tmp_path: Path, kills: int) -> None:
    pytest.importorskip("fastapi")
    table = write_table(tmp_path / "table", 3, ("recap", "none"))
    ask = StudyAsk(3, identical=1, repeats=1)
    made = make_study([table], tmp_path / "study", tmp_path / "key.json", ask)
    ahead = attack_server(tmp_path / "study", made.study, tmp_path / "votes.jsonl", kills)
    print(f"{kills} kills, {sum(ahead)} lines were on the disk and not acknowledged")


def die_at(place: Path, number: int) -> Callable[[str, tuple[object, ...]], None]:
    """Make an auditor that kills its process just before the change of that number to files in a folder."""
    seen = SimpleNamespace(changes=0)

    def audit(event: str, values: tuple[object, ...]) -> None:
        if event not in CHANGES or not isinstance(values[0], str | os.PathLike):
            return
        if os.fspath(values[0]).startswith(str(place)):
            if seen.changes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.changes += 1

    return audit


def make_and_die(table: Path, out: Path, key: Path, number: int) -> int:
    """Run `recap study make` in a process of its own that dies at that change; returns how it ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.addaudithook(die_at(out.parent, number))
            words = ["study", "make", table, "--out", out, "--key", key, "--pairs", 2, "--identical", 1]
            sys.argv = ["recap", *map(str, words), "--repeats", "0"]
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_whole(out: Path, key: Path) -> None:
    """Check that a study is one: its page, its videos and its key belong together."""
    made = Key.from_dict(read_json(key), str(key))
    assert read_study(out).digest == made.study.digest
    for file, digest in made.made["sha256"].items():
        assert digest_file(out / "videos" / file) == digest
    assert (out / "index.html").is_file()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the command is killed in a forked process")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_study_killed_at_any_change_of_files_is_whole_or_can_be_made(tmp_path: Path, every: int) -> None:
    table = write_table(tmp_path / "table", 2, ("recap", "none"))
    alone = kills = 0
    for number in range(0, 1000, every):
        place = tmp_path / f"attempt{number}"
        place.mkdir()
        out, key = place / "study", place / "study.key.json"
        ended = make_and_die(table, out, key, number)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        if out.exists():
            is_whole(out, key)
            continue
        ask = StudyAsk(2, identical=1, repeats=0)
        if key.exists():
            # The key comes first, as a folder without one would be of no use. It is never replaced.
            alone += 1
            with pytest.raises(RecapError, match=r"--key is .* is there already.*delete it if its folder"):
                make_study([table], out, key, ask)
            key.unlink()
        make_study([table], out, key, ask)
        is_whole(out, key)
    assert ended == 0 and kills >= 40 // every and (alone or every > 1)
    print(f"{kills} kills, after {alone} of them the key was there alone")
