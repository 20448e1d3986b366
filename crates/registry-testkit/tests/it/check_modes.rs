//! Tests the checks of histories of shared locks, upgradable locks and permits: histories of a
//! correct lock pass, and those of a broken lock do not.

use std::time::Duration;

use registry_core::{ClaimMode, FencingToken};
use registry_testkit::check::{
    Promise, SearchResult, Violation, busy_answers, check, guarded_writes, token_order, validity,
};
use registry_testkit::history::{AcquireRecord, ConvertRecord, History, HistoryEvent, HoldRecord};

use crate::check::{KEY, TestHistory, assert_message, not_linearizable, search_result};

use ClaimMode::{Exclusive, Shared, Upgradable};

const HOUR: Duration = Duration::from_secs(3_600);

fn permits(take: u32, of: u32) -> ClaimMode {
    ClaimMode::Permits { take, of }
}

/// A history in which each step is one millisecond after the previous one.
struct Tape {
    history: TestHistory,
    now: std::cell::Cell<u64>,
}

impl Tape {
    fn new() -> Self {
        Self { history: TestHistory::new(), now: 0.into() }
    }

    fn next(&self) -> &TestHistory {
        self.now.set(self.now.get() + 1);
        self.history.at(self.now.get())
    }

    fn call(&self, client: u32, mode: ClaimMode) -> AcquireRecord {
        self.next().recorder.acquire_as(client, KEY, mode)
    }

    fn grant(&self, called: AcquireRecord, token: u64) -> HoldRecord {
        self.next();
        called.granted(FencingToken::new(token), || HOUR)
    }

    fn hold(&self, client: u32, mode: ClaimMode, token: u64) -> HoldRecord {
        self.grant(self.call(client, mode), token)
    }

    fn free(&self, held: HoldRecord) {
        self.next();
        let releasing = held.release();
        self.next();
        releasing.freed();
    }

    fn convert(&self, held: HoldRecord, mode: ClaimMode) -> ConvertRecord {
        self.next();
        held.convert(mode)
    }

    fn converted(&self, called: ConvertRecord, token: u64) -> HoldRecord {
        self.next();
        called.granted(FencingToken::new(token), || HOUR)
    }

    fn history(&self) -> History {
        self.history.history()
    }

    /// Asserts that all checks accept the history.
    fn assert_passes(&self) {
        let history = self.history();
        check(&history).unwrap_or_else(|found| panic!("{found}"));
        assert_eq!(search_result(&history), SearchResult::Linearizable);
    }

    /// Asserts that the token order and the search refuse the history.
    fn assert_refused(&self, promise: Promise, parts: &[&str]) {
        let history = self.history();
        let found = token_order(&history).expect_err("the checker finds the violation");
        assert_message(&found, promise, parts);
        assert_eq!(search_result(&history), not_linearizable());
    }

    /// Asserts that the check of guards, `validity`, refuses the history.
    fn assert_invalid(&self, promise: Promise) -> Violation {
        let found = validity(&self.history()).expect_err("the checker finds the violation");
        assert_message(&found, promise, &[]);
        found
    }
}

// ---- readers and writers

#[test]
fn readers_that_hold_together_pass_with_tokens_in_any_order() {
    let tape = Tape::new();
    let first = tape.hold(1, Shared, 7);
    let second = tape.hold(2, Shared, 5);
    tape.free(first);
    let third = tape.hold(3, Shared, 6);
    tape.free(second);
    tape.free(third);
    tape.free(tape.hold(4, Exclusive, 8));
    tape.free(tape.hold(1, Shared, 9));
    tape.assert_passes();
}

#[test]
fn a_reader_beside_a_writer_is_found() {
    for modes in [[Exclusive, Shared], [Shared, Exclusive], [Upgradable, Exclusive]] {
        let tape = Tape::new();
        let first = tape.hold(1, modes[0], 5);
        let second = tape.hold(2, modes[1], 6);
        tape.assert_invalid(Promise::ValidGuardsAreCompatible);
        tape.free(first);
        tape.free(second);
        tape.assert_refused(Promise::HoldersFollowTokens, &["token 5", "token 6"]);
        tape.assert_invalid(Promise::ValidGuardsAreCompatible);
    }
}

#[test]
fn a_writer_beside_the_older_of_two_readers_is_found() {
    let tape = Tape::new();
    let old = tape.hold(1, Shared, 5);
    tape.free(tape.hold(2, Shared, 6));
    let writer = tape.hold(3, Exclusive, 7);
    tape.free(old);
    tape.free(writer);
    tape.assert_refused(Promise::HoldersFollowTokens, &["client 1 acquired token 5 as shared"]);
    tape.assert_invalid(Promise::ValidGuardsAreCompatible);
}

#[test]
fn a_writer_with_a_smaller_token_than_an_earlier_reader_is_found() {
    let tape = Tape::new();
    tape.free(tape.hold(1, Shared, 6));
    tape.free(tape.hold(2, Exclusive, 5));
    tape.assert_refused(Promise::HoldersFollowTokens, &["token 5", "token 6"]);
}

#[test]
fn two_readers_with_one_token_are_found() {
    let tape = Tape::new();
    let first = tape.hold(1, Shared, 5);
    let second = tape.hold(2, Shared, 5);
    tape.free(first);
    tape.free(second);
    tape.assert_refused(Promise::TokensAreUnique, &["token 5"]);
}

#[test]
fn a_reader_may_be_granted_while_the_writer_releases() {
    let tape = Tape::new();
    let writer = tape.hold(1, Exclusive, 5);
    let called = tape.call(2, Shared);
    tape.next();
    let releasing = writer.release();
    let reader = tape.grant(called, 6);
    tape.next();
    releasing.freed();
    tape.free(reader);
    tape.assert_passes();
}

// ---- upgradable holders and conversions

#[test]
fn two_upgradable_holders_are_found() {
    let tape = Tape::new();
    let first = tape.hold(1, Upgradable, 5);
    let second = tape.hold(2, Upgradable, 6);
    tape.assert_invalid(Promise::ValidGuardsAreCompatible);
    tape.free(first);
    tape.free(second);
    tape.assert_refused(Promise::HoldersFollowTokens, &["as upgradable"]);
}

#[test]
fn an_upgrade_after_the_readers_and_a_downgrade_pass() {
    let tape = Tape::new();
    let reader = tape.hold(1, Shared, 5);
    let upgradable = tape.hold(2, Upgradable, 6);
    let late = tape.hold(3, Shared, 7);
    let upgrading = tape.convert(upgradable, Exclusive);
    tape.free(reader);
    tape.free(late);
    let writer = tape.converted(upgrading, 8);
    let called = tape.call(4, Shared);
    let downgrading = tape.convert(writer, Upgradable);
    // Granted before the response to the downgrade has arrived.
    let other = tape.grant(called, 9);
    let upgradable = tape.converted(downgrading, 8);
    let reader = tape.convert(upgradable, Shared);
    let reader = tape.converted(reader, 8);
    let next = tape.hold(5, Upgradable, 10);
    tape.free(other);
    tape.free(reader);
    tape.free(next);
    tape.assert_passes();
}

#[test]
fn an_upgrade_beside_a_reader_is_found() {
    for is_older in [true, false] {
        let tape = Tape::new();
        let tokens = if is_older { [5, 6] } else { [6, 5] };
        let reader = tape.hold(1, Shared, tokens[0]);
        let upgradable = tape.hold(2, Upgradable, tokens[1]);
        let upgrading = tape.convert(upgradable, Exclusive);
        let writer = tape.converted(upgrading, 8);
        tape.assert_invalid(Promise::ValidGuardsAreCompatible);
        tape.free(reader);
        tape.free(writer);
        tape.assert_refused(Promise::HoldersFollowTokens, &["made it exclusive with token 8"]);
        tape.assert_invalid(Promise::ValidGuardsAreCompatible);
    }
}

#[test]
fn a_reader_beside_an_upgraded_writer_is_found() {
    let tape = Tape::new();
    let upgradable = tape.hold(1, Upgradable, 5);
    let upgrading = tape.convert(upgradable, Exclusive);
    let writer = tape.converted(upgrading, 6);
    let reader = tape.hold(2, Shared, 7);
    tape.assert_invalid(Promise::ValidGuardsAreCompatible);
    tape.free(writer);
    tape.free(reader);
    tape.assert_refused(Promise::HoldersFollowTokens, &["token 6", "token 7"]);
}

#[test]
fn a_second_upgradable_holder_before_the_upgrade_is_found() {
    let tape = Tape::new();
    let first = tape.hold(1, Upgradable, 5);
    let second = tape.hold(2, Upgradable, 6);
    tape.free(second);
    let upgrading = tape.convert(first, Exclusive);
    tape.free(tape.converted(upgrading, 7));
    tape.assert_refused(Promise::HoldersFollowTokens, &["client 2 acquired token 6"]);
}

#[test]
fn an_upgrade_without_a_larger_token_and_a_downgrade_with_another_one_are_found() {
    for (from, to, token) in
        [(Upgradable, Exclusive, 5), (Upgradable, Exclusive, 4), (Exclusive, Shared, 6)]
    {
        let tape = Tape::new();
        let held = tape.hold(1, from, 5);
        let converting = tape.convert(held, to);
        tape.free(tape.converted(converting, token));
        tape.assert_refused(Promise::HoldersFollowTokens, &["the conversion to"]);
    }
}

#[test]
fn an_upgrade_in_flight_and_a_refused_one_leave_the_lock_upgradable() {
    let tape = Tape::new();
    let reader = tape.hold(1, Shared, 5);
    let upgradable = tape.hold(2, Upgradable, 6);
    let upgrading = tape.convert(upgradable, Exclusive);
    tape.free(reader);
    let reader = tape.hold(3, Shared, 7);
    tape.next();
    let upgradable = upgrading.refused();
    tape.assert_passes();
    let second = tape.hold(4, Upgradable, 8);
    tape.assert_invalid(Promise::ValidGuardsAreCompatible);
    for held in [reader, upgradable, second] {
        tape.free(held);
    }
    tape.assert_refused(Promise::HoldersFollowTokens, &["could not make it exclusive"]);
}

#[test]
fn a_conversion_of_unknown_outcome_ends_the_hold() {
    for fails in [true, false] {
        let tape = Tape::new();
        let upgradable = tape.hold(1, Upgradable, 5);
        let upgrading = tape.convert(upgradable, Exclusive);
        if fails {
            tape.next();
            upgrading.failed();
        } else {
            drop(upgrading);
        }
        tape.free(tape.hold(2, Exclusive, 7));
        tape.assert_passes();
    }
}

#[test]
fn the_lease_of_a_conversion_replaces_the_previous_lease() {
    let tape = Tape::new();
    let writer = tape.hold(1, Exclusive, 5);
    let converting = tape.convert(writer, Shared);
    tape.next();
    drop(converting.granted(FencingToken::new(5), || Duration::from_millis(1)));
    tape.next();
    tape.next();
    tape.free(tape.hold(2, Exclusive, 6));
    tape.assert_passes();
}

// ---- permits

#[test]
fn permits_pass_until_all_units_are_taken() {
    let tape = Tape::new();
    let first = tape.hold(1, permits(2, 3), 5);
    let called = tape.call(3, permits(2, 3));
    let second = tape.hold(2, permits(1, 3), 6);
    tape.next();
    let releasing = first.release();
    let third = tape.grant(called, 7);
    releasing.freed();
    tape.free(second);
    tape.free(third);
    tape.assert_passes();
}

#[test]
fn more_units_than_exist_are_found() {
    let tape = Tape::new();
    let held = [
        tape.hold(1, permits(1, 3), 5),
        tape.hold(2, permits(1, 3), 6),
        tape.hold(3, permits(2, 3), 7),
    ];
    let found = tape.assert_invalid(Promise::UnitsFit);
    assert!(found.to_string().contains("4 units of 3"), "{found}");
    assert_eq!(found.operations.len(), 3);
    for held in held {
        tape.free(held);
    }
    tape.assert_refused(Promise::UnitsFit, &["4 units of 3", "permits 2 of 3"]);
}

#[test]
fn a_permit_beside_a_writer_or_another_number_of_units_is_found() {
    for (first, second) in
        [(permits(1, 3), Exclusive), (Shared, permits(1, 3)), (permits(1, 3), permits(1, 4))]
    {
        let tape = Tape::new();
        let held = [tape.hold(1, first, 5), tape.hold(2, second, 6)];
        tape.assert_invalid(Promise::ValidGuardsAreCompatible);
        for held in held {
            tape.free(held);
        }
        tape.assert_refused(Promise::HoldersFollowTokens, &["permits 1 of 3"]);
    }
}

#[test]
fn the_units_of_a_dead_holder_return_with_its_lease() {
    let tape = Tape::new();
    let called = tape.call(1, permits(3, 3));
    tape.next();
    drop(called.granted(FencingToken::new(5), || Duration::from_millis(2)));
    let early = tape.call(2, permits(1, 3));
    for _ in 0..3 {
        tape.next();
    }
    let taken = tape.grant(early, 6);
    tape.free(taken);
    tape.assert_passes();
}

// ---- busy answers and writes

#[test]
fn a_reader_that_is_busy_beside_readers_only_is_found() {
    let tape = Tape::new();
    let reader = tape.hold(1, Shared, 5);
    let attempt = tape.call(2, Shared);
    tape.next();
    attempt.busy();
    let found = busy_answers(&tape.history()).unwrap_err();
    assert_message(&found, Promise::BusyMeansHeld, &["client 2 tried to acquire as shared"]);
    tape.free(reader);
}

#[test]
fn a_reader_may_be_busy_beside_a_writer_an_upgrade_or_a_waiting_writer() {
    let tape = Tape::new();
    let writer = tape.hold(1, Exclusive, 5);
    tape.call(2, Shared).busy();
    tape.free(writer);
    tape.assert_passes();

    let tape = Tape::new();
    let reader = tape.hold(1, Shared, 5);
    let upgradable = tape.hold(2, Upgradable, 6);
    let upgrading = tape.convert(upgradable, Exclusive);
    tape.call(3, Shared).busy();
    tape.free(reader);
    tape.free(tape.converted(upgrading, 7));
    tape.assert_passes();

    let tape = Tape::new();
    let reader = tape.hold(1, Shared, 5);
    tape.call(2, Exclusive).busy();
    tape.call(3, Shared).busy();
    tape.free(reader);
    tape.assert_passes();
}

#[test]
fn a_write_of_a_downgraded_holder_beside_a_reader_is_accepted_and_one_of_a_replaced_writer_is_not()
{
    let token = |token| FencingToken::new(token).unwrap();
    let tape = Tape::new();
    let writer = tape.hold(1, Exclusive, 5);
    tape.next().recorder.write(1, KEY, token(5)).accepted();
    let converting = tape.convert(writer, Upgradable);
    let upgradable = tape.converted(converting, 5);
    let reader = tape.hold(2, Shared, 6);
    tape.next().recorder.write(1, KEY, token(5)).accepted();
    assert_eq!(guarded_writes(&tape.history()), Ok(2));
    tape.free(upgradable);
    tape.free(reader);
    drop(tape.hold(3, Exclusive, 7));
    tape.next().recorder.write(1, KEY, token(5)).accepted();
    let found = guarded_writes(&tape.history()).unwrap_err();
    assert_message(&found, Promise::ReplacedHoldersCannotWrite, &["token 5", "token 7"]);
}

// ---- the record

#[test]
fn modes_and_conversions_are_read_back_from_lines_of_json() {
    let tape = Tape::new();
    let upgradable = tape.hold(1, Upgradable, 5);
    let upgrading = tape.convert(upgradable, Exclusive);
    drop(tape.converted(upgrading, 6).convert(Shared).refused());
    drop(tape.call(2, permits(2, 5)));
    let events = tape.history.recorder.events();
    let lines: Vec<String> =
        events.iter().map(|event| serde_json::to_string(event).unwrap()).collect();
    assert!(lines[0].ends_with(r#""key":"orders/42","mode":"upgradable"}"#), "{}", lines[0]);
    let last = lines.last().unwrap();
    assert!(last.ends_with(r#""mode":{"permits":{"take":2,"of":5}}}"#), "{last}");
    let back: Vec<HistoryEvent> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(back, events);
    assert_eq!(History::from_events(back).unwrap(), tape.history());
}

#[test]
fn an_inconsistent_conversion_is_an_error() {
    let tape = Tape::new();
    let upgradable = tape.hold(1, Upgradable, 5);
    let upgrading = tape.convert(upgradable, Exclusive);
    tape.free(tape.converted(upgrading, 6));
    let events = tape.history.recorder.events();
    // Without the grant, the call of the conversion, or its answer, the next step is meaningless.
    for missing in [1, 2, 3] {
        let mut events = events.clone();
        events.remove(missing);
        assert!(History::from_events(events).is_err(), "without event {missing}");
    }
}
