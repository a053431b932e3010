"""The page of a study in a real browser: raters of known preference look at the pictures, and the report finds it."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import random
import socket
import threading
import time

import cv2
import numpy as np
import pytest

from recap.eval.study.box import BallotBox
from recap.show.study_page import PAGE, PARTS
from recap.studio.settings import StudioSettings
from recap.studio.voting import make_voting_app
from recap.tables.study.folder import StudyAsk, make_study, read_study
from recap.tables.study.report import write_report
from tests.studio.test_studio_page import browser, opened  # noqa: F401
from tests.study.conftest import COLOURS, write_table

uvicorn = pytest.importorskip("uvicorn")

# The colour in the middle of both videos, as the browser decodes them.
SEEN = """() => [...document.querySelectorAll("video")].map((video) => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
  canvas.getContext("2d").drawImage(video, 20, 10, 8, 8, 0, 0, 1, 1);
  return [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data].slice(0, 3); })"""
AT = """(place) => document.getElementById('trial').dataset.shown == place
  && document.querySelector('video').currentTime > 0"""
OVER = "(place) => document.getElementById('trial').hidden || document.getElementById('trial').dataset.shown == place"
KEYS = {"A": "ArrowLeft", "B": "ArrowRight", "tie": "ArrowDown"}


def make(tmp_path, prompts=2, pairs=4, **more):
    ask = StudyAsk(pairs, **{"identical": 1, "repeats": 1, "title": "Which <b>one</b>?", **more})
    table = write_table(tmp_path / "table", prompts)
    return make_study([table], tmp_path / "study", tmp_path / "key.json", ask)


@contextlib.contextmanager
def served(tmp_path, study, port=0):
    """`recap study serve` without its process, on a free port."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
        port = found.getsockname()[1]
    files = [PAGE, *PARTS, *(f"videos/{file}" for pair in study.pairs.values() for file in pair)]
    box = BallotBox(tmp_path / "votes.jsonl", study)
    app = make_voting_app(tmp_path / "study", files, box, StudioSettings(tmp_path / "study", port=port))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def plain_server(folder):
    """A file server that knows nothing of studies, and cannot seek."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/"
    made.shutdown()


def whose(colour):
    """The memory whose colour this is."""
    return min(COLOURS, key=lambda name: np.abs(np.subtract(COLOURS[name], colour)).sum())


def seen_by_canvas(page):
    return [whose(colour) for colour in page.evaluate(SEEN)]


def seen_on_screen(page):
    """Where a page may not read its own pixels, from a picture of the screen."""
    found = []
    for video in page.locator("video").all():
        picture = cv2.imdecode(np.frombuffer(video.screenshot(), np.uint8), cv2.IMREAD_COLOR)
        found.append(whose(picture[picture.shape[0] // 2, picture.shape[1] // 2, ::-1].astype(int)))
    return found


def begin(page, name):
    page.wait_for_selector("#start", state="visible")
    page.fill("#name", name)
    page.click("#start .primary")


def rate(page, decide, first=1, last=99, look=seen_by_canvas):
    """Answer trials by keyboard until the end, or up to `last`; `decide(a, b)` sees whose the videos are."""
    place, asked = first, page.locator(".question").count
    page.wait_for_selector("#trial", state="visible")
    while place <= last and page.locator("#trial").is_visible():
        page.wait_for_function(AT, arg=place)
        a, b = look(page)
        for _ in range(asked()):
            page.keyboard.press(KEYS[decide(a, b)])
        page.wait_for_function("() => !document.getElementById('next').disabled")
        page.keyboard.press("Enter")
        place += 1
        page.wait_for_function(OVER, arg=place)


def fond_of(order):
    """A rater who prefers the memory that comes first in a list, and sees that equals are equal."""
    return lambda a, b: "tie" if a == b else "A" if order.index(a) < order.index(b) else "B"


def rows_of(tmp_path, *votes):
    write_report(votes, tmp_path / "key.json", tmp_path / "report")
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = {(q["question"], row["rival"]): row for q in found["questions"] for row in q["rows"]}
    return rows, {facts["rater"]: facts["status"] for facts in found["raters"]}


def test_raters_of_known_preference_by_a_server(browser, tmp_path):  # noqa: F811
    """One likes ours best, one likes sink best, one presses A all the time: the report says so."""
    key = make(tmp_path)
    with served(tmp_path, key.study) as url:
        for name, decide in (
            ("Anna", fond_of(["recap", "sink", "none"])),
            ("Ben", fond_of(["sink", "recap", "none"])),
            ("Cem", lambda a, b: "A"),
        ):
            with opened(browser, url) as page:
                begin(page, name)
                rate(page, decide)
                page.wait_for_function(
                    "() => document.getElementById('outcome').textContent.includes('have arrived')"
                )
                assert page.locator("h1").inner_text() == "Which <b>one</b>?"
        with opened(browser, url) as page:
            begin(page, " anna")
            page.wait_for_function(
                "() => document.getElementById('notice').textContent.includes('somebody else')"
            )
            assert page.locator("#start").is_visible()
    rows, status = rows_of(tmp_path, tmp_path / "votes.jsonl")
    assert status == {"Anna": "counted", "Ben": "counted", "Cem": "failed the checks"}
    for question in key.study.questions:
        none, sink = rows[question, "none"]["counted"], rows[question, "sink"]["counted"]
        assert (none["wins"], none["ties"], none["losses"]) == (4, 0, 0)
        assert (sink["wins"], sink["ties"], sink["losses"], sink["mean"]) == (2, 0, 2, 0.5)
        # Two raters by two pairs: the third pressed A where ours was on either side.
        assert rows[question, "none"]["everyone"]["n"] == 6


def test_from_a_disk_with_a_reload_a_second_rater_and_a_saved_file(browser, tmp_path):  # noqa: F811
    """No server at all: the page goes on where it was, keeps raters apart, and hands out files."""
    key = make(tmp_path)
    url = (tmp_path / "study" / PAGE).as_uri()
    with opened(browser, url, accept_downloads=True) as page:
        begin(page, "Anna")
        rate(page, fond_of(["recap", "none", "sink"]), last=3, look=seen_on_screen)
        sheet, place = json.loads(page.evaluate(f"() => localStorage['recap-study-{key.study.digest}']")), 3
        own = sheet["sessions"][sheet["now"]]
        # What is on the screen is what the key says of this trial.
        page.wait_for_function(AT, arg=place + 1)
        pair, swapped = key.study.sheets[own["sheet"]][place]
        files = key.study.pairs[pair][:: -1 if swapped else 1]
        assert page.evaluate(
            "() => [...document.querySelectorAll('video')].map((v) => v.src.split('/').at(-1))"
        ) == list(files)
        page.reload()
        page.wait_for_function(AT, arg=4)
        page.click("#other")
        begin(page, "Ben")
        rate(page, fond_of(["none", "recap", "sink"]), last=1, look=seen_on_screen)
        page.click("#other")
        page.click("text=Continue as Anna (3 of 6)")
        rate(page, fond_of(["recap", "none", "sink"]), first=4, look=seen_on_screen)
        # Somebody changes their mind about the last pair: the later answer counts.
        page.click("#review")
        page.wait_for_function(AT, arg=6)
        page.click("[data-question=motion] [data-answer=tie]")
        page.click("#next")
        with page.expect_download() as saved:
            page.click("#save")
        saved.value.save_as(tmp_path / "anna.jsonl")
        assert saved.value.suggested_filename.startswith("votes-Anna-")
    lines = [json.loads(line) for line in (tmp_path / "anna.jsonl").read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(8)) and lines[-1]["answers"]["motion"] == "tie"
    rows, status = rows_of(tmp_path, tmp_path / "anna.jsonl")
    assert status == {"Anna": "counted"}
    assert rows["overall", "all"]["counted"]["wins"] == 4
    text = (tmp_path / "anna.jsonl").read_text()
    (tmp_path / "edited.jsonl").write_text(text.replace('"overall":"A"', '"overall":"B"', 1))
    with pytest.raises(ValueError, match=r"edited\.jsonl, line \d: was changed|line \d+.*was changed"):
        rows_of(tmp_path, tmp_path / "edited.jsonl")


def test_on_a_phone_from_a_plain_file_server_by_touch_and_in_sync(browser, tmp_path):  # noqa: F811
    make(tmp_path, pairs=2, questions={"overall": "Which?"}, identical=1, repeats=0)
    with plain_server(tmp_path / "study") as url:
        context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        page = context.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        begin(page, "Änna Ω")
        for place in range(1, 4):
            page.wait_for_function(AT, arg=place)
            apart = page.evaluate(
                """async () => { const [a, b] = document.querySelectorAll("video"); const found = [];
                for (let i = 0; i < 12; i++) { await new Promise((done) => setTimeout(done, 50));
                  found.push(Math.abs(a.currentTime - b.currentTime)); } return found.sort((x, y) => x - y); }"""
            )
            assert apart[6] < 0.11, "the two videos are at most a picture apart"
            page.tap("[data-answer=tie]")
            wide = page.evaluate("() => document.documentElement.scrollWidth")
            boxes = [video.bounding_box() for video in page.locator("video").all()]
            assert wide <= 390 and boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"], "one above the other"
            page.wait_for_function("() => !document.getElementById('next').disabled")
            page.tap("#next")
        page.wait_for_selector("#end", state="visible")
        assert "save the votes as a file" in page.inner_text("#outcome")
        with page.expect_download() as saved:
            page.tap("#save")
        saved.value.save_as(tmp_path / "votes")
        context.close()
        assert not problems
    _, status = rows_of(tmp_path, tmp_path / "votes")
    assert status == {"Änna Ω": "counted"}


def test_votes_wait_in_the_browser_while_the_server_is_away(browser, tmp_path):  # noqa: F811
    key = make(tmp_path, pairs=2, questions={"overall": "Which?"}, identical=1, repeats=0)
    with contextlib.ExitStack() as outer, contextlib.ExitStack() as stack:
        url = stack.enter_context(served(tmp_path, key.study))
        page = outer.enter_context(opened(browser, url))
        begin(page, "Anna")
        page.wait_for_function(AT, arg=1)
        page.route("**/v1/votes", lambda route: route.abort())
        rate(page, fond_of(["recap", "none", "sink"]))
        page.wait_for_function("() => document.getElementById('outcome').textContent.includes('not arrived')")
        assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 1
        page.unroute("**/v1/votes")
        page.click("#send")
        page.wait_for_function(
            "() => document.getElementById('outcome').textContent.includes('have arrived')"
        )
        assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 4
        whole = (tmp_path / "votes.jsonl").read_bytes()
        # Somebody changes an answer, and the server has moved to an empty file meanwhile.
        stack.close()
        (tmp_path / "votes.jsonl").unlink()
        with served(tmp_path, key.study, int(url.rstrip("/").rpartition(":")[2])):
            page.click("#review")
            page.wait_for_function(AT, arg=3)
            before = page.get_attribute("[aria-pressed=true]", "data-answer")
            page.click(f"[data-answer={'A' if before == 'B' else 'B'}]")
            page.click("#next")
            page.wait_for_function(
                "() => document.getElementById('outcome').textContent.includes('have arrived')"
            )
    again = (tmp_path / "votes.jsonl").read_bytes()
    assert again.startswith(whole) and len(again.splitlines()) == 5


@pytest.mark.slow
def test_twelve_raters_and_what_they_like_is_estimated(browser, tmp_path):  # noqa: F811
    """Ten choose ours over none with a chance of 0.8 and over sink with 0.4, two are careless."""
    make(tmp_path, prompts=6, pairs=12, questions={"overall": "Which?"}, identical=4, repeats=0)
    key_votes = tmp_path / "votes.jsonl"
    chance, won = random.Random(4), {"none": 0, "sink": 0}

    def careful(a, b):
        if a == b:
            return "tie"
        rival = b if a == "recap" else a
        wins = chance.random() < {"none": 0.8, "sink": 0.4}[rival]
        won[rival] += wins
        return "A" if wins == (a == "recap") else "B"

    with served(tmp_path, read_study(tmp_path / "study")) as url:
        for number in range(12):
            with opened(browser, url) as page:
                begin(page, f"r{number}")
                rate(page, careful if number < 10 else lambda a, b: chance.choice("AB"))
                page.wait_for_function(
                    "() => document.getElementById('outcome').textContent.includes('have arrived')"
                )
    rows, status = rows_of(tmp_path, key_votes)
    assert {name for name, own in status.items() if own != "counted"} == {"r10", "r11"}
    for rival, truth in (("none", 0.8), ("sink", 0.4)):
        found = rows["overall", rival]["counted"]
        print(f"{rival}: truth {truth}, found {found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]")
        assert (
            found["n"] == 60 and found["wins"] == won[rival] and found["low"] < found["mean"] < found["high"]
        )
        # Four standard errors of 60 votes.
        assert abs(found["mean"] - truth) < 0.25
