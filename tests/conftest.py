"""What tests share: the real data next to the checkout, and a small backbone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from recap.io.files import OFFLINE, weights_folder
from recap.io.older import tomllib
from recap.registry import ADMISSIONS, MEMORIES, load_backbone
from recap.types import BackboneSpec
from tests.gpu import MARKED

# The tensors here are small: a second thread costs more than it brings, most of all on a busy machine.
torch.set_num_threads(1)

# What is collected stays until the end: looking for garbage in it took a third of the collecting.
gc.disable()

ROOT = Path(__file__).resolve().parents[1]
PLUG_IN = ROOT / "integrations" / "vbench"
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def installed_home(tmp_path_factory):
    """The folder of weights on this machine, which tests see only if they ask for it here.

    Nothing is fetched in tests, and flow `auto` is the quick classical one, for the embedded model the package's own,
    whatever is installed.
    """
    home = weights_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECAP_HOME", str(tmp_path_factory.mktemp("no-weights")))
        patch.setenv(OFFLINE, "1")
        yield home


@pytest.fixture(scope="session")
def plug_in(tmp_path_factory):
    """Register `recap vbench` for this process and those that it starts, whether or not it is installed here."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PLUG_IN / "pyproject.toml").read_text())["project"]
    about = site / "recap_vbench-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    points = project["entry-points"]["recap.commands"].items()
    lines = ["[recap.commands]", *(f"{name} = {target}" for name, target in points)]
    (about / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        paths = [str(site), str(PLUG_IN / "src"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


@pytest.fixture(scope="session")
def random_raft(tmp_path_factory) -> Path:
    """A folder of weights with a RAFT-small in it that has learnt nothing."""
    from recap.flow import RAFT_SMALL
    from recap.flow.raft import RaftSmall

    folder = tmp_path_factory.mktemp("random-raft")
    torch.manual_seed(0)
    torch.save(RaftSmall().state_dict(), folder / RAFT_SMALL.file_name)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real weights and clips, never part of the product."""
    if not SHARED.is_dir():
        pytest.skip("the folder of real weights and clips is not next to this checkout")
    return SHARED


@pytest.fixture(scope="session")
def backbone():
    return load_backbone("untrained")


@pytest.fixture
def spec() -> BackboneSpec:
    """A backbone that exists on paper: 2 layers, 2 heads of 12, 2 x 3 tokens a frame."""
    return BackboneSpec(
        name="paper",
        layers=2,
        heads=2,
        head_dim=12,
        grid=(2, 3),
        token_pixels=16,
        latent_channels=4,
        latent_size=(4, 6),
        frames_per_block=3,
        window_frames=6,
        pictures_per_frame=4,
        pictures_per_second=16,
    )


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _each_test_is_a_process(monkeypatch):
    """Let every test see the notice about missing weights, which a process prints once."""
    monkeypatch.setattr("recap.flow._reported", set())


# Left out by `make test` and run by `make test-all`: each takes long, and cheaper tests of the same promise stay.
SLOW = (
    "tests/cli/test_demo.py::test_the_demo_resumes_where_it_was_stopped_and_starts_again_where_it_was_finished",
    # On `untrained` these stay in `make test`.
    "tests/contracts/test_policies.py::test_policy_runs_and_its_trace_adds_up[embedded-",
    "tests/contracts/test_policies.py::test_stopping_and_continuing_changes_nothing[embedded-",
    "tests/contracts/test_policies.py::test_memory_changes_what_is_generated[embedded",
    "tests/contracts/test_policies.py::test_a_memory_made_again_from_latents_is_the_memory_that_was_there[embedded-",
    "tests/contracts/test_policies.py::test_reinforcement_1_and_capacity_0_give_sink_bit_for_bit[embedded",
    # Growth over fewer blocks is tested on `untrained`.
    "tests/contracts/test_admissions.py::test_sixty_blocks_on_the_embedded_backbone_with_a_cut_do_not_grow",
    "tests/memory/test_promises.py::test_sixty_blocks_on_the_embedded_backbone",
    # With exact flow these stay.
    *(
        f"tests/admission/test_flow_texture.py::{test}[{scene}-classical]"
        for test, scenes in (
            ("test_late_subjects_are_kept_and_texture_has_few_slots", ("ripples", "rain")),
            (
                "test_without_texture_it_agrees_with_flow",
                ("static", "pan", "pan-return", "entering", "hiding"),
            ),
        )
        for scene in scenes
    ),
    # With the usual rule of each memory these stay, the first of them with blocks of three frames.
    *(
        f"tests/contracts/test_admissions.py::{test}[{blocks}{memory}-{rule}]"
        for memory, usual in (("recap", "flow"), ("recap-plus", "keys"))
        for rule in ADMISSIONS
        if rule != usual
        for test, blocks in (
            ("test_sixty_blocks_with_a_cut_stop_and_go_on_bit_for_bit_without_growing", "blocks-of-3-"),
            ("test_generates_on_the_embedded_backbone_and_its_trace_is_plain_data", ""),
        )
    ),
    "tests/contracts/test_admissions.py::test_sixty_blocks_with_a_cut_stop_and_go_on_bit_for_bit_without_growing[blocks-of-1",
    # With every memory and the rule `flow` this stays.
    *(
        f"tests/contracts/test_states.py::test_a_changed_state_of_a_memory_is_refused_or_works[blocks-of-1-recap-{rule}]"
        for rule in ("flow-texture", "diversity", "diversity-keys", "keys", "flow+keys", "recent", "random")
    ),
    "tests/laws/test_no_host_sync.py::test_a_block_is_generated_and_remembered_without_reading_a_value[blocks-of-1-fast]",
    # With blocks of three frames these stay, and by `keys` alone.
    "tests/laws/test_no_host_sync.py::test_a_block_is_generated_and_remembered_without_reading_a_value[blocks-of-1-readable]",
    "tests/laws/test_no_host_sync.py::test_rules_by_keys_read_none_either[blocks-of-3-blocks-of-3-flow+keys]",
    "tests/laws/test_no_host_sync.py::test_other_memories_read_none_either[blocks-of-1-",
    "tests/laws/test_no_host_sync.py::test_rules_by_keys_read_none_either[blocks-of-1-",
    "tests/laws/test_no_host_sync.py::test_rules_by_keys_read_none_either[blocks-of-3-blocks-of-1-",
    # A sink with a number stays, and schedules on the fast path.
    *(
        f"tests/laws/test_no_host_sync.py::test_other_memories_read_none_either[blocks-of-3-config{number}]"
        for number in (1, 3, 4, 5)
    ),
    # With the factor 2 these stay.
    "tests/memory/test_bank_options.py::test_a_reinforced_bank_equals_its_keys_repeated[3-",
    "tests/memory/test_bank_options.py::test_a_reinforced_bank_equals_its_keys_repeated[5-",
    "tests/memory/test_bank_options.py::test_a_reinforced_bank_equals_its_keys_repeated[2-settings3-",
    # One row of a batch stays.
    "tests/fast/test_backbone.py::test_fast_and_readable_generate_the_same[2-by ",
    "tests/fast/test_backbone.py::test_fast_and_readable_generate_the_same[2-recap, ",
    # With the default settings of each memory these stay.
    *(
        f"tests/memory/test_promises.py::test_cuts_and_stopping_anywhere_around_them[{memory}, "
        for memory in ("deep-forcing", "memrope", "relax-forcing", "rolling-sink")
    ),
    # With exact flow, and two scenes, these stay.
    *(
        f"tests/admission/test_flow_texture.py::test_without_texture_it_agrees_with_flow[{scene}"
        for scene in ("burst", "demo", "returning-classical", "entering", "hiding", "pan-return")
    ),
    # With no room for states every memory stays, and with room for all of them ours.
    *(
        f"tests/test_session.py::test_going_back_anywhere_and_forward_again_changes_no_bit[1000000000-{memory}]"
        for memory in MEMORIES
        if memory not in ("recap", "recap-plus")
    ),
    "tests/contracts/test_decoders.py::test_state_goes_through_a_file_and_resumes_bit_for_bit[taehv-2]",
    "tests/contracts/test_decoders.py::test_state_goes_through_a_file_and_resumes_bit_for_bit[taehv-4]",
    *(
        f"tests/contracts/test_states.py::test_a_changed_state_of_a_memory_is_refused_or_works[blocks-of-3-recap-{rule}]"
        for rule in ("flow-texture", "flow+keys", "diversity-keys")
    ),
    # In `make test` the vote file is handed over by a file.
    "tests/study/test_study_page.py::test_raters_of_known_preference_by_a_server",
    # With the distilled model these stay.
    *(
        f"tests/{file}::test_off_is_the_stock_pipeline_bit_for_bit[{model}-"
        for file in ("backbones/helios/test_helios_backbone.py", "attach/test_helios_attach.py")
        for model in ("amplified", "mid", "base")
    ),
    "tests/training/test_world.py::test_captions_name_actors_from_left_to_right",
    "tests/contracts/test_states.py::test_a_changed_state_of_a_memory_is_refused_or_works[blocks-of-3-recap-diversity]",
    "tests/eval/metrics/test_bank_story.py::test_the_oracle_of_all_candidates_finds_a_real_bank_faultless",
    "tests/tables/test_batches.py::test_attention_is_measured_by_the_readable_path",
    "tests/benchmarks/test_speed.py::test_every_stage_is_timed_and_paths_are_compared",
    "tests/io/test_opening.py::test_it_resumes_when_the_clip_is_gone",
    "tests/memory/test_promises.py::test_other_precisions_and_devices_work_too[cpu",
    "tests/attach/test_compile.py::test_a_compiled_pipeline_generates_the_same_and_no_frame_of_ours_is_traced[self-forcing-wrapped",
    # One model of the three stays.
    "tests/attach/test_helios_attach.py::test_on_the_first_chunk_stays_and_later_ones_change[mid]",
    "tests/attach/test_helios_attach.py::test_on_the_first_chunk_stays_and_later_ones_change[base]",
    # Stopped after another number of blocks stays.
    "tests/show/test_comparison.py::test_a_stopped_comparison_is_resumed[14]",
    # The page's lines are in a test of sessions, too.
    "tests/house/test_readme.py::test_the_lines_of_the_directors_page_run",
    # The five recipes themselves are run in `make test`.
    "tests/house/test_extending.py::test_an_entry_in_the_registry_is_tested_by_the_contracts_without_any_list",
    "tests/benchmarks/test_bench_helios.py::test_tiny_size_runs_to_its_json_line",
    "tests/laws/test_resume.py::test_killed_at_a_random_moment_and_resumed_equals_undisturbed",
    "tests/tables/test_on_ray.py::test_ray_gives_the_same_bytes_as_this_machine_alone",
    "tests/tables/test_runner.py::test_200_jobs_killed_20_times_end_as_if_nothing_had_happened",
    "tests/training/test_evaluate.py::test_every_part_runs_and_writes_its_numbers",
    "tests/training/test_evaluate.py::test_the_command_measures_the_shipped_weights",
    "tests/training/test_probe.py::test_the_probe_learns_a_few_pictures",
    "tests/training/test_train_autoencoder.py::test_the_loss_falls_on_a_repeated_clip",
    "tests/training/test_train_dit.py::test_the_loss_falls_on_few_clips",
    "tests/training/test_train_flow.py::test_the_loss_falls_on_few_clips",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("cuda") is None:
            continue
        if not MARKED.search(item.path.read_text("utf-8")):
            raise pytest.UsageError(f"{item.path} has a test for a GPU that `make test-gpu` does not find")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish():
    # From here on garbage is looked for, but not among the modules and tests that were collected.
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def dino(tmp_path_factory):
    """A DINOv2 of one small layer with random weights, in a folder as the hub has them."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14
    )
    folder = tmp_path_factory.mktemp("dino")
    Dinov2Model(config).save_pretrained(folder)
    return str(folder)
