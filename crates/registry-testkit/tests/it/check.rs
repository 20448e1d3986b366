//! Tests the checks of histories of exclusive locks. Each check finds its violations, names the
//! clients and tokens, and accepts valid histories.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use registry_core::{ClaimMode, FencingToken};
use registry_testkit::check::{
    Promise, SearchResult, Violation, busy_answers, check, fenced_writes, guarded_writes, search,
    token_order, validity,
};
use registry_testkit::history::{
    AcquireRecord, History, HistoryEvent, HistoryEventKind, HoldRecord, Recorder, WriteRecord,
};

pub(crate) const KEY: &str = "orders/42";

/// A recorder whose clock the test sets.
pub(crate) struct TestHistory {
    now: Arc<AtomicU64>,
    pub(crate) recorder: Recorder,
}

impl TestHistory {
    pub(crate) fn new() -> Self {
        let now = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&now);
        Self { now, recorder: Recorder::new(move || clock.load(Ordering::Relaxed)) }
    }

    pub(crate) fn at(&self, millis: u64) -> &Self {
        let before = self.now.swap(millis * 1_000_000, Ordering::Relaxed);
        assert!(before <= millis * 1_000_000, "the clock must not go back");
        self
    }

    fn acquire(&self, client: u32) -> AcquireRecord {
        self.recorder.acquire(client, KEY)
    }

    fn write(&self, client: u32, token: u64) -> WriteRecord {
        self.recorder.write(client, KEY, FencingToken::new(token).unwrap())
    }

    /// Returns `that` unchanged, so that one line sets the time and then uses `that`.
    fn on<T>(&self, that: T) -> T {
        that
    }

    pub(crate) fn history(&self) -> History {
        self.recorder.history()
    }
}

fn grant(called: AcquireRecord, token: u64) -> HoldRecord {
    grant_for(called, token, Duration::from_secs(3_600))
}

fn grant_for(called: AcquireRecord, token: u64, lease: Duration) -> HoldRecord {
    called.granted(FencingToken::new(token), || lease)
}

pub(crate) fn assert_message(found: &Violation, promise: Promise, parts: &[&str]) {
    let text = found.to_string();
    assert_eq!(found.promise, promise, "{text}");
    assert!(text.contains(KEY), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

pub(crate) fn search_result(history: &History) -> SearchResult {
    search(history, Duration::from_secs(60))
}

pub(crate) fn not_linearizable() -> SearchResult {
    SearchResult::NotLinearizable { key: KEY.into() }
}

// ---- the order of tokens

#[test]
fn holders_that_follow_each_other_pass_and_are_counted() {
    let tape = TestHistory::new();
    for (turn, client) in [1, 2, 1, 3].into_iter().enumerate() {
        let turn = turn as u64;
        let called = tape.at(100 * turn).acquire(client);
        let held = grant(tape.at(100 * turn + 10).on(called), turn + 5);
        let released = tape.at(100 * turn + 50).on(held).release();
        tape.at(100 * turn + 60).on(released).freed();
    }
    let history = tape.history();
    let checked = check(&history).unwrap();
    assert_eq!((checked.grants, checked.tokens, checked.unknown), (4, 4, 0));
    assert_eq!(search_result(&history), SearchResult::Linearizable);
}

#[test]
fn a_second_holder_before_the_release_is_found() {
    let tape = TestHistory::new();
    let first = grant(tape.at(0).acquire(1), 5);
    let second = grant(tape.at(100).acquire(2), 6);
    tape.at(200).on(first).release().freed();
    tape.at(300).on(second).release().freed();
    let history = tape.history();
    let found = token_order(&history).unwrap_err();
    assert_message(
        &found,
        Promise::HoldersFollowTokens,
        &["client 1 acquired token 5", "client 2 acquired token 6", "+0.100000001 s", "+0.2000"],
    );
    assert_eq!(search_result(&history), not_linearizable());
}

#[test]
fn a_release_that_overlaps_the_next_acquisition_passes() {
    let tape = TestHistory::new();
    let first = grant(tape.at(0).acquire(1), 5);
    let called = tape.at(50).acquire(2);
    let releasing = tape.at(100).on(first).release();
    // Another process may acquire the lock before the reply to the release has arrived.
    let second = grant(tape.at(150).on(called), 6);
    tape.at(200).on(releasing).freed();
    tape.at(250).on(second).release().freed();
    check(&tape.history()).unwrap();
    assert_eq!(search_result(&tape.history()), SearchResult::Linearizable);
}

#[test]
fn a_hand_over_inside_a_process_passes() {
    let tape = TestHistory::new();
    let mut held = grant(tape.at(0).acquire(1), 5);
    for hop in 1..10 {
        let waiting = tape.at(hop * 10).acquire(1 + hop as u32);
        let releasing = tape.at(hop * 10 + 1).on(held).release();
        held = grant(waiting, 5 + hop);
        releasing.freed();
    }
    held.release().freed();
    check(&tape.history()).unwrap();
}

#[test]
fn a_duplicate_token_is_found() {
    let tape = TestHistory::new();
    grant(tape.at(0).acquire(1), 5).release().freed();
    grant(tape.at(100).acquire(2), 5).release().freed();
    let found = token_order(&tape.history()).unwrap_err();
    assert_message(&found, Promise::TokensAreUnique, &["token 5", "client 1", "client 2"]);
    assert_eq!(search_result(&tape.history()), not_linearizable());
}

#[test]
fn a_decreasing_token_is_found() {
    let tape = TestHistory::new();
    grant(tape.at(0).acquire(1), 6).release().freed();
    grant(tape.at(100).acquire(2), 5).release().freed();
    let found = token_order(&tape.history()).unwrap_err();
    assert_message(&found, Promise::HoldersFollowTokens, &["token 5", "token 6"]);
    assert_eq!(search_result(&tape.history()), not_linearizable());
}

#[test]
fn a_decreasing_token_after_an_expiry_is_found() {
    let tape = TestHistory::new();
    drop(grant_for(tape.at(0).acquire(1), 6, Duration::from_millis(50)));
    drop(grant_for(tape.at(100).acquire(2), 5, Duration::from_millis(50)));
    token_order(&tape.history()).unwrap_err();
    assert_eq!(search_result(&tape.history()), not_linearizable());
}

/// A case that the simple rule "tokens increase in real time" misses. The three acquisitions
/// overlap, so the rule orders no two of them. But the first hold is released only after the other
/// two grants.
#[test]
fn a_hold_that_does_not_fit_between_its_neighbours_is_found() {
    let tape = TestHistory::new();
    let (one, two, three) = (tape.at(0).acquire(1), tape.acquire(2), tape.acquire(3));
    let first = grant(tape.at(10).on(one), 1);
    let second = grant(tape.at(20).on(two), 2);
    let third = grant(tape.at(30).on(three), 3);
    let releasing = tape.at(40).on(first).release();
    tape.at(50).on(releasing).freed();
    drop((second, third));
    let history = tape.history();
    assert!(!breaks_the_real_time_rule(&history), "the simple rule finds no violation");
    token_order(&history).unwrap_err();
    assert_eq!(search_result(&history), not_linearizable());
}

fn breaks_the_real_time_rule(history: &History) -> bool {
    history.grants.iter().any(|earlier| {
        history
            .grants
            .iter()
            .any(|later| earlier.acquire.to < later.acquire.from && earlier.token >= later.token)
    })
}

#[test]
fn holds_without_a_confirmed_release_may_have_ended_early() {
    let tape = TestHistory::new();
    let short = Duration::from_millis(10);
    let expired = grant_for(tape.at(0).acquire(1), 1, short);
    let notified = grant_for(tape.at(100).acquire(2), 2, short);
    tape.at(120).on(&notified).lost();
    let unsure = grant_for(tape.at(200).acquire(3), 3, short);
    let dropped = grant_for(tape.at(300).acquire(4), 4, short);
    drop(grant(tape.at(400).acquire(5), 5));
    tape.at(500).on(expired).release().not_held();
    notified.release().not_held();
    unsure.release().failed();
    drop(dropped.release());
    let checked = check(&tape.history()).unwrap();
    assert_eq!((checked.tokens, checked.unknown), (5, 3));
    assert_eq!(search_result(&tape.history()), SearchResult::Linearizable);
}

#[test]
fn a_successful_release_of_a_lost_lock_is_found() {
    let tape = TestHistory::new();
    let first = grant_for(tape.at(0).acquire(1), 1, Duration::from_millis(10));
    let second = grant(tape.at(100).acquire(2), 2);
    // The lease had expired and another client had the lock, but the release reported success.
    tape.at(200).on(first).release().freed();
    drop(second);
    token_order(&tape.history()).unwrap_err();
}

#[test]
fn acquisitions_of_unknown_outcome_are_ignored() {
    let tape = TestHistory::new();
    tape.at(0).acquire(9).failed();
    drop(tape.acquire(8));
    grant(tape.at(10).acquire(1), 1).release().freed();
    let unknown = tape.at(20).acquire(7);
    grant(tape.at(30).acquire(2), 2).release().freed();
    unknown.failed();
    let checked = check(&tape.history()).unwrap();
    assert_eq!((checked.tokens, checked.unknown), (2, 3));
    assert_eq!(search_result(&tape.history()), SearchResult::Linearizable);
}

#[test]
fn keys_are_checked_separately() {
    let tape = TestHistory::new();
    let first = grant(tape.at(0).acquire(1), 5);
    let other = tape.recorder.acquire(2, "other").granted(FencingToken::new(5), || Duration::MAX);
    first.release().freed();
    other.release().freed();
    check(&tape.history()).unwrap();
}

// ---- guards

#[test]
fn two_guards_that_are_valid_at_once_are_found_even_without_tokens() {
    let tape = TestHistory::new();
    let lease = Duration::from_millis(100);
    let first = tape.at(0).acquire(1).granted(None, || lease);
    let second = tape.at(99).acquire(2).granted(None, || lease);
    let found = validity(&tape.history()).unwrap_err();
    assert_message(
        &found,
        Promise::ValidGuardsAreCompatible,
        &["client 1", "client 2", "+0.099000001 s to +0.100000000 s", "without a token"],
    );
    // The search accepts this history, because an unreleased hold may have ended early.
    assert_eq!(search_result(&tape.history()), SearchResult::Linearizable);
    drop((first, second));
}

#[test]
fn a_guard_may_begin_where_another_ends() {
    let lease = Duration::from_millis(100);
    for ending in ["by itself", "loss reported", "released"] {
        let tape = TestHistory::new();
        let first = tape.at(0).acquire(1).granted(None, || lease);
        match ending {
            "by itself" => {
                tape.at(100);
                drop(first);
            }
            "loss reported" => tape.at(50).on(first).lost(),
            _ => drop(tape.at(50).on(first).release()),
        }
        drop(tape.acquire(2).granted(None, || lease));
        validity(&tape.history()).expect(ending);
    }
}

#[test]
fn a_renewed_guard_is_valid_for_longer() {
    let tape = TestHistory::new();
    let lease = Duration::from_millis(100);
    let first = tape.at(0).acquire(1).granted(None, || lease);
    tape.at(90).on(&first).valid_for(|| lease);
    // An expired guard returns zero, which does not shorten the recorded validity.
    tape.at(91).on(&first).valid_for(|| Duration::ZERO);
    let second = tape.at(150).acquire(2).granted(None, || lease);
    let found = validity(&tape.history()).unwrap_err();
    assert_message(&found, Promise::ValidGuardsAreCompatible, &["to +0.190000000 s"]);
    drop((first, second));
}

#[test]
fn querying_an_expired_guard_does_not_extend_it() {
    let tape = TestHistory::new();
    let lease = Duration::from_millis(100);
    let first = tape.at(0).acquire(1).granted(None, || lease);
    let second = tape.at(120).acquire(2).granted(None, || lease);
    tape.at(150).on(&first).valid_for(|| Duration::ZERO);
    validity(&tape.history()).unwrap();
    drop((first, second));
}

#[test]
fn the_end_of_a_guard_is_not_part_of_it() {
    let guard = |op, from, until| {
        let granted = HistoryEventKind::AcquireGranted { token: None, valid_until: Some(until) };
        let mode = ClaimMode::Exclusive;
        let called = HistoryEventKind::AcquireCalled { key: KEY.into(), mode };
        let called = HistoryEvent::new(from, op, 1, called);
        [called, HistoryEvent::new(from, op, 1, granted)]
    };
    let touching = [guard(1, 0, 100), guard(2, 100, 200)].into_iter().flatten();
    validity(&History::from_events(touching).unwrap()).unwrap();
    let overlapping = [guard(1, 0, 100), guard(2, 99, 200)].into_iter().flatten();
    validity(&History::from_events(overlapping).unwrap()).unwrap_err();
}

#[test]
fn a_guard_without_an_end_of_its_own_is_valid_until_it_is_released() {
    let tape = TestHistory::new();
    let first = tape.at(0).acquire(1).granted_without_lease(None);
    let second = tape.at(1_000_000).acquire(2).granted_without_lease(None);
    validity(&tape.history()).unwrap_err();
    drop((first, second));
}

// ---- writes

#[test]
fn an_older_token_after_a_newer_one_is_found() {
    let tape = TestHistory::new();
    tape.at(0).write(1, 5).accepted();
    tape.at(10).write(2, 7).accepted();
    tape.at(20).write(1, 5).rejected();
    tape.at(30).write(2, 7).accepted();
    assert_eq!(fenced_writes(&tape.history()), Ok(3));
    tape.at(40).write(1, 6).accepted();
    let found = fenced_writes(&tape.history()).unwrap_err();
    assert_message(
        &found,
        Promise::WritesNeverGoBack,
        &["client 1 wrote with token 6", "client 2 wrote with token 7"],
    );
}

#[test]
fn overlapping_writes_may_take_effect_in_either_order() {
    let tape = TestHistory::new();
    let slow = tape.at(0).write(1, 5);
    tape.at(10).write(2, 7).accepted();
    tape.at(20).on(slow).accepted();
    tape.at(30).write(3, 9).failed();
    drop(tape.at(40).write(3, 9));
    tape.at(50).write(2, 7).accepted();
    let checked = check(&tape.history()).unwrap();
    assert_eq!((checked.writes, checked.unknown), (3, 2));
}

#[test]
fn a_write_of_a_replaced_holder_is_found_before_its_successor_writes() {
    let tape = TestHistory::new();
    let first = grant(tape.at(0).acquire(1), 5);
    tape.at(10).write(1, 5).accepted();
    first.lost();
    let overlapping = tape.at(20).write(1, 5);
    let second = grant(tape.at(30).acquire(2), 6);
    overlapping.accepted();
    assert_eq!(guarded_writes(&tape.history()), Ok(2));
    tape.at(40).write(1, 5).accepted();
    assert_eq!(fenced_writes(&tape.history()), Ok(3));
    let found = guarded_writes(&tape.history()).unwrap_err();
    assert_message(
        &found,
        Promise::ReplacedHoldersCannotWrite,
        &["client 1 wrote with token 5", "client 2 acquired token 6"],
    );
    drop(second);
}

// ---- busy

#[test]
fn busy_without_a_holder_is_found() {
    let tape = TestHistory::new();
    let held = grant(tape.at(0).acquire(1), 5);
    tape.at(10).acquire(2).busy();
    held.release().freed();
    assert_eq!(busy_answers(&tape.history()), Ok(1));
    tape.at(30).acquire(3).busy();
    grant(tape.at(40).acquire(1), 6).release().freed();
    let found = busy_answers(&tape.history()).unwrap_err();
    assert_message(&found, Promise::BusyMeansHeld, &["client 3 tried to acquire"]);
}

#[test]
fn busy_is_accepted_while_a_client_may_hold_the_lock() {
    let tape = TestHistory::new();
    tape.at(0).acquire(9).failed();
    tape.at(10).acquire(2).busy();
    check(&tape.history()).unwrap();

    let tape = TestHistory::new();
    let attempt = tape.at(0).acquire(2);
    grant(tape.at(10).acquire(1), 5).release().freed();
    tape.at(20).on(attempt).busy();
    check(&tape.history()).unwrap();
}

// ---- the record

#[test]
fn an_inconsistent_record_is_an_error() {
    let tape = TestHistory::new();
    grant(tape.at(0).acquire(1), 5).release().freed();
    let events = tape.recorder.events();
    for missing in 0..events.len() - 1 {
        let mut events = events.clone();
        events.remove(missing);
        // An answer without its call is meaningless. (A grant without a release is a valid record.)
        assert!(History::from_events(events).is_err(), "without event {missing}");
    }
    for event in &events {
        let mut twice = events.clone();
        twice.push(event.clone());
        let broken = History::from_events(twice).unwrap_err();
        assert!(broken.to_string().contains("the record is inconsistent at"), "{broken}");
    }
}

#[test]
fn events_are_read_back_from_lines_of_json() {
    let tape = TestHistory::new();
    let held = grant(tape.at(0).acquire(1), FencingToken::MAX.get());
    held.valid_for(|| Duration::from_secs(1));
    held.lost();
    held.release().not_held();
    tape.write(1, 7).rejected();
    tape.acquire(2).busy();
    let events = tape.recorder.events();
    let lines: Vec<String> =
        events.iter().map(|event| serde_json::to_string(event).unwrap()).collect();
    assert_eq!(lines[0], r#"{"at":0,"op":0,"client":1,"what":"acquire_called","key":"orders/42"}"#);
    let back: Vec<HistoryEvent> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(back, events);
}

#[test]
fn the_events_of_several_recorders_make_one_history_in_any_order() {
    let sent = Arc::new(std::sync::Mutex::new(Vec::new()));
    let now = Arc::new(AtomicU64::new(0));
    let recorders: Vec<Recorder> = (0..3)
        .map(|source| {
            let (clock, sink) = (Arc::clone(&now), Arc::clone(&sent));
            Recorder::forwarding(
                move || clock.fetch_add(1, Ordering::Relaxed),
                source,
                move |event| sink.lock().unwrap().push(event.clone()),
            )
        })
        .collect();
    for token in 1..100 {
        let recorder = &recorders[token as usize % 3];
        let called = recorder.acquire(token as u32 % 3, KEY);
        called.granted(FencingToken::new(token), || Duration::from_secs(1)).release().freed();
    }
    let mut events = sent.lock().unwrap().clone();
    fastrand::Rng::with_seed(1).shuffle(&mut events);
    assert_eq!(check(&History::from_events(events).unwrap()).unwrap().tokens, 99);
}

#[test]
fn no_two_events_of_a_recorder_have_the_same_time() {
    let recorder = Recorder::new(|| 7);
    std::thread::scope(|scope| {
        for client in 0..4 {
            let recorder = &recorder;
            scope.spawn(move || (0..1_000).for_each(|_| recorder.acquire(client, KEY).busy()));
        }
    });
    let mut times: Vec<u64> = recorder.events().iter().map(|event| event.at).collect();
    times.sort_unstable();
    times.dedup();
    assert_eq!(times.len(), 8_000);
}

#[test]
fn a_million_events_are_checked() {
    let tape = TestHistory::new();
    for turn in 1..=250_000 {
        grant(tape.at(turn).acquire(turn as u32 % 7), turn).release().freed();
    }
    assert_eq!(check(&tape.history()).unwrap().tokens, 250_000);
}
