"""`--devices` names where a model runs, and where its decoder does."""

from __future__ import annotations

import pytest

from recap.cli.settings import Generation
from recap.errors import RecapError


def test_the_option_names_two_devices() -> None:
    values = Generation("a fox", devices="cpu, cpu").values()
    assert (values["device"], values["decoder_device"]) == ("cpu", "cpu")


@pytest.mark.parametrize("devices", ["cpu", "cpu,", "cpu,cpu,cpu"])
def test_another_number_of_devices_is_refused(devices: str) -> None:
    with pytest.raises(RecapError, match=r"--devices is .*must name two devices"):
        Generation("a fox", devices=devices).values()


def test_the_option_excludes_the_other_one() -> None:
    with pytest.raises(RecapError, match="--devices names two"):
        Generation("a fox", device="cpu", devices="cpu,cpu").values()
