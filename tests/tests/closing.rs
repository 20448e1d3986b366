//! The end of a registry: its report is true, nobody holds anything afterwards, and nobody waits longer than need be.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    LockBackend, LockError, LockEvent, LockOptions, LockRegistry, MemoryBackend, Observer, Registry,
};
use tokio::time::advance;

/// An `unlock` in mid-flight is neither held any more nor the janitor's yet. `close` must not close the store under it.
#[tokio::test(start_paused = true)]
async fn close_waits_for_an_unlock_on_its_way() {
    let store = MemoryBackend::new();
    let slow =
        Faults::none().always(Operation::Release, Fault::DelayRequest(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> = Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let ours = Registry::builder(faulty).build().unwrap();
    let theirs = Registry::builder(Arc::new(store)).build().unwrap();
    let guard = ours.obtain("k").lock().await.unwrap();
    let unlocking = tokio::spawn(guard.unlock());
    tokio::task::yield_now().await;
    let report = ours.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    let next = theirs.obtain("k").try_lock().await.unwrap();
    assert!(next.is_some(), "closed with a clean report, and the key is still taken");
    unlocking.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_comes_during_the_close_gets_nothing() {
    let store = MemoryBackend::new();
    let slow =
        Faults::none().always(Operation::Acquire, Fault::DelayReply(Duration::from_millis(500)));
    let faulty: Arc<dyn LockBackend> = Arc::new(FaultyBackend::new(Arc::new(store.clone()), slow));
    let ours = Registry::builder(faulty).build().unwrap();
    let locking = tokio::spawn({
        let lock = ours.obtain("k");
        async move { lock.lock().await }
    });
    tokio::task::yield_now().await;
    let report = ours.close(Duration::from_secs(60)).await;
    assert!(report.is_clean(), "{report:?}");
    assert!(locking.await.unwrap().is_err());
    assert_eq!(store.records(), 0);
    advance(Duration::from_secs(60)).await;
    assert_eq!((ours.slots(), ours.held()), (0, 0));
}

/// The limit is for holders. Waiters hear at once that there is nothing to wait for.
#[tokio::test(start_paused = true)]
async fn waiters_are_sent_away_before_the_limit() {
    let store = MemoryBackend::new();
    let open = || Registry::builder(Arc::new(store.clone())).build().unwrap();
    let (ours, theirs) = (open(), open());
    let held = ours.obtain("ours").lock().await.unwrap();
    let elsewhere = theirs.obtain("theirs").lock().await.unwrap();
    let waiters = ["ours", "theirs"].map(|key| {
        let lock = ours.obtain(key);
        tokio::spawn(async move { lock.lock().await })
    });
    tokio::task::yield_now().await;
    let closing = tokio::spawn({
        let ours = ours.clone();
        async move { ours.close(Duration::from_secs(60)).await }
    });
    for waiter in waiters {
        let sent_away = tokio::time::timeout(Duration::from_secs(1), waiter).await.unwrap();
        assert!(matches!(sent_away.unwrap(), Err(LockError::Closed)));
    }
    assert!(held.is_held() && !closing.is_finished());
    held.unlock().await.unwrap();
    assert!(closing.await.unwrap().is_clean());
    elsewhere.unlock().await.unwrap();
}

/// Holds up whoever tells it of a loss until it is let go.
#[derive(Debug)]
struct Stopping {
    told: mpsc::Sender<String>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Observer for Stopping {
    fn on(&self, event: &LockEvent<'_>) {
        if let LockEvent::Lost { key: key @ ("gate" | "over"), .. } = event {
            let _ = self.told.send((*key).to_owned());
            let _ = self.go_on.lock().unwrap().recv();
        }
    }
}

/// The keeper takes what is due off its schedule before it looks at it. A claim that is in its hands at that moment must
/// not be overlooked by `close`.
#[test]
fn close_loses_guards_that_the_keeper_is_just_looking_at() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (tell, told) = mpsc::channel();
    let (let_go, go_on) = mpsc::channel();
    let observer = Stopping { told: tell, go_on: Mutex::new(go_on) };
    let ours = {
        let _inside = runtime.enter();
        Registry::builder(Arc::new(MemoryBackend::new()))
            .observer(Arc::new(observer))
            .timeout(Duration::from_millis(100))
            .build()
            .unwrap()
    };
    let lock = |key: &str, lease: u64, renew: bool| {
        let options = LockOptions::new().lease(Duration::from_millis(lease)).renew(renew);
        runtime.block_on(ours.obtain(key).lock_with(options)).unwrap().unwrap()
    };
    let guards = (lock("gate", 500, false), lock("over", 2_020, false));
    let renewed = lock("renewed", 6_000, true);
    // Holds the keeper up until the others are due together: one is over, one is to be renewed.
    assert_eq!(told.recv().unwrap(), "gate");
    std::thread::sleep(Duration::from_millis(2_200));
    let_go.send(()).unwrap();
    // Now it holds both and looks at the first.
    assert_eq!(told.recv().unwrap(), "over");
    // Elsewhere, because the keeper that is held up may hold up the timers of its own runtime.
    let elsewhere = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    elsewhere.block_on(ours.close(Duration::ZERO));
    drop(let_go);
    assert!(!renewed.is_held(), "the registry is closed and the guard does not know");
    drop(guards);
}
