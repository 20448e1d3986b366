//! Callers of one owner that wait together while the claim is handed over, on real threads. The
//! model checker covers the same in `crates/registry-core/tests/local_lock_shuttle.rs`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use registry_core::{LockOptions, MemoryBackend, Owner, Registry};
use tokio::runtime::{Builder, Runtime};

/// Wakes a thread, and gives it time to run before the waking thread continues.
struct SlowWaker(Thread);

impl Wake for SlowWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
        thread::sleep(Duration::from_millis(100));
    }
}

/// After a hand-over, the previous holder searches the queue for callers with the owner of the new
/// holder. If the new holder releases before that, such a caller stays queued and is granted the
/// lock later.
#[test]
fn a_waiter_with_the_owner_of_a_short_holder_is_granted() {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The scheduler decides which thread accesses the queue first after the hand-over.
    for _ in 0..10 {
        assert_waiter_is_granted(&runtime);
    }
}

fn assert_waiter_is_granted(runtime: &Runtime) {
    let _inside = runtime.enter();
    let local = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let lock = local.obtain("k");
    let options = LockOptions::new().owner(&Owner::new());
    let lock_with_owner = || {
        let (lock, options) = (lock.clone(), options.clone());
        Box::pin(async move { lock.lock_with(options).await.map(Some) })
    };
    let first = runtime.block_on(lock.lock()).unwrap();

    let (queued_sender, is_queued) = mpsc::channel();
    let short_holder = thread::spawn({
        let (mut lock_with_owner, handle) = (lock_with_owner(), runtime.handle().clone());
        move || {
            let _inside = handle.enter();
            let waker = Waker::from(Arc::new(SlowWaker(thread::current())));
            let mut context = Context::from_waker(&waker);
            assert!(lock_with_owner.as_mut().poll(&mut context).is_pending());
            queued_sender.send(()).unwrap();
            loop {
                thread::park();
                if let Poll::Ready(guard) = lock_with_owner.as_mut().poll(&mut context) {
                    drop(guard.unwrap());
                    return;
                }
            }
        }
    });
    is_queued.recv().unwrap();
    let mut same_owner = lock_with_owner();
    assert!(same_owner.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let same_owner = runtime.spawn(same_owner);

    runtime.block_on(first.unlock()).unwrap();
    short_holder.join().unwrap();
    let same_owner = runtime.block_on(same_owner).unwrap();
    assert!(matches!(same_owner, Ok(Some(_))), "{same_owner:?}");
}
