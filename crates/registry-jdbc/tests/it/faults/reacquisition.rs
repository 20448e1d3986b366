//! A session that is granted the same key repeatedly reserves tokens, and does not write every
//! grant to the row. Tokens and fences still keep their guarantees.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use registry_core::{LockGuard, LockOptions, Registry};
use registry_jdbc::FenceError;
use registry_testkit::clock::ClockShim;
use registry_testkit::{eventually, within};

use super::app_connection::AppConnection;
use super::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const KEY: &str = "orders/42";
const LEASE: Duration = Duration::from_secs(20);
const HOUR: i64 = 3_600;
const SELL: &str = "INSERT INTO sale VALUES (1)";

async fn session(server: &Server) -> Registry {
    registry_with_mode(&server.url(), LEASE, LockMode::Session).await
}

async fn lock(registry: &Registry) -> LockGuard {
    within(TEST_TIMEOUT, registry.obtain(KEY).lock()).await.unwrap()
}

fn token(guard: &LockGuard) -> i64 {
    guard.fencing_token().into()
}

/// Checks that each token is larger than the last one.
#[derive(Debug, Default)]
struct TokenCheck {
    last: i64,
}

impl TokenCheck {
    fn assert_grows(&mut self, guard: &LockGuard) {
        let token = token(guard);
        assert!(self.last < token, "{token} after {}", self.last);
        self.last = token;
    }

    /// Locks and unlocks `times` times.
    async fn lock_and_unlock(&mut self, registry: &Registry, times: u32) {
        for _ in 0..times {
            let guard = lock(registry).await;
            self.assert_grows(&guard);
            guard.unlock().await.unwrap();
        }
    }

    /// Acquires the lock until a grant is not written to the row. Returns the guard of that grant.
    async fn lock_without_write(&mut self, server: &Server, registry: &Registry) -> LockGuard {
        let last = &mut self.last;
        let mut tokens = Self { last: *last };
        // A session reserves no tokens while a loaded machine makes its grants rare.
        let guard = eventually(TEST_TIMEOUT * 4, async || {
            tokens.lock_and_unlock(registry, 100).await;
            let guard = lock(registry).await;
            tokens.assert_grows(&guard);
            if row_token(server).await < token(&guard) {
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
async fn row_token(server: &Server) -> i64 {
    server.sql("SELECT token FROM lock_registry_locks").await.unwrap().parse().unwrap()
}

async fn tokens_of_alternating_sessions_increase(kind: ServerKind) {
    let server = kind.start().await;
    let sessions = [session(&server).await, session(&server).await, session(&server).await];
    let mut tokens = TokenCheck::default();
    for _ in 0..60 {
        let times = fastrand::u32(1..30);
        tokens.lock_and_unlock(&sessions[fastrand::usize(..sessions.len())], times).await;
    }
    for session in &sessions {
        drop(tokens.lock_without_write(&server, session).await);
        session.idle().await;
    }
}

/// The first session reserves tokens ahead of the clock. The second session begins with the token
/// after them.
async fn tokens_stay_close_to_the_clock(kind: ServerKind) {
    let server = kind.start().await;
    let (first, second) = (session(&server).await, session(&server).await);
    let mut tokens = TokenCheck::default();
    for registry in [&first, &second] {
        let until = Instant::now() + Duration::from_secs(3);
        while Instant::now() < until {
            tokens.lock_and_unlock(registry, 10).await;
        }
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let ahead = tokens.last - i64::try_from(now).unwrap();
    assert!(ahead < 1_500_000, "{ahead} µs ahead of the clock");
}

/// Between two grants of the session, a client of another mode holds the key, by lease or by row
/// lock.
async fn a_session_detects_grants_of_other_modes(kind: ServerKind) {
    let server = kind.start().await;
    let first_registry = session(&server).await;
    let mut tokens = TokenCheck::default();
    for mode in [LockMode::Lease, LockMode::Row] {
        let other = registry_with_mode(&server.url(), LEASE, mode).await;
        tokens.lock_without_write(&server, &first_registry).await.unlock().await.unwrap();
        let held = lock(&other).await;
        tokens.assert_grows(&held);
        let lock = first_registry.obtain(KEY);
        // A session reports a row that a row lock holds as a retryable store error.
        assert!(!matches!(lock.try_lock().await, Ok(Some(_))), "{mode:?}");
        held.unlock().await.unwrap();
        tokens.lock_and_unlock(&first_registry, 1).await;
    }
}

async fn tokens_increase_after_crashes(kind: ServerKind) {
    let mut server = kind.start().await;
    let mut tokens = TokenCheck::default();
    for _ in 0..3 {
        let first_registry = session(&server).await;
        drop(tokens.lock_without_write(&server, &first_registry).await);
        server.kill();
        server.restart().await;
        let other = session(&server).await;
        tokens.lock_and_unlock(&other, 1).await;
        let relock = || eventually(TEST_TIMEOUT, async || first_registry.obtain(KEY).lock().await);
        let guard = relock().await;
        tokens.assert_grows(&guard);
    }
}

/// The rows of free keys must not appear as active leases after the clock was set back.
async fn free_rows_stay_free_when_the_clock_is_set_back(kind: ServerKind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let mut tokens = TokenCheck::default();
    for mode in [LockMode::Row, LockMode::Session, LockMode::Lease] {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        tokens.lock_and_unlock(&registry, 2).await;
        clock.jump_wall(-HOUR).unwrap();
        tokens.lock_and_unlock(&registry, 2).await;
    }
}

async fn tokens_increase_when_the_clock_is_set_back(kind: ServerKind) {
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let (first_registry, other) = (session(&server).await, session(&server).await);
    let mut tokens = TokenCheck::default();
    for _ in 0..2 {
        tokens.lock_without_write(&server, &first_registry).await.unlock().await.unwrap();
        clock.jump_wall(-HOUR).unwrap();
        tokens.lock_and_unlock(&first_registry, 2).await;
        tokens.lock_and_unlock(&other, 2).await;
        tokens.lock_and_unlock(&first_registry, 2).await;
        clock.jump_wall(2 * HOUR).unwrap();
    }
}

/// Deletes all rows, as a purge does. The column `floor` keeps the largest of their tokens.
async fn purge(server: &Server) {
    // In PostgreSQL a trigger updates `floor` as well.
    let floor = "UPDATE lock_registry_meta SET floor = GREATEST(floor, \
        COALESCE((SELECT MAX(token + block - 1) FROM lock_registry_locks), 0))";
    server.sql(&format!("{floor}; DELETE FROM lock_registry_locks")).await.unwrap();
}

/// A random sequence of grants to clients of all modes, and of changes to sessions, rows and
/// clocks. The printed seed determines the sequence.
async fn tokens_increase_across_random_events(kind: ServerKind) {
    const STEPS: u32 = 120;
    let clock = ClockShim::new().unwrap();
    let server = kind.start_with_clock(&clock).await;
    let sessions = [session(&server).await, session(&server).await];
    let leases = registry_with_mode(&server.url(), LEASE, LockMode::Lease).await;
    let rows = registry_with_mode(&server.url(), LEASE, LockMode::Row).await;
    let mut app_connection = AppConnection::connect(&server).await;
    let mut tokens = TokenCheck::default();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for step in 0..STEPS {
        let first_registry = &sessions[rng.usize(..sessions.len())];
        match rng.u32(..12) {
            // Often enough grants for a token reservation.
            0..4 => tokens.lock_and_unlock(first_registry, rng.u32(1..120)).await,
            4 => tokens.lock_and_unlock(&leases, 1).await,
            5 => tokens.lock_and_unlock(&rows, 1).await,
            6 => purge(&server).await,
            7 => {
                // By at most a second, which a token reservation may cover, or by more.
                let large_jump = rng.i64(-HOUR..=HOUR);
                let seconds = if rng.bool() { rng.i64(-1..=1) } else { large_jump };
                clock.jump_wall(seconds).unwrap();
            }
            8 => {
                let guard = lock(first_registry).await;
                tokens.assert_grows(&guard);
                server.close_session_connection().await;
                within(TEST_TIMEOUT, guard.lost()).await;
                drop(guard);
                first_registry.idle().await;
            }
            9 => {
                let guard = lock(first_registry).await;
                tokens.assert_grows(&guard);
                let mut transaction = app_connection.begin().await;
                transaction.fence(&guard).await.unwrap();
                transaction.commit().await;
                guard.unlock().await.unwrap();
            }
            // The row is purged while the key is held.
            10 => {
                let guard = lock(first_registry).await;
                tokens.assert_grows(&guard);
                purge(&server).await;
                guard.unlock().await.unwrap();
            }
            _ => {
                let mut transaction = app_connection.begin().await;
                let registry =
                    if matches!(kind, ServerKind::Postgres) { first_registry } else { &rows };
                let lock = transaction.try_lock_in(registry, KEY).await.unwrap();
                let token = i64::from(lock.unwrap().fencing_token());
                assert!(tokens.last < token, "{token} after {} at step {step}", tokens.last);
                // Only a committed token counts.
                if rng.bool() {
                    tokens.last = token;
                    transaction.commit().await;
                } else {
                    transaction.rollback().await;
                }
            }
        }
    }
}

/// Checks that no caller of `registry` is granted the key.
async fn assert_excluded(registry: &Registry) {
    let options = LockOptions::new().wait(Duration::from_millis(500));
    let got = registry.obtain(KEY).try_lock_with(options).await;
    assert!(!matches!(got, Ok(Some(_))), "{got:?}");
}

async fn a_fence_excludes_every_client_even_the_same_session(kind: ServerKind) {
    let server = kind.start().await;
    let (first_registry, other) = (session(&server).await, session(&server).await);
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    let (mut app_connection, mut tokens) =
        (AppConnection::connect(&server).await, TokenCheck::default());
    for _ in 0..3 {
        let guard = tokens.lock_without_write(&server, &first_registry).await;
        let mut transaction = app_connection.begin().await;
        transaction.fence(&guard).await.unwrap();
        // A second fence changes nothing.
        transaction.fence(&guard).await.unwrap();
        guard.unlock().await.unwrap();
        assert_excluded(&first_registry).await;
        assert_excluded(&other).await;
        transaction.run(SELL).await;
        transaction.commit().await;
        tokens.lock_and_unlock(&first_registry, 1).await;
    }
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "3");
}

async fn a_fence_outlasts_its_session_and_fails_after_the_next_grant(kind: ServerKind) {
    let server = kind.start().await;
    let (first_registry, other) = (session(&server).await, session(&server).await);
    server.sql("CREATE TABLE sale (n int)").await.unwrap();
    let (mut app_connection, mut tokens) =
        (AppConnection::connect(&server).await, TokenCheck::default());
    let guard = tokens.lock_without_write(&server, &first_registry).await;
    let mut transaction = app_connection.begin().await;
    transaction.fence(&guard).await.unwrap();
    server.close_session_connection().await;
    assert_excluded(&other).await;
    transaction.run(SELL).await;
    transaction.commit().await;
    within(TEST_TIMEOUT, guard.lost()).await;
    tokens.lock_and_unlock(&other, 1).await;

    // In the other order: another client is granted the key before the fence.
    let guard = tokens.lock_without_write(&server, &first_registry).await;
    server.close_session_connection().await;
    let successor = lock(&other).await;
    tokens.assert_grows(&successor);
    let mut transaction = app_connection.begin().await;
    let fenced = transaction.fence(&guard).await;
    assert!(matches!(fenced, Err(FenceError::Lost { .. } | FenceError::Backend { .. })));
    transaction.rollback().await;
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "1");
}

on_both_servers! {
    tokens_of_alternating_sessions_increase,
    tokens_stay_close_to_the_clock,
    a_session_detects_grants_of_other_modes,
    tokens_increase_after_crashes,
    tokens_increase_across_random_events,
    tokens_increase_when_the_clock_is_set_back,
    free_rows_stay_free_when_the_clock_is_set_back,
    a_fence_excludes_every_client_even_the_same_session,
    a_fence_outlasts_its_session_and_fails_after_the_next_grant,
}
