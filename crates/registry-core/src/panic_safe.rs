//! Calls code of users and backends (wakers, observers, destructors) and catches its panics.
//!
//! A waker can also poll or drop its task synchronously, before `wake` returns.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

/// Runs `work`. Returns `None` if it panicked.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(discard_panic).ok()
}

/// Drops the payload of a panic. Catches a panic of its destructor.
pub(crate) fn discard_panic(payload: Box<dyn Any + Send>) {
    if let Err(second_payload) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second_payload);
    }
}

/// Wakes a task. Catches a panic of the waker.
///
/// A waker that drops its task may pass a local permit to the next caller, and thus call the next
/// waker recursively. A long queue of such callers would overflow the stack. From [`NESTED_MAX`]
/// nested calls on, this function therefore queues the wakers. The innermost call then runs the
/// queued wakers in a loop.
pub(crate) fn wake(waker: Waker) {
    let depth = DEPTH.try_with(Cell::get).unwrap_or_default();
    if depth >= NESTED_MAX {
        let mut waker = Some(waker);
        let _ = QUEUED.try_with(|queued| queued.borrow_mut().extend(waker.take()));
        if let Some(waker) = waker {
            catch_panic(|| waker.wake());
        }
        return;
    }
    let _ = DEPTH.try_with(|cell| cell.set(depth + 1));
    catch_panic(|| waker.wake());
    if depth + 1 == NESTED_MAX {
        while let Ok(Some(next)) = QUEUED.try_with(|queued| queued.borrow_mut().pop()) {
            catch_panic(|| next.wake());
        }
    }
    let _ = DEPTH.try_with(|cell| cell.set(depth));
}

/// The maximum depth of nested calls of [`wake`].
const NESTED_MAX: usize = 16;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static QUEUED: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
}

/// Polls `future` with a waker that catches panics of the task's own waker.
pub(crate) async fn with_panic_safe_waker<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    // The task's waker, and the waker around it.
    let mut wakers: Option<(Waker, Waker)> = None;
    poll_fn(|cx| {
        let inner = cx.waker();
        if !wakers.as_ref().is_some_and(|(known, _)| known.will_wake(inner)) {
            wakers = None;
        }
        let (_, outer) = wakers.get_or_insert_with(|| {
            (inner.clone(), Waker::from(Arc::new(PanicSafeWaker(inner.clone()))))
        });
        future.as_mut().poll(&mut Context::from_waker(outer))
    })
    .await
}

struct PanicSafeWaker(Waker);

impl Wake for PanicSafeWaker {
    fn wake(self: Arc<Self>) {
        wake(self.0.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct PanicsOnDrop;

    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            std::panic::panic_any(Self);
        }
    }

    #[test]
    fn a_payload_that_panics_when_dropped_is_caught() {
        assert_eq!(catch_panic(|| std::panic::panic_any(PanicsOnDrop)), None::<()>);
        assert_eq!(catch_panic(|| 1), Some(1));
    }

    /// Calls another waker of this type, up to the depth in its first field, and counts the calls.
    struct ChainedWaker(usize, Arc<std::sync::atomic::AtomicUsize>);

    impl Wake for ChainedWaker {
        fn wake(self: Arc<Self>) {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if self.0 > 0 {
                wake(Waker::from(Arc::new(Self(self.0 - 1, Arc::clone(&self.1)))));
            }
        }
    }

    #[test]
    fn a_long_chain_of_wakers_does_not_overflow_the_stack() {
        let calls = Arc::default();
        wake(Waker::from(Arc::new(ChainedWaker(1_000_000, Arc::clone(&calls)))));
        assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 1_000_001);
    }
}
