//! Tests local locks under a model checker: each key has one local lock, one caller at a time has
//! its local permit, and every waiter gets the permit.
//!
//! `RUSTC_WORKSPACE_WRAPPER=$PWD/.ci/rustc-shuttle cargo test -p registry-core --test
//! local_lock_shuttle`
//!
//! The code under test is the engine's own. At each [interleaving_point](../src/interleave.rs), the
//! checker chooses the thread that continues. The store grants every claim, so that only the local
//! locks keep callers apart. A failure prints a schedule that `shuttle::replay` repeats.
#![cfg(shuttle)]
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use registry_core::{
    DistributedLock, LockError, LockGuard, LockOptions, Owner, PassThroughBackend, Registry,
};
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::{future::block_on, thread};
use tokio::runtime::Runtime;

/// The number of schedules per test and strategy.
const SCHEDULES: usize = 2_000;

/// Runs `scenario` under random schedules, and under schedules with few thread switches (PCT).
fn check(scenario: impl Fn(&Registry) + Send + Sync + 'static, handoff: u32) {
    // No task of the runtime runs: the engine only needs a runtime to exist, because all calls of
    // these scenarios are ready at their first poll or wait for another thread.
    check_with_runtime(move |registry, _| scenario(registry), handoff);
}

/// Like [`check`], for a scenario that runs the tasks of the runtime.
fn check_with_runtime(
    scenario: impl Fn(&Registry, &Arc<Runtime>) + Send + Sync + 'static,
    handoff: u32,
) {
    let scenario = Arc::new(scenario);
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    let run = move || {
        let runtime =
            Arc::new(tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
        let _inside = runtime.enter();
        let backend = Arc::new(PassThroughBackend::new());
        let registry = Registry::builder(backend).handoff(handoff).build().unwrap();
        scenario(&registry, &runtime);
        assert_eq!(registry.local_locks(), 0, "a local lock is left");
        assert_eq!(registry.held(), 0, "a claim is left");
    };
    shuttle::Runner::new(RandomScheduler::new(SCHEDULES), config.clone()).run(run.clone());
    for depth in [2, 4] {
        let scheduler = PctScheduler::new(depth, SCHEDULES);
        shuttle::Runner::new(scheduler, config.clone()).run(run.clone());
    }
}

/// Fails when two threads are inside at the same time.
#[derive(Default)]
struct CriticalSection(AtomicBool);

impl CriticalSection {
    fn enter(&self) {
        assert!(!self.0.swap(true, Ordering::SeqCst), "two callers have the local permit at once");
        thread::yield_now();
        self.0.store(false, Ordering::SeqCst);
    }

    fn enter_under(&self, lock: &DistributedLock) {
        let guard = block_on(lock.lock()).unwrap();
        self.enter();
        block_on(guard.unlock()).unwrap();
    }
}

fn join_all(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    let threads: Vec<_> = threads.into_iter().collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Polls `future` once.
fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

type LockFuture = Pin<Box<dyn Future<Output = Result<LockGuard, LockError>> + Send>>;

fn lock_future(lock: &DistributedLock) -> LockFuture {
    let lock = lock.clone();
    Box::pin(async move { lock.lock().await })
}

/// Threads that obtain and drop handles of one key at random share one local lock at any time.
#[test]
fn concurrent_obtains_and_drops_never_create_two_local_locks() {
    check(
        |registry| {
            let section = Arc::new(CriticalSection::default());
            join_all((0..3).map(|_| {
                let (registry, section) = (registry.clone(), Arc::clone(&section));
                thread::spawn(move || {
                    for _ in 0..2 {
                        let mut lock = registry.obtain("k");
                        if thread_rng().gen_bool(0.5) {
                            // The old handle may be the last one when it is dropped.
                            lock = registry.obtain("k");
                        }
                        if thread_rng().gen_bool(0.8) {
                            section.enter_under(&lock);
                        }
                    }
                })
            }));
        },
        0,
    );
}

/// A guard keeps the local lock alive when all handles are dropped.
#[test]
fn a_held_local_lock_is_found_by_the_next_caller() {
    check(
        |registry| {
            let section = Arc::new(CriticalSection::default());
            join_all((0..3).map(|_| {
                let (registry, section) = (registry.clone(), Arc::clone(&section));
                thread::spawn(move || {
                    let guard = block_on(registry.obtain("k").lock()).unwrap();
                    section.enter();
                    block_on(guard.unlock()).unwrap();
                })
            }));
        },
        0,
    );
}

/// Two threads wait for the lock, and two others drop their waiting futures at random times.
fn drop_waiting_futures(registry: &Registry) {
    let section = Arc::new(CriticalSection::default());
    let waiting = (0..2).map(|_| {
        let (lock, section) = (registry.obtain("k"), Arc::clone(&section));
        thread::spawn(move || section.enter_under(&lock))
    });
    let dropping = (0..2).map(|_| {
        let (mut entering, section) = (lock_future(&registry.obtain("k")), Arc::clone(&section));
        thread::spawn(move || {
            for _ in 0..thread_rng().gen_range(0..4) {
                if let Poll::Ready(entered) = poll_once(entering.as_mut()) {
                    section.enter();
                    block_on(entered.unwrap().unlock()).unwrap();
                    return;
                }
                thread::yield_now();
            }
        })
    });
    join_all(waiting.chain(dropping).collect::<Vec<_>>());
}

/// The local permit skips callers that were dropped, at whatever time, and reaches the others.
#[test]
fn dropped_waiters_lose_no_permit() {
    check(drop_waiting_futures, 0);
}

/// A claim that is handed over to a dropped caller passes to the next caller, or is released in the
/// store.
#[test]
fn dropped_waiters_lose_no_claim() {
    check_with_runtime(
        |registry, runtime| {
            let done = Arc::new(AtomicBool::new(false));
            // Drives the background releaser, which releases a guard that no caller received.
            let background = {
                let (runtime, done) = (Arc::clone(runtime), Arc::clone(&done));
                thread::spawn(move || {
                    while !done.load(Ordering::SeqCst) {
                        runtime.block_on(tokio::task::yield_now());
                        thread::yield_now();
                    }
                })
            };
            drop_waiting_futures(registry);
            while registry.held() > 0 {
                thread::yield_now();
            }
            block_on(registry.idle());
            done.store(true, Ordering::SeqCst);
            background.join().unwrap();
        },
        32,
    );
}

/// Callers get the local permit in the order of their arrival.
#[test]
fn local_permits_are_given_in_the_order_of_arrival() {
    for handoff in [0, 32] {
        check(
            |registry| {
                let new_caller = || lock_future(&registry.obtain("k"));
                let holder = block_on(registry.obtain("k").lock()).unwrap();
                // How many callers have arrived, and how many have had the permit.
                let counts = Arc::new(shuttle::sync::Mutex::new((0, 0)));
                let callers: Vec<_> = (0..3)
                    .map(|_| {
                        let (mut entering, counts) = (new_caller(), Arc::clone(&counts));
                        thread::spawn(move || {
                            let place = {
                                let mut counts = counts.lock().unwrap();
                                assert!(poll_once(entering.as_mut()).is_pending());
                                counts.0 += 1;
                                counts.0
                            };
                            let guard = block_on(entering).unwrap();
                            let mut counts = counts.lock().unwrap();
                            counts.1 += 1;
                            assert_eq!(counts.1, place, "a waiter was overtaken");
                            drop(counts);
                            block_on(guard.unlock()).unwrap();
                        })
                    })
                    .collect();
                while counts.lock().unwrap().0 < 3 {
                    thread::yield_now();
                }
                block_on(holder.unlock()).unwrap();
                join_all(callers);
            },
            handoff,
        );
    }
}

/// A claim that is handed over from caller to caller has one holder at a time, and is released at
/// the end.
#[test]
fn a_claim_that_is_handed_over_has_one_holder() {
    check(
        |registry| {
            let section = Arc::new(CriticalSection::default());
            join_all((0..4).map(|_| {
                let (lock, section) = (registry.obtain("k"), Arc::clone(&section));
                thread::spawn(move || section.enter_under(&lock))
            }));
        },
        2,
    );
}

/// An owner that holds the lock re-enters it at once, whether the grant came from the store or by a
/// hand-over.
#[test]
fn an_owner_never_waits_for_itself() {
    for handoff in [0, 32] {
        check(
            |registry| {
                let section = Arc::new(CriticalSection::default());
                join_all((0..3).map(|_| {
                    let (lock, section) = (registry.obtain("k"), Arc::clone(&section));
                    thread::spawn(move || {
                        let options = LockOptions::new().owner(&Owner::new());
                        let mut guard = block_on(lock.lock_with(options.clone())).unwrap();
                        if thread_rng().gen_bool(0.5) {
                            let inner = block_on(lock.lock_with(options)).unwrap();
                            block_on(guard.unlock()).unwrap();
                            guard = inner;
                        }
                        section.enter();
                        block_on(guard.unlock()).unwrap();
                    })
                }));
            },
            handoff,
        );
    }
}

/// Several callers of one owner may wait for another owner's lock; all of them get a guard.
#[test]
fn all_callers_of_one_owner_reenter() {
    for handoff in [0, 32] {
        check(
            |registry| {
                let owner = Owner::new();
                let other = {
                    let lock = registry.obtain("k");
                    thread::spawn(move || CriticalSection::default().enter_under(&lock))
                };
                let same_owner = (0..3).map(|_| {
                    let (lock, owner) = (registry.obtain("k"), owner.clone());
                    thread::spawn(move || {
                        let options = LockOptions::new().owner(&owner);
                        let guard = block_on(lock.lock_with(options)).unwrap();
                        thread::yield_now();
                        block_on(guard.unlock()).unwrap();
                    })
                });
                join_all(same_owner.chain([other]).collect::<Vec<_>>());
            },
            handoff,
        );
    }
}

/// Without switching points in the table of local locks, the tests above would not interleave
/// accesses to it.
#[test]
fn the_model_checker_reaches_the_table_of_local_locks() {
    check(
        |registry| {
            let before = shuttle::current::context_switches();
            // Another thread to switch to.
            let other = thread::spawn(|| ());
            drop(registry.obtain("k"));
            let points = shuttle::current::context_switches() - before;
            assert!(
                points >= 3,
                "{points} switching points while a handle is obtained and dropped"
            );
            other.join().unwrap();
        },
        0,
    );
}
