"""From the noise to the committed block nothing waits for the device: no value made there is read on the way.

Three nets, from wide to fine. The *meta* device has shapes and no values, so whoever reads one fails there, and as
it is not the CPU the code takes the branches it takes on a GPU. On the CPU, where values exist, a dispatch mode
refuses the operations that hand one to Python or make a shape of it. On CUDA the driver's own watch is asked.

The boundary, where the values are wanted:
- inside it: `begin`, `denoise`, `settle`, `decode`, `commit` (propose, admit, slide), RAFT-small, plain and fast;
- outside: recorders (`BlockTrace.of` reads the trace), the run's check that a block is finite, files, states that
  are loaded; flow by OpenCV, which works on the CPU.
"""

from __future__ import annotations

import traceback
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recap.admission.base import retain_top
from recap.admission.flow import FlowNoveltyConfig
from recap.admission.flow_keys import FlowKeysConfig
from recap.admission.keys import KeyNoveltyConfig
from recap.backbones.wan.backbone import UntrainedConfig
from recap.contracts import Flow
from recap.fast.backbone import FastWanBackbone
from recap.fast.raft import FastRaftFlow
from recap.flow.raft import RaftFlow, RaftSmall
from recap.io.trace import BlockTrace
from recap.memory.bank import NoveltyBank
from recap.memory.recap import RecapConfig
from recap.memory.sink import NoMemoryConfig, SinkConfig
from recap.plan import Shot, make_plan
from recap.registry import load_backbone
from recap.rollout import rollout
from recap.types import Block

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "equal", "is_nonzero"}

CPU_ONLY = {
    # On the CPU a block of NaN is refused at once; on other devices that check is left out.
    ("flow.py", "_check"),
    ("flow.py", "_check_flow"),
    # torch checks quantiles to lie in 0..1 by their values, on the CPU alone (aten/native/Sorting.cpp).
    ("flow.py", "_scale"),
}


class NoReads(TorchDispatchMode):
    """Refuses what hands a value to Python, or makes a shape of one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if by_mask or name in READS:
            place = last_of_ours()
            assert place in CPU_ONLY, f"{name} in {place} would wait for the device"
        return function(*args, **(kwargs or {}))


def last_of_ours() -> tuple[str, str]:
    stack = [frame for frame in traceback.extract_stack() if "/recap/" in frame.filename]
    return (stack[-1].filename.rpartition("/")[2], stack[-1].name) if stack else ("", "")


class Crossings(TorchDispatchMode):
    """Notes every copy between devices, and whether Python waits for it."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        if len({t.device.type for t in tensors if t.dim()}) > 1:  # numbers travel with a launch
            waits = not (kwargs or {}).get("non_blocking", False)
            self.found.append((f"{function} in {last_of_ours()}", waits))
        return made


class SmallShifts:
    """Flow that is made of the pictures, so that some tokens fire; it reads no value."""

    def __call__(self, pictures):
        change = (pictures[:, 1:] - pictures[:, :-1])[:, :, :2]
        return Flow(60 * change, -40 * change)


def policy_of(config, spec, flow):
    return config.build(spec, lambda: FlowNoveltyConfig().build(spec, flow))


def blocks(backbone, policy, num):
    plan = make_plan([[Shot("a red boat", 6.0)]], backbone.spec)
    return islice(rollout(backbone, policy, plan, seeds=[0]), num)


@pytest.fixture(scope="module", params=[3, 1], ids=["blocks-of-3", "blocks-of-1"])
def elsewhere(request):
    return UntrainedConfig(frames_per_block=request.param).build(device="meta", dtype=torch.float32)


def raft(kind):
    with torch.device("meta"):
        flow = RaftFlow(RaftSmall(), num_updates=2)
    return flow if kind == "readable" else FastRaftFlow(flow)


@pytest.mark.parametrize("kind", ["readable", "fast"])
def test_a_block_is_generated_and_remembered_without_reading_a_value(elsewhere, kind):
    policy = policy_of(RecapConfig(), elsewhere.spec, raft(kind))
    made = list(blocks(elsewhere, policy, 4))
    assert len(made) == 4 and made[-1].pixels.device.type == "meta"
    assert policy.bank.count == elsewhere.spec.frame_tokens
    # The boundary: the trace is written down later, by whoever wants it, and that is where one waits.
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        BlockTrace.of(made[-1])


@pytest.mark.parametrize("rule", [KeyNoveltyConfig(), FlowKeysConfig()], ids=["keys", "flow+keys"])
def test_rules_by_keys_read_none_either(elsewhere, backbone, rule):
    def policy_on(spec, flow):
        options = RecapConfig(bank_reinforcement=2.0, merge_margin=1.0, share_by_block=True)
        return options.build(spec, lambda: rule.build(spec, flow))

    flow = raft("readable") if rule.needs_flow else None
    assert len(list(blocks(elsewhere, policy_on(elsewhere.spec, flow), 4))) == 4
    rolling = blocks(backbone, policy_on(backbone.spec, SmallShifts() if rule.needs_flow else None), 3)
    next(rolling)
    with NoReads():
        assert len(list(rolling)) == 2


SCHEDULED = [
    SinkConfig(reinforcement=text) for text in ("5@layers:0@steps:0-1", "5@heads:top-0.5@gate", "share:0.3")
]


@pytest.mark.parametrize(
    "config", [NoMemoryConfig(), SinkConfig(), SinkConfig(reinforcement=5.0), *SCHEDULED]
)
def test_other_memories_read_none_either(elsewhere, config):
    assert len(list(blocks(elsewhere, policy_of(config, elsewhere.spec, None), 4))) == 4


def test_only_noise_and_phases_cross_over_and_nobody_waits_for_them(elsewhere):
    rolling = blocks(elsewhere, policy_of(RecapConfig(), elsewhere.spec, raft("readable")), 2)
    next(rolling)  # the first block also brings over the text and, in this decoder, its constants
    with Crossings() as crossings:
        next(rolling)
    steps = len(elsewhere.model.spec.steps)
    assert len(crossings.found) == steps + 1, crossings.found
    assert not any(waits for _, waits in crossings.found), crossings.found


def test_on_the_cpu_no_operation_hands_out_a_value(backbone):
    policy = policy_of(RecapConfig(), backbone.spec, SmallShifts())
    rolling = blocks(backbone, policy, 3)
    next(rolling)  # reads its prompt's words, once per prompt
    with NoReads():
        made = list(rolling)
    assert sum(int(each.memory.fired.sum()) for each in made) > 0


@pytest.mark.parametrize("config", SCHEDULED, ids=lambda config: config.reinforcement)
def test_nor_does_a_schedule_of_lambda_on_the_fast_path(backbone, config):
    fast = FastWanBackbone(backbone)
    rolling = blocks(fast, policy_of(config, fast.spec, None), 5)
    next(rolling)
    with NoReads():
        assert len(list(rolling)) == 4


def offer(device, num_blocks, length=3):
    """Propose and admit, block by block, apart from any backbone."""
    novelty = FlowNoveltyConfig().build(load_backbone("untrained").spec, SmallShifts())
    bank, grid = NoveltyBank(40, 2), novelty._grid
    for index in range(num_blocks):
        size = (grid[0] * novelty._token_pixels, grid[1] * novelty._token_pixels)
        pixels = torch.rand(2, 4 * length - 3 * (index == 0), 3, *size, device=device)
        keys, values = torch.randn(2, 2, 2, length * grid[0] * grid[1], 2, 4, device=device)
        yield lambda i=index, p=pixels, k=keys, v=values: bank.admit(
            novelty.propose(Block(i, length * i, length, ("a", "b")), p), k, v, retain_top
        )


@pytest.mark.parametrize("length", [3, 1])
def test_propose_and_admit_hand_out_no_value(length):
    for step in offer("cpu", 3, length):
        with NoReads():
            step()


SEEN_BY_BOTH = [
    lambda x: bool(x.sum() > 0),
    lambda x: x.sum().item(),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: torch.where(x > 0),
    lambda x: x.masked_select(x > 0),
    lambda x: x.unique(),
    lambda x: torch.equal(x, x + 1),
]
# On the CPU these read memory without an operation, so only the device without values sees them.
SEEN_BY_META = [lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.numpy()]


@pytest.mark.parametrize("read", SEEN_BY_BOTH + SEEN_BY_META)
def test_the_nets_hold(read):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.randn(5, device="meta"))
    if read in SEEN_BY_BOTH:
        with NoReads(), pytest.raises(AssertionError, match="would wait"):
            read(torch.randn(5))


@pytest.mark.cuda
@pytest.mark.parametrize("length", [3, 1])
def test_cuda_itself_sees_nobody_wait(length):
    for step in offer("cuda", 4, length):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
