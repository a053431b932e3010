"""These are the nodes: what each shows as widgets and sockets, and which function of `work` it calls."""

from __future__ import annotations

from typing import Any

from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import ComfyAPISync, io, ui
from PIL import Image as Pictures
from torch import Tensor

from recap import Shot
from recap.backbones.wan.quantised import PRECISIONS
from recap.flow import FLOWS
from recap.registry import ADMISSIONS, BACKBONES, MEMORIES

from .work import CHANGES, Generated, LazyModel, generate, read_schedule, read_settings, show_bank

CATEGORY = "recap"
MODEL, MEMORY = io.Custom("RECAP_MODEL"), io.Custom("RECAP_MEMORY")
SCHEDULE, VIDEO = io.Custom("RECAP_SCHEDULE"), io.Custom("RECAP_VIDEO")
FOX = "4: a fox on a beach by day\n4: a beach by day\n4: a fox on a beach by day"


class LoadModelNode(io.ComfyNode):
    """Chooses a video model that works block by block."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapLoadModel",
            display_name="Load Causal Model (RECAP)",
            category=CATEGORY,
            description="A video model that works block by block. 'embedded' is small, needs no weights and no GPU.",
            inputs=[
                io.Combo.Input("backbone", options=list(BACKBONES), default="embedded"),
                io.Combo.Input("device", options=["auto", "cpu", "cuda", "mps"], default="auto"),
                io.Combo.Input("dtype", options=["auto", "float32", "bfloat16", "float16"], default="auto"),
                io.String.Input(
                    "settings",
                    multiline=True,
                    default="",
                    optional=True,
                    tooltip="Settings of the model, a line name=value each, such as decoder=tiny or loras=FILE:0.8.",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default="full",
                    optional=True,
                    tooltip="The transformer in 8 bits: int8 takes half the memory, fp8 is also faster (RTX 40 on).",
                ),
            ],
            outputs=[MODEL.Output("model", display_name="model")],
        )

    @classmethod
    def execute(
        cls, backbone: str, device: str, dtype: str, settings: str = "", precision: str = "full"
    ) -> io.NodeOutput:
        values = read_settings("backbone", backbone, settings)
        return io.NodeOutput(LazyModel({**values, "device": device, "dtype": dtype, "precision": precision}))


class BankMemoryNode(io.ComfyNode):
    """Sets up the memory `recap`: a reinforced first frame, a bank of what was new, and the recent frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapBankMemory",
            display_name="Appearance Memory (RECAP)",
            category=CATEGORY,
            description="Remembers the first frame and what was new when it first appeared.",
            inputs=[
                io.Float.Input(
                    "reinforcement",
                    default=5.0,
                    min=1.0,
                    max=20.0,
                    step=0.1,
                    tooltip="Lambda: how strongly the first frame is reinforced; 1 is not at all.",
                ),
                io.Float.Input(
                    "capacity_frames",
                    default=1.0,
                    min=0.0,
                    max=16.0,
                    step=0.25,
                    tooltip="The room in the bank, in frames; 0 is no bank.",
                ),
                io.Combo.Input("admission", options=list(ADMISSIONS), default="flow"),
                io.Combo.Input("flow", options=list(FLOWS), default="auto"),
            ],
            outputs=[MEMORY.Output("memory", display_name="memory")],
        )

    @classmethod
    def execute(
        cls, reinforcement: float, capacity_frames: float, admission: str, flow: str
    ) -> io.NodeOutput:
        settings = f"reinforcement={reinforcement}\ncapacity_frames={capacity_frames}"
        return io.NodeOutput(
            {**read_settings("memory", "recap", settings), "admission": admission, "flow": flow}
        )


class NamedMemoryNode(io.ComfyNode):
    """Chooses any memory by name, to compare with."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapNamedMemory",
            display_name="Memory by Name (RECAP)",
            category=CATEGORY,
            description="Any memory: 'recap-plus'; to compare with, 'none', 'sink' and re-implemented rivals.",
            inputs=[
                io.Combo.Input("name", options=list(MEMORIES), default="sink"),
                io.String.Input(
                    "settings",
                    multiline=True,
                    default="",
                    optional=True,
                    tooltip="Settings of the memory, a line name=value each.",
                ),
            ],
            outputs=[MEMORY.Output("memory", display_name="memory")],
        )

    @classmethod
    def execute(cls, name: str, settings: str = "") -> io.NodeOutput:
        return io.NodeOutput(read_settings("memory", name, settings))


class ScheduleNode(io.ComfyNode):
    """Says what the video shows, and for how long."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapSchedule",
            display_name="Prompt Schedule (RECAP)",
            category=CATEGORY,
            description="A line per prompt, SECONDS: PROMPT.",
            inputs=[
                io.String.Input("schedule", multiline=True, default=FOX),
                io.Combo.Input(
                    "change",
                    options=list(CHANGES),
                    default="cut",
                    tooltip="What happens to the recent frames where a prompt begins. The memory's bank stays.",
                ),
            ],
            outputs=[SCHEDULE.Output("shots", display_name="shots")],
        )

    @classmethod
    def execute(cls, schedule: str, change: str) -> io.NodeOutput:
        return io.NodeOutput(read_schedule(schedule, change))


class SamplerNode(io.ComfyNode):
    """Generates the video, and shows the last picture of every block as it is finished."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapSampler",
            display_name="Sample Long Video (RECAP)",
            category=CATEGORY,
            description="Generates the schedule block by block. Pass images and fps to Create Video.",
            inputs=[
                MODEL.Input("model"),
                MEMORY.Input("memory"),
                SCHEDULE.Input("shots"),
                io.Int.Input("seed", default=0, min=0, max=2**31 - 1, control_after_generate=True),
                io.Image.Input(
                    "start_image", optional=True, tooltip="One picture that the video begins from."
                ),
            ],
            outputs=[
                io.Image.Output("images", display_name="images"),
                io.Float.Output("fps", display_name="fps"),
                VIDEO.Output("video", display_name="video"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: LazyModel,
        memory: dict[str, Any],
        shots: tuple[Shot, ...],
        seed: int,
        start_image: Tensor | None = None,
    ) -> io.NodeOutput:
        report = ComfyAPISync().execution.set_progress

        def on_block(done: int, total: int, shown: Tensor) -> None:
            throw_exception_if_processing_interrupted()
            picture = Pictures.fromarray((shown[-1] * 255).round().byte().numpy())
            report(done, total, node_id=cls.hidden.unique_id, preview_image=picture)

        made = generate(model, memory, shots, seed, start_image, on_block)
        return io.NodeOutput(made.pictures, float(made.spec.pictures_per_second), made)


class MemoryViewNode(io.ComfyNode):
    """Shows what the memory kept."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecapMemoryView",
            display_name="View Memory (RECAP)",
            category=CATEGORY,
            description="The bank: patches that were new when they first appeared, each with its second.",
            inputs=[
                VIDEO.Input("video"),
                io.Int.Input(
                    "block",
                    default=-1,
                    min=-1,
                    max=1_000_000,
                    tooltip="The bank as it was before this block; -1 is the end of the video.",
                ),
            ],
            outputs=[
                io.Image.Output("sheet", display_name="sheet"),
                io.String.Output("about", display_name="about"),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, video: Generated, block: int) -> io.NodeOutput:
        sheet, about = show_bank(video, block)
        return io.NodeOutput(sheet, about, ui=ui.PreviewImage(sheet, cls=cls))
