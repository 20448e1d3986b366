//! Runs the suite against a small store with one bug at a time. Each bug must fail the clause that
//! names the broken promise, and the store without a bug must pass all clauses.

use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};

use crate::tiny::{StoreBug, Tiny};
use registry_conformance::{Harness, run};

mod without_a_bug {
    use crate::tiny::{StoreBug, Tiny};

    registry_conformance::conformance! {
        harness = Tiny(StoreBug::None),
        runs = 228,
        skips = 207,
        without = [
        fair,
        fair_on_request,
        shared,
        upgradable,
        permits,
        values,
        waiters,
        namespaces,
        restart,
        wipe,
        remote,
    ],
    }
}

/// Asserts that the broken store fails each of `clauses`, and that the correct store passes it.
#[track_caller]
pub(crate) fn assert_fails<H: Harness + 'static>(
    correct: impl Fn() -> H + UnwindSafe + RefUnwindSafe,
    broken: impl Fn() -> H + UnwindSafe + RefUnwindSafe,
    clauses: &[&str],
) {
    for clause in clauses {
        let (theme, name) = clause.split_once("::").expect("a theme and a name");
        // First without the bug, because a clause that always fails proves nothing.
        run(correct(), theme, name);
        let result = catch_unwind(|| run(broken(), theme, name));
        assert!(result.is_err(), "{clause} does not find the bug of {:?}", broken());
    }
}

macro_rules! bugs {
    ($($test:ident: $bug:ident => [$($clause:literal),+ $(,)?];)*) => {
        $(
            #[test]
            fn $test() {
                let (correct, broken) = (|| Tiny(StoreBug::None), || Tiny(StoreBug::$bug));
                assert_fails(correct, broken, &[$($clause),+]);
            }
        )*
    };
}

bugs! {
    a_release_by_another_claim_is_found: ReleaseByOtherClaim => [
        "release::releasing_another_claim_does_not_free_the_key",
        "release::a_late_release_does_not_free_the_successor",
        "expiry::an_expired_claim_does_not_affect_its_successor",
    ];
    a_release_that_compares_more_than_the_id_is_found: ReleaseComparesLease => [
        "release::a_grant_is_released_through_another_client",
    ];
    a_release_of_another_key_is_found: ReleaseIgnoresKey => [
        "release::a_release_under_another_key_frees_nothing",
    ];
    a_late_release_is_found: ReleaseIsDelayed => [
        "release::a_released_key_is_free_at_once",
        "release::an_unlocked_lock_is_free_for_another_process_at_once",
    ];
    a_release_that_always_returns_freed_is_found: ReleaseAlwaysFreed => [
        "release::a_repeated_release_returns_not_held",
        "release::of_concurrent_repetitions_of_one_release_at_most_one_frees",
        "loss::unlock_detects_the_loss",
    ];
    a_renewal_that_revives_an_expired_grant_is_found: RenewRevives => [
        "renewal::a_renewal_does_not_revive_an_expired_grant",
    ];
    a_renewal_that_grants_is_found: RenewGrants => [
        "renewal::renewing_a_claim_that_was_never_granted_grants_nothing",
        "renewal::a_renewal_does_not_revive_a_released_grant",
        "loss::a_holder_is_notified_when_its_claim_is_gone",
    ];
    a_renewal_by_another_claim_is_found: RenewWithoutOwner => [
        "renewal::renewing_another_claim_does_not_extend_the_holders_lease",
    ];
    a_renewal_that_shortens_is_found: RenewShortens => [
        "renewal::a_renewal_never_shortens_a_lease",
    ];
    a_batch_that_stops_at_the_first_gone_claim_is_found: BatchStopsAtGone => [
        "renewal::a_released_claim_in_a_batch_does_not_prevent_other_renewals",
    ];
    a_batch_that_is_answered_out_of_order_is_found: BatchOutOfOrder => [
        "renewal::a_batch_is_answered_in_the_order_of_its_claims",
    ];
    a_batch_of_one_lease_is_found: BatchOfOneLease => [
        "renewal::each_claim_of_a_batch_has_its_own_lease",
    ];
    a_truncated_batch_is_found: BatchTruncated => [
        "renewal::a_large_batch_is_renewed_completely",
    ];
    tokens_that_restart_are_found: TokensResetOnRelease => [
        "fencing::tokens_increase_after_a_release",
        "fencing::tokens_increase_when_one_claim_is_granted_again",
        "fencing::guards_of_two_processes_have_increasing_tokens",
    ];
    tokens_of_each_client_are_found: TokensPerClient => [
        "fencing::tokens_increase_across_clients",
    ];
    tokens_without_blocks_are_found: TokensIgnoreBlock => [
        "fencing::a_reserved_block_of_tokens_is_issued_to_no_other_grant",
        "fencing::a_reserved_block_of_tokens_stays_reserved_after_an_expiry",
        "handoff::each_hand_over_has_a_larger_token",
    ];
    a_token_for_each_repetition_is_found: NewTokenOnRepeat => [
        "fencing::a_repeated_acquire_has_the_same_token",
    ];
    tokens_of_a_coarse_clock_are_found: TokensOfCoarseClock => [
        "fencing::tokens_increase_after_a_release",
    ];
    a_grant_with_a_constant_token_is_found: ConstantToken => [
        "fencing::every_grant_has_a_token",
    ];
    a_claim_that_is_busy_for_itself_is_found: RepeatedAcquireIsBusy => [
        "spi::a_granted_claim_is_granted_again",
    ];
    a_repetition_that_counts_as_reentry_is_found: RepeatedAcquireCounts => [
        "spi::a_granted_claim_is_granted_again",
        "spi::concurrent_repetitions_of_one_acquire_are_one_grant",
    ];
    a_repetition_that_shortens_the_lease_is_found: RepeatedAcquireShortens => [
        "spi::a_repeated_acquire_does_not_shorten_the_lease",
    ];
    a_gap_between_check_and_acquire_is_found: CheckThenAct => [
        "exclusion::of_many_concurrent_claims_exactly_one_is_granted",
        "exclusion::of_many_concurrent_try_locks_exactly_one_returns_a_guard",
    ];
    a_busy_answer_that_extends_the_lease_is_found: BusyExtendsLease => [
        "expiry::busy_attempts_do_not_extend_the_holders_lease",
    ];
    a_busy_claim_that_stays_queued_is_found: BusyQueuesClaim => [
        "spi::a_busy_claim_leaves_no_record",
        "drop_and_cancel::a_dropped_waiter_leaves_no_record",
    ];
    a_lease_without_end_is_found: NeverExpires => [
        "expiry::a_grant_ends_with_its_lease",
        "expiry::a_waiter_acquires_the_lock_of_a_dead_holder",
    ];
    a_lease_that_ends_early_is_found: ExpiresEarly => [
        "expiry::a_grant_does_not_end_before_its_lease",
        "renewal::a_renewed_grant_does_not_end_before_its_returned_lease",
        "expiry::an_expired_guard_is_not_held_once_another_process_has_the_lock",
    ];
    a_lease_that_is_stated_too_long_is_found: StatesLongerLease => [
        "expiry::a_grant_does_not_end_before_its_lease",
        "expiry::a_guard_is_valid_for_less_than_its_lease",
        "expiry::an_expired_guard_is_not_held_once_another_process_has_the_lock",
    ];
    a_missed_wake_up_is_found: WakesAreMissed => [
        "waiting::a_release_between_busy_and_wait_is_not_missed",
    ];
    a_wake_up_for_one_client_is_found: WakesOwnClientOnly => [
        "waiting::a_release_ends_the_wait_of_another_client",
    ];
    folded_keys_are_found: KeysFolded => ["keys::similar_keys_are_different_locks"];
    trimmed_keys_are_found: KeysTrimmed => ["keys::similar_keys_are_different_locks"];
    truncated_keys_are_found: KeysTruncated => ["keys::the_longest_keys_are_different_locks"];
    badly_escaped_keys_are_found: KeysEscapedBadly => ["keys::keys_made_of_separators_are_different_locks"];
    a_list_of_expired_holders_is_found: ListsExpired => ["inspect::inspect_returns_no_holder_of_a_free_key"];
    forgotten_labels_are_found: LabelsLost => ["inspect::labels_are_returned_unchanged"];
    a_forced_release_without_effect_is_found: ForceReleaseHasNoEffect => [
        "inspect::a_forced_release_frees_the_key_at_once",
        "inspect::a_forced_release_of_a_free_key_frees_nothing",
    ];
    a_forced_release_without_a_wake_up_is_found: ForceReleaseWakesNone => ["inspect::a_forced_release_ends_a_wait"];
    a_forced_release_without_an_invalidation_is_found: ForceReleaseSendsNoInvalidation => [
        "loss::a_forced_release_is_reported_before_the_next_renewal",
        "loss::a_forced_release_is_reported_to_a_holder_that_does_not_renew",
    ];
    an_invalidation_sent_to_only_one_registry_is_found: NotifiesLastRegistryOnly => [
        "loss::every_registry_over_one_client_is_notified_of_its_losses",
    ];
    an_inspection_that_renews_is_found: InspectRenews => ["inspect::inspection_neither_locks_nor_extends"];
    a_connection_held_by_an_unpolled_caller_is_found: ConnectionHeldByCaller => [
        "drop_and_cancel::an_unpolled_future_does_not_block_other_keys",
    ];
}
