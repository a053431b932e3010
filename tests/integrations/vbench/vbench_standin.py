"""A stand-in package with VBench's entry points and signatures and a prompt list of the same shape.

It has no model: the value of a clip follows from its name. Its wheel is written by hand, so that pip can install it
without an index.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from recap_vbench.scores import DIMENSIONS

REQUIREMENTS = "vbench==0.1.5\n"

# The groups of the real list and their sizes.
GROUPS = {
    ("temporal_style",): 100, ("human_action",): 100,
    ("overall_consistency", "aesthetic_quality", "imaging_quality"): 93,
    ("appearance_style",): 90, ("scene", "background_consistency"): 86, ("color",): 85, ("spatial_relationship",): 84,
    ("multiple_objects",): 82, ("object_class",): 79, ("temporal_flickering",): 75,
    ("subject_consistency", "dynamic_degree", "motion_smoothness"): 72,
}  # fmt: skip
LABELLED = ("object_class", "multiple_objects", "color", "spatial_relationship", "scene", "appearance_style")

UTILS = """
import os
CACHE_DIR = os.environ["VBENCH_CACHE_DIR"]
def init_submodules(dimension_list, local=False, read_frame=False):
    return {name: {"model": name} for name in dimension_list}
"""

# The name of a clip has its seed and number: <prompt>-<seed>-<number>.mp4 or <prompt>-<seed>-full.mp4.
DIMENSION = """
import json, os, pathlib, re
import vbench.utils
NAME = {name!r}
if NAME == "spatial_relationship" and not os.environ.get("STANDIN_DETECTRON"):
    import detectron2
def value_of(path):
    _, seed, number = pathlib.Path(path).stem.rsplit("-", 2)
    return 0.5 + int(seed) / 10 + (0 if number == "full" else int(number) / 100)
def compute_{name}(json_dir, device, submodules, **kwargs):
    assert device.type == "cpu" and submodules == {{"model": NAME}} and not kwargs
    with open(os.environ["STANDIN_CALLS"], "a") as calls:
        calls.write(NAME + chr(10))
    if os.environ.get("STANDIN_FAILS") == NAME:
        raise RuntimeError("no weights for " + NAME)
    results = []
    for entry in json.loads(pathlib.Path(json_dir).read_text()):
        assert NAME in entry["dimension"]
        if NAME in {labelled!r}:
            assert NAME in entry["auxiliary_info"], "no label"
        for path in entry["video_list"]:
            assert os.path.getsize(path) > 0 and "_" not in os.path.basename(path)
            value = value_of(path)
            if NAME == "human_action":
                wanted = re.search("person is (.*)", entry["prompt_en"])[1]
                value = re.search("person is ([^-_]*)", os.path.basename(path))[1] == wanted
            if NAME == "overall_consistency":
                value = len(entry["prompt_en"]) / 1000
            if NAME == "imaging_quality":
                value *= 100
            if NAME == "color" and not path.endswith("-000.mp4"):
                continue
            if NAME == os.environ.get("STANDIN_DROPS") and path.endswith("-001.mp4"):
                continue
            results.append({{"video_path": path, "video_results": value}})
    mean = sum(item["video_results"] for item in results) / len(results)
    return mean, results
"""

LONG = """
import os, pathlib
def {name}(model, {prepare}video_list, device, read_frame):
    assert model == "{model}" and read_frame is False
    found = []
    for path in video_list:
        assert path.endswith("-firsts.mp4") and os.path.getsize(path) > 0
        found.append({{"video_path": path, "video_results": 0.5}})
    return 0.5, found
"""

STATIC = """
DEVICE = "cuda"
class StaticFilter:
    def __init__(self, args, device):
        assert args.model == "dynamic_degree" and "small" in args and not args.small
    def infer(self, path):
        assert str(DEVICE) == "cpu"
        return not path.endswith("-000.mp4")
"""

TORCH = """
class device:
    def __init__(self, name):
        self.type = name
    def __str__(self):
        return self.type
class cuda:
    @staticmethod
    def is_available():
        return False
class _Model:
    def __init__(self, name):
        self.name = name
    def to(self, device):
        return self.name
class hub:
    @staticmethod
    def load(repo_or_dir, model):
        assert repo_or_dir == "facebookresearch/dinov2"
        return _Model(model)
"""

DREAMSIM = """
import os
def dreamsim(pretrained, device="cuda", cache_dir="./models"):
    assert pretrained and device == "cpu" and os.path.isdir(cache_dir)
    return "dreamsim", None
"""


def full_info() -> list[dict]:
    """Return as many prompts in as many groups as VBench's list has; two texts are in two groups."""
    rows = []
    for names, count in GROUPS.items():
        for number in range(count):
            text = f"a {names[0].replace('_', ' ')} number {number}"
            if names == ("human_action",):
                text = f"A person is doing thing {number}"
            if names[0] in ("appearance_style", "overall_consistency") and number in (0, 50):
                text = f"a painting {number}"
            row = {"prompt_en": text, "dimension": list(names)}
            if names[0] in LABELLED:
                row["auxiliary_info"] = {names[0]: {names[0]: f"label {number}"}}
            rows.append(row)
    return rows


def write_wheel(folder: Path) -> Path:
    files = {
        "vbench/__init__.py": "",
        "vbench/utils.py": UTILS,
        "vbench/VBench_full_info.json": json.dumps(full_info()),
        "vbench2_beta_long/__init__.py": "",
        "vbench2_beta_long/static_filter.py": STATIC,
        "torch.py": TORCH,
        "dreamsim.py": DREAMSIM,
    }
    for name in DIMENSIONS:
        files[f"vbench/{name}.py"] = DIMENSION.format(name=name, labelled=LABELLED)
    for name, model, prepare in (
        ("subject_consistency", "dinov2_vitb14", ""),
        ("background_consistency", "dreamsim", "preprocess, "),
    ):
        function = f"{name}_{'dinov2' if model != 'dreamsim' else model}"
        files[f"vbench2_beta_long/{name}.py"] = LONG.format(name=function, model=model, prepare=prepare)
    about = "vbench-0.1.5.dist-info"
    files[f"{about}/METADATA"] = "Metadata-Version: 2.1\nName: vbench\nVersion: 0.1.5\n"
    files[f"{about}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    wheel = folder / "vbench-0.1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel
