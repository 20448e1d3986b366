//! Session locks, which end with the connection of their process, and row locks, which end with a
//! connection of their own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{Attempt, Claim, LockBackend, Registry, Release, Renewal};
use registry_jdbc::SqlMode;
use tokio::time::timeout;

use super::common::{LEASE, TEST_TIMEOUT, backend, claim, config, grant, key, lock, server};
use super::server::*;

/// The time limit for a loss notification: well before the next renewal.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(5);

pub(crate) async fn session_backend(server: &Server) -> Arc<Backend> {
    open(server, &SqlMode::Session).await
}

pub(crate) fn registry_over(backend: &Arc<Backend>) -> Registry {
    Registry::builder(Arc::<Backend>::clone(backend)).build().unwrap()
}

pub(crate) async fn attempt(backend: &Backend, claim: &Claim) -> Attempt {
    backend.try_acquire(claim).await.unwrap()
}

/// The modes in which locks end with a connection.
const MODES: [SqlMode; 2] = [SqlMode::Session, SqlMode::Row];

async fn open(server: &Server, mode: &SqlMode) -> Arc<Backend> {
    Arc::new(Backend::open_mode(config(server), mode.clone()).await.unwrap())
}

#[tokio::test]
async fn a_closed_connection_frees_the_lock_and_notifies_the_holder_at_once() {
    let server = server().await;
    for mode in MODES {
        let (first, second) = (open(&server, &mode).await, open(&server, &mode).await);
        let (first, second) = (registry_over(&first), registry_over(&second));
        let guards = [lock(&first, "orders/42").await, lock(&first, "orders/43").await];
        let began = Instant::now();
        end_connections(&server).await;
        for guard in &guards {
            timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
        }
        assert!(began.elapsed() < AT_ONCE, "{mode:?}: after {:?}", began.elapsed());
        let next = second.obtain("orders/42");
        let next = timeout(TEST_TIMEOUT, next.lock()).await.unwrap().unwrap();
        assert!(next.fencing_token() > guards[0].fencing_token());
        let other = lock(&first, "orders/43").await;
        assert!(other.is_held() && first.obtain("orders/42").try_lock().await.unwrap().is_none());
        other.unlock().await.unwrap();
        next.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_restarted_server_has_no_locks_and_notifies_their_holders() {
    let mut server = server().await;
    for mode in MODES {
        let registry = registry_over(&open(&server, &mode).await);
        let guard = lock(&registry, "orders/42").await;
        lock(&registry, "orders/43").await.unlock().await.unwrap();
        if mode == SqlMode::Session {
            server.stop().await.unwrap();
        } else {
            server.kill();
        }
        timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
        server.restart().await.unwrap();
        let next = registry.obtain("orders/42");
        let next = timeout(TEST_TIMEOUT, next.lock()).await.unwrap().unwrap();
        assert!(next.fencing_token() > guard.fencing_token(), "{mode:?}");
    }
}

#[tokio::test]
async fn a_lock_ends_with_its_process_and_not_with_a_lease() {
    let server = server().await;
    for mode in MODES {
        let other = registry_over(&open(&server, &mode).await);
        // A runtime that is shut down stands for a process that dies: the socket is closed without
        // a disconnect message.
        let (config, dead_mode) = (config(&server), mode.clone());
        tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let backend = Backend::open_mode(config, dead_mode).await.unwrap();
                let granted = attempt(&backend, &claim("orders/42")).await;
                assert!(matches!(granted, Attempt::Granted(_)));
            });
            runtime.shutdown_background();
        })
        .await
        .unwrap();
        let began = Instant::now();
        let guard = timeout(TEST_TIMEOUT, other.obtain("orders/42").lock()).await.unwrap().unwrap();
        assert!(began.elapsed() < LEASE / 2, "{mode:?}: after {:?}", began.elapsed());
        assert!(guard.is_held());
    }
}

#[tokio::test]
async fn cancelled_waits_leave_no_lock_behind() {
    let server = server().await;
    for mode in MODES {
        let (a, b) = (open(&server, &mode).await, open(&server, &mode).await);
        let (a, b) = (registry_over(&a), registry_over(&b));
        let guard = lock(&a, "orders/42").await;
        for n in 1..20 {
            let waiting = b.obtain("orders/42");
            assert!(timeout(Duration::from_millis(n), waiting.lock()).await.is_err());
        }
        guard.unlock().await.unwrap();
        for n in 1..20 {
            let free = b.obtain("orders/42");
            let _ = timeout(Duration::from_micros(150 * n), free.lock()).await;
        }
        b.idle().await;
        match mode {
            SqlMode::Session => assert_no_session_locks(&server).await,
            _ => assert_eq!(row_lock_count(&server).await, 0),
        }
        lock(&a, "orders/42").await.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_lock_without_renewal_is_released_at_the_end_of_its_lease() {
    let server = server().await;
    for mode in MODES {
        let (a, b) = (open(&server, &mode).await, open(&server, &mode).await);
        // The first lock of `b` opens a connection, which would take time from the lease below.
        lock(&registry_over(&b), "another").await.unlock().await.unwrap();
        let short = Claim::new(key("orders/42"), Duration::from_secs(2));
        assert!(matches!(attempt(&a, &short).await, Attempt::Granted(_)));
        assert!(matches!(attempt(&b, &claim("orders/42")).await, Attempt::Busy(_)));
        let next = registry_over(&b).obtain("orders/42");
        let guard = timeout(TEST_TIMEOUT, next.lock()).await.unwrap().unwrap();
        assert!(guard.is_held());
        assert!(matches!(a.renew(std::slice::from_ref(&short)).await[0], Ok(Renewal::Gone)));
        assert_eq!(a.release(&short).await.unwrap(), Release::NotHeld);
        guard.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn leases_and_session_locks_exclude_each_other_and_tokens_increase() {
    let server = server().await;
    let (leases, sessions) = (backend(config(&server)).await, session_backend(&server).await);
    let lease = claim("orders/42");
    let first = grant(&leases, &lease).await.token;
    assert!(matches!(attempt(&sessions, &claim("orders/42")).await, Attempt::Busy(_)));
    assert_no_session_locks(&server).await;
    leases.release(&lease).await.unwrap();
    let held = claim("orders/42");
    let Attempt::Granted(second) = attempt(&sessions, &held).await else { panic!("busy") };
    sessions.release(&held).await.unwrap();
    let third = grant(&leases, &lease).await.token;
    assert!(first < second.token && second.token < third);
}
