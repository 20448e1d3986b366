//! The local half of a lock under a model checker. One local lock exists per key, whenever handles
//! are obtained and dropped. One caller at a time has the local permit, and every waiter gets it.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p registry-core --test local_lock_shuttle`
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
    DistributedLock, LockError, LockGuard, LockOptions, LockRegistry, Owner, PassThroughBackend,
    Registry,
};
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::{future::block_on, thread};
use tokio::runtime::Runtime;

/// The number of schedules per test and strategy.
const SCHEDULES: usize = 2_000;

/// Runs `scene` under many schedules: random ones, and schedules with few switches at the most
/// harmful points.
fn check(scene: impl Fn(&Registry) + Send + Sync + 'static, handoff: u32) {
    // No runtime is driven, because all calls of these scenes are ready at once. The engine only
    // needs a runtime to exist.
    check_in(move |registry, _| scene(registry), handoff);
}

fn check_in(scene: impl Fn(&Registry, &Arc<Runtime>) + Send + Sync + 'static, handoff: u32) {
    let scene = Arc::new(scene);
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    let run = move || {
        let runtime =
            Arc::new(tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
        let _inside = runtime.enter();
        let backend = Arc::new(PassThroughBackend::new());
        let registry = Registry::builder(backend).handoff(handoff).build().unwrap();
        scene(&registry, &runtime);
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
struct Room(AtomicBool);

impl Room {
    fn visit(&self) {
        assert!(!self.0.swap(true, Ordering::SeqCst), "two callers have the local permit at once");
        thread::yield_now();
        self.0.store(false, Ordering::SeqCst);
    }

    fn visit_under(&self, lock: &DistributedLock) {
        let guard = block_on(lock.lock()).unwrap();
        self.visit();
        block_on(guard.unlock()).unwrap();
    }
}

fn all(visitors: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    let visitors: Vec<_> = visitors.into_iter().collect();
    for visitor in visitors {
        visitor.join().unwrap();
    }
}

/// Polls `future` once.
fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

type Lock = Pin<Box<dyn Future<Output = Result<LockGuard, LockError>> + Send>>;

fn lock(lock: &DistributedLock) -> Lock {
    let lock = lock.clone();
    Box::pin(async move { lock.lock().await })
}

/// Threads that obtain and drop handles of one key at random share one local lock at any time.
#[test]
fn handles_that_come_and_go_never_create_two_local_locks() {
    check(
        |registry| {
            let room = Arc::new(Room::default());
            all((0..3).map(|_| {
                let (registry, room) = (registry.clone(), Arc::clone(&room));
                thread::spawn(move || {
                    for _ in 0..2 {
                        let mut lock = registry.obtain("k");
                        if thread_rng().gen_bool(0.5) {
                            // The old handle may be the last one when it is dropped.
                            lock = registry.obtain("k");
                        }
                        if thread_rng().gen_bool(0.8) {
                            room.visit_under(&lock);
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
            let room = Arc::new(Room::default());
            all((0..3).map(|_| {
                let (registry, room) = (registry.clone(), Arc::clone(&room));
                thread::spawn(move || {
                    let guard = block_on(registry.obtain("k").lock()).unwrap();
                    room.visit();
                    block_on(guard.unlock()).unwrap();
                })
            }));
        },
        0,
    );
}

fn leave_the_queue(registry: &Registry) {
    let room = Arc::new(Room::default());
    let stay = (0..2).map(|_| {
        let (lock, room) = (registry.obtain("k"), Arc::clone(&room));
        thread::spawn(move || room.visit_under(&lock))
    });
    let leave = (0..2).map(|_| {
        let (mut entering, room) = (lock(&registry.obtain("k")), Arc::clone(&room));
        thread::spawn(move || {
            for _ in 0..thread_rng().gen_range(0..4) {
                if let Poll::Ready(entered) = poll_once(entering.as_mut()) {
                    room.visit();
                    block_on(entered.unwrap().unlock()).unwrap();
                    return;
                }
                thread::yield_now();
            }
        })
    });
    all(stay.chain(leave).collect::<Vec<_>>());
}

/// The local permit skips callers that have left the queue, whenever they leave, and reaches those
/// that remain.
#[test]
fn callers_that_leave_the_queue_lose_no_permit() {
    check(leave_the_queue, 0);
}

/// A claim that was handed over to a caller that has left passes to the next caller, or is released
/// in the store.
#[test]
fn callers_that_leave_the_queue_lose_no_claim() {
    check_in(
        |registry, runtime| {
            let over = Arc::new(AtomicBool::new(false));
            // Drives the background releaser, which releases a guard that no caller received.
            let background = {
                let (runtime, over) = (Arc::clone(runtime), Arc::clone(&over));
                thread::spawn(move || {
                    while !over.load(Ordering::SeqCst) {
                        runtime.block_on(tokio::task::yield_now());
                        thread::yield_now();
                    }
                })
            };
            leave_the_queue(registry);
            while registry.held() > 0 {
                thread::yield_now();
            }
            block_on(registry.idle());
            over.store(true, Ordering::SeqCst);
            background.join().unwrap();
        },
        32,
    );
}

/// Callers get the local permit in the order of their arrival.
#[test]
fn permits_are_given_in_the_order_of_arrival() {
    for handoff in [0, 32] {
        check(
            |registry| {
                let lock_now = || lock(&registry.obtain("k"));
                let holder = block_on(registry.obtain("k").lock()).unwrap();
                let arrived = Arc::new(shuttle::sync::Mutex::new((0, 0)));
                let callers: Vec<_> = (0..3)
                    .map(|_| {
                        let (mut entering, arrived) = (lock_now(), Arc::clone(&arrived));
                        thread::spawn(move || {
                            let place = {
                                let mut arrived = arrived.lock().unwrap();
                                assert!(poll_once(entering.as_mut()).is_pending());
                                arrived.0 += 1;
                                arrived.0
                            };
                            let guard = block_on(entering).unwrap();
                            let mut arrived = arrived.lock().unwrap();
                            arrived.1 += 1;
                            assert_eq!(arrived.1, place, "a waiter was overtaken");
                            drop(arrived);
                            block_on(guard.unlock()).unwrap();
                        })
                    })
                    .collect();
                while arrived.lock().unwrap().0 < 3 {
                    thread::yield_now();
                }
                block_on(holder.unlock()).unwrap();
                all(callers);
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
            let room = Arc::new(Room::default());
            all((0..4).map(|_| {
                let (lock, room) = (registry.obtain("k"), Arc::clone(&room));
                thread::spawn(move || room.visit_under(&lock))
            }));
        },
        2,
    );
}

/// An owner that holds the lock re-enters it at once, whichever caller held it before, and however
/// the owner got it.
#[test]
fn an_owner_never_waits_for_itself() {
    for handoff in [0, 32] {
        check(
            |registry| {
                let room = Arc::new(Room::default());
                all((0..3).map(|_| {
                    let (lock, room) = (registry.obtain("k"), Arc::clone(&room));
                    thread::spawn(move || {
                        let options = LockOptions::new().owner(&Owner::new());
                        let mut guard = block_on(lock.lock_with(options.clone())).unwrap();
                        if thread_rng().gen_bool(0.5) {
                            let inner = block_on(lock.lock_with(options)).unwrap();
                            block_on(guard.unlock()).unwrap();
                            guard = inner;
                        }
                        room.visit();
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
                let stranger = {
                    let lock = registry.obtain("k");
                    thread::spawn(move || Room::default().visit_under(&lock))
                };
                let friends = (0..3).map(|_| {
                    let (lock, owner) = (registry.obtain("k"), owner.clone());
                    thread::spawn(move || {
                        let options = LockOptions::new().owner(&owner);
                        let guard = block_on(lock.lock_with(options)).unwrap();
                        thread::yield_now();
                        block_on(guard.unlock()).unwrap();
                    })
                });
                all(friends.chain([stranger]).collect::<Vec<_>>());
            },
            handoff,
        );
    }
}

/// Without points in the table of local locks, the tests above would run each caller to its end
/// before the next one.
#[test]
fn the_model_checker_reaches_the_table_of_local_locks() {
    check(
        |registry| {
            let before = shuttle::current::context_switches();
            // Another thread to switch to.
            let other = thread::spawn(|| ());
            drop(registry.obtain("k"));
            let points = shuttle::current::context_switches() - before;
            assert!(points >= 3, "{points} points on the way of a handle that comes and goes");
            other.join().unwrap();
        },
        0,
    );
}
