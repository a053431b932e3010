"""The node pack, loaded as ComfyUI loads it: under a stand-in, or under a checkout that RECAP_COMFYUI names."""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import comfy_standin
import pytest
from comfy_standin import CHECKOUT, PACK


class RealComfy:
    """Is a checkout of ComfyUI: its node API, its progress, its Cancel button."""

    def __init__(self, monkeypatch):
        sys.path.insert(0, CHECKOUT)
        import comfy.cli_args

        comfy.cli_args.args.cpu = True
        import comfy.model_management as management
        from comfy_execution import progress

        self.progress, self.cancel_at = [], None
        own = management.throw_exception_if_processing_interrupted

        def check():
            if self.cancel_at is not None and len(self.progress) >= self.cancel_at:
                management.interrupt_current_processing()
            own()

        monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", check)
        comfy_standin.InterruptProcessingException = management.InterruptProcessingException

        class Listener(progress.ProgressHandler):
            def update_handler(_, node_id, value, max_value, state, prompt_id, image=None):
                self.progress.append((value, max_value, node_id, image and image[1]))

        progress.reset_progress_state("prompt", None)
        progress.get_progress_state().register_handler(Listener("test"))


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    if not CHECKOUT:
        made = comfy_standin.StandIn()
        made.install(monkeypatch)
        return made
    made = RealComfy(monkeypatch)
    import folder_paths

    folder_paths.set_temp_directory(str(tmp_path))
    return made


@pytest.fixture
def pack(comfy, monkeypatch):
    """The nodes by id. The folder is imported by its path, under a name with dots and slashes, as ComfyUI does."""
    name = str(PACK).replace(".", "_x_")
    found = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)
    found.loader.exec_module(module)
    nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
    yield {node.GET_SCHEMA().node_id: node for node in nodes}
    for part in [key for key in sys.modules if key.startswith(f"{name}.")]:
        del sys.modules[part]
