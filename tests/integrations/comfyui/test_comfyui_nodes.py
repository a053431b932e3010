"""The node pack of ComfyUI: its graph generates what the package generates, and shows every block and the bank."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import comfy_standin
import numpy as np
import pytest
import torch
from comfy_standin import CHECKOUT, PACK

import recap
from recap.io.older import tomllib
from recap.registry import BACKBONES, MEMORIES
from recap.show.sheet import cut_out

WORKFLOW = json.loads((PACK / "workflow.json").read_text())
SHORT = "0.75: a fox on a beach by day\n0.75: a beach by day"


def changed(**widgets):
    """The workflow that comes with the pack, with other widgets, as node__widget; without ComfyUI's own nodes."""
    made = {
        key: json.loads(json.dumps(node))
        for key, node in WORKFLOW.items()
        if node["class_type"].startswith("Recap")
    }
    for path, value in widgets.items():
        node, _, name = path.partition("__")
        next(n for n in made.values() if n["class_type"] == node)["inputs"][name] = value
    return made


def check(graph, pack, key):
    """Refuse what ComfyUI refuses before it runs a node: missing inputs, wrong links, values out of range."""
    node, inputs = pack[graph[key]["class_type"]], graph[key]["inputs"]
    known = node.INPUT_TYPES()
    required, optional = known["required"], known.get("optional", {})
    assert required.keys() <= inputs.keys() <= required.keys() | optional.keys()
    for name, value in inputs.items():
        kind, told = (required | optional)[name]
        if isinstance(value, list):
            source, index = value
            sockets = pack[graph[source]["class_type"]].GET_SCHEMA().outputs
            assert sockets[index].io_type == kind, name
        elif kind == "COMBO":
            assert value in told["options"], name
        elif kind in ("INT", "FLOAT"):
            assert told["min"] <= value <= told["max"], name


def run(graph, pack, given=None):
    """Run a graph in the order of its links, and return what each node returned."""
    given, results = given or {}, {}

    def result(key):
        if key not in results:
            check(graph, pack, key)
            inputs = {
                name: result(value[0]).result[value[1]] if isinstance(value, list) else value
                for name, value in graph[key]["inputs"].items()
            }
            node = pack[graph[key]["class_type"]].PREPARE_CLASS_CLONE({comfy_standin.Hidden.unique_id: key})
            results[key] = node.EXECUTE_NORMALIZED(**inputs, **given.get(key, {}))
        return results[key]

    for key in graph:
        result(key)
    return results


def test_the_graph_generates_what_the_package_does_and_shows_each_block(pack, comfy):
    results = run(changed(RecapSchedule__schedule=SHORT, RecapSampler__seed=3), pack)
    images, fps, _ = results["4"].result
    sheet, about = results["5"].result

    shots = (recap.Shot("a fox on a beach by day", 0.75), recap.Shot("a beach by day", 0.75))
    config = recap.RunConfig(shots=shots, seeds=(3,))
    backbone = recap.build_backbone(config)
    policy = recap.build_memory(config, backbone.spec)
    blocks = list(recap.rollout(backbone, policy, recap.make_plan([shots], backbone.spec), seeds=[3]))
    expected = torch.cat([block.pixels[0] for block in blocks]).permute(0, 2, 3, 1)
    assert torch.equal(images, expected) and fps == backbone.spec.pictures_per_second == 16

    shown = [seen for seen in comfy.progress if seen[3] is not None]
    assert [seen[:3] for seen in shown] == [(done, len(blocks), "4") for done in range(1, len(blocks) + 1)]
    for (*_, preview), block in zip(shown, blocks, strict=True):
        last = (block.pixels[0, -1].permute(1, 2, 0) * 255).round().byte().numpy()
        assert np.array_equal(np.asarray(preview), last)

    assert sheet.shape[0] == 1 and sheet.shape[-1] == 3 and 0 <= sheet.min() <= sheet.max() <= 1
    count = int(re.match(r"(\d+) patches were new", about)[1])
    assert 0 < count <= backbone.spec.frame_tokens
    _first_patch_is_cut_from_the_video(sheet[0], images, blocks, backbone.spec)


def _first_patch_is_cut_from_the_video(sheet, images, blocks, spec):
    """The sheet begins with the token that came into the bank first, threefold, from its frame's last picture."""
    bank = recap.io.trace.bank_before([recap.io.trace.BlockTrace.of(block) for block in blocks], len(blocks))
    position = min(place for place, score in bank.items() if score > 0)
    starts = [start for block in blocks for start in block.first_pictures]
    last = [*starts[1:], len(images)][position[0]] - 1
    patch = cut_out((images[last] * 255).round().byte().numpy(), position, spec.token_pixels)
    side = 3 * spec.token_pixels
    found = (sheet[:side:3, :side:3] * 255).round().byte().numpy()
    assert np.array_equal(found, patch)


def test_another_memory_remembers_nothing_and_the_model_is_loaded_once(pack):
    graph = changed(RecapLoadModel__backbone="untrained", RecapSchedule__schedule="0.75: a boat")
    graph["2"] = {"class_type": "RecapNamedMemory", "inputs": {"name": "none"}}
    first = run(graph, pack)
    assert first["5"].result[1] == "Nothing in it was new."
    model = first["1"].result[0]
    loaded = model._loaded
    again = pack["RecapSampler"].PREPARE_CLASS_CLONE({comfy_standin.Hidden.unique_id: "4"})
    second = again.EXECUTE_NORMALIZED(
        model=model, memory=first["2"].result[0], shots=first["3"].result[0], seed=0
    )
    assert model._loaded is loaded is not None
    assert torch.equal(second.result[0], first["4"].result[0])


def test_the_model_is_fitted_to_its_card_once(pack, monkeypatch):
    """A config of its own for every video, and one path for all of them: that of the model that is loaded."""
    asked = []

    def fit(config, notice):
        asked.append(config.precision)
        return replace(config, eager=True)

    work = sys.modules[pack["RecapLoadModel"].__module__.rpartition(".")[0] + ".work"]
    monkeypatch.setattr(work, "fit_card", fit)
    graph = changed(
        RecapLoadModel__backbone="untrained", RecapLoadModel__precision="int8", RecapSchedule__schedule="0.75: a boat"
    )  # fmt: skip
    model = run(graph, pack)["1"].result[0]
    plain = {"shots": [{"prompt": "a boat", "seconds": 0.75}]}
    _, config = model.load(recap.RunConfig.from_dict({**model.values, **plain}))
    assert asked == ["int8"] and config.eager and config.precision == "int8"


def test_a_video_begins_from_a_picture(pack):
    graph = changed(RecapSchedule__schedule="0.75: a fox on a beach by day")
    still = run(graph, pack)["4"].result[0][:1]
    video = run(graph, pack, {"4": {"start_image": still}})["4"].result[0]
    # Through the autoencoder and back.
    assert (video[0] - still[0]).abs().mean() < 0.05
    with pytest.raises(recap.RecapError, match="begins from one picture"):
        run(graph, pack, {"4": {"start_image": still.repeat(2, 1, 1, 1)}})


def test_cancel_ends_it_at_the_next_block(pack, comfy):
    comfy.cancel_at = 1
    with pytest.raises(comfy_standin.InterruptProcessingException):
        run(changed(RecapLoadModel__backbone="untrained", RecapSchedule__schedule="8: a boat"), pack)
    assert len(comfy.progress) <= 2


@pytest.mark.parametrize(
    ("widgets", "words"),
    [
        ({"RecapSchedule__schedule": "a fox"}, "line 1 is 'a fox': must read SECONDS: PROMPT"),
        ({"RecapSchedule__schedule": "4: a fox\nlong: a bus"}, "line 2"),
        ({"RecapSchedule__schedule": "0: a fox"}, "seconds is 0.0"),
        ({"RecapSchedule__schedule": " \n"}, "has no prompt"),
        ({"RecapLoadModel__settings": "decodr=tiny"}, "backbone setting is 'decodr'"),
        ({"RecapLoadModel__settings": "name=os:getcwd"}, "this workflow names code that would be imported"),
        ({"RecapMemoryView__block": 99}, "the video has 1 blocks"),
    ],
)
def test_what_is_wrong_is_said(pack, widgets, words):
    plain = {"RecapLoadModel__backbone": "untrained", "RecapSchedule__schedule": "0.75: a boat"}
    with pytest.raises(recap.RecapError, match=re.escape(words)):
        run(changed(**{**plain, **widgets}), pack)


@pytest.mark.parametrize(
    ("line", "loras"),
    [
        ("loras=x.safetensors", ["x.safetensors"]),
        (r"loras=C:\loras\x.safetensors:0.8", [r"C:\loras\x.safetensors:0.8"]),
        (r'loras="C:\loras\x.safetensors"', [r"C:\loras\x.safetensors"]),
        (r'loras=["C:\loras\x.safetensors:0.8", "y.pt"]', [r"C:\loras\x.safetensors:0.8", "y.pt"]),
        (r'loras=["C:\\loras\\x.safetensors:0.8"]', [r"C:\loras\x.safetensors:0.8"]),
    ],
)
def test_loras_are_plain_text_or_a_list(pack, line, loras):
    """Windows' paths, too, as they are copied from a window."""
    node = pack["RecapLoadModel"].EXECUTE_NORMALIZED(
        backbone="self-forcing", device="cpu", dtype="auto", settings=line
    )
    assert node.result[0].values["backbone"] == {"name": "self-forcing", "loras": loras}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loras=[x.safetensors]", 'it is no list of texts in quotes; write it as ["one", "two"]'),
        (r'loras=["C:\new.safetensors"]', "write the path with / instead"),
        ("loras=3", "must be of type tuple"),
    ],
)
def test_loras_that_cannot_be_read_are_refused_with_what_to_write(pack, line, words):
    node = pack["RecapLoadModel"]
    with pytest.raises(recap.RecapError, match=re.escape(words)):
        node.EXECUTE_NORMALIZED(backbone="self-forcing", device="cpu", dtype="auto", settings=line)


def test_widgets_are_the_arguments_of_their_node(pack):
    for name, node in pack.items():
        schema, types = node.GET_SCHEMA(), node.INPUT_TYPES()
        arguments = inspect.signature(node.execute).parameters
        assert list(arguments) == [each.id for each in schema.inputs], name
        optional = {key for key, value in arguments.items() if value.default is not inspect.Parameter.empty}
        assert optional == types.get("optional", {}).keys(), name
        assert name.startswith("Recap") and schema.display_name.endswith("(RECAP)") and schema.description
    widgets = pack["RecapBankMemory"].INPUT_TYPES()["required"]
    defaults = MEMORIES["recap"]()
    for setting in ("reinforcement", "capacity_frames"):
        assert widgets[setting][1]["default"] == getattr(defaults, setting)
    assert list(BACKBONES) == pack["RecapLoadModel"].INPUT_TYPES()["required"]["backbone"][1]["options"]
    assert set(pack["RecapLoadModel"].INPUT_TYPES()["required"]["device"][1]["options"]) == {
        "auto", "cpu", "cuda", "mps",
    }  # fmt: skip
    # ComfyUI's own nodes in the workflow take what ours give: pictures, and how many a second.
    kinds = [socket.io_type for socket in pack["RecapSampler"].GET_SCHEMA().outputs]
    assert kinds[:2] == ["IMAGE", "FLOAT"]
    assert WORKFLOW["6"]["inputs"] == {"images": ["4", 0], "fps": ["4", 1]}


def test_the_pack_keeps_the_rules_of_the_registry():
    about = tomllib.loads((PACK / "pyproject.toml").read_text())
    project = about["project"]
    assert len(project["name"]) < 100 and "comfy" not in project["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["license"] and "Repository" in project["urls"]
    assert {"PublisherId", "DisplayName"} <= about["tool"]["comfy"].keys()
    assert project["dependencies"] == (PACK / "requirements.txt").read_text().split()
    for path in PACK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called.split(".")[-1] not in ("eval", "exec", "system", "Popen", "__import__"), path
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {m.split(".")[0] for m in modules} & {"subprocess", "pip", "os", "importlib"}, path


@pytest.mark.skipif(not CHECKOUT, reason="RECAP_COMFYUI names no checkout of ComfyUI")
def test_the_stand_in_has_the_signatures_of_the_real_one(comfy):
    from comfy_api.latest import ComfyAPI, ui
    from comfy_api.latest import io as real

    def names(function):
        return [name for name in inspect.signature(function).parameters if name != "self"]

    for kind in ("Schema", "NodeOutput"):
        assert names(getattr(comfy_standin, kind)) == names(getattr(real, kind)), kind
    for kind, ours in comfy_standin.WIDGETS.items():
        expected = set(getattr(ours, "parameters", names(ours)))
        assert expected == set(names(getattr(real, kind).Input)), kind
    assert names(comfy_standin.Output) == names(real.Output)
    assert names(comfy_standin.PreviewImage) == names(ui.PreviewImage)
    assert names(comfy_standin.StandIn().set_progress) == names(ComfyAPI.Execution.set_progress)
    for hidden in comfy_standin.Hidden:
        assert real.Hidden[hidden.name].value == hidden.value
    assert Path(CHECKOUT, "comfyui_version.py").is_file()
