"""Admissions are chosen and set by name, and those that need no flow do without an estimator."""

from __future__ import annotations

import sys

import pytest

import recap.run
from recap.cli.main import main
from recap.cli.settings import full_config
from recap.config import RunConfig
from recap.registry import ADMISSIONS
from recap.run import build_memory

SHOT = {"shots": [{"prompt": "a red boat", "seconds": 1}]}


def test_a_rule_can_be_chosen_and_set_in_one_command():
    config = full_config(SHOT, ["admission=flow-texture", "admission.speck_share=0.05"])
    assert config.admission.name == "flow-texture" and config.admission.settings.speck_share == 0.05
    assert RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"admission setting is 'sped_share'.*did you mean 'speck_share'"):
        full_config(SHOT, ["admission=flow-texture", "admission.sped_share=1"])
    with pytest.raises(ValueError, match="did you mean 'random'"):
        full_config(SHOT, ["admission=randm"])


@pytest.mark.parametrize("rule", ["random", "recent", "diversity-keys"])
def test_rules_without_flow_ask_for_no_estimator(rule, spec, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a flow estimator was built")

    monkeypatch.setattr(recap.run, "build_flow", refuse)
    build_memory(RunConfig.from_dict({**SHOT, "admission": rule}), spec)


def test_the_list_says_what_each_keeps_and_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recap", "list"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, kind in ADMISSIONS.items():
        assert name in words and kind.keeps and kind.needs
    assert "needs: optical flow" in words and "needs: DINOv2 weights" in words
