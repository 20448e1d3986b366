//! Runs the clauses of modes against a small store with one bug at a time. Each bug must fail the
//! clauses that name the broken promise.

use crate::broken::assert_fails;
use crate::tiny_modes::{ModeBug, TinyModes};

macro_rules! bugs {
    ($($test:ident: $bug:ident => [$($clause:literal),+ $(,)?];)*) => {
        $(
            #[test]
            fn $test() {
                let (correct, broken) = (|| TinyModes(ModeBug::None), || TinyModes(ModeBug::$bug));
                assert_fails(correct, broken, &[$($clause),+]);
            }
        )*
    };
}

bugs! {
    readers_that_overtake_writers_are_found: ReadersOvertakeWriters => [
        "shared::a_waiting_writer_blocks_new_readers",
        "shared::a_waiting_lock_call_blocks_readers_of_other_processes",
        "shared::readers_without_a_pause_do_not_starve_a_writer",
        "fair_queue::readers_and_writers_are_granted_in_the_order_of_arrival",
    ];
    a_place_without_end_is_found: PlacesNeverLapse => [
        "shared::the_place_of_a_waiting_writer_lapses_with_its_lease",
        "fair_queue::the_place_of_a_waiter_lapses_with_its_lease",
        "fair_queue::a_fair_caller_acquires_the_lock_after_a_dead_waiter",
    ];
    a_place_without_a_lease_is_found: PlacesLapseAtOnce => [
        "shared::a_waiting_writer_that_repeats_its_attempt_keeps_its_place",
        "fair_queue::a_waiter_that_repeats_its_attempt_keeps_its_place",
    ];
    a_place_that_outlives_its_release_is_found: PlacesOutliveReleases => [
        "shared::a_released_waiting_writer_lets_readers_in_at_once",
        "shared::a_dropped_waiting_lock_call_lets_readers_in",
        "shared::a_lock_call_that_gives_up_lets_readers_in",
        "fair_queue::a_released_waiter_leaves_the_queue",
        "fair_queue::a_fair_caller_that_leaves_does_not_block_the_next_one",
    ];
    a_claim_that_queues_unasked_is_found: AllClaimsQueue => [
        "shared::a_writer_that_does_not_wait_blocks_no_readers",
        "shared::a_writer_excludes_readers",
        "shared::an_attempt_that_does_not_wait_leaves_no_record",
        "permits::a_claim_takes_all_of_its_units_or_none",
    ];
    a_claim_that_does_not_queue_is_found: NoClaimQueues => [
        "shared::a_waiting_writer_blocks_new_readers",
        "fair_queue::claims_that_join_are_granted_in_the_order_of_arrival",
        "permits::a_waiting_writer_blocks_new_permits",
        "permits::a_semaphore_is_resized_when_no_permit_is_held",
        "fair_queue::a_call_that_does_not_wait_does_not_overtake_a_fair_one",
    ];
    a_release_of_all_claims_is_found: ReleaseEndsAll => [
        "shared::a_release_of_one_reader_keeps_the_others",
        "shared::readers_of_two_clients_hold_together",
        "permits::a_release_returns_its_own_units",
    ];
    a_renewal_of_all_claims_is_found: RenewalExtendsAll => [
        "shared::a_renewal_extends_only_its_own_reader",
        "permits::a_renewal_extends_only_its_own_permit",
    ];
    claims_with_one_lease_are_found: ClaimsExpireTogether => [
        "shared::each_reader_expires_by_itself",
        "permits::each_permit_expires_by_itself",
        "permits::the_units_of_a_dead_holder_return_after_its_lease",
    ];
    a_token_of_several_readers_is_found: ReadersShareTokens => [
        "shared::tokens_of_readers_and_writers_increase",
        "shared::tokens_of_readers_differ_and_the_next_writer_has_a_larger_one",
    ];
    tokens_without_blocks_are_found: TokensIgnoreBlocks => [
        "shared::tokens_of_readers_and_writers_increase",
        "shared::tokens_of_readers_differ_and_the_next_writer_has_a_larger_one",
        "permits::tokens_of_permits_are_unique_and_increase",
        "upgradable::an_upgraded_claim_has_a_larger_token",
    ];
    a_forced_release_of_one_claim_is_found: ForcedReleaseEndsFirst => [
        "shared::a_forced_release_ends_all_readers",
        "shared::a_forced_release_is_reported_to_all_readers",
        "permits::a_forced_release_ends_all_permits",
    ];
    a_forced_release_of_waiters_is_found: ForcedReleaseClearsQueue => [
        "fair_queue::a_forced_release_keeps_the_queue",
    ];
    an_inspection_of_one_holder_is_found: InspectReturnsFirst => [
        "shared::inspect_returns_all_readers",
        "permits::inspect_returns_the_units_of_each_permit",
        "permits::holders_returns_each_permit",
    ];
    an_inspection_of_waiters_is_found: InspectReturnsWaiters => [
        "shared::inspect_returns_all_readers",
        "fair_queue::a_forced_release_keeps_the_queue",
    ];
    an_inspection_without_modes_is_found: InspectForgetsModes => [
        "shared::inspect_returns_the_mode_of_each_holder",
        "upgradable::inspect_returns_the_mode_after_a_conversion",
    ];
    readers_that_exclude_each_other_are_found: SharedIsExclusive => [
        "shared::readers_of_two_clients_hold_together",
        "shared::readers_of_two_processes_hold_together",
    ];
    a_writer_next_to_readers_is_found: WritersJoinReaders => [
        "shared::a_reader_excludes_writers",
        "shared::a_writer_is_granted_after_the_last_reader",
        "shared::concurrent_readers_and_writers_never_hold_together",
        "shared::critical_sections_of_readers_and_writers_never_overlap",
    ];
    two_upgradable_claims_are_found: ManyUpgradable => [
        "upgradable::an_upgradable_claim_excludes_writers_and_a_second_one",
        "upgradable::of_many_concurrent_upgradable_claims_exactly_one_is_granted",
        "upgradable::a_guard_is_upgraded_after_the_readers_and_downgraded",
    ];
    an_upgrade_next_to_readers_is_found: UpgradeIgnoresReaders => [
        "upgradable::an_upgrade_waits_for_readers_and_blocks_new_ones",
        "upgradable::a_guard_is_upgraded_after_the_readers_and_downgraded",
        "upgradable::an_upgrade_that_times_out_leaves_the_guard_held",
        "upgradable::upgraded_sections_never_overlap_with_others",
    ];
    an_upgrade_that_readers_overtake_is_found: UpgradeBlocksNone => [
        "upgradable::an_upgrade_waits_for_readers_and_blocks_new_ones",
        "upgradable::a_guard_is_upgraded_after_the_readers_and_downgraded",
    ];
    an_upgrade_that_never_lapses_is_found: UpgradeNeverLapses => [
        "upgradable::a_waiting_upgrade_lapses_with_its_lease",
    ];
    an_upgrade_without_a_new_token_is_found: UpgradeKeepsToken => [
        "upgradable::an_upgraded_claim_has_a_larger_token",
        "upgradable::a_claim_is_upgraded_and_downgraded_again",
        "upgradable::a_guard_is_converted_repeatedly",
    ];
    a_repeated_upgrade_with_a_new_token_is_found: RepeatedUpgradeHasNewToken => [
        "upgradable::a_repeated_upgrade_is_one_conversion",
    ];
    a_downgrade_with_a_new_token_is_found: DowngradeChangesToken => [
        "upgradable::a_downgrade_lets_readers_in_and_keeps_the_token",
        "upgradable::a_guard_is_converted_repeatedly",
    ];
    a_conversion_that_grants_is_found: ConversionGrants => [
        "upgradable::a_conversion_of_an_ended_claim_grants_nothing",
        "upgradable::a_claim_that_was_released_by_force_cannot_be_converted",
    ];
    a_conversion_that_extends_no_lease_is_found: ConversionKeepsLease => [
        "upgradable::a_conversion_extends_the_lease_and_never_shortens_it",
    ];
    a_late_conversion_that_weakens_is_found: LateConversionWeakens => [
        "upgradable::a_late_downgrade_does_not_weaken_a_later_upgrade",
    ];
    units_that_are_not_summed_are_found: UnitsAreNotSummed => [
        "permits::permits_are_granted_until_all_units_are_taken",
        "permits::concurrent_permits_never_exceed_the_units",
        "permits::of_many_concurrent_permits_as_many_as_fit_are_granted",
        "permits::a_semaphore_limits_the_callers_of_several_processes",
    ];
    one_unit_too_many_is_found: UnitsOffByOne => [
        "permits::a_claim_takes_all_of_its_units_or_none",
        "permits::concurrent_permits_never_exceed_the_units",
        "permits::a_process_holds_several_permits",
    ];
    a_units_mismatch_that_is_busy_is_found: UnitsMismatchIsBusy => [
        "permits::a_different_total_of_units_is_busy_with_the_total_in_the_store",
        "permits::a_different_total_of_units_is_an_error",
    ];
    a_units_mismatch_that_is_accepted_is_found: UnitsMismatchIsAccepted => [
        "permits::a_different_total_of_units_is_busy_with_the_total_in_the_store",
        "permits::a_different_total_of_units_is_an_error",
    ];
    a_repetition_that_loses_its_place_is_found: RepeatedAttemptsMoveBack => [
        "fair_queue::claims_that_join_are_granted_in_the_order_of_arrival",
    ];
    a_claim_that_overtakes_is_found: SkippingClaimsOvertake => [
        "fair_queue::a_claim_that_does_not_queue_does_not_overtake",
    ];
    a_permit_that_overtakes_is_found: PermitsOvertake => [
        "fair_queue::permits_are_granted_in_the_order_of_arrival",
        "permits::a_waiting_writer_blocks_new_permits",
    ];
    a_wake_up_for_free_keys_only_is_found: WakesOnlyWhenFree => [
        "shared::the_last_reader_wakes_a_waiting_writer",
        "shared::a_writer_that_gives_up_wakes_a_waiting_reader",
        "permits::a_released_unit_wakes_a_claim_for_one_unit",
        "fair_queue::the_next_waiter_is_woken",
    ];
    a_conversion_without_a_wake_up_is_found: ConversionsWakeNone => [
        "upgradable::a_weaker_mode_wakes_waiting_readers",
    ];
}
