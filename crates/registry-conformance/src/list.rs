//! The only list of clauses, from which every macro that needs all clauses is expanded. A test
//! compares it with the sources.

use crate::need::Need;
use crate::run::Clause;

/// Calls the macro `$then` with all clauses and their needs.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_all_clauses {
    ($then:ident) => {
        $then! {
            spi {
                a_granted_claim_is_granted_again [faithful],
                a_granted_claim_is_granted_again_through_another_client [faithful roaming],
                repetitions_of_one_acquire_at_once_are_one_grant [faithful],
                a_repeated_acquire_does_not_shorten_the_lease [faithful],
                a_grant_tells_how_long_it_lasts [faithful],
                the_shortest_and_the_longest_lease_are_granted [faithful],
                every_client_of_a_store_has_the_same_capabilities [faithful],
                a_claim_has_the_same_shard_in_every_client [faithful],
                a_client_sees_at_once_what_another_did [faithful],
                a_thousand_requests_leave_a_client_as_good_as_new [faithful],
                many_requests_at_once_through_one_client_are_all_answered [faithful],
                a_busy_claim_is_not_kept_beyond_its_release [faithful],
                a_busy_claim_leaves_nothing_behind [faithful],
                queued_claims_are_granted_in_the_order_of_their_arrival [faithful fair],
                a_queued_claim_that_is_released_lets_the_next_one_pass [faithful fair],
                a_store_that_works_can_be_diagnosed [faithful],
            }
            exclusion {
                a_second_claim_is_busy_while_the_first_holds [faithful],
                a_claim_of_another_client_is_busy_while_the_first_holds [faithful],
                of_many_claims_at_once_exactly_one_is_granted [faithful],
                claims_of_different_keys_are_held_at_once [faithful],
                try_lock_gives_none_while_this_process_holds_the_lock [],
                try_lock_gives_none_while_another_process_holds_the_lock [],
                an_outage_is_an_error_and_never_busy [],
                two_handles_of_one_key_are_one_lock [],
                one_caller_holds_many_keys_at_once [],
                of_many_try_locks_at_once_exactly_one_wins [],
                critical_sections_of_several_processes_never_overlap [],
                critical_sections_of_one_process_never_overlap [],
                a_lock_that_another_process_holds_is_busy_here [remote],
                a_lock_that_is_held_here_is_busy_in_another_process [remote],
            }
            fencing {
                every_grant_has_a_token [faithful fencing],
                tokens_grow_over_release [faithful fencing],
                tokens_grow_over_clients [faithful fencing],
                tokens_grow_over_expiry [faithful fencing],
                tokens_grow_over_a_forced_release [faithful fencing inspect],
                tokens_grow_when_one_claim_is_granted_anew [faithful fencing],
                tokens_grow_over_a_restart [faithful fencing restart],
                tokens_grow_even_when_the_store_lost_its_data [faithful fencing wipe],
                a_repeated_acquire_has_the_same_token [faithful fencing],
                a_holder_keeps_its_token [faithful fencing],
                a_reserved_block_of_tokens_is_given_to_nobody_else [faithful fencing handoff],
                a_reserved_block_of_tokens_outlives_its_holder [faithful fencing handoff],
                guards_of_all_processes_have_growing_tokens [fencing],
                waiters_of_all_processes_have_growing_tokens [fencing],
            }
            expiry {
                a_grant_ends_with_its_lease [faithful],
                a_grant_does_not_end_before_its_lease [faithful],
                failed_attempts_do_not_prolong_the_holders_lease [faithful],
                an_expired_claim_is_powerless_against_its_successor [faithful],
                a_busy_reply_never_tells_more_time_than_the_lease [faithful],
                a_guard_is_valid_for_less_than_its_lease [],
                a_slow_reply_shortens_what_the_guard_believes [],
                a_waiter_gets_a_dead_holders_lock [],
                a_holder_knows_of_its_end_before_anybody_else_can_have_the_lock [],
                a_killed_process_holds_no_longer_than_its_lease [remote],
                a_stopped_process_finds_out_and_leaves_its_successor_alone [remote],
            }
            renewal {
                renewing_prolongs_a_grant [faithful],
                a_grant_is_renewed_through_another_client [faithful roaming],
                renewing_never_shortens_a_lease [faithful],
                renewing_does_not_bring_back_an_expired_grant [faithful],
                renewing_does_not_bring_back_a_grant_that_was_followed_by_another [faithful],
                renewing_does_not_bring_back_a_released_grant [faithful],
                renewing_what_was_never_granted_grants_nothing [faithful],
                renewing_anothers_grant_does_nothing_to_it [faithful],
                a_batch_is_answered_in_the_order_of_its_claims [faithful],
                a_dead_claim_in_a_batch_does_not_stop_the_others [faithful],
                each_claim_of_a_batch_has_its_own_lease [faithful],
                a_renewed_grant_does_not_end_before_it_was_told [faithful],
                an_empty_batch_has_no_answers [faithful],
                a_large_batch_is_renewed_whole [faithful],
                a_held_lock_outlives_its_lease_by_renewal [],
                a_guard_renewed_by_hand_is_valid_for_longer [],
                a_guard_renewed_by_hand_never_loses_time [],
                renewal_survives_an_outage_shorter_than_the_lease [],
                a_lost_renewal_reply_is_borne [],
                nothing_is_renewed_after_unlock [],
                nothing_is_renewed_after_an_unlock_that_failed [],
                a_lock_that_is_not_to_be_renewed_is_not_renewed [],
                one_lost_lock_does_not_stop_the_renewal_of_others [],
            }
            release {
                a_released_key_is_free_at_once [faithful],
                a_repeated_release_is_harmless [faithful],
                repetitions_of_one_release_at_once_free_once [faithful],
                releasing_what_was_never_granted_is_harmless [faithful],
                releasing_anothers_grant_does_not_free_it [faithful],
                a_late_release_does_not_free_the_successor [faithful],
                a_release_under_another_key_frees_nothing [faithful],
                a_grant_is_released_through_another_client [faithful],
                a_claim_that_was_granted_after_its_release_is_released_again [faithful],
                an_unlocked_lock_is_free_for_all_at_once [],
                a_refused_release_is_made_again [],
                a_lost_release_reply_is_not_taken_for_a_lost_lock [],
                an_unlock_that_never_reaches_the_store_is_an_error [],
                execute_locked_holds_the_lock_during_the_work_only [],
                execute_locked_for_gives_none_when_the_lock_is_busy [],
                a_failing_unlock_does_not_hide_the_result_of_the_work [],
                unlocking_an_expired_lock_is_an_error_and_leaves_the_successor_alone [],
                dropping_an_expired_guard_leaves_the_successor_alone [],
            }
            waiting {
                a_store_that_wakes_ends_the_wait_when_the_holder_releases [faithful wakes],
                a_store_that_wakes_ends_the_waits_of_other_clients [faithful wakes],
                a_release_between_busy_and_wait_is_not_missed [faithful wakes],
                waits_of_many_keys_end_each_with_its_own_release [faithful wakes],
                a_wait_may_be_dropped_at_any_time [faithful],
                a_waiter_gets_the_lock_when_this_process_unlocks_it [],
                a_waiter_gets_the_lock_when_another_process_unlocks_it [],
                a_wait_of_zero_still_gets_a_free_lock [],
                a_wait_of_zero_does_not_wait [],
                a_wait_for_this_process_ends_with_none_at_its_deadline [],
                a_wait_for_another_process_ends_with_none_at_its_deadline [],
                callers_of_one_process_are_served_in_the_order_of_their_arrival [],
                a_caller_that_gives_up_leaves_the_others_in_order [],
                one_unlock_lets_one_of_two_processes_in [],
                a_lost_wake_up_costs_no_more_than_a_poll [],
                a_wake_up_for_nothing_neither_ends_the_wait_nor_grants [],
                a_waiter_bears_passing_trouble_of_the_store [],
                an_outage_for_the_whole_wait_is_an_error [],
                lasting_trouble_ends_the_wait_at_once [],
                many_waiters_of_one_process_ask_the_store_as_rarely_as_one [],
                waiters_of_one_key_do_not_hold_up_another [],
                a_waiter_gets_the_lock_when_a_real_process_unlocks_it [remote],
                a_real_process_gets_the_lock_when_it_is_unlocked_here [remote],
            }
            keys {
                hostile_keys_are_different_locks [faithful],
                keys_that_look_alike_are_different_locks [faithful],
                the_longest_keys_are_different_locks [faithful],
                keys_made_of_separators_are_different_locks [faithful],
                no_two_of_many_keys_are_the_same_lock [faithful],
                keys_come_back_as_they_were_given [faithful inspect],
                hostile_keys_are_locked_and_unlocked [],
                an_empty_key_is_refused_before_any_request [],
                a_key_that_is_too_long_is_refused_before_any_request [],
            }
            inspect {
                a_holder_is_told_as_it_is [faithful inspect],
                a_label_comes_back_as_it_was_given [faithful inspect labels],
                a_renewed_holder_is_told_with_its_new_lease [faithful inspect],
                nobody_is_told_of_a_free_key [faithful inspect],
                inspecting_holds_and_changes_nothing [faithful inspect],
                a_list_has_every_held_key_and_no_other [faithful inspect],
                a_busy_answer_names_no_other_than_the_holder [faithful],
                a_forced_release_frees_the_key_at_once [faithful inspect],
                the_holder_of_a_broken_lock_is_powerless [faithful inspect],
                a_forced_release_of_a_free_key_frees_nothing [faithful inspect],
                a_forced_release_wakes_those_who_wait [faithful inspect wakes],
                namespaces_share_no_locks [faithful namespaces],
                nothing_is_told_or_broken_across_namespaces [faithful inspect namespaces],
                a_lock_tells_its_holder [inspect],
                a_broken_lock_is_free_and_its_holder_is_told [inspect],
                a_waiter_gets_a_broken_lock [inspect],
            }
            options {
                a_lease_out_of_range_is_refused_before_any_request [],
                a_wait_of_a_hundred_years_is_refused_before_any_request [],
                holds_out_of_range_are_refused_before_any_request [],
                a_lock_may_have_its_own_lease [],
                a_lock_may_have_its_own_label [labels inspect],
                a_lock_ends_with_its_max_hold [],
                a_forgotten_guard_with_a_max_hold_is_freed [],
                a_key_stays_taken_for_its_min_hold [],
                a_key_that_is_kept_for_its_min_hold_may_be_broken [inspect],
                a_min_hold_that_is_over_delays_nothing [],
                a_renewal_out_of_range_is_refused_and_costs_nothing [],
                a_registry_tells_what_its_store_can [],
            }
            loss {
                a_lock_that_is_gone_is_told_to_its_holder [],
                a_lost_lock_stays_lost [],
                a_lock_that_is_let_go_is_not_lost [],
                a_held_lock_is_not_told_as_lost [],
                a_broken_lock_is_told_at_once [inspect reports_invalidations],
                a_broken_lock_that_is_not_renewed_is_told_at_once [inspect reports_invalidations],
                every_registry_over_a_client_is_told_of_its_losses [inspect reports_invalidations],
                a_lock_that_its_own_registry_breaks_is_lost_at_once [inspect],
                a_lock_that_a_registry_over_the_same_client_breaks_is_lost_at_once [inspect],
                an_outage_longer_than_the_lease_is_a_loss [],
                a_store_that_never_answers_is_a_loss [],
                an_unrenewed_lock_is_lost_when_its_lease_ends [],
                a_lost_lock_gives_up_its_turn_in_this_process [],
                protected_work_stops_when_the_lock_is_lost [],
                protected_work_gives_its_own_result [],
                work_does_not_begin_under_a_lost_lock [],
                executed_work_stops_when_the_lock_is_lost [],
                a_renewal_by_hand_finds_out_about_the_loss [],
                unlocking_finds_out_about_the_loss [faithful],
                a_refused_release_does_not_hide_the_loss [faithful],
            }
            reentry {
                a_lock_without_an_owner_is_not_reentrant [],
                an_owner_enters_its_own_lock_again [],
                an_owner_does_not_enter_from_another_process [],
                entering_again_asks_the_store_nothing [],
                entering_again_has_the_same_token [fencing],
                entering_again_never_shortens_the_lease [],
                holds_are_those_of_the_first_guard_of_a_lock [],
                a_lock_is_free_when_its_last_guard_is_gone [],
                an_owner_scope_reaches_nested_calls [],
                an_owner_does_not_queue_behind_those_who_wait [],
                a_waiter_is_let_in_beside_its_own_owner [],
                a_loss_is_told_to_all_guards_of_a_lock [],
            }
            handoff {
                a_hand_over_asks_the_store_nothing [faithful handoff],
                without_hand_over_each_caller_asks_the_store [faithful handoff],
                a_claim_is_handed_over_a_bounded_number_of_times [faithful handoff],
                a_busy_process_does_not_shut_another_out [],
                each_hand_over_has_a_larger_token [handoff fencing],
                a_handed_over_lock_outlives_its_lease_by_renewal [handoff],
                a_claim_is_handed_over_only_to_those_who_asked_for_the_same [handoff],
                a_claim_with_a_fenced_write_is_not_handed_over [handoff],
            }
            drop_and_cancel {
                a_dropped_guard_frees_the_lock [],
                a_dropped_guard_lets_the_next_caller_in [],
                a_panic_in_the_critical_section_frees_the_lock [],
                a_guard_dropped_outside_the_runtime_frees_the_lock [],
                a_waiter_dropped_outside_the_runtime_leaves_nothing [],
                a_future_that_is_not_polled_holds_up_no_other_key [],
                a_parked_lock_leaves_the_stores_queue [],
                a_parked_lock_gives_back_a_grant_that_it_does_not_take [],
                a_parked_lock_lets_the_next_caller_of_its_process_pass [],
                a_parked_waiter_passes_on_what_it_was_given [],
                a_parked_unlock_frees_the_lock [],
                a_dropped_handle_or_registry_lets_nothing_go [],
                a_dropped_waiter_leaves_no_record [],
                a_dropped_waiter_lets_the_next_one_pass [],
                an_acquisition_dropped_in_flight_is_given_back [],
                a_grant_whose_reply_was_lost_is_given_back [],
                an_acquire_that_arrives_after_its_release_ends_with_its_lease [],
                no_slot_is_left_when_all_is_dropped [],
                lock_may_be_dropped_at_every_poll [],
                a_waiting_lock_may_be_dropped_at_every_poll [],
                a_queued_lock_may_be_dropped_at_every_poll [],
                a_slow_try_lock_for_may_be_dropped_at_every_poll [],
                unlock_may_be_dropped_at_every_poll [],
                renew_may_be_dropped_at_every_poll [],
                protect_may_be_dropped_at_every_poll [],
                close_may_be_dropped_at_every_poll [],
                entering_again_may_be_dropped_at_every_poll [],
            }
            close {
                close_waits_for_guards_to_be_let_go [],
                close_takes_what_is_not_let_go [],
                close_gives_back_what_was_dropped_before [],
                a_closed_registry_gives_no_lock [],
                close_sends_waiters_away [],
                closing_twice_is_harmless [],
                a_parked_close_holds_up_no_other [],
                close_ends_in_time_though_the_store_hangs [],
                closing_one_registry_leaves_the_others_alone [],
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
                    call: |lab| Box::pin(crate::clauses::$theme::$name(lab)),
                },
            )*)*
        ];
    };
}

macro_rules! need {
    (faithful) => {
        Need::Faithful
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
    (roaming) => {
        Need::Roaming
    };
}

__for_all_clauses! { table }
