"""A compiled pipeline with a memory attached: the same latents, upstream compiled, none of our Python traced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo
from pipelines import generate, make
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import recap
from recap import attach

OURS = str(Path(recap.__file__).parent)
THEIRS = str(Path(__file__).parent / "upstream_")


@pytest.fixture
def traced(monkeypatch):
    """How often dynamo translated a frame of each file, inlined ones too."""
    files: Counter[str] = Counter()
    init = InstructionTranslatorBase.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        files[self.f_code.co_filename] += 1

    monkeypatch.setattr(InstructionTranslatorBase, "__init__", watched)
    torch._dynamo.reset()
    yield files
    torch._dynamo.reset()


def in_place(pipeline):
    pipeline.generator.compile(backend="eager")  # what Self-Forcing's demo does


def model_in_place(pipeline):
    pipeline.generator.model.compile(backend="eager")


def wrapped(pipeline):
    pipeline.generator = torch.compile(pipeline.generator, backend="eager")


def parts_wrapped(pipeline):
    for block in pipeline.generator.model.blocks:
        block.self_attn = torch.compile(block.self_attn, backend="eager")
    pipeline.generator.model = torch.compile(pipeline.generator.model, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compiled", "inside"),
    [
        ("self-forcing", in_place, False),
        ("self-forcing", wrapped, False),
        ("infinite-forcing", parts_wrapped, False),
        ("longlive-1.0", model_in_place, False),
        ("self-forcing", wrapped, True),
    ],
)
def test_a_compiled_pipeline_generates_the_same_and_no_frame_of_ours_is_traced(
    kind, compiled, inside, traced
):
    plain, pipeline = make(kind), make(kind)
    with attach(plain, "recap", flow="classical"):
        expected = generate(plain, blocks=4)[1]
    assert not traced
    if not inside:
        compiled(pipeline)
    with attach(pipeline, "recap", flow="classical") as attached:
        if inside:
            compiled(pipeline)
        found = generate(pipeline, blocks=4)[1]
    assert len(attached.trace) == 4, "the hooks were reached"
    assert torch.equal(found, expected)
    assert sum(count for file, count in traced.items() if file.startswith(THEIRS)) > 0
    assert not [file for file in traced if file.startswith(OURS)]


def test_a_generator_that_hides_its_arguments_is_refused():
    """Its calls would look like calls without a cache, and the memory would do nothing, unnoticed."""

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.model = inner, inner.model

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    pipeline = make("self-forcing")
    pipeline.generator = Wrapper(pipeline.generator)
    with pytest.raises(ValueError, match=r"pipeline.generator is '.*Wrapper': its forward takes no"):
        attach(pipeline, "recap").__enter__()
