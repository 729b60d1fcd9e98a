"""The tests that `make quick` leaves out, because they take more than about three seconds.

That is on one quiet core with everything imported; a test with many parameters counts with all of
them together. tests/conftest.py gives them the marker `slow`, so that `pytest -m "not slow"` runs
the others. tests/test_architecture.py asks that they exist and that every package keeps fast tests.
"""

# These exercises plan full-size models: about 10 to 30 seconds each.
FULL_SIZE = (
    "00.1",
    "00.2",
    "00.4",
    "02.2",
    "03.1",
    "03.2",
    "03.4",
    "05.4",
    "07.2",
    "19.1",
    "19.2",
)

# {file below tests/: slow tests, by their names or with one of their parameters}
SLOW: dict[str, tuple[str, ...]] = {
    "tools/test_pretended.py": (
        "test_on_a_pretended_gpu",
        "test_every_check_ran",
        "test_ranks_exchange_messages_over_nccl",
        "test_a_broken_branch_for_gpus_is_caught",
        "test_a_lesson_runs_on_a_pretended_gpu",
        "test_what_it_writes_is_marked_and_refused_everywhere",
        "test_make_record_refuses_to_rehearse_into_results",
    ),
    "tools/test_again.py": (
        "test_what_fails_runs_again_by_itself",
        "test_where_much_fails_nothing_runs_again",
    ),
    "tools/test_session.py": ("test_a_notebook_is_stopped_when_its_time_is_over",),
    "attack/test_ranks.py": ("test_no_process_of_a_rank_outlives_the_launch",),
    "packages/test_install.py": (
        "test_real_pip_without_an_index_finds_no_network",
        "test_wheels_beside_the_course_are_installed_without_a_network",
    ),
    "attack/test_saving.py": ("test_a_run_that_goes_on_ends_at_the_same_weights",),
    "attack/test_submissions.py": (
        "test_a_file_of_others_gives_no_points_and_a_lost_one_is_said",
        "test_a_suffix_in_capitals_is_a_notebook",
        "test_a_date_in_a_name_is_no_chapter",
        "test_a_copy_of_a_lab_is_a_lab",
        "test_a_neighbour_s_file_cannot_be_run",
        "test_a_fraction_is_a_number_as_it_is_in_the_notebook",
    ),
    "attack/test_grading.py": (
        "test_a_grader_that_is_killed_leaves_no_process",
        "test_a_file_that_cannot_be_read_is_a_row_that_says_so",
        "test_every_student_gets_the_points_of_right_answers_and_no_other",
        "test_no_cell_of_the_table_is_a_formula",
        "test_nothing_is_left_of_a_class",
        "test_what_became_of_the_hostile_is_said",
        "test_limits_end_a_submission",
        "test_what_hangs_is_ended_and_what_it_handed_in_before_counts",
        "test_without_namespaces_nothing_is_left_either",
    ),
    "benchmarks/test_measured_steps.py": (
        "test_kept_plans_are_todays",
        "test_steps_in_processes_of_their_own_are_kept_and_read_again",
        "test_what_is_missed_by_more_is_bitsandbytes_own",
    ),
    "benchmarks/test_peaks.py": ("test_kept_plans_are_todays",),
    "benchmarks/test_sweeps.py": (
        "test_a_kept_run_comes_out_again",
        "test_adapters_beside_query_and_value_are_those_of_the_recipe",
    ),
    "benchmarks/test_torchtitan.py": ("test_the_kept_plan_of_eight_gpus_is_todays",),
    "benchmarks/test_published_peaks.py": (
        "test_the_allocated_peak_of_a_real_gpu",
        "test_the_courses_step_planned_as_ones_own",
        "test_the_reserved_peak_of_a_real_gpu",
        "test_the_table_says_it",
    ),
    "core/test_frameworks.py": (
        "test_deepspeeds_stages_give_the_plain_weights",
        "test_every_loop_gives_the_weights_of_the_courses_own_bit_for_bit",
        "test_with_dropout_the_losses_are_the_same_too",
    ),
    "core/test_hub.py": ("test_a_cached_model_loads_offline_without_touching_the_network",),
    "core/test_notebook_setup.py": ("test_a_gpu_that_cannot_be_used_is_named_and_hidden",),
    "core/test_pairs.py": ("test_three_steps_move_what_should_train_and_nothing_else",),
    "core/test_panels.py": ("test_in_a_real_kernel",),
    "core/test_train.py": (
        "test_a_killed_process_resumes_to_the_same_weights",
        "test_killed_at_any_step_and_resumed_the_weights_are_the_same",
        "test_out_of_memory_says_what_would_fit_and_lets_go",
    ),
    "data/test_chat.py": ("test_a_fine_tune_learns_to_answer",),
    "script/test_command.py": ("test_remedies_are_planned_and_worded_for_the_program",),
    "script/test_page.py": ("test_commands_print_what_the_page_shows",),
    "script/test_programs.py": (
        "test_a_plan_is_what_the_real_run_takes",
        "test_programs_run_unchanged_for_a_gpu",
    ),
    "data/test_padding.py": (
        "test_accuracy_is_the_same_however_the_test_rows_are_padded",
        "test_fixed_and_dynamic_have_the_same_gradients",
    ),
    "data/test_tokenizers.py": (
        "test_all_of_r8",
        "test_every_character_that_unicode_3_2_knew",
    ),
    "exercises/test_check.py": (
        "test_in_a_real_kernel_a_check_prints_one_line_and_no_result",
        "test_without_assertions_nothing_passes",
        *(
            f"{test}[{number}]"
            for test in (
                "test_the_right_answer_passes_and_none_is_not_answered",
                "test_wrong_answers_fail_each_with_a_sentence",
            )
            for number in FULL_SIZE
        ),
    ),
    "exercises/test_handout.py": ("test_solutions_are_judged_from_another_process_as_in_this_one",),
    "memory/test_memory.py": ("test_release_lets_go_of_what_a_kernel_holds",),
    "parallel/test_cluster_script.py": (
        "test_a_lost_rank_costs_the_steps_since_the_last_checkpoint_and_no_loss",
        "test_without_a_checkpoint_all_steps_are_done_again",
        "test_another_number_of_ranks_goes_on_with_the_same_losses",
        "test_a_checkpoint_that_was_interrupted_is_passed_over",
        "test_a_checkpoint_that_does_not_fit_ends_in_one_sentence",
        "test_a_rank_lost_without_restarts_is_named_and_nothing_is_left",
        "test_a_number_that_cannot_be_is_refused",
        "test_the_batch_file_trains_on_two_machines",
    ),
    "parallel/test_collectives.py": ("test_on_real_processes_it_is_torchs_own_all_reduce",),
    "parallel/test_context_script.py": (
        "test_attention_and_its_gradients_are_those_of_one_process",
        "test_experts_on_two_ranks_are_those_of_one_process",
        "test_a_model_whose_text_is_cut_has_the_losses_of_one_process",
        "test_experts_train_to_the_losses_of_one_process",
        "test_what_cannot_be_cut_ends_in_one_sentence",
    ),
    "parallel/test_launch.py": (
        "test_a_failing_rank_is_named_with_its_traceback",
        "test_a_killed_rank_is_named_with_its_signal",
        "test_a_port_in_use_is_no_error",
        "test_each_rank_knows_who_it_is_and_can_talk",
        "test_nothing_is_left_when_the_notebooks_process_ends",
        "test_ranks_that_hang_are_stopped",
        "test_ranks_that_ignore_being_told_to_end_are_ended",
    ),
    "parallel/test_pipeline.py": (
        "test_a_killed_rank_is_named",
        "test_full_models_without_values",
        "test_on_real_processes_the_gradients_are_the_whole_models_by_hand_and_by_torch",
    ),
    "parallel/test_scripts.py": (
        "test_two_ranks_have_the_losses_of_one_process",
        "test_shards_of_two_ranks_are_resumed_by_three",
    ),
    "parallel/test_tensor_by_hand.py": ("test_on_real_processes",),
    "parallel/test_tensor_dtensor.py": (
        "test_dropout_is_alike_outside_the_pairs_and_apart_inside",
        "test_full_models_without_values_and_without_ranks",
        "test_logits_gradients_norm_and_a_step_are_the_whole_models",
        "test_two_all_reduces_a_layer_each_way",
    ),
    "parallel/test_zero_by_hand.py": (
        "test_a_killed_rank_is_named",
        "test_torchs_own_give_the_unsharded_weights_and_the_formulas_bytes",
    ),
    "plan/test_custom_step_layers.py": (
        "test_buckets_lie_beside_gradients_unless_these_are_views_of_them",
        "test_the_peak_is_the_one_that_pytorchs_recipe_publishes",
    ),
    "plan/test_hf_model.py": (
        "test_published_models_have_the_published_sizes",
        "test_the_courses_own_models_plan_alike_by_this_way",
        "test_the_plan_is_what_real_tensors_take_to_the_byte",
    ),
    "plan/test_known.py": (
        "test_a_sample_of_the_shipped_answers_is_what_is_planned_today",
        "test_a_shipped_answer_is_what_is_planned_today",
        "test_an_ambiguous_gpu_is_said",
        "test_known_models_have_the_published_sizes",
        "test_the_first_line_says_what_is_planned",
    ),
    "plan/test_plan.py": (
        "test_accumulation_keeps_gradients_alive_in_the_next_forward_pass",
        "test_full_models_have_the_published_sizes",
        "test_nothing_is_offered_where_nothing_helps_or_nothing_is_needed",
        "test_remedies_fit_and_change_one_field",
        "test_several_fields_of_a_recipe_where_none_suffices_alone",
        "test_the_bound_for_more_micro_batches_is_a_lower_one",
        "test_the_interpolation_holds_for_full_models",
        "test_the_interpolation_is_the_plan",
        "test_the_largest_batch_of_a_recipe",
        "test_the_plan_is_what_real_tensors_take_to_the_byte",
        "test_the_plan_of_newer_fields_is_what_real_tensors_take_to_the_byte",
        "test_the_plan_needs_little_memory_and_no_network",
        "test_torchs_own_tracker_agrees_by_category",
    ),
    "plan/test_fastest.py": (
        "test_half_precision_is_found_where_products_take_the_time",
        "test_it_is_as_fast_as_the_fastest_of_all_combinations",
        "test_the_command_prints_it",
        "test_the_host_is_tried_last_and_only_where_nothing_fits_without",
    ),
    "plan/test_compiled.py": (
        "test_a_compiled_decoder_keeps_less_and_does_not_break",
        "test_the_compiled_side_is_that_of_inductors_code_to_the_byte",
        "test_the_eager_side_is_that_of_real_tensors",
    ),
    "plan/test_language_models.py": (
        "test_every_two_fields_together_plan",
        "test_layers_traced_once_give_the_trace_of_all",
        "test_nf4_is_what_real_quantized_layers_take_to_the_byte",
        "test_the_plan_is_what_real_tensors_take_to_the_byte",
    ),
    "plan/test_plan_command.py": (
        "test_a_hopeless_case_ends_plainly",
        "test_lora_beside_eight_billion_parameters_on_24_gb",
        "test_json_holds_the_plan",
        "test_several_changes_together_where_none_suffices",
        "test_the_command_runs_by_itself_without_network_or_gpu",
        "test_the_largest_batch_fits_and_one_more_does_not",
        "test_what_does_not_fit_says_what_would",
        "test_without_a_gpu_the_gpus_that_hold_it",
    ),
    "plan/test_repeated_layers.py": ("test_a_trace_with_layers_left_out_is_that_of_all_layers",),
    "strategy/test_choose.py": (
        "test_a_bound_never_hides_the_best",
        "test_nothing_fits",
        "test_one_gpu_that_is_too_small",
        "test_what_the_planner_refuses_is_left_out_with_its_reason",
    ),
    "strategy/test_ladder.py": (
        "test_flops_of_a_micro_batch_are_a_polynomial_in_its_width",
        "test_the_blogs_confounded_rows_are_those_whose_peak_something_else_moved",
    ),
    "strategy/test_long_context.py": ("test_a_kept_plan_is_todays",),
    "strategy/test_plan_cache.py": ("test_kept_plans_are_those_of_today",),
    "strategy/test_plan_ranks.py": (
        "test_messages_are_zeros_formulas",
        "test_one_rank_is_the_plain_plan",
        "test_optimizer_states_are_shared_out",
        "test_planned_ranks_are_real_ranks",
    ),
    "strategy/test_plan_layout.py": (
        "test_a_few_layers_stand_for_all",
        "test_a_planned_rank_is_a_real_one",
        "test_messages_of_fsdp_are_zeros_formulas",
        "test_replicas_sum_their_shards",
        "test_tied_embeddings_are_in_one_group",
        "test_what_zero_shards_is_a_part_and_the_rest_is_whole",
    ),
    "strategy/test_search.py": (
        "test_adapters_are_laid_out_over_copies_of_the_model",
        "test_adapters_that_fit_nowhere_are_told_what_saves",
        "test_bounds_are_below_what_is_planned",
        "test_bounds_never_hide_the_best",
        "test_eight_billion_parameters_on_eight_h100s_are_laid_out_as_torchtitan_did",
        "test_the_bound_of_messages_is_below_those_that_are_sent",
        "test_the_command_answers_and_its_own_command_gives_the_same",
        "test_the_text",
        "test_what_one_gpu_cannot_hold_is_said_with_what_is_missing",
        "test_zero_2_keeps_weights_as_fsdp_without_resharding_does",
    ),
    "strategy/test_rank_time.py": ("test_without_messages_it_is_the_time_of_one_gpu",),
    "strategy/test_step_time.py": (
        "test_slower_links_cost_time_and_never_work",
        "test_the_trace_holds_every_message_that_is_sent",
        "test_what_cannot_be_timed_is_refused",
    ),
    "parallel/test_finetune_script.py": ("test_a_fine_tune_learns_and_saves_adapters",),
    "techniques/test_compiled.py": ("test_a_compiled_fine_tune_has_the_losses_of_the_one_without",),
    "techniques/test_base_weights.py": (
        "test_the_frozen_base_is_stored_small_and_adapters_and_head_learn_in_fp32",
    ),
    "techniques/test_offload.py": ("test_what_is_on_the_host_is_not_on_the_gpu",),
    "timing/test_describe.py": (
        "test_a_plan_without_operations_says_so",
        "test_a_recipes_flops_are_the_plans",
        "test_the_plans_operations_are_those_of_a_real_step",
    ),
    "timing/test_published_times.py": (
        "test_steps_on_four_gpus_are_missed_by_less_than_10_percent",
        "test_backward_passes_are_missed_by_less_than_8_percent_in_the_mean",
        "test_plans_are_nearer_than_the_simpler_estimates",
        "test_whole_passes_are_missed_by_less_than_10_percent_in_the_mean",
    ),
    "tools/test_course.py": (
        "test_a_dead_kernel_is_a_failure_not_a_wait",
        "test_a_failing_cell_is_shown",
        "test_an_interrupted_run_keeps_nothing_and_leaves_no_kernel",
    ),
    "tools/test_grade.py": (
        "test_each_exercise_counts_for_itself",
        "test_what_is_no_students_notebook",
    ),
    "tools/test_packaging.py": (
        "test_the_installed_package_plans_and_builds_a_mini_model",
        "test_the_wheel_holds_helpers_exercises_and_all_their_data",
    ),
    "tools/test_pretrain.py": (
        "test_first_deberta_steps_are_the_cards",
        "test_first_decoder_steps_are_the_cards",
        "test_first_vit_steps_are_the_cards",
        "test_no_test_document_in_the_corpus",
        "test_tokenizer_is_reproducible",
    ),
    "site/test_calculator.py": (
        "test_a_kept_plan_is_a_fresh_plan",
        "test_the_page_plans_as_python_does",
        "test_the_page_answers_what_the_command_answers",
    ),
    "site/test_jupyterlab.py": ("test_a_panel_answers_and_is_never_lost",),
    "site/test_site.py": (
        "test_every_link_of_every_page_leads_somewhere_and_nothing_is_loaded_from_elsewhere",
        "test_every_notebook_is_a_page_with_neighbours_and_a_copy_to_take",
        "test_formulas_are_mathml_and_none_is_left_as_it_was_written",
        "test_every_page_opens_without_an_error_and_fits_a_phone",
        "test_search_finds_the_lesson_of_a_technique",
        "test_light_and_dark_wide_and_narrow",
        "test_axe_finds_nothing_serious",
    ),
    "tools/test_readme.py": (
        "test_the_kept_plans_of_the_notebooks_table_are_fresh_and_it_marks_its_rows",
        "test_the_tables_are_fresh",
    ),
    "tools/test_stress.py": (
        "test_a_gpu_without_kernels_ends_in_advice_and_the_rest_runs_on_the_cpu",
        "test_interrupted_finds_a_process_left_behind_and_ends_it",
        "test_interrupted_finds_what_an_interrupt_breaks_and_a_notebook_too_short",
        "test_interrupted_runs_again_in_the_same_kernel",
        "test_offline_cuts_the_kernel_and_its_children_off_but_not_from_this_machine",
        "test_offline_hides_the_packages_that_hosted_machines_lack",
        "test_offline_reports_what_needs_the_network",
        "test_offline_the_course_imports_and_its_first_cell_says_what_is_left_out",
        "test_order_runs_all_every_round_and_goes_on_after_a_failure",
        "test_silence_about_such_a_gpu_is_a_failure",
        "test_the_order_is_the_seed_s",
    ),
}

# {file: parameters of slow tests that are fast by themselves, and show what the test is about}
FAST: dict[str, tuple[str, ...]] = {
    "core/test_frameworks.py": (
        "test_every_loop_gives_the_weights_of_the_courses_own_bit_for_bit[fabric-deberta]",
        "test_every_loop_gives_the_weights_of_the_courses_own_bit_for_bit[plain-vit]",
    ),
    "core/test_pairs.py": (
        "test_three_steps_move_what_should_train_and_nothing_else[deberta-plain]",
        "test_three_steps_move_what_should_train_and_nothing_else[vit-plain]",
    ),
    "core/test_train.py": ("test_killed_at_any_step_and_resumed_the_weights_are_the_same[vit]",),
    "plan/test_hf_model.py": (
        "test_the_plan_is_what_real_tensors_take_to_the_byte[gpt2-plain]",
        "test_the_plan_is_what_real_tensors_take_to_the_byte[llama-4-1]",
        "test_the_plan_is_what_real_tensors_take_to_the_byte[resnet-plain]",
    ),
    "plan/test_known.py": ("test_known_models_have_the_published_sizes[openai-community/gpt2]",),
    "plan/test_plan.py": (
        "test_the_plan_is_what_real_tensors_take_to_the_byte[deberta-plain]",
        "test_the_plan_is_what_real_tensors_take_to_the_byte[vit-optimizer=adamw8bit]",
        "test_the_plan_is_what_real_tensors_take_to_the_byte[vit-plain]",
    ),
    "plan/test_repeated_layers.py": (
        "test_a_trace_with_layers_left_out_is_that_of_all_layers[bert-{}]",
        "test_a_trace_with_layers_left_out_is_that_of_all_layers[llama-{}]",
    ),
    "timing/test_describe.py": ("test_a_recipes_flops_are_the_plans[vit]",),
}
