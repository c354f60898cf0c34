"""Fixtures and order of all tests."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys

import pytest

# A shell's background job ignores Ctrl-C, and so would the children that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config) -> None:
    """Divide the cores among the processes of pytest-xdist, and let threads of torch sleep where
    they wait for one: the suite takes three times as long otherwise. Commands that tests start
    inherit both.

    Files are not flushed to the disk: no test survives a loss of power, and thousands of files
    would wait for it.
    """
    os.fsync = lambda fd: None
    if (worker := getattr(config, "workerinput", None)) is not None:
        share = max(1, len(os.sched_getaffinity(0)) // worker["workercount"])
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it with torch's import


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from modules and tests, which stay until the end: it would visit
    them again and again, here and in each of its runs later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    """Name the seed before workers start, which inherit it."""
    from .seed import VARIABLE, run_seed

    return f"random tests: {VARIABLE}={run_seed()}"


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Put back the number of threads that a test has set, as commands do that are called as
    functions: later tests of the process would share cores among more threads than there are.
    """
    if (torch := sys.modules.get("torch")) is None:  # tests that import it set no number
        yield
        return
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def pools_of_random_rows():
    """Draw the rows of random models once for all models of some tests: they are the same ones.
    32 pools take 128 MiB.
    """
    from iqforge.runtime.bench import synthetic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_pool_rows", functools.lru_cache(32)(synthetic._pool_rows))
        yield


@pytest.fixture(scope="session")
def gpu(request):
    """Skip without a device that numba can compile for. Otherwise compile the searches that the
    tests request, in several processes.
    """
    from .encode_cases import TYPES, compile_side_by_side, reason_to_skip

    if reason := reason_to_skip():
        pytest.skip(reason)
    asked = {
        value
        for item in request.session.items
        if "gpu" in item.fixturenames and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if value in TYPES
    }
    if len(asked) > 2:
        compile_side_by_side(sorted(asked))


# Tests run in as many processes as there are cores (pytest-xdist, --dist loadscope). The tests of a
# module stay in one process, as they share fixtures. The tests in the modules of SPREAD share none,
# and most of their time is compilation: there, the tests of one type or kernel source stay
# together, so that no two processes compile the same thing at once.
SPREAD = {"test_encode.py", "test_kernels.py"}
WHAT_IS_COMPILED = re.compile(r"[\[-]([A-Z]{1,5}\d\w*?|\w+/\w+\.cu)(?:_R\d+)?[\]-]")
# Tests that compile come first, as later tests need their code, and then the longest modules, so
# that no process waits for another at the end.
FIRST = (
    "test_encode.py",
    "test_kernels.py",
    "test_step_path.py",
    "test_architectures_random.py",
    "test_auto.py",
    "test_cpu_steps.py",
    "test_step_kernels_on_host.py",
    "test_parallel.py",
    "test_demo.py",
    "test_units.py",
    "test_kernel_races.py",
    "test_perplexity.py",
    "test_imatrix.py",
    "test_tokenizer_kinds.py",
    "test_bench.py",
    "test_first_hour.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Run tests on a GPU one after another, as they measure its memory and fill it."""
    return 0 if config.option.markexpr == "gpu" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module, _, rest = nodeid.partition("::")
            if module.rpartition("/")[2] not in SPREAD or "[" not in rest:
                return module
            compiled = WHAT_IS_COMPILED.search(rest)
            return f"{module}[{compiled[1]}]" if compiled else module

    return Scheduler(config, log)


# Slow, besides the tests marked so, are tests that need one of these fixtures, those of modules
# that compile kernels by g++ or whole searches, single ones that do so, and those of the searches
# for all types but these.
SLOW_FIXTURES = {"demo", "host_units"}
SLOW_MODULES = {
    "test_architectures_commands.py",
    "test_auto.py",
    "test_calibrate.py",
    "test_sequential.py",
    "test_compilation.py",
    "test_compile_ahead.py",
    "test_convert_multimodal.py",
    "test_cpu_steps.py",
    "test_delta_on_host.py",
    "test_device_calls.py",
    "test_row_kernels_on_host.py",
    "test_kernel_races.py",
    "test_latent_on_host.py",
    "test_latent_prompt_on_host.py",
    "test_latent_warpgroup_on_host.py",
    "test_many_rows.py",
    "test_matvec_experts_on_host.py",
    "test_matvec_on_host.py",
    "test_mla_commands.py",
    "test_offloaded_experts.py",
    "test_offloaded_prompts.py",
    "test_offloaded_steps.py",
    "test_peer_rows_on_host.py",
    "test_prompt_scores_on_host.py",
    "test_provenance.py",
    "test_rounded_steps.py",
    "test_rounding_on_host.py",
    "test_search_choices.py",
    "test_shared_chunks.py",
    "test_simd.py",
    "test_split_random.py",
    "test_stages.py",
    "test_step_kernels_on_host.py",
    "test_tasks.py",
    "test_tokenizer_kinds.py",
}
SLOW_TESTS = {
    "test_no_type_falls_back",
    "test_quantized_weights_are_the_decoded_ones",
    "test_merged_gate_and_up_change_nothing",
    "test_importance_matrix_and_what_is_quantized_with_it",
    "test_bench_and_sweep_bench_restore_the_context",
    "test_keys_that_are_set",
    "test_checkpoint_folders_are_quantized_to_a_size_too",
    "test_values_are_fitted_as_products_use_them",
    "test_blocks_of_the_checkpoint_are_kept",
    "test_every_expert_uses_its_own_importance",
    "test_memory_stays_far_below_the_tensor",
    "test_memory_is_the_peak_of_the_run",
    "test_quantizing_names_missing_bytes_and_resumes",
    "test_quantizing_finds_every_expert",
    "test_recipe_on_the_command_line",
    "test_killed_at_random_moments",
    "test_layouts_with_a_search_of_their_own_hold_the_same_rows",
    "test_sensitivities_are_measured",
    "test_layers_that_are_left_out_do_not_count",
    "test_threads_do_not_change_a_byte",
    "test_checkpoint_and_shards_give_the_same_file",
    "test_which_importances_are_used",
    "test_figures_are_their_definitions",
    "test_searches_use_importances_where_the_table_says_so",
    "test_expert_switches_without_effect_are_reported_once",
    "test_the_file_is_as_the_dry_run_predicted",
    "test_perplexity_with_caches_and_switches",
    "test_a_rank_that_fails_ends_all",
    "test_estimates_have_no_bias",
    "test_resuming_where_a_run_stopped",
    "test_a_command_runs_as_ranks_and_prints_once",
    "test_two_hosts",
    "test_executors_of_ranks",
    "test_an_importance_matrix_and_second_moments_take_it_by_name",
    "test_layers_that_cannot_be_cut_back",
    "test_json_has_the_plan_and_the_prediction",
    "test_ranks_give_the_logits_of_one",
    "test_other_options_on_ranks",
    "test_against_a_model_is_against_its_base_file",
    "test_an_error_of_all_ranks_is_said_once",
    "test_predictions_are_near_what_one_gpu_measures",
    "test_predictions_are_near_what_two_gpus_measure",
    "test_small_active_models_gain_nothing_in_steps",
    "test_a_checkpoint_gives_what_its_file_gives",
    "test_no_layer_is_slow",
    "test_memory_is_known_before_anything_is_loaded",
    "test_texts_and_names_in_the_c_locale",
    "test_torchrun_starts_ranks",
    "test_several_texts_each_in_its_own_chunks",
    "test_command_with_several_texts",
    "test_random_damage",
    "test_what_is_finished_is_not_repeated",
    "test_streams_that_are_closed_or_full",
    "test_an_interrupted_run_resumes_to_the_same_bytes",
    "test_threads_change_nothing_and_keys_name_texts",
    "test_random_schemas",
    "test_quantized_tensors_are_covered",
    "test_the_error_names_the_tensor",
    "test_shares_of_drawn_tokens",
    "test_resident_matrices_are_those_of_the_file",
    "test_a_prompt_in_pieces_gives_the_same_logits",
    "test_a_checkpoint_folder_is_measured",
    "test_a_second_interruption_keeps_finished_tensors",
    "test_characters_that_the_terminal_lacks",
    "test_smart_expert_reduction",
    "test_chunks_of_a_long_prompt_and_steps_after_them",
    "test_a_checkpoint_becomes_a_file_with_proof",
    "test_sums_are_those_of_the_reference_path",
    "test_nothing_is_cut_off_in_a_browser",
    "test_an_interrupted_run_resumes",
    "test_the_table_of_architectures",
    "test_the_seed_of_a_run_can_be_repeated",
    "test_packing_loses_nothing",
    "test_units_on_the_cpu",
    "test_rows_do_not_depend_on_each_other",
    "test_error_falls_with_feedback_and_with_refinement",
    "test_three_values_stay_what_they_are",
    "test_graphs_of_other_architectures",
    "test_other_architectures",
    "test_a_model_on_the_cpu",
    "test_parts_of_experts_are_within_their_layer",
    "test_a_command_without_a_writable_home_or_package",
    "test_interrupted_run_leaves_no_finished_file",
    "test_bytes_are_those_of_encode",
    "test_every_plan_of_the_reference",
    "test_magnitudes_of_yarn",
    "test_nan_to_zero",
    "test_command_line_names_the_output_after_the_repository",
    "test_the_profiler_s_log_is_not_shown",
    "test_a_size_is_that_of_the_file",
    "test_without_a_network_the_command_is_one_line_of_error",
    "test_what_a_test_runs",
    "test_sweep_command",
    "test_options_of_loading_are_for_paths",
    "test_commands",
    "test_file_size_limit_is_an_error_with_nothing_left",
    "test_hostile_pickle",
    "test_every_kind_of_layer",
    "test_lasting_trouble_is_named_and_leaves_no_file",
    "test_all_at_once_is_one_by_one",
    "test_interrupted_in_mid_write",
    "test_what_is_claimed_to_be_exact_is_and_the_rest_is_bounded",
    "test_layers_in_turn_give_what_passes_give",
    "test_second_moments_are_those_of_the_reference_path",
    "test_every_token_with_every_expert",
    "test_what_ranks_exchange",
    "test_nothing_probes_for_parts_of_the_contract",
    "test_quantizing_again_replaces_the_record",
    "test_rows_outlive_the_file",
    "test_numbers_per_expert_are_those_of_the_reference",
    "test_latent_attention_with_other_caches",
    "test_what_rounding_costs",
    "test_against_brute_force",
    "test_the_reference_distributes_qwen3_30b_so",
}
QUICK_TYPES = {"Q4_0", "Q8_0", "IQ4_NL"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    everything = config.option.markexpr == "slow" or "IQFORGE_TEST_FULL" in os.environ
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(pytest.mark.slow)
            if not everything:
                reason = "part of the full matrix: -m slow, or IQFORGE_TEST_FULL=1"
                item.add_marker(pytest.mark.skip(reason=reason))
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))
    for item in items:
        compiled = item.path.name == "test_encode.py" and WHAT_IS_COMPILED.search(item.name)
        if (
            SLOW_FIXTURES & set(item.fixturenames)
            or item.path.name in SLOW_MODULES
            or getattr(item, "originalname", "") in SLOW_TESTS
            or (compiled and compiled[1] not in QUICK_TYPES)
        ):
            item.add_marker(pytest.mark.slow)
