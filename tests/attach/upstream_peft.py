"""What peft's LoRA wrapping looks like from outside: linears replaced, the model two attributes further in."""

from __future__ import annotations

import torch
from torch import nn


class LoraLinear(nn.Module):
    """Has no `weight` of its own: it must be called."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Forwarding(nn.Module):
    def forward(self, *args, **kwargs):
        return next(iter(self.children()))(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(next(iter(self.children())), name)


class LoraModel(Forwarding):
    def __init__(self, model):
        super().__init__()
        self.model = model


class PeftModel(Forwarding):
    def __init__(self, model):
        super().__init__()
        self.base_model = LoraModel(model)


def get_peft_model(model):
    """Every linear inside the attention blocks; other weights than zero, so that the adapter counts."""
    torch.manual_seed(5)
    for block in model.blocks:
        linears = [(name, part) for name, part in block.named_modules() if isinstance(part, nn.Linear)]
        for path, linear in linears:
            owner, _, name = path.rpartition(".")
            setattr(block.get_submodule(owner), name, LoraLinear(linear))
    return PeftModel(model)
