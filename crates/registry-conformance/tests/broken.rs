//! Runs the suite against a small store with one bug at a time. Each bug must fail the clause that
//! names the broken promise, and the store without a bug must pass all clauses.

mod tiny;

use std::panic::catch_unwind;

use registry_conformance::run;
use tiny::{Bug, Tiny};

mod without_a_bug {
    use super::tiny::{Bug, Tiny};

    registry_conformance::conformance! {
        harness = Tiny(Bug::None),
        runs = 220,
        skips = 12,
        without = [fair, namespaces, restart, wipe, remote],
    }
}

/// Asserts that a store with `bug` fails each of `clauses`.
#[track_caller]
fn found(bug: Bug, clauses: &[&str]) {
    for clause in clauses {
        let (theme, name) = clause.split_once("::").expect("a theme and a name");
        // First without the bug, because a clause that always fails proves nothing.
        run(Tiny(Bug::None), theme, name);
        assert!(
            catch_unwind(|| run(Tiny(bug), theme, name)).is_err(),
            "{clause} does not find {bug:?}"
        );
    }
}

macro_rules! bugs {
    ($($test:ident: $bug:ident => [$($clause:literal),+ $(,)?];)*) => {
        $(
            #[test]
            fn $test() {
                found(Bug::$bug, &[$($clause),+]);
            }
        )*
    };
}

bugs! {
    a_release_by_anybody_is_found: ReleaseWithoutOwner => [
        "release::releasing_anothers_grant_does_not_free_it",
        "release::a_late_release_does_not_free_the_successor",
        "expiry::an_expired_claim_is_powerless_against_its_successor",
    ];
    a_release_that_compares_more_than_the_id_is_found: ReleaseComparesLease => [
        "release::a_grant_is_released_through_another_client",
    ];
    a_release_of_another_key_is_found: ReleaseIgnoresKey => [
        "release::a_release_under_another_key_frees_nothing",
    ];
    a_release_that_takes_its_time_is_found: ReleaseFreesLate => [
        "release::a_released_key_is_free_at_once",
        "release::an_unlocked_lock_is_free_for_all_at_once",
    ];
    a_release_that_is_always_right_is_found: ReleaseAlwaysFreed => [
        "release::a_repeated_release_is_harmless",
        "release::repetitions_of_one_release_at_once_free_once",
        "loss::unlocking_finds_out_about_the_loss",
    ];
    a_renewal_that_brings_back_the_dead_is_found: RenewResurrects => [
        "renewal::renewing_does_not_bring_back_an_expired_grant",
    ];
    a_renewal_that_grants_is_found: RenewGrants => [
        "renewal::renewing_what_was_never_granted_grants_nothing",
        "renewal::renewing_does_not_bring_back_a_released_grant",
        "loss::a_lock_that_is_gone_is_told_to_its_holder",
    ];
    a_renewal_by_anybody_is_found: RenewWithoutOwner => [
        "renewal::renewing_anothers_grant_does_nothing_to_it",
    ];
    a_renewal_that_shortens_is_found: RenewShortens => [
        "renewal::renewing_never_shortens_a_lease",
    ];
    a_batch_that_stops_at_the_first_dead_is_found: BatchStopsAtGone => [
        "renewal::a_dead_claim_in_a_batch_does_not_stop_the_others",
    ];
    a_batch_that_is_answered_out_of_order_is_found: BatchOutOfOrder => [
        "renewal::a_batch_is_answered_in_the_order_of_its_claims",
    ];
    a_batch_of_one_lease_is_found: BatchOfOneLease => [
        "renewal::each_claim_of_a_batch_has_its_own_lease",
    ];
    a_batch_that_is_cut_off_is_found: BatchCutOff => [
        "renewal::a_large_batch_is_renewed_whole",
    ];
    tokens_that_begin_anew_are_found: TokensResetOnRelease => [
        "fencing::tokens_grow_over_release",
        "fencing::tokens_grow_when_one_claim_is_granted_anew",
        "fencing::guards_of_all_processes_have_growing_tokens",
    ];
    tokens_of_each_client_are_found: TokensPerClient => [
        "fencing::tokens_grow_over_clients",
    ];
    tokens_without_blocks_are_found: TokensIgnoreBlock => [
        "fencing::a_reserved_block_of_tokens_is_given_to_nobody_else",
        "fencing::a_reserved_block_of_tokens_outlives_its_holder",
        "handoff::each_hand_over_has_a_larger_token",
    ];
    a_token_for_each_repetition_is_found: TokensAnewOnRepeat => [
        "fencing::a_repeated_acquire_has_the_same_token",
    ];
    tokens_of_a_coarse_clock_are_found: TokensOfCoarseClock => [
        "fencing::tokens_grow_over_release",
    ];
    a_grant_without_token_is_found: NoToken => [
        "fencing::every_grant_has_a_token",
    ];
    a_claim_that_is_busy_for_itself_is_found: AcquireBusyForItself => [
        "spi::a_granted_claim_is_granted_again",
    ];
    a_repetition_that_counts_as_reentry_is_found: AcquireCountsRepeats => [
        "spi::a_granted_claim_is_granted_again",
        "spi::repetitions_of_one_acquire_at_once_are_one_grant",
    ];
    a_repetition_that_shortens_the_lease_is_found: AcquireShortensOnRepeat => [
        "spi::a_repeated_acquire_does_not_shorten_the_lease",
    ];
    a_gap_between_looking_and_taking_is_found: CheckThenAct => [
        "exclusion::of_many_claims_at_once_exactly_one_is_granted",
        "exclusion::of_many_try_locks_at_once_exactly_one_wins",
    ];
    a_refusal_that_prolongs_the_lease_is_found: BusyProlongs => [
        "expiry::failed_attempts_do_not_prolong_the_holders_lease",
    ];
    a_refused_claim_that_is_kept_is_found: BusyKeepsClaim => [
        "spi::a_busy_claim_leaves_nothing_behind",
        "drop_and_cancel::a_dropped_waiter_leaves_no_record",
    ];
    a_lease_without_end_is_found: NeverExpires => [
        "expiry::a_grant_ends_with_its_lease",
        "expiry::a_waiter_gets_a_dead_holders_lock",
    ];
    a_lease_that_ends_early_is_found: ExpiresEarly => [
        "expiry::a_grant_does_not_end_before_its_lease",
        "renewal::a_renewed_grant_does_not_end_before_it_was_told",
        "expiry::a_holder_knows_of_its_end_before_anybody_else_can_have_the_lock",
    ];
    a_lease_that_is_told_too_long_is_found: TellsLongerLease => [
        "expiry::a_grant_does_not_end_before_its_lease",
        "expiry::a_guard_is_valid_for_less_than_its_lease",
        "expiry::a_holder_knows_of_its_end_before_anybody_else_can_have_the_lock",
    ];
    a_missed_wake_up_is_found: WakesAreMissed => [
        "waiting::a_release_between_busy_and_wait_is_not_missed",
    ];
    a_wake_up_for_one_client_is_found: WakesOwnClientOnly => [
        "waiting::a_store_that_wakes_ends_the_waits_of_other_clients",
    ];
    folded_keys_are_found: KeysFolded => ["keys::keys_that_look_alike_are_different_locks"];
    trimmed_keys_are_found: KeysTrimmed => ["keys::keys_that_look_alike_are_different_locks"];
    cut_keys_are_found: KeysCut => ["keys::the_longest_keys_are_different_locks"];
    badly_escaped_keys_are_found: KeysEscapedBadly => ["keys::keys_made_of_separators_are_different_locks"];
    a_list_of_the_dead_is_found: ListsTheDead => ["inspect::nobody_is_told_of_a_free_key"];
    forgotten_labels_are_found: ForgetsLabels => ["inspect::a_label_comes_back_as_it_was_given"];
    a_break_that_breaks_nothing_is_found: ForcesNothing => [
        "inspect::a_forced_release_frees_the_key_at_once",
        "inspect::a_forced_release_of_a_free_key_frees_nothing",
    ];
    a_break_that_wakes_nobody_is_found: ForcesWithoutWaking => ["inspect::a_forced_release_wakes_those_who_wait"];
    a_break_that_is_told_to_nobody_is_found: ForcesInSilence => [
        "loss::a_broken_lock_is_told_at_once",
        "loss::a_broken_lock_that_is_not_renewed_is_told_at_once",
    ];
    a_break_that_is_told_to_one_registry_is_found: TellsLastRegistryOnly => [
        "loss::every_registry_over_a_client_is_told_of_its_losses",
    ];
    an_inspection_that_renews_is_found: InspectRenews => ["inspect::inspecting_holds_and_changes_nothing"];
    a_connection_that_a_parked_caller_keeps_is_found: ConnectionHeldByCaller => [
        "drop_and_cancel::a_future_that_is_not_polled_holds_up_no_other_key",
    ];
}
