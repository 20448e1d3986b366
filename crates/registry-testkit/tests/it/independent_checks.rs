//! Compares two independent checks: the sweep, `token_order`, and the search for a linearization,
//! `search`. They agree on histories of a simulated lock and on arbitrary histories. Each bug of
//! the simulated lock is found by the check for it.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

mod simulated;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use registry_core::ClaimMode;
use registry_testkit::check::{
    Promise, SearchResult, Violation, busy_answers, check, fenced_writes, guarded_writes, search,
    token_order, validity,
};
use registry_testkit::history::{History, HistoryEvent, HistoryEventKind};
use registry_testkit::seed::{Seed, Seeds, assert_repeatable};

use simulated::{SimulatedBug, simulate, simulate_modes};

/// The time limit of one search. An undecided search fails the test.
const LIMIT: Duration = Duration::from_secs(120);

/// Asserts that the sweep and the search agree, and returns whether they accept the history.
fn agree(history: &History) -> bool {
    match (token_order(history), search(history, LIMIT)) {
        (Ok(_), SearchResult::Linearizable) => true,
        (Err(_), SearchResult::NotLinearizable { .. }) => false,
        (sweep, search) => panic!("the sweep says {sweep:?}, the search {search:?}: {history:#?}"),
    }
}

/// The simple rule that is often considered sufficient: a later acquisition has a larger token.
fn tokens_rise_in_real_time(history: &History) -> bool {
    history.grants.iter().all(|earlier| {
        history
            .grants
            .iter()
            .all(|later| earlier.acquire.to >= later.acquire.from || earlier.token < later.token)
    })
}

#[test]
fn a_correct_lock_passes_every_check_and_the_search() {
    let ran = Seeds::first(400).run(|seed| {
        let history = simulate(seed, None);
        let checked = check(&history).unwrap_or_else(|found| panic!("{found}"));
        guarded_writes(&history).unwrap_or_else(|found| panic!("{found}"));
        assert!(checked.tokens > 5 && agree(&history));
    });
    assert!(ran == 400 || ran == 1);
}

#[test]
fn a_simulation_is_repeatable() {
    Seeds::first(20).run(|seed| _ = assert_repeatable(seed, |seed| simulate(seed, None).grants));
}

#[test]
fn a_correct_lock_of_all_modes_passes_every_check_and_the_search() {
    Seeds::first(300).run(|seed| {
        let history = simulate_modes(seed, None);
        let checked = check(&history).unwrap_or_else(|found| panic!("{found}"));
        guarded_writes(&history).unwrap_or_else(|found| panic!("{found}"));
        assert!(checked.tokens > 5 && agree(&history));
    });
}

/// Runs a broken lock over many seeds. The sweep and the search must agree on each history. `found`
/// counts the histories in which the check finds the bug.
fn assert_found(
    bug: SimulatedBug,
    simulate: impl Fn(Seed, Option<SimulatedBug>) -> History + Sync,
    checker: impl Fn(&History) -> Option<Promise> + Sync,
    expected: &[Promise],
) {
    let found = AtomicU32::new(0);
    let ran = Seeds::first(100).run(|seed| {
        let history = simulate(seed, Some(bug));
        // If many compatible holds have no valid order, the search takes too long. The property
        // tests below compare the checks on short histories of other modes.
        if history.grants.iter().all(|grant| grant.mode == ClaimMode::Exclusive) {
            agree(&history);
        }
        if let Some(promise) = checker(&history) {
            assert!(expected.contains(&promise), "{bug:?} was taken for {promise:?}");
            found.fetch_add(1, Ordering::Relaxed);
        }
    });
    let found = found.into_inner();
    assert!(found >= 5 || ran == 1, "{bug:?} was found in {found} of {ran} histories");
}

macro_rules! seeded_bugs {
    ($simulate:ident: $($name:ident: $bug:ident by $checker:ident as $($promise:ident)|+;)+) => {
        $(#[test]
        fn $name() {
            let checker = |history: &History| $checker(history).err().map(|found| found.promise);
            assert_found(SimulatedBug::$bug, $simulate, checker, &[$(Promise::$promise),+]);
        })+
    };
}

seeded_bugs! {
    simulate:
    a_split_brain_is_found_by_its_tokens:
        TwoHolders by token_order as HoldersFollowTokens;
    a_split_brain_is_found_by_its_guards:
        TwoHolders by validity as ValidGuardsAreCompatible;
    a_stolen_lock_is_found_by_its_guards:
        GrantWhileHeld by validity as ValidGuardsAreCompatible;
    a_lock_that_issues_a_token_twice_is_found:
        DuplicateToken by token_order as TokensAreUnique;
    a_lock_with_decreasing_tokens_is_found:
        DecreasingTokens by token_order as HoldersFollowTokens | TokensAreUnique;
    a_release_that_ignores_the_owner_is_found:
        ReleaseByOtherClaim by token_order as HoldersFollowTokens;
    a_release_that_swallows_the_loss_is_found:
        ReleaseReportsSuccessAfterLoss by token_order as HoldersFollowTokens;
    a_deadline_counted_from_the_reply_is_found:
        LeaseCountedFromReply by validity as ValidGuardsAreCompatible;
    a_resource_that_does_not_fence_is_found:
        AcceptsEveryWrite by fenced_writes as WritesNeverGoBack;
    a_resource_that_fences_by_the_newest_write_alone_is_not_guarded:
        FencesByNewestWriteOnly by guarded_writes as ReplacedHoldersCannotWrite;
    an_outage_reported_as_busy_is_found:
        OutageReportedAsBusy by busy_answers as BusyMeansHeld;
}

seeded_bugs! {
    simulate_modes:
    a_reader_beside_a_writer_is_found_by_its_tokens:
        ReaderAlongsideWriter by token_order as HoldersFollowTokens;
    a_reader_beside_a_writer_is_found_by_its_guards:
        ReaderAlongsideWriter by validity as ValidGuardsAreCompatible;
    two_upgradable_holders_are_found:
        TwoUpgradable by validity as ValidGuardsAreCompatible;
    an_upgrade_beside_readers_is_found_by_its_tokens:
        UpgradeAlongsideReaders by token_order as HoldersFollowTokens;
    an_upgrade_beside_readers_is_found_by_its_guards:
        UpgradeAlongsideReaders by validity as ValidGuardsAreCompatible;
    an_upgrade_that_keeps_its_token_is_found:
        UpgradeKeepsToken by token_order as HoldersFollowTokens;
}

/// The search is not compared here: it also finds permits that exceeded the units for an instant.
/// The sweep judges only permits that were certainly held.
#[test]
fn units_that_are_not_summed_are_found() {
    let is_found = |result: Result<usize, Violation>| {
        result.is_err_and(|found| {
            assert_eq!(found.promise, Promise::UnitsFit);
            true
        })
    };
    let count =
        |found: &AtomicU32, is_found| _ = found.fetch_add(u32::from(is_found), Ordering::Relaxed);
    let (by_tokens, by_guards) = (AtomicU32::new(0), AtomicU32::new(0));
    let ran = Seeds::first(100).run(|seed| {
        let history = simulate_modes(seed, Some(SimulatedBug::UnitsNotSummed));
        count(&by_tokens, is_found(token_order(&history)));
        count(&by_guards, is_found(validity(&history)));
    });
    let found = by_tokens.into_inner().min(by_guards.into_inner());
    assert!(found >= 5 || ran == 1, "found in {found} of {ran} histories");
}

#[test]
fn a_resource_that_fences_by_the_newest_write_passes_its_own_check() {
    Seeds::first(100).run(|seed| {
        let history = simulate(seed, Some(SimulatedBug::FencesByNewestWriteOnly));
        fenced_writes(&history).unwrap_or_else(|found| panic!("{found}"));
    });
}

#[test]
fn the_real_time_rule_misses_violations_that_the_sweep_finds() {
    let missed = AtomicU32::new(0);
    Seeds::first(100).run(|seed| {
        for bug in [
            SimulatedBug::TwoHolders,
            SimulatedBug::ReleaseByOtherClaim,
            SimulatedBug::ReleaseReportsSuccessAfterLoss,
        ] {
            let history = simulate(seed, Some(bug));
            if token_order(&history).is_err() && tokens_rise_in_real_time(&history) {
                missed.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    assert!(missed.into_inner() > 0);
}

/// An arbitrary hold, at any times and with any token.
#[derive(Debug, Clone)]
struct AnyHold {
    called: u64,
    answered_after: u64,
    token: u64,
    /// 0: the acquisition has no response. 1: no release. 2: the release fails. Otherwise, the
    /// release frees the lock.
    kind: u8,
    released_after: u64,
    freed_after: u64,
    mode: ClaimMode,
    /// The time from the grant to a conversion, the time to its response, and the number by which
    /// an upgrade increases the token.
    conversion: Option<(u64, u64, u64)>,
}

/// Returns holds of the same shape with other modes, of which some are converted.
fn with_modes(holds: &[AnyHold], modes: &[(u8, bool, u64, u64, u64)]) -> Vec<AnyHold> {
    let with_mode = |(hold, mode): (&AnyHold, &(u8, bool, u64, u64, u64))| {
        let (number, converts, called, answered, increase) = *mode;
        let mode = match number {
            0 => ClaimMode::Exclusive,
            1 | 2 => ClaimMode::Shared,
            _ => ClaimMode::Upgradable,
        };
        let conversion =
            (converts && mode != ClaimMode::Shared).then_some((called, answered, increase));
        AnyHold { mode, conversion, ..hold.clone() }
    };
    holds.iter().zip(modes).map(with_mode).collect()
}

fn any_modes() -> impl Strategy<Value = Vec<(u8, bool, u64, u64, u64)>> {
    prop::collection::vec((0..4_u8, any::<bool>(), 0..10_u64, 0..10_u64, 0..3_u64), 7)
}

fn any_hold() -> impl Strategy<Value = AnyHold> {
    (0..40_u64, 0..15_u64, 1..12_u64, 0..8_u8, 0..15_u64, 0..15_u64).prop_map(
        |(called, answered_after, token, kind, released_after, freed_after)| AnyHold {
            called,
            answered_after,
            token,
            kind,
            released_after,
            freed_after,
            mode: ClaimMode::Exclusive,
            conversion: None,
        },
    )
}

fn any_history(holds: &[AnyHold]) -> History {
    let mut events = Vec::new();
    for (op, hold) in holds.iter().enumerate() {
        let mut record = |at, what| events.push(HistoryEvent::new(at, op as u64, op as u32, what));
        let (key, mode) = ("any".into(), hold.mode);
        record(hold.called, HistoryEventKind::AcquireCalled { key, mode });
        if hold.kind == 0 {
            continue;
        }
        let mut at = hold.called + hold.answered_after;
        record(at, HistoryEventKind::AcquireGranted { token: Some(hold.token), valid_until: None });
        if let Some((called, answered, increase)) = hold.conversion {
            let (mode, token) = match hold.mode {
                ClaimMode::Exclusive => (ClaimMode::Shared, hold.token),
                _ => (ClaimMode::Exclusive, hold.token + increase),
            };
            at += called;
            record(at, HistoryEventKind::ConvertCalled { mode });
            at += answered;
            let token = Some(token);
            record(at, HistoryEventKind::ConvertGranted { token, valid_until: None });
        }
        at += hold.released_after;
        let freed_at = at + hold.freed_after;
        match hold.kind {
            1 => {}
            2 => {
                record(at, HistoryEventKind::ReleaseCalled);
                record(freed_at, HistoryEventKind::ReleaseFailed);
            }
            _ => {
                record(at, HistoryEventKind::ReleaseCalled);
                record(freed_at, HistoryEventKind::ReleaseFreed);
            }
        }
    }
    History::from_events(events).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sweep_and_search_agree_on_any_history(holds in prop::collection::vec(any_hold(), 0..7)) {
        agree(&any_history(&holds));
    }

    #[test]
    fn sweep_and_search_agree_when_tokens_are_unique(mut holds in prop::collection::vec(any_hold(), 0..7)) {
        // Sorted by start, so that many of these histories have a linearization.
        holds.sort_by_key(|hold| hold.called);
        for (token, hold) in holds.iter_mut().enumerate() {
            hold.token = token as u64;
        }
        agree(&any_history(&holds));
    }

    #[test]
    fn sweep_and_search_agree_on_any_history_of_modes(
        mut holds in prop::collection::vec(any_hold(), 0..6), modes in any_modes(), has_order: bool,
    ) {
        if has_order {
            holds.sort_by_key(|hold| hold.called);
            for (token, hold) in holds.iter_mut().enumerate() {
                // Leaves room for the tokens of upgrades.
                hold.token = token as u64 * 2;
            }
        }
        agree(&any_history(&with_modes(&holds, &modes)));
    }

    #[test]
    fn sweep_and_search_agree_on_permits_that_were_released(
        mut holds in prop::collection::vec(any_hold(), 0..6), units in prop::collection::vec(1..4_u32, 6),
    ) {
        for (token, (hold, take)) in holds.iter_mut().zip(units).enumerate() {
            // Unique tokens, so that only the units decide. Each permit is certainly held for some
            // time.
            hold.token = token as u64;
            hold.kind = 7;
            hold.released_after += 1;
            hold.mode = ClaimMode::Permits { take, of: 4 };
        }
        agree(&any_history(&holds));
    }
}
