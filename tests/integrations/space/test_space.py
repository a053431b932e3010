"""The Space: app.py is started for real, serves its page to anybody, and forgets who left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
websockets = pytest.importorskip("websockets.sync.client")

SPACE = Path(__file__).resolve().parents[3] / "integrations" / "space"
NAME = "you-recap-studio.hf.space"


@pytest.fixture(scope="module")
def port():
    command = [sys.executable, "app.py", "--port", "0", "--abandoned", "0.5"]
    with subprocess.Popen(command, cwd=SPACE, stdout=subprocess.PIPE, text=True) as app:
        try:
            found = re.search(r"port (\d+)", app.stdout.readline())
            assert found, "it did not start"
            yield int(found[1])
        finally:
            app.terminate()
            app.wait(timeout=30)


def ask(port, path, body=None, **headers):
    """Ask as the proxy of a Space does: under the Space's own name."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Host": NAME, **headers})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.headers, answer.read().decode()


def test_anybody_gets_the_page_and_the_hub_may_frame_it(port):
    code, headers, page = ask(port, "/")
    assert code == 200 and "<title>" in page and "studio.js" in page
    assert headers["content-security-policy"].endswith("frame-ancestors https://huggingface.co")
    code, _, script = ask(port, "/page/studio.js", Origin=f"https://{NAME}")
    assert code == 200 and "import" in script
    code, _, about = ask(port, "/v1/about")
    assert code == 200 and json.loads(about)["backbone"] == "embedded"
    assert ask(port, "/v1/about", Origin="https://evil.example")[0] == 403


@pytest.mark.slow
def test_a_session_plays_while_it_is_watched_and_is_forgotten_after(port):
    code, _, begun = ask(port, "/v1/sessions", {"prompt": "a fox on a beach by day"})
    assert code == 201
    session = json.loads(begun)["session"]
    with websockets.connect(f"ws://127.0.0.1:{port}/v1/sessions/{session}/stream") as stream:
        kinds = set()
        while "block" not in kinds:
            message = stream.recv(timeout=60)
            if isinstance(message, str):
                kinds.add(json.loads(message)["type"])
        # Longer than it takes to forget one that nobody watches.
        time.sleep(2)
        assert session in ask(port, "/v1/sessions")[2]
    end = time.monotonic() + 60
    while session in ask(port, "/v1/sessions")[2]:
        assert time.monotonic() < end, "it was not forgotten"
        time.sleep(0.1)


def test_the_folder_is_a_space():
    _, front, _ = (SPACE / "README.md").read_text().split("---\n", 2)
    about = dict(line.split(": ", 1) for line in front.splitlines())
    assert about["sdk"] == "docker" and len(about["short_description"]) <= 60
    assert f'"--port", type=int, default={about["app_port"]}' in (SPACE / "app.py").read_text()
    image = (SPACE / "Dockerfile").read_text()
    assert 'CMD ["python", "app.py"]' in image and "requirements.txt" in image
    assert "recap-forcing[studio]" in (SPACE / "requirements.txt").read_text()
