"""The quick subset: what `make quick` runs, in less than 90 seconds on two cores.

Every test module is here: with patterns of its quick tests, or with a reason why it has none.
Patterns match names such as `test_contract[dense-3]`. `*` stands for anything, `?` for a character.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

QUICK = {
    # kernels and wire
    "test_kernels": "test_accumulate[* test_select* test_histogram* test_keep* test_merge* "
    "test_sum_select test_adam* test_codes_of_positions* test_quantise test_kth_largest*",
    "test_gpu_kernels": "test_cuda_has_them test_the_reference_runs_without_triton",
    "test_step": "test_steps test_hostile* test_halves* test_a_step_is_few_calls*",
    "test_wire": "test_round_trip* test_damage_is_noticed* test_positions_that_lie* "
    "test_a_forged_message_is_an_error[int8-prepare-*",
    "test_devices": "test_a_phase_that* test_claimed* "
    "test_every_algorithm_gives*[oktopk-2] "
    "test_streams_never_race[oktopk-*",
    # algorithms
    "test_contract": "test_contract[*-3] test_every_algorithm_has_a_row",
    "test_allreduce": "test_works_alone* test_algorithms_by_name test_every_byte_is_counted* "
    "test_who_asks_for_everything_gets_it* test_exchange_rotates_and_starts_at_once "
    "test_balance_moves_as_little_as_needed",
    "test_auto": "test_times_decide* test_a_step* test_a_decision* test_mistakes*",
    "test_bad_input": "test_bad_* test_ranks_that_disagree_all_say_so* test_nan_and_inf*",
    # reducer
    "test_engine": "test_parts_are_one_vector* test_a_step_that_is_not_committed_leaves_no_trace* "
    "test_an_exception_of_the_thread_reaches_the_training_thread test_two_models_in_one_process "
    "test_the_process_ends_cleanly[at?once]",
    "test_watch": "test_a_discarded_step_leaves_no_trace* test_a_skipped_step_moves_nothing*",
    "test_together": "test_calls_that_differ* test_a_mistake_of_one_rank_is_told_to_all*",
    "test_forks": "*",
    "test_inspect": "test_looking_changes_nothing[OkTopk-2] test_what_is_seen_is_right[OkTopk] "
    "test_magnitudes* test_staleness* test_kinds*",
    # DDP
    "test_ddp": "test_everything_sent_is_plain_ddp[*-3] test_nothing_is_lost* test_stats_add_up "
    "test_uneven_inputs_with_join* test_odd_parameters* test_a_nan_raises_on_all_ranks* "
    "test_mistakes_are_explained_on_every_rank*",
    "test_ddp_forms": "test_results_are_those_of_plain_ddp[*-2]",
    "test_front_end": "*",
    "test_copies": "test_a_copy_averages_densely_and_says_so*",
    "test_practice": "test_ordinary_clipping* test_residuals_are_unscaled* test_density_ramp*",
    # optimizers
    "test_optimizer": "test_the_wrapper_equals_ddp* test_no_sync_accumulates "
    "test_its_state_includes_the_compression test_mistakes_are_explained*",
    "test_adam": "test_warm_up_is_torchs_own* test_sparse_steps_equal_a_reference* "
    "test_all_ways_of_training_come_to_the_same* test_resume_is_bitwise_the_same*",
    # checkpoints
    "test_checkpoint": "test_resume_is_bitwise_the_same* test_another_number_of_ranks_keeps* "
    "test_damage_is_an_error_on_every_rank* test_a_manifest_is_checked_as_a_whole "
    "test_with_torch_distributed_checkpoint*",
    "test_dense_residual": "*",
    "test_damage": "test_of_a_reduction* test_thresholds_of_another_shape_are_not_taken*",
    # trainer and workloads
    "test_train": "test_every_compressor_trains* test_everything_at_once_trains "
    "test_resumed_run_is_bitwise_the_uninterrupted_one test_it_learns test_bad_* "
    "test_learning_rates*",
    "test_workloads": "*",
    "test_language": "test_number* test_block* test_no_byte* test_generation* test_text* "
    "test_windows* test_each_window* test_order* test_recipe test_places* test_prompts*",
    "test_folder": "*",
    "test_view": "*",
    "test_report": "test_thin* test_smooth* test_a_band* test_damage* test_mistakes* test_labels* "
    "test_it_names* test_runs_of* test_training_ends*",
    "test_speech": "*",
    "test_corpora": "test_reads_* test_normalise* test_manifest_* test_command_* test_spoken_sets*",
    # common ground and laboratory
    "test_common": "*",
    "test_bench": "test_a_contender_* test_every_algorithm_and_all_* test_a_wrong_spec_* "
    "test_the_slowest_rank_counts* test_a_whole_file_is_reported* "
    "test_raw_results_have_their_schema",
    "test_compare": "test_knobs* test_a_cell_is* test_values* test_commas* test_seeds* "
    "test_a_mistake_is_one_line* test_quantiles* test_the_interval* test_differences* test_one_* "
    "test_tables* test_the_target* test_progress* test_the_reason* "
    "test_without_a_baseline* test_notes*",
    "test_cost": "test_the_model_* test_it_* test_a_message_* test_real_ranks*[dense-int8-3] "
    "test_one_rank_* test_mistakes_* test_ok_topk_*",
    "test_plan": "test_a_table_* test_json_* test_a_mistake_* test_sizes_* test_sentences",
    "test_simulate": "test_simulated_ranks_equal_real_ones[oktopk-3] "
    "test_simulated_ranks_equal_real_ones[topka-3] test_the_ring_adds_in_gloos_order[5-4096] "
    "test_a_message_* test_many_* test_fair_* test_an_error_* test_ranks_that_* test_mistakes_of_*",
    "test_lab": "test_links_limit_the_rate test_ranks_know_their_place test_mistakes* test_rates* "
    "test_loopback*",
    # command line, launchers, package
    "test_cli": "*",
    "test_launch": "test_srun test_damaged_inputs",
    "test_readme": "*",
    "test_docs": "test_an_algorithm_takes* test_names*",
    "test_version": "*",
    "test_quick": "*",
}

LEFT_OUT = {
    "test_examples": "imports three frameworks and trains with each",
    "test_real_training": "needs hundreds of steps to compare losses",
    "test_torch_suite": "runs dozens of torch's own cases; test_ddp covers the same layer",
}


def is_quick(module: str, name: str) -> bool:
    patterns = QUICK.get(module, "").replace("[", "[[]").split()
    return any(fnmatchcase(name, pattern) for pattern in patterns)
