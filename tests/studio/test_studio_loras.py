"""A studio with LoRAs: the commands read them, every session has them, and none is continued with others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from recap.cli.main import app
from recap.errors import RecapError, refuse
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.messages import NewSession
from recap.studio.studio import check_model, make_config
from tests.studio.conftest import PROMPT

WORDS = ("--backbone", "self-forcing", "--lora", "a.pt:0.5", "--lora", "b.pt")


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Where it is set, the studio does not start its process again.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
def styled(settings):
    return replace(settings, backbone="self-forcing", loras=("/a.pt:0.5",))


def test_both_commands_take_loras(command, monkeypatch, tmp_path):
    asked = []

    def stop(settings, *_, **__):
        asked.append(settings)
        raise refuse("model", "x", "it was asked for", "this is a test")

    monkeypatch.setattr("recap.cli.studio.Studio", stop)
    monkeypatch.setattr("recap.cli.serve.Cluster", stop)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    command("studio", "--no-open", "--port", "0", *WORDS)
    command("serve", "--port", "0", *WORDS)
    here = tmp_path.resolve()
    assert [each.loras for each in asked] == [(f"{here}/a.pt:0.5", f"{here}/b.pt:1.0")] * 2


def test_a_missing_file_is_named_before_the_page_opens(command):
    answer = command("studio", "--no-open", "--port", "0", *WORDS)
    assert re.search(r"--lora is '.*/a\.pt': there is no such file; check the path", str(answer.exception))


def test_sessions_have_the_loras_on_every_replica(styled):
    config = make_config(styled, NewSession(prompt=PROMPT))
    assert config.backbone.settings.loras == ("/a.pt:0.5",)
    cluster = ClusterSettings("store", "self-forcing", loras=("/a.pt:0.5",))
    replica = make_config(cluster.as_studio(replace(styled, loras=())), NewSession(prompt=PROMPT))
    assert replica.backbone == config.backbone


def test_a_session_is_not_continued_with_other_loras(styled):
    plain = replace(styled, loras=())
    with_it, without = (make_config(each, NewSession(prompt=PROMPT)) for each in (styled, plain))
    check_model(with_it, styled)
    check_model(without, plain)
    with pytest.raises(
        RecapError, match=r"lora is \['/a\.pt:0\.5'\].*start the studio with --lora /a\.pt:0\.5"
    ):
        check_model(with_it, plain)
    with pytest.raises(RecapError, match=r"lora is \[\].*start the studio with no --lora") as refusal:
        check_model(without, styled)
    assert "a.pt" not in str(refusal.value), "a client learns no paths of the server"


@pytest.mark.parametrize(
    "words",
    [("studio", "--no-open", "--port", "0"), ("serve", "--port", "0"), ("verify", "embedded")],
    ids=lambda words: words[0],
)
def test_a_model_that_takes_none_is_named(command, words):
    answer = command(*words, "--lora", "a.pt")
    assert isinstance(answer.exception, RecapError)
    assert "--lora is " in str(answer.exception) and "embedded has no such setting" in str(answer.exception)


def test_random_weights_take_no_lora(command):
    answer = command("verify", "self-forcing", "--random-weights", "--lora", "a.pt")
    assert "random weights take none" in str(answer.exception)
