//! Callers of one owner who wait together, while the claim is handed from caller to caller. The model checker finds both
//! faults with ease (`callers_of_one_owner_all_get_in` and `an_owner_never_waits_for_itself` in
//! `crates/registry-core/tests/slots_shuttle.rs`); this is the first of them on real threads.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use registry_core::{LockOptions, LockRegistry, MemoryBackend, Owner, Registry};

/// Wakes a thread, and gives it time to do what it wants before the one who wakes goes on.
struct Patient(Thread);

impl Wake for Patient {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
        thread::sleep(Duration::from_millis(200));
    }
}

/// The claim goes from A to B; B lets go before A has looked for B's friends in the line. The friend must stay in line
/// and get its turn. It is told that the registry is closed.
#[test]
fn a_friend_of_a_short_holder_gets_its_turn() {
    // Who of A and B is first at the line after the claim has passed is up to the machine.
    for _ in 0..10 {
        short_holder_with_a_friend();
    }
}

fn short_holder_with_a_friend() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let ours = Registry::builder(Arc::new(MemoryBackend::new())).build().unwrap();
    let lock = ours.obtain("k");
    let options = LockOptions::new().owner(&Owner::new());
    let first = runtime.block_on(lock.lock()).unwrap();

    let mut short = Box::pin({
        let (lock, options) = (lock.clone(), options.clone());
        async move { lock.lock_with(options).await }
    });
    let (in_line, is_in_line) = std::sync::mpsc::channel();
    let handle = runtime.handle().clone();
    let holder = thread::spawn(move || {
        let _inside = handle.enter();
        let waker = Waker::from(Arc::new(Patient(thread::current())));
        assert!(short.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        in_line.send(()).unwrap();
        loop {
            thread::park();
            if let Poll::Ready(guard) = short.as_mut().poll(&mut Context::from_waker(&waker)) {
                drop(guard.unwrap());
                return;
            }
        }
    });
    is_in_line.recv().unwrap();
    let friend =
        runtime.spawn(async move { lock.lock_with(options).await.map(|guard| guard.is_some()) });
    // Until the friend is in line too; a friend who comes late proves nothing and does no harm.
    thread::sleep(Duration::from_millis(200));

    runtime.block_on(first.unlock()).unwrap();
    holder.join().unwrap();
    let friend = runtime.block_on(friend).unwrap();
    assert!(matches!(friend, Ok(true)), "{friend:?}");
}
