//! Callers of one owner that wait together while the claim is handed over, on real threads. The
//! model checker covers the same in `crates/registry-core/tests/slots_shuttle.rs`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use registry_core::{LockOptions, LockRegistry, MemoryBackend, Owner, Registry};
use tokio::runtime::{Builder, Runtime};

/// Wakes a thread, and gives it time to run before the waking thread continues.
struct Patient(Thread);

impl Wake for Patient {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
        thread::sleep(Duration::from_millis(100));
    }
}

/// The next caller releases before the previous holder has searched the queue for callers with the
/// same owner. Such a caller then stays queued and is granted the lock later.
#[test]
fn a_friend_of_a_short_holder_gets_its_turn() {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // The scheduler decides which thread accesses the queue first after the hand-over.
    for _ in 0..10 {
        hand_over_to_a_short_holder(&runtime);
    }
}

fn hand_over_to_a_short_holder(runtime: &Runtime) {
    let _inside = runtime.enter();
    let ours = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let lock = ours.obtain("k");
    let options = LockOptions::new().owner(&Owner::new());
    let entering = || {
        let (lock, options) = (lock.clone(), options.clone());
        Box::pin(async move { lock.lock_with(options).await })
    };
    let first = runtime.block_on(lock.lock()).unwrap();

    let (in_line, is_in_line) = mpsc::channel();
    let short_holder = thread::spawn({
        let (mut entering, handle) = (entering(), runtime.handle().clone());
        move || {
            let _inside = handle.enter();
            let waker = Waker::from(Arc::new(Patient(thread::current())));
            let mut context = Context::from_waker(&waker);
            assert!(entering.as_mut().poll(&mut context).is_pending());
            in_line.send(()).unwrap();
            loop {
                thread::park();
                if let Poll::Ready(guard) = entering.as_mut().poll(&mut context) {
                    drop(guard.unwrap());
                    return;
                }
            }
        }
    });
    is_in_line.recv().unwrap();
    let mut friend = entering();
    assert!(friend.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let friend = runtime.spawn(friend);

    runtime.block_on(first.unlock()).unwrap();
    short_holder.join().unwrap();
    let friend = runtime.block_on(friend).unwrap();
    assert!(matches!(friend, Ok(Some(_))), "{friend:?}");
}
