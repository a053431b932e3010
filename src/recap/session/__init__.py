"""A session is a video that is directed while it is generated, block by block, without an end.

    session = Session(RunConfig(shots=(Shot("a fox on a beach by day", 10),)))
    block = session.step()
    session.prompt("a bus on a beach by day")
    session.rewind(3)
    other = session.fork(2)

A timeline decides the video: it lists from which block on which prompt and which reinforcement apply. It stays when
the session goes back, so stepping forward again generates the same blocks, unless the timeline was changed. The
memory of any earlier block is rebuilt from the nearest state that was kept: blocks in between are not generated again
but read from their latents, which are always kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from recap.attention.context import OWN_KERNELS, ContextKernels
from recap.config import RunConfig
from recap.contracts import Backbone, Decoder, MemoryPolicy
from recap.errors import refuse
from recap.fast.accelerate import choose_aside
from recap.fast.fitting import fit_card
from recap.io.cast import Subject, check_names, read_members, read_words, spell_out, with_cast
from recap.io.report import Reporter
from recap.memory.pinned import join_cast
from recap.plan import make_plan
from recap.rollout import Conductor, at_once, reach, read_alone
from recap.run import build_backbone, build_memory, encode_opening, settle_flow
from recap.session.batcher import ALONE, Batcher, Turn, note_rows, rows_at
from recap.session.values import (
    Cue,
    Edit,
    MemoryState,
    Slot,
    Snapshot,
    check_block,
    check_history,
    check_later,
    cues_of,
    latest,
    resized,
    slots_of,
    words_at,
)
from recap.types import Block, GeneratedBlock

HISTORY_S = 600.0
"""How far back a session can go by default, in seconds of video."""

STATES_BYTES = 512 * 2**20
"""How much memory the kept states may take by default: of large ones fewer are kept, and going back takes longer."""

LAST_STATES = 4
"""How many last blocks have a state each: a user most often goes back a few blocks, and should not wait."""


class Session:
    """Generates one video block by block, and can go back to any block of it; see the module's first lines."""

    def __init__(
        self,
        config: RunConfig,
        *,
        backbone: Backbone | None = None,
        reporter: Reporter = Reporter(),
        history_s: float = HISTORY_S,
        states_bytes: int = STATES_BYTES,
        kernels: ContextKernels = OWN_KERNELS,
        batcher: Batcher = ALONE,
    ) -> None:
        """Load the model, or share one, in turns or through a `batcher`; `kernels` may sample attention."""
        check_history(history_s=history_s, states_bytes=states_bytes)
        self._edits: dict[int, tuple[Edit, ...]] = {}
        self._own_words = read_words(config.cast)
        config = config if backbone else fit_card(config, reporter.notice)
        self.backbone = backbone or build_backbone(config, reporter.notice, self._own_words)
        self.config = settle_flow(config, self.backbone.spec, reporter.notice)
        self.paused = False
        self._reporter, self._kernels = reporter, kernels
        self.batcher = batcher
        spec = self.backbone.spec
        self._history = math.ceil(history_s / spec.block_s)
        self._states_bytes = states_bytes
        self._opening = None
        if config.opening:
            self._opening = encode_opening(self.config, self.backbone, reporter.notice)
        self._cast = read_members(config.cast, self.backbone, self.config.device, reporter.notice)
        opening_frames = 0 if self._opening is None else self._opening.shape[1]
        # Blocks of the opening, whose sizes differ, and where the shots of the config begin.
        plan = make_plan([config.shots] * len(config.seeds), self.backbone.spec, opening_frames)
        self._opening_blocks = tuple(block for block in plan.blocks if block.end_frame <= opening_frames)
        self._cues = cues_of(plan)
        for cue in self._cues.values():
            self._check_prompt(cue.prompt)
        self._reinforcements: dict[int, float | str] = {}
        self.next_block = 0
        self._first: Tensor | None = None
        self._latents: dict[int, Tensor] = {}
        self._states: dict[int, MemoryState] = {}
        self._begin(MemoryState({}, {}), 0)
        self._rows = note_rows({}, 0, self.num_rows)
        self._states[0] = MemoryState.of(self._policy, self._decoder)

    @property
    def oldest_block(self) -> int:
        """Return the first block that `rewind` can return to."""
        return min(self._states)

    @property
    def kept_state(self) -> MemoryState | None:
        """Return the state before the next block and its edits, where it is kept."""
        return self._states.get(self.next_block)

    @property
    def cues(self) -> dict[int, Cue]:
        """Return the prompts of the timeline by the block where they begin, in order."""
        return dict(sorted(self._cues.items()))

    def __iter__(self) -> Iterator[GeneratedBlock]:
        """Generate blocks until the session is paused."""
        while not self.paused:
            yield self.step()

    def step(self, latents: Tensor | None = None) -> GeneratedBlock:
        """Generate the next block; one that was generated before, by an equal session, is read from its latents."""
        # A block is read in as many rows as it was generated in.
        width = self.batcher.width if latents is None else rows_at(self._rows, self.next_block)
        (made,) = self.batcher.of_width(width).run([self.next_turn(latents)])
        return self.take(made)

    @property
    def num_rows(self) -> int:
        """Return in how many rows the next block is generated; of a video that is never joined, in one."""
        return self.batcher.width if self._conductor.is_joinable else 1

    def next_turn(self, latents: Tensor | None = None) -> Turn:
        """Return what the batcher must run for the next block."""
        if latents is None:
            self._rows = note_rows(self._rows, self.next_block, self.num_rows)
        factor = latest(self._reinforcements, self.next_block)
        if factor is not None:
            self._policy.reinforce(factor)
        known, block = self._known_latents(self.next_block), self._block(self.next_block)
        if known is None and latents is not None:
            return Turn(self._conductor, block, latents.to(self.config.device), again=True)
        return Turn(self._conductor, block, known)

    def pause(self) -> None:
        """End a loop over the session after its present block; `step` still works."""
        self.paused = True

    def play(self) -> None:
        """Undo `pause`."""
        self.paused = False

    def prompt(self, text: str, at: int | None = None, *, cut: bool = False, reread: bool = False) -> None:
        """Change the prompt from the next block on, or from the later block `at`; refused prompts change nothing.

        `cut` drops the recent past there, `reread` makes it again under the new prompt; sink and bank stay.
        """
        block = self.next_block if at is None else check_later(at, self.next_block)
        if not isinstance(text, str) or not text.strip():
            raise refuse("prompt", text, "must be text", "say what the picture shows")
        if cut and reread:
            limit = "a cut drops the prior, so there is none to read again"
            raise refuse("reread", reread, limit, "choose one of the two")
        self._check_prompt(text)
        self._cues[block] = Cue(text, cut and block > 0, reread and block > 0)

    def drop_cue(self, block: int) -> None:
        """Remove a prompt that has not begun yet; the one before it stays on."""
        if block not in self._cues or block < max(1, self.next_block):
            later = [index for index in self.cues if index >= max(1, self.next_block)]
            raise refuse("cue", block, f"those that can be removed begin at {later}", "name one of them")
        del self._cues[block]

    def set(self, *, reinforcement: float | str | None = None, capacity_frames: float | None = None) -> None:
        """Change settings of the memory from the next block on: its lambda, and the size of its bank.

        Lambda is a number or a schedule (`recap.memory.reinforcement`). A smaller bank keeps the highest scores.
        """
        edit = None if capacity_frames is None else self.resizing(capacity_frames)
        if reinforcement is not None:
            self._policy.reinforce(reinforcement)
            self._reinforcements[self.next_block] = reinforcement
        if edit is not None:
            self._edit(edit)

    def resizing(self, capacity_frames: float) -> Edit:
        """Return the edit that changes the size of the bank."""
        config = resized(self.config, capacity_frames)
        # Built once here, so that a wrong size is refused before anything changes.
        self._new_memory(config)
        return Edit(lambda policy: policy.replace_bank(self._new_memory(config)), reshapes=True)

    def _new_memory(self, config: RunConfig) -> MemoryPolicy:
        return build_memory(config, self.backbone.spec, lambda _: None)

    @property
    def bank(self) -> tuple[Slot, ...]:
        """Return the slots of the bank that are in use, of the first row; () for a memory without a bank."""
        return slots_of(self._policy)

    def pin(self, slots: Sequence[int], name: str = "pinned") -> None:
        """Move slots of the bank to slots of their own, from which nothing is evicted, from the next block on."""
        words = {} if name in self._words() else {name: f"a {name}"}
        self._edit(Edit(lambda policy: policy.pin(slots, name), words))

    def forget(self, slots: Sequence[int]) -> None:
        """Empty slots of the bank, in every row, from the next block on."""
        self._edit(Edit(lambda policy: policy.forget(slots)))

    def prompt_at(self, block: int) -> str:
        """Return the prompt of a block as the model reads it; refuses one that names an absent subject."""
        return self._block(block).prompts[0]

    def cast(self, *members: str | Subject, prompt: str | None = None) -> None:
        """Add subjects to the video from the next block on: cast files, pictures as NAME=PICTURE, or subjects.

        The model reads them under the prompt of that block; `prompt` names the one of an earlier time to repeat.
        """
        files = [member for member in members if isinstance(member, str)]
        new = read_members(files, self.backbone, self.config.device, self._reporter.notice)
        new += [member for member in members if isinstance(member, Subject)]
        check_names(new)
        if taken := [subject.name for subject in new if subject.name in self._words()]:
            raise refuse("cast", taken[0], "that name is in use", "save the subject under another name")
        prompts = (self.prompt_at(self.next_block) if prompt is None else prompt,) * len(self.config.seeds)
        read = partial(read_alone, self.backbone)
        words = {subject.name: subject.words for subject in new}
        self._edit(Edit(lambda policy: join_cast(policy, new, prompts, read), words))

    def drop_cast(self, name: str) -> None:
        """Remove a subject, or what was pinned under a name, from the memory, from the next block on."""
        self._edit(Edit(lambda policy: policy.drop_cast(name), {name: None}))

    def _edit(self, edit: Edit) -> None:
        """Change the memory now, and note it, so that a rebuilt memory is changed at the same block."""
        edit.apply(self._policy)
        self._edits[self.next_block] = (*self._edits.get(self.next_block, ()), edit)

    def rewind(self, block: int) -> None:
        """Go back to where `block` was next; what was generated from there on is dropped, the timeline stays.

        Pins, casts and forgotten slots since then are undone: they changed a memory that is gone.
        """
        check_block(block, self.oldest_block, self.next_block)
        self._edits = {at: edits for at, edits in self._edits.items() if at < block}
        start = max(at for at in self._states if at <= block)
        between = [self._latents[index] for index in range(start, block)]
        self._states = {at: state for at, state in self._states.items() if at <= start}
        self._latents = {index: latents for index, latents in self._latents.items() if index < start}
        self._first = self._first if start else None
        self.next_block = start
        self._begin(self._states[start], start)
        for latents in between:
            for edit in self._edits.get(self.next_block, ()):
                edit.apply(self._policy)
            self.step(latents)

    def fork(self, block: int | None = None) -> Session:
        """Return a second session that is as this one was before `block`, by default as it is now.

        Both share the model, and from here on nothing else.
        """
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.paused = False
        other.restore(self.snapshot())
        if block is not None:
            other.rewind(block)
        return other

    def snapshot(self) -> Snapshot:
        """Take the session as it is now, with its timeline and its history."""
        return Snapshot(
            self.config,
            self.next_block,
            dict(self._cues),
            dict(self._reinforcements),
            dict(self._edits),
            MemoryState.of(self._policy, self._decoder),
            self._first,
            dict(self._latents),
            dict(self._states),
            dict(self._rows),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back: of this session, or of another one with the same config."""
        if snapshot.config != self.config:
            limit = "was taken under another config than this session's"
            raise refuse("snapshot", f"block {snapshot.block}", limit, "make a session with its config")
        self.next_block, self._first = snapshot.block, snapshot.first_latent
        self._cues, self._reinforcements = dict(snapshot.cues), dict(snapshot.reinforcements)
        self._edits, self._rows = dict(snapshot.edits), dict(snapshot.rows)
        self._latents, self._states = dict(snapshot.latents), dict(snapshot.states)
        self._begin(snapshot.memory, self.next_block + 1)

    def _begin(self, state: MemoryState, changed_before: int) -> None:
        """Make memory, decoder and conductor for the block that is next; edits before some block are in the state."""
        device, spec = self.config.device, self.backbone.spec
        self._policy: MemoryPolicy = self._new_memory(self.config)
        for at in sorted(self._edits):
            for edit in self._edits[at] if at < changed_before else ():
                if edit.reshapes:
                    edit.apply(self._policy)
        self._decoder: Decoder = self.backbone.decoder()
        if self.next_block:
            self._decoder.load_state({name: value.to(device) for name, value in state.decoder.items()})
        if self.next_block or state.policy:
            # Before the first block the cast is all that the memory has.
            self._policy.load_state({name: value.to(device) for name, value in state.policy.items()})
        else:
            join_cast(self._policy, self._cast, self._block(0).prompts, partial(read_alone, self.backbone))
        near = range(max(0, self.next_block - reach(spec)), self.next_block)
        self._conductor = Conductor(
            self.backbone,
            self._policy,
            seeds=self.config.seeds,
            decoder=self._decoder,
            aside=at_once if self.config.eager else choose_aside(device),
            sampling=self.config.sampling,
            first_latent=None if self._first is None else self._first.to(device),
            past=[(self._block(index), self._latents[index].to(device)) for index in near],
            kernels=self._kernels,
        )

    def take(self, made: GeneratedBlock) -> GeneratedBlock:
        """Take the next block from the batcher, and keep what going back needs."""
        self._latents[self.next_block] = made.latents.detach().cpu()
        self._first = self._latents[0][:, :1] if self._first is None else self._first
        self.next_block += 1
        self._keep_state()
        self._forget_oldest()
        return made

    def _keep_state(self) -> None:
        """Keep the present state if it is due; the last few blocks have theirs as long as they are the last."""
        largest = max(state.num_bytes for state in self._states.values())
        affordable = max(1, self._states_bytes // max(1, largest))
        # How many blocks lie between two states, so that all of the history fits.
        spacing = max(1, math.ceil(self._history / affordable))
        recent = LAST_STATES if affordable >= 2 * LAST_STATES else 0
        if recent or self.next_block - max(self._states) >= spacing:
            self._states[self.next_block] = MemoryState.of(self._policy, self._decoder)
        leaving = self.next_block - recent
        before = [at for at in self._states if at < leaving]
        if recent and leaving in self._states and before and leaving - max(before) < spacing:
            del self._states[leaving]

    def _forget_oldest(self) -> None:
        """Drop states and latents that only blocks beyond the history need."""
        beyond = [at for at in self._states if at <= self.next_block - self._history]
        for at in sorted(beyond)[:-1]:
            del self._states[at]
        needed = self.oldest_block - reach(self.backbone.spec)
        for index in [index for index in self._latents if index < needed]:
            del self._latents[index]

    def _check_prompt(self, text: str) -> None:
        self.backbone.condition((spell_out(text, self._words()),) * len(self.config.seeds))

    def _block(self, index: int) -> Block:
        return with_cast(self._plain_block(index), self._words(index))

    def _words(self, index: float = math.inf) -> dict[str, str]:
        return words_at(self._own_words, self._edits, index)

    def _plain_block(self, index: int) -> Block:
        cue = latest(self._cues, index)
        assert cue is not None, "a timeline has a prompt at block 0"
        prompts = (cue.prompt,) * len(self.config.seeds)
        if index < len(self._opening_blocks):
            return replace(self._opening_blocks[index], prompts=prompts)
        length = self.backbone.spec.frames_per_block
        opening_end = self._opening_blocks[-1].end_frame if self._opening_blocks else 0
        first = opening_end + (index - len(self._opening_blocks)) * length
        begins = index in self._cues
        return Block(index, first, length, prompts, begins and cue.cut, begins and cue.reread)

    def _known_latents(self, index: int) -> Tensor | None:
        if self._opening is None or index >= len(self._opening_blocks):
            return None
        block = self._opening_blocks[index]
        return self._opening[:, block.first_frame : block.end_frame]
