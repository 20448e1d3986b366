//! A session that is granted the same key repeatedly does not write every grant to the row. Tokens
//! and fences keep their guarantees all the same.

use registry_core::{LockGuard, LockOptions, LockRegistry, Registry};
use registry_jdbc::FenceError;
use registry_testkit::clock::ClockShim;
use registry_testkit::{eventually, within};
use std::time::Duration;

use crate::data::Data;
use crate::server::{Kind, LONG, Mode, Server, registry_in};

const KEY: &str = "orders/42";
const LEASE: Duration = Duration::from_secs(20);
const HOUR: i64 = 3_600;
const SELL: &str = "INSERT INTO sale VALUES (1)";

async fn session(server: &Server) -> Registry {
    registry_in(&server.url(), LEASE, Mode::Session).await
}

async fn lock(registry: &Registry) -> LockGuard {
    within(LONG, registry.obtain(KEY).lock()).await.unwrap()
}

fn token(guard: &LockGuard) -> i64 {
    guard.fencing_token().unwrap().into()
}

/// Checks that tokens grow.
#[derive(Debug, Default)]
struct Tokens {
    last: i64,
}

impl Tokens {
    fn grow(&mut self, guard: &LockGuard) {
        let token = token(guard);
        assert!(self.last < token, "{token} after {}", self.last);
        self.last = token;
    }

    /// Locks and unlocks `pairs` times.
    async fn pairs(&mut self, registry: &Registry, pairs: u32) {
        for _ in 0..pairs {
            let guard = lock(registry).await;
            self.grow(&guard);
            guard.unlock().await.unwrap();
        }
    }

    /// Returns a guard whose grant was not written to the row.
    async fn unwritten(&mut self, server: &Server, registry: &Registry) -> LockGuard {
        let last = &mut self.last;
        let mut tokens = Self { last: *last };
        let guard = eventually(LONG, async || {
            tokens.pairs(registry, 100).await;
            let guard = lock(registry).await;
            tokens.grow(&guard);
            if noted(server).await < token(&guard) {
                return Some(guard);
            }
            guard.unlock().await.unwrap();
            None
        });
        let guard = guard.await;
        *last = tokens.last;
        guard
    }
}

/// The token in the row.
async fn noted(server: &Server) -> i64 {
    server.sql("SELECT token FROM lock_registry_locks").await.unwrap().parse().unwrap()
}

async fn tokens_of_sessions_that_alternate_grow(kind: Kind) {
    let server = kind.start().await;
    let sessions = [session(&server).await, session(&server).await, session(&server).await];
    let mut tokens = Tokens::default();
    for _ in 0..60 {
        let pairs = fastrand::u32(1..30);
        tokens.pairs(&sessions[fastrand::usize(..sessions.len())], pairs).await;
    }
    for session in &sessions {
        drop(tokens.unwritten(&server, session).await);
        session.idle().await;
    }
}

/// A client of another mode holds the key in between, by lease or by row lock.
async fn what_other_modes_do_in_between_is_seen(kind: Kind) {
    let server = kind.start().await;
    let ours = session(&server).await;
    let mut tokens = Tokens::default();
    for mode in [Mode::Lease, Mode::Row] {
        let other = registry_in(&server.url(), LEASE, mode).await;
        tokens.unwritten(&server, &ours).await.unlock().await.unwrap();
        let held = lock(&other).await;
        tokens.grow(&held);
        let lock = ours.obtain(KEY);
        // In this mode a locked row is reported as a retryable store error.
        assert!(!matches!(lock.try_lock().await, Ok(Some(_))), "{mode:?}");
        held.unlock().await.unwrap();
        tokens.pairs(&ours, 1).await;
    }
}

async fn tokens_grow_over_crashes(kind: Kind) {
    let mut server = kind.start().await;
    let mut tokens = Tokens::default();
    for _ in 0..3 {
        let ours = session(&server).await;
        drop(tokens.unwritten(&server, &ours).await);
        server.kill();
        server.start_again().await;
        let other = session(&server).await;
        tokens.pairs(&other, 1).await;
        let again = || eventually(LONG, async || ours.obtain(KEY).lock().await);
        let guard = again().await;
        tokens.grow(&guard);
    }
}

/// The rows of free keys must not look like active leases after the clock was set back.
async fn rows_keep_nobody_out_when_the_clock_is_put_back(kind: Kind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let mut tokens = Tokens::default();
    for mode in [Mode::Row, Mode::Session, Mode::Lease] {
        let registry = registry_in(&server.url(), LEASE, mode).await;
        tokens.pairs(&registry, 2).await;
        clock.jump_wall(-HOUR).unwrap();
        tokens.pairs(&registry, 2).await;
    }
}

async fn tokens_grow_over_a_clock_that_is_put_back(kind: Kind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let (ours, other) = (session(&server).await, session(&server).await);
    let mut tokens = Tokens::default();
    for _ in 0..2 {
        tokens.unwritten(&server, &ours).await.unlock().await.unwrap();
        clock.jump_wall(-HOUR).unwrap();
        tokens.pairs(&ours, 2).await;
        tokens.pairs(&other, 2).await;
        tokens.pairs(&ours, 2).await;
        clock.jump_wall(2 * HOUR).unwrap();
    }
}

/// Deletes all rows as a purge does. Their tokens are kept in the floor.
async fn purge(server: &Server) {
    // In PostgreSQL a trigger updates the floor.
    let floor = "UPDATE lock_registry_meta SET floor = GREATEST(floor, \
        COALESCE((SELECT MAX(token + block - 1) FROM lock_registry_locks), 0))";
    server.sql(&format!("{floor}; DELETE FROM lock_registry_locks")).await.unwrap();
}

/// A random sequence of all clients that may hold the key, and of changes to sessions, rows and
/// clocks. The printed seed reproduces a run.
async fn tokens_grow_whatever_comes_in_between(kind: Kind) {
    const STEPS: u32 = 120;
    let clock = ClockShim::new().unwrap();
    let server = kind.start_by(&clock).await;
    let sessions = [session(&server).await, session(&server).await];
    let leases = registry_in(&server.url(), LEASE, Mode::Lease).await;
    let rows = registry_in(&server.url(), LEASE, Mode::Row).await;
    let mut data = Data::connect(&server).await;
    let mut tokens = Tokens::default();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    for step in 0..STEPS {
        let ours = &sessions[dice.usize(..sessions.len())];
        match dice.u32(..12) {
            // Enough pairs for a token reservation.
            0..4 => tokens.pairs(ours, dice.u32(1..120)).await,
            4 => tokens.pairs(&leases, 1).await,
            5 => tokens.pairs(&rows, 1).await,
            6 => purge(&server).await,
            7 => {
                // By a second, which a token reservation may cover, or by more.
                let far = dice.i64(-HOUR..=HOUR);
                let seconds = if dice.bool() { dice.i64(-1..=1) } else { far };
                clock.jump_wall(seconds).unwrap();
            }
            8 => {
                let guard = lock(ours).await;
                tokens.grow(&guard);
                server.cut_session().await;
                within(LONG, guard.lost()).await;
                drop(guard);
                ours.idle().await;
            }
            9 => {
                let guard = lock(ours).await;
                tokens.grow(&guard);
                let mut transaction = data.begin().await;
                transaction.fence(&guard).await.unwrap();
                transaction.commit().await;
                guard.unlock().await.unwrap();
            }
            // The row is purged while the key is held.
            10 => {
                let guard = lock(ours).await;
                tokens.grow(&guard);
                purge(&server).await;
                guard.unlock().await.unwrap();
            }
            _ => {
                let mut transaction = data.begin().await;
                let registry = if matches!(kind, Kind::Postgres) { ours } else { &rows };
                let lock = transaction.try_lock_in(registry, KEY).await.unwrap();
                let token = i64::from(lock.unwrap().fencing_token());
                assert!(tokens.last < token, "{token} after {} at step {step}", tokens.last);
                // Only a committed token counts.
                if dice.bool() {
                    tokens.last = token;
                    transaction.commit().await;
                } else {
                    transaction.rollback().await;
                }
            }
        }
    }
}

/// Checks that no caller is granted the key.
async fn is_kept_out(registry: &Registry) {
    let options = LockOptions::new().wait(Duration::from_millis(500));
    let got = registry.obtain(KEY).lock_with(options).await;
    assert!(!matches!(got, Ok(Some(_))), "{got:?}");
}

async fn a_fence_keeps_everybody_out_the_same_session_too(kind: Kind) {
    let server = kind.start().await;
    let (ours, other) = (session(&server).await, session(&server).await);
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    let (mut data, mut tokens) = (Data::connect(&server).await, Tokens::default());
    for _ in 0..3 {
        let guard = tokens.unwritten(&server, &ours).await;
        let mut transaction = data.begin().await;
        transaction.fence(&guard).await.unwrap();
        // A second fence changes nothing.
        transaction.fence(&guard).await.unwrap();
        guard.unlock().await.unwrap();
        is_kept_out(&ours).await;
        is_kept_out(&other).await;
        transaction.run(SELL).await;
        transaction.commit().await;
        tokens.pairs(&ours, 1).await;
    }
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "3");
}

async fn a_fence_outlasts_the_session_and_comes_too_late_after_it(kind: Kind) {
    let server = kind.start().await;
    let (ours, other) = (session(&server).await, session(&server).await);
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    let (mut data, mut tokens) = (Data::connect(&server).await, Tokens::default());
    let guard = tokens.unwritten(&server, &ours).await;
    let mut transaction = data.begin().await;
    transaction.fence(&guard).await.unwrap();
    server.cut_session().await;
    is_kept_out(&other).await;
    transaction.run(SELL).await;
    transaction.commit().await;
    within(LONG, guard.lost()).await;
    tokens.pairs(&other, 1).await;

    // The other order: another client is granted the key first.
    let guard = tokens.unwritten(&server, &ours).await;
    server.cut_session().await;
    let successor = lock(&other).await;
    tokens.grow(&successor);
    let mut transaction = data.begin().await;
    let fenced = transaction.fence(&guard).await;
    assert!(matches!(fenced, Err(FenceError::Lost { .. } | FenceError::Backend { .. })));
    transaction.rollback().await;
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "1");
}

on_both_servers! {
    tokens_of_sessions_that_alternate_grow,
    what_other_modes_do_in_between_is_seen,
    tokens_grow_over_crashes,
    tokens_grow_whatever_comes_in_between,
    tokens_grow_over_a_clock_that_is_put_back,
    rows_keep_nobody_out_when_the_clock_is_put_back,
    a_fence_keeps_everybody_out_the_same_session_too,
    a_fence_outlasts_the_session_and_comes_too_late_after_it,
}
