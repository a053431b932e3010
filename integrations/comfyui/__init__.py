"""This is a node pack for ComfyUI: videos with a memory of appearances, block by block."""

from comfy_api.latest import ComfyExtension, io

from .nodes import BankMemoryNode, LoadModelNode, MemoryViewNode, NamedMemoryNode, SamplerNode, ScheduleNode


class RecapExtension(ComfyExtension):
    """Lists the nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadModelNode, BankMemoryNode, NamedMemoryNode, ScheduleNode, SamplerNode, MemoryViewNode]


async def comfy_entrypoint() -> RecapExtension:
    """Return the extension; ComfyUI calls this when it loads the pack."""
    return RecapExtension()
