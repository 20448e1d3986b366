//! The only list of clauses. `__for_all_clauses!` passes it to another macro. The test
//! `every_clause_function_is_in_the_list` compares this list with the functions in `clauses`.

use crate::need::Need;
use crate::run::Clause;

/// Calls the macro `$then` with all clauses and their needs.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_all_clauses {
    ($then:ident) => {
        $then! {
            spi {
                a_granted_claim_is_granted_again [fault_free],
                a_granted_claim_is_granted_again_through_another_client [fault_free grants_outlive_client],
                concurrent_repetitions_of_one_acquire_are_one_grant [fault_free],
                a_repeated_acquire_does_not_shorten_the_lease [fault_free],
                a_grant_states_its_lease [fault_free],
                the_shortest_and_the_longest_lease_are_granted [fault_free],
                every_client_of_a_store_has_the_same_capabilities [fault_free],
                a_claim_has_the_same_shard_in_every_client [fault_free],
                a_change_by_one_client_is_visible_to_another_at_once [fault_free],
                a_client_answers_correctly_after_a_thousand_requests [fault_free],
                many_concurrent_requests_of_one_client_are_all_answered [fault_free],
                a_released_busy_claim_leaves_the_queue [fault_free],
                a_busy_claim_leaves_no_record [fault_free],
                queued_claims_are_granted_in_the_order_of_their_arrival [fault_free fair],
                a_released_queued_claim_does_not_block_the_next_one [fault_free fair],
                a_reachable_store_can_be_diagnosed [fault_free],
            }
            exclusion {
                a_second_claim_is_busy_while_the_first_holds [fault_free],
                a_claim_of_another_client_is_busy_while_the_first_holds [fault_free],
                of_many_concurrent_claims_exactly_one_is_granted [fault_free],
                claims_of_different_keys_are_held_at_once [fault_free],
                try_lock_returns_none_while_this_process_holds_the_lock [],
                try_lock_returns_none_while_another_process_holds_the_lock [],
                an_outage_is_an_error_and_never_busy [],
                two_handles_of_one_key_are_one_lock [],
                one_caller_holds_many_keys_at_once [],
                of_many_concurrent_try_locks_exactly_one_returns_a_guard [],
                critical_sections_of_several_processes_never_overlap [],
                critical_sections_of_one_process_never_overlap [],
                a_lock_that_another_process_holds_is_busy_here [remote],
                a_lock_that_is_held_here_is_busy_in_another_process [remote],
            }
            fencing {
                every_grant_has_a_token [fault_free fencing],
                tokens_increase_after_a_release [fault_free fencing],
                tokens_increase_across_clients [fault_free fencing],
                tokens_increase_after_an_expiry [fault_free fencing],
                tokens_increase_after_a_forced_release [fault_free fencing inspect],
                tokens_increase_when_one_claim_is_granted_again [fault_free fencing],
                tokens_increase_after_a_restart [fault_free fencing restart],
                tokens_increase_after_a_restart_without_data [fault_free fencing wipe],
                a_repeated_acquire_has_the_same_token [fault_free fencing],
                a_holder_keeps_its_token [fault_free fencing],
                a_reserved_block_of_tokens_is_issued_to_no_other_grant [fault_free fencing handoff],
                a_reserved_block_of_tokens_stays_reserved_after_an_expiry [fault_free fencing handoff],
                guards_of_two_processes_have_increasing_tokens [fencing],
                waiters_of_two_processes_have_increasing_tokens [fencing],
            }
            expiry {
                a_grant_ends_with_its_lease [fault_free],
                a_grant_does_not_end_before_its_lease [fault_free],
                busy_attempts_do_not_extend_the_holders_lease [fault_free],
                an_expired_claim_does_not_affect_its_successor [fault_free],
                retry_after_is_at_most_the_lease_plus_one_second [fault_free],
                a_guard_is_valid_for_less_than_its_lease [],
                a_slow_reply_shortens_the_validity_of_the_guard [],
                a_waiter_acquires_the_lock_of_a_dead_holder [],
                an_expired_guard_is_not_held_once_another_process_has_the_lock [],
                the_lock_of_a_killed_process_becomes_free_after_its_lease [remote],
                a_stopped_process_detects_its_loss_and_does_not_affect_its_successor [remote],
            }
            renewal {
                a_renewal_extends_a_grant [fault_free],
                a_grant_is_renewed_through_another_client [fault_free grants_outlive_client],
                a_renewal_never_shortens_a_lease [fault_free],
                a_renewal_does_not_revive_an_expired_grant [fault_free],
                a_renewal_does_not_revive_a_grant_after_its_successor [fault_free],
                a_renewal_does_not_revive_a_released_grant [fault_free],
                renewing_a_claim_that_was_never_granted_grants_nothing [fault_free],
                renewing_another_claim_does_not_extend_the_holders_lease [fault_free],
                a_batch_is_answered_in_the_order_of_its_claims [fault_free],
                a_released_claim_in_a_batch_does_not_prevent_other_renewals [fault_free],
                each_claim_of_a_batch_has_its_own_lease [fault_free],
                a_renewed_grant_does_not_end_before_its_returned_lease [fault_free],
                an_empty_batch_has_no_answers [fault_free],
                a_large_batch_is_renewed_completely [fault_free],
                a_held_lock_is_renewed_beyond_its_lease [],
                a_manual_renewal_extends_the_validity_of_the_guard [],
                a_manual_renewal_never_shortens_the_lease [],
                renewal_survives_an_outage_shorter_than_the_lease [],
                a_lost_renewal_reply_does_not_end_the_lock [],
                nothing_is_renewed_after_unlock [],
                nothing_is_renewed_after_a_refused_release [],
                a_lock_with_renewal_disabled_is_not_renewed [],
                one_lost_lock_does_not_stop_the_renewal_of_others [],
            }
            release {
                a_released_key_is_free_at_once [fault_free],
                a_repeated_release_returns_not_held [fault_free],
                of_concurrent_repetitions_of_one_release_at_most_one_frees [fault_free],
                releasing_a_claim_that_was_never_granted_returns_not_held [fault_free],
                releasing_another_claim_does_not_free_the_key [fault_free],
                a_late_release_does_not_free_the_successor [fault_free],
                a_release_under_another_key_frees_nothing [fault_free],
                a_grant_is_released_through_another_client [fault_free],
                a_claim_that_was_granted_after_its_release_is_released_again [fault_free],
                an_unlocked_lock_is_free_for_another_process_at_once [],
                a_refused_release_is_retried [],
                a_lost_release_reply_is_not_reported_as_a_lost_lock [],
                an_unlock_that_never_reaches_the_store_is_an_error [],
                execute_locked_holds_the_lock_during_the_work_only [],
                execute_locked_with_returns_none_when_the_lock_is_busy [],
                a_failing_unlock_does_not_hide_the_result_of_the_work [],
                unlocking_an_expired_lock_is_an_error_and_does_not_affect_the_successor [],
                dropping_an_expired_guard_does_not_affect_the_successor [],
            }
            waiting {
                a_release_ends_the_wait_of_the_same_client [fault_free wakes],
                a_release_ends_the_wait_of_another_client [fault_free wakes],
                a_release_between_busy_and_wait_is_not_missed [fault_free wakes],
                each_wait_ends_with_the_release_of_its_own_key [fault_free wakes],
                a_wait_may_be_dropped_at_any_time [fault_free],
                a_waiter_acquires_the_lock_when_this_process_unlocks_it [],
                a_waiter_acquires_the_lock_when_another_process_unlocks_it [],
                a_wait_of_zero_acquires_a_free_lock [],
                a_wait_of_zero_does_not_wait [],
                a_wait_for_a_holder_in_this_process_returns_none_at_its_deadline [],
                a_wait_for_a_holder_in_another_process_returns_none_at_its_deadline [],
                callers_of_one_process_acquire_in_the_order_of_their_arrival [],
                a_cancelled_waiter_does_not_change_the_order_of_the_others [],
                one_unlock_ends_the_wait_of_one_of_two_processes [],
                a_waiter_acquires_the_lock_after_a_lost_wake_up [],
                a_premature_wake_up_neither_ends_the_wait_nor_grants [],
                a_waiter_retries_after_transient_store_errors [],
                an_outage_for_the_whole_wait_is_an_error [],
                a_permanent_store_error_ends_the_wait_at_once [],
                fifty_waiters_of_one_process_poll_as_rarely_as_one [],
                waiters_of_one_key_do_not_delay_callers_of_other_keys [],
                a_waiter_acquires_the_lock_when_a_separate_process_unlocks_it [remote],
                a_separate_process_acquires_the_lock_when_it_is_unlocked_here [remote],
            }
            waiters {
                a_waiting_claim_is_listed_with_its_key_and_mode [fault_free waiters],
                a_claim_that_gives_up_is_not_listed_any_more [fault_free waiters],
                waiting_claims_of_all_modes_are_listed [fault_free waiters shared permits],
                listed_labels_and_keys_are_unchanged [fault_free waiters labels],
                a_registered_claim_affects_no_grant [fault_free waiters handoff],
                a_registration_lapses_with_its_lease [fault_free waiters handoff],
                namespaces_share_no_waiters [fault_free waiters namespaces],
                a_waiting_caller_is_listed_until_it_gives_up [fault_free waiters],
                a_waiting_caller_that_acquires_the_lock_is_not_listed_any_more [fault_free waiters],
            }
            keys {
                keys_with_special_characters_are_different_locks [fault_free],
                similar_keys_are_different_locks [fault_free],
                the_longest_keys_are_different_locks [fault_free],
                keys_made_of_separators_are_different_locks [fault_free],
                many_short_keys_are_different_locks [fault_free],
                keys_are_returned_unchanged [fault_free inspect],
                keys_with_special_characters_can_be_locked_and_unlocked [],
                an_empty_key_is_refused_before_any_request [],
                a_key_that_is_too_long_is_refused_before_any_request [],
            }
            inspect {
                inspect_returns_the_holder [fault_free inspect],
                labels_are_returned_unchanged [fault_free inspect labels],
                inspect_returns_the_new_lease_after_a_renewal [fault_free inspect],
                inspect_returns_no_holder_of_a_free_key [fault_free inspect],
                inspection_neither_locks_nor_extends [fault_free inspect],
                list_returns_every_held_key_and_no_other [fault_free inspect],
                a_holder_named_in_a_busy_answer_is_the_current_one [fault_free],
                a_forced_release_frees_the_key_at_once [fault_free inspect],
                a_claim_ends_with_a_forced_release [fault_free inspect],
                a_forced_release_of_a_free_key_frees_nothing [fault_free inspect],
                a_forced_release_ends_a_wait [fault_free inspect wakes],
                namespaces_share_no_locks [fault_free namespaces],
                inspection_and_forced_release_do_not_cross_namespaces [fault_free inspect namespaces],
                holders_and_list_return_the_current_holder [inspect],
                a_forced_release_frees_the_lock_and_ends_the_guard [inspect],
                a_waiter_acquires_the_lock_after_a_forced_release [inspect],
            }
            options {
                a_lease_out_of_range_is_refused_before_any_request [],
                a_wait_of_a_hundred_years_has_no_limit [],
                hold_limits_out_of_range_are_refused_before_any_request [],
                a_lock_may_have_its_own_lease [],
                a_lock_may_have_its_own_label [labels inspect],
                a_lock_ends_with_its_max_hold [],
                a_lock_with_a_leaked_guard_ends_with_its_max_hold [],
                a_key_stays_locked_for_its_min_hold [],
                a_forced_release_ends_a_min_hold [inspect],
                an_elapsed_min_hold_does_not_delay_the_release [],
                a_renewal_out_of_range_is_refused_before_any_request [],
                a_registry_returns_the_capabilities_of_its_store [],
            }
            shared {
                readers_of_two_clients_hold_together [fault_free shared],
                a_reader_excludes_writers [fault_free shared],
                a_writer_excludes_readers [fault_free shared],
                a_writer_is_granted_after_the_last_reader [fault_free shared],
                concurrent_readers_and_writers_never_hold_together [fault_free shared],
                a_waiting_writer_blocks_new_readers [fault_free shared],
                the_place_of_a_waiting_writer_lapses_with_its_lease [fault_free shared],
                a_waiting_writer_that_repeats_its_attempt_keeps_its_place [fault_free shared],
                a_released_waiting_writer_lets_readers_in_at_once [fault_free shared],
                a_writer_that_does_not_wait_blocks_no_readers [fault_free shared],
                a_repeated_shared_acquire_is_one_grant [fault_free shared],
                each_reader_expires_by_itself [fault_free shared],
                a_writer_is_granted_after_the_readers_expire [fault_free shared],
                a_renewal_extends_only_its_own_reader [fault_free shared],
                a_batch_renews_readers_of_one_key [fault_free shared],
                a_release_of_one_reader_keeps_the_others [fault_free shared],
                a_release_of_another_claim_ends_no_reader [fault_free shared],
                tokens_of_readers_and_writers_increase [fault_free shared fencing],
                a_forced_release_ends_all_readers [fault_free shared inspect],
                inspect_returns_all_readers [fault_free shared inspect],
                inspect_returns_the_mode_of_each_holder [fault_free shared inspect],
                the_last_reader_wakes_a_waiting_writer [fault_free shared wakes],
                a_writer_that_gives_up_wakes_a_waiting_reader [fault_free shared wakes],
                a_mode_that_the_store_does_not_have_is_refused_before_any_request [],
                readers_of_two_processes_hold_together [shared],
                try_read_returns_none_while_a_writer_holds_the_lock [shared],
                an_attempt_that_does_not_wait_leaves_no_record [shared],
                a_waiting_lock_call_blocks_readers_of_other_processes [shared],
                readers_without_a_pause_do_not_starve_a_writer [shared],
                a_dropped_waiting_lock_call_lets_readers_in [shared],
                an_unpolled_waiting_lock_call_lets_readers_in [shared],
                a_lock_call_that_gives_up_lets_readers_in [shared],
                a_dropped_waiting_read_call_leaves_nothing_behind [shared],
                waiting_readers_acquire_the_lock_after_a_writer [shared],
                readers_of_one_process_share_one_grant [shared inspect handoff],
                tokens_of_readers_differ_and_the_next_writer_has_a_larger_one [shared fencing],
                a_lost_shared_grant_is_reported_to_all_its_readers [shared handoff],
                a_lost_reader_does_not_affect_readers_of_other_processes [shared],
                a_forced_release_is_reported_to_all_readers [shared inspect],
                a_forced_release_is_reported_to_all_grants_of_a_process_at_once [shared inspect reports_invalidations],
                a_shared_lock_is_renewed_beyond_its_lease [shared],
                a_writer_acquires_the_lock_of_a_dead_reader [shared],
                an_owner_reenters_its_shared_lock_as_a_reader_only [shared],
                close_ends_readers_and_waiting_callers [shared],
                critical_sections_of_readers_and_writers_never_overlap [shared],
                read_may_be_dropped_at_every_poll [shared],
                a_lock_call_behind_a_reader_may_be_dropped_at_every_poll [shared],
                a_read_with_a_lost_reply_leaves_no_grant [shared],
            }
            upgradable {
                an_upgradable_claim_holds_next_to_readers [fault_free shared upgradable],
                an_upgradable_claim_excludes_writers_and_a_second_one [fault_free upgradable],
                of_many_concurrent_upgradable_claims_exactly_one_is_granted [fault_free upgradable],
                an_upgrade_waits_for_readers_and_blocks_new_ones [fault_free shared upgradable],
                an_upgrade_without_readers_is_granted_at_once [fault_free upgradable],
                an_upgrade_does_not_wait_for_a_waiting_writer [fault_free upgradable],
                an_upgraded_claim_has_a_larger_token [fault_free shared upgradable fencing],
                a_repeated_upgrade_is_one_conversion [fault_free upgradable],
                a_repeated_downgrade_is_one_conversion [fault_free shared upgradable],
                a_conversion_of_an_ended_claim_grants_nothing [fault_free shared upgradable],
                a_conversion_of_a_waiting_claim_grants_nothing [fault_free shared upgradable],
                a_downgrade_lets_readers_in_and_keeps_the_token [fault_free shared upgradable],
                a_claim_is_upgraded_and_downgraded_again [fault_free shared upgradable],
                a_late_downgrade_does_not_weaken_a_later_upgrade [fault_free shared upgradable fencing],
                a_late_upgrade_does_not_strengthen_a_downgraded_claim [fault_free shared upgradable fencing],
                a_withdrawn_upgrade_lets_readers_in [fault_free shared upgradable],
                a_waiting_upgrade_lapses_with_its_lease [fault_free shared upgradable],
                a_release_during_an_upgrade_lets_readers_in [fault_free shared upgradable],
                an_upgrade_is_granted_after_the_readers_expire [fault_free shared upgradable],
                a_conversion_extends_the_lease_and_never_shortens_it [fault_free shared upgradable],
                the_last_reader_wakes_a_waiting_upgrade [fault_free shared upgradable wakes],
                a_weaker_mode_wakes_waiting_readers [fault_free shared upgradable wakes],
                inspect_returns_the_mode_after_a_conversion [fault_free shared upgradable inspect],
                a_claim_that_was_released_by_force_cannot_be_converted [fault_free upgradable inspect],
                a_guard_is_upgraded_after_the_readers_and_downgraded [shared upgradable],
                a_guard_is_converted_repeatedly [shared upgradable],
                an_upgrade_that_times_out_leaves_the_guard_held [shared upgradable],
                a_dropped_upgrade_frees_the_key [shared upgradable],
                a_loss_during_an_upgrade_ends_it [shared upgradable],
                a_lost_future_from_before_a_conversion_reports_a_later_loss [shared upgradable],
                a_converted_lock_is_renewed_beyond_its_lease [shared upgradable],
                an_owner_reenters_a_converted_lock [shared upgradable],
                an_invalid_conversion_is_refused_before_any_request [shared upgradable],
                a_downgrade_after_a_hand_over_keeps_the_token [shared upgradable fencing handoff],
                readers_of_a_converted_grant_have_tokens_of_their_own [shared upgradable fencing],
                waiters_acquire_the_lock_after_an_upgradable_holder [upgradable],
                a_guard_is_upgraded_before_a_waiting_writer [upgradable],
                a_conversion_is_repeated_after_lost_requests_and_replies [shared upgradable],
                a_permanent_store_error_during_a_conversion_releases_the_lock [shared upgradable],
                close_ends_a_waiting_upgrade [shared upgradable],
                upgraded_sections_never_overlap_with_others [shared upgradable],
                upgrade_may_be_dropped_at_every_poll [shared upgradable],
                a_withdrawal_and_a_downgrade_may_be_dropped_at_every_poll [shared upgradable],
            }
            permits {
                permits_are_granted_until_all_units_are_taken [fault_free permits],
                a_claim_takes_all_of_its_units_or_none [fault_free permits],
                concurrent_permits_never_exceed_the_units [fault_free permits],
                of_many_concurrent_permits_as_many_as_fit_are_granted [fault_free permits],
                a_repeated_permit_takes_its_units_once [fault_free permits],
                each_permit_expires_by_itself [fault_free permits],
                a_renewal_extends_only_its_own_permit [fault_free permits],
                a_release_returns_its_own_units [fault_free permits],
                a_different_total_of_units_is_busy_with_the_total_in_the_store [fault_free permits],
                permits_and_writers_exclude_each_other [fault_free permits],
                permits_and_readers_exclude_each_other [fault_free permits shared],
                a_waiting_writer_blocks_new_permits [fault_free permits],
                units_of_different_keys_are_counted_separately [fault_free permits],
                tokens_of_permits_are_unique_and_increase [fault_free permits fencing],
                a_released_unit_wakes_a_claim_for_one_unit [fault_free permits wakes],
                a_claim_for_three_units_is_woken_when_the_third_is_released [fault_free permits wakes],
                inspect_returns_the_units_of_each_permit [fault_free permits inspect],
                a_forced_release_ends_all_permits [fault_free permits inspect],
                a_semaphore_limits_the_callers_of_several_processes [permits],
                a_process_holds_several_permits [permits],
                units_out_of_range_are_refused_before_any_request [permits],
                a_different_total_of_units_is_an_error [permits],
                a_released_unit_goes_to_a_caller_that_takes_one [permits handoff],
                a_lost_permit_is_reported_to_its_guard_only [permits],
                a_forced_release_is_reported_to_all_permits_at_once [permits inspect reports_invalidations],
                the_units_of_a_dead_holder_return_after_its_lease [permits],
                permits_are_renewed_beyond_their_leases [permits],
                a_dropped_caller_or_guard_returns_its_units [permits],
                a_semaphore_is_resized_when_no_permit_is_held [permits],
                holders_returns_each_permit [permits inspect],
                close_returns_the_units_of_its_process [permits],
                acquire_many_may_be_dropped_at_every_poll [permits],
                a_permit_with_a_lost_reply_takes_its_units_once [permits],
            }
            fair_queue {
                claims_that_join_are_granted_in_the_order_of_arrival [fault_free fair_on_request],
                a_claim_that_does_not_queue_does_not_overtake [fault_free fair_on_request],
                the_place_of_a_waiter_lapses_with_its_lease [fault_free fair_on_request],
                a_waiter_that_repeats_its_attempt_keeps_its_place [fault_free fair_on_request],
                a_released_waiter_leaves_the_queue [fault_free fair_on_request],
                the_first_waiter_follows_an_expired_holder [fault_free fair_on_request],
                a_forced_release_keeps_the_queue [fault_free fair_on_request inspect],
                the_next_waiter_is_woken [fault_free fair_on_request wakes],
                readers_and_writers_are_granted_in_the_order_of_arrival [fault_free fair_on_request shared],
                permits_are_granted_in_the_order_of_arrival [fault_free fair_on_request permits],
                a_claim_that_joins_a_free_key_is_granted_at_once [fault_free fair_on_request],
                fair_is_refused_before_any_request_by_a_store_without_a_queue [],
                fair_callers_of_several_processes_acquire_in_turn [fair_on_request],
                a_call_that_does_not_wait_does_not_overtake_a_fair_one [fair_on_request],
                a_fair_caller_that_leaves_does_not_block_the_next_one [fair_on_request],
                a_fair_caller_acquires_the_lock_after_a_dead_waiter [fault_free fair_on_request],
                many_local_callers_do_not_overtake_a_fair_caller [fair_on_request],
                fair_callers_of_all_modes_get_the_key [fair_on_request shared permits],
            }
            several_keys {
                an_attempt_with_one_busy_key_holds_none [fault_free],
                a_repeated_attempt_for_several_keys_has_the_same_tokens [fault_free fencing],
                tokens_of_several_keys_increase [fault_free fencing],
                claims_of_several_keys_are_released_independently [fault_free],
                a_lock_of_several_keys_waits_for_the_busy_one [fault_free],
                a_lock_of_several_keys_may_be_dropped_at_every_poll [fault_free],
            }
            values {
                a_key_has_no_value_before_the_first_write [fault_free values],
                a_value_is_visible_to_all_clients_and_survives_the_release [fault_free values],
                a_value_has_any_bytes_up_to_the_maximum [fault_free values],
                a_repeated_write_is_written_again [fault_free values],
                only_a_holder_writes_the_value [fault_free values],
                a_holder_writes_while_others_wait [fault_free values],
                an_expired_holder_does_not_write_the_value [fault_free values],
                a_holder_of_a_broken_lock_does_not_write_the_value [fault_free values inspect],
                a_late_write_does_not_replace_a_newer_value [fault_free values handoff],
                a_shared_holder_does_not_write_the_value [fault_free values shared],
                values_of_different_keys_are_independent [fault_free values],
                a_value_is_not_a_lock [fault_free values inspect],
                a_value_survives_a_restart [fault_free values restart],
                values_of_other_namespaces_are_not_visible [fault_free values namespaces],
                a_guard_writes_the_value_and_every_registry_reads_it [values],
                a_guard_of_a_broken_lock_cannot_write [values inspect],
                an_invalid_value_is_refused_before_any_request [values],
                a_guard_that_has_written_is_not_handed_over [values],
            }
            once {
                a_tick_runs_once_over_all_processes [values],
                an_earlier_tick_is_already_done [values],
                a_tick_that_another_process_runs_is_busy [values],
                a_caller_that_waits_does_not_repeat_the_tick [values],
                a_failed_run_leaves_the_tick_available [values],
                the_tick_of_a_dead_process_runs_after_its_lease [values],
                catch_up_selects_which_missed_ticks_run [values],
                each_run_has_a_larger_token [values fencing],
                a_period_runs_once [values],
                a_named_tick_is_not_repeated_while_it_is_the_last_one [values],
                a_run_that_lost_its_lock_does_not_record_the_tick [values inspect],
                a_record_write_with_a_lost_reply_is_repeated [values],
                a_foreign_value_is_refused [values],
                a_run_may_be_dropped_at_every_poll [fault_free values],
            }
            election {
                one_candidate_leads_at_a_time [values],
                a_step_down_releases_only_after_the_work_has_ended [values],
                work_that_does_not_end_is_dropped_after_a_step_down [values],
                another_candidate_leads_after_a_step_down [values],
                observers_see_the_leader_and_the_vacancy [values],
                observers_see_the_vacancy_after_a_forced_release [values inspect],
                a_lost_term_drops_the_work_and_begins_a_new_campaign [values inspect],
                a_candidate_leads_after_a_dead_leader [values],
                a_failed_campaign_is_retried_and_leaves_no_record [values],
                a_failed_release_does_not_keep_the_role [values],
                a_candidate_with_a_higher_priority_is_preferred [values inspect shared labels],
                a_candidate_leads_if_the_preferred_one_does_not_campaign
                    [values inspect shared labels],
                an_election_ends_when_its_registry_is_closed [values],
                a_campaign_may_be_dropped_at_every_poll [values],
            }
            loss {
                a_holder_is_notified_when_its_claim_is_gone [],
                a_lost_lock_stays_lost [],
                a_released_lock_is_not_reported_as_lost [],
                a_held_lock_is_not_reported_as_lost [],
                a_forced_release_is_reported_before_the_next_renewal [inspect reports_invalidations],
                a_forced_release_is_reported_to_a_holder_that_does_not_renew [inspect reports_invalidations],
                every_registry_over_one_client_is_notified_of_its_losses [inspect reports_invalidations],
                a_forced_release_by_the_same_registry_is_reported_at_once [inspect],
                a_forced_release_by_another_registry_over_the_client_is_reported_at_once [inspect],
                an_outage_longer_than_the_lease_is_a_loss [],
                an_unanswered_renewal_is_a_loss [],
                an_unrenewed_lock_is_lost_when_its_lease_ends [],
                a_lost_lock_does_not_block_other_callers_of_its_process [],
                protect_stops_the_work_when_the_lock_is_lost [],
                protect_returns_the_output_of_completed_work [],
                protect_does_not_start_work_under_a_lost_lock [],
                execute_locked_stops_the_work_when_the_lock_is_lost [],
                a_manual_renewal_detects_the_loss [],
                unlock_detects_the_loss [fault_free],
                a_refused_release_does_not_hide_the_loss [fault_free],
            }
            reentry {
                a_lock_without_an_owner_is_not_reentrant [],
                an_owner_can_reenter_its_lock [],
                an_owner_cannot_reenter_from_another_process [],
                reentry_sends_no_request_to_the_store [],
                reentered_guards_have_the_same_token [fencing],
                reentry_never_shortens_the_lease [],
                hold_limits_are_those_of_the_first_guard_of_a_lock [],
                a_lock_is_released_with_its_last_guard [],
                an_owner_scope_applies_to_nested_calls [],
                a_reentering_owner_does_not_queue_behind_waiters [],
                two_waiting_calls_of_one_owner_acquire_together [],
                a_loss_is_reported_to_all_guards_of_a_lock [],
            }
            handoff {
                a_hand_over_sends_no_request_to_the_store [fault_free handoff],
                without_hand_over_each_caller_has_its_own_claim [fault_free handoff],
                a_claim_is_handed_over_a_bounded_number_of_times [fault_free handoff],
                many_local_callers_do_not_starve_another_registry [],
                each_hand_over_has_a_larger_token [handoff fencing],
                a_handed_over_lock_is_renewed_beyond_its_lease [handoff],
                a_claim_is_handed_over_only_for_equal_options [handoff],
                a_claim_with_a_fenced_write_is_not_handed_over [handoff],
            }
            drop_and_cancel {
                a_dropped_guard_frees_the_lock [],
                a_waiter_acquires_the_lock_of_a_dropped_guard [],
                a_panic_in_the_critical_section_frees_the_lock [],
                a_guard_dropped_outside_the_runtime_frees_the_lock [],
                a_waiter_dropped_outside_the_runtime_leaves_the_key_free [],
                an_unpolled_future_does_not_block_other_keys [],
                an_unpolled_lock_leaves_the_queue_of_the_store [],
                a_grant_for_an_unpolled_lock_ends_with_its_lease [],
                an_unpolled_lock_does_not_block_the_next_caller_of_its_process [],
                an_unpolled_waiter_passes_its_lock_to_the_next_caller [],
                an_unpolled_unlock_frees_the_lock [],
                a_dropped_handle_or_registry_releases_no_lock [],
                a_dropped_waiter_leaves_no_record [],
                a_dropped_waiter_does_not_block_the_next_one [],
                an_acquisition_dropped_in_flight_is_released [],
                a_grant_with_a_lost_reply_is_released [],
                an_acquire_that_arrives_after_its_release_ends_with_its_lease [],
                no_local_lock_remains_for_unused_keys [],
                lock_may_be_dropped_at_every_poll [],
                a_waiting_lock_may_be_dropped_at_every_poll [],
                a_queued_lock_may_be_dropped_at_every_poll [],
                a_slow_try_lock_for_may_be_dropped_at_every_poll [],
                unlock_may_be_dropped_at_every_poll [],
                extend_may_be_dropped_at_every_poll [],
                protect_may_be_dropped_at_every_poll [],
                close_may_be_dropped_at_every_poll [],
                reentry_may_be_dropped_at_every_poll [],
            }
            close {
                close_waits_for_guards_to_be_released [],
                close_releases_the_remaining_locks_at_its_limit [],
                close_releases_the_locks_of_dropped_guards [],
                a_closed_registry_returns_closed [],
                close_ends_waits_with_closed [],
                closing_twice_returns_clean_reports [],
                an_unpolled_close_does_not_block_another_close [],
                close_ends_in_bounded_time_if_the_store_does_not_answer [],
                closing_one_registry_does_not_affect_another [],
            }
        }
    };
}

macro_rules! table {
    ($($theme:ident { $($name:ident [$($need:ident)*],)* })*) => {
        /// All clauses, in the order of the list.
        pub(crate) static CLAUSES: &[Clause] = &[
            $($(
                Clause {
                    theme: stringify!($theme),
                    name: stringify!($name),
                    needs: &[$(need!($need)),*],
                    call: |context| Box::pin(crate::clauses::$theme::$name(context)),
                },
            )*)*
        ];
    };
}

macro_rules! need {
    (fault_free) => {
        Need::FaultFree
    };
    (fencing) => {
        Need::Fencing
    };
    (fair) => {
        Need::Fair
    };
    (handoff) => {
        Need::Handoff
    };
    (fair_on_request) => {
        Need::FairOnRequest
    };
    (shared) => {
        Need::Shared
    };
    (upgradable) => {
        Need::Upgradable
    };
    (permits) => {
        Need::Permits
    };
    (values) => {
        Need::Values
    };
    (waiters) => {
        Need::Waiters
    };
    (wakes) => {
        Need::Wakes
    };
    (reports_invalidations) => {
        Need::ReportsInvalidations
    };
    (labels) => {
        Need::Labels
    };
    (inspect) => {
        Need::Inspect
    };
    (namespaces) => {
        Need::Namespaces
    };
    (restart) => {
        Need::Restart
    };
    (wipe) => {
        Need::Wipe
    };
    (remote) => {
        Need::Remote
    };
    (grants_outlive_client) => {
        Need::GrantsOutliveClient
    };
}

__for_all_clauses! { table }
