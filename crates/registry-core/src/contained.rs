//! Calls user code (wakers, observers, destructors) so that a panic ends only that call.
//!
//! A waker may also poll or drop the task that it wakes before `wake` returns.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

/// Runs `work`. Returns `None` if it panicked.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(discard).ok()
}

/// Drops the payload of a panic.
pub(crate) fn discard(payload: Box<dyn Any + Send>) {
    // The payload's destructor is user code as well, and may panic.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
}

/// Wakes a task. A panic of the waker is discarded.
///
/// If a waker drops its task, a local permit may pass to the next caller, whose waker is then
/// called from within the first one. At [`NESTED_MAX`] nested calls, further wakers are queued, and
/// the innermost of these calls calls them. A long queue of callers therefore does not overflow the
/// stack.
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
    let _ = DEPTH.try_with(|own| own.set(depth + 1));
    catch_panic(|| waker.wake());
    if depth + 1 == NESTED_MAX {
        while let Ok(Some(next)) = QUEUED.try_with(|queued| queued.borrow_mut().pop()) {
            catch_panic(|| next.wake());
        }
    }
    let _ = DEPTH.try_with(|own| own.set(depth));
}

const NESTED_MAX: usize = 16;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static QUEUED: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
}

/// Polls `future` with a waker that discards panics of the task's own waker.
pub(crate) async fn shielded<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut shield: Option<(Waker, Waker)> = None;
    poll_fn(|cx| {
        let waker = cx.waker();
        if !shield.as_ref().is_some_and(|(own, _)| own.will_wake(waker)) {
            shield = None;
        }
        let (_, shield) = shield
            .get_or_insert_with(|| (waker.clone(), Waker::from(Arc::new(Shield(waker.clone())))));
        future.as_mut().poll(&mut Context::from_waker(shield))
    })
    .await
}

struct Shield(Waker);

impl Wake for Shield {
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
    fn a_payload_that_panics_when_dropped_is_contained() {
        assert_eq!(catch_panic(|| std::panic::panic_any(PanicsOnDrop)), None::<()>);
        assert_eq!(catch_panic(|| 1), Some(1));
    }

    struct Chain(usize, Arc<std::sync::atomic::AtomicUsize>);

    impl Wake for Chain {
        fn wake(self: Arc<Self>) {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if self.0 > 0 {
                wake(Waker::from(Arc::new(Self(self.0 - 1, Arc::clone(&self.1)))));
            }
        }
    }

    #[test]
    fn wakers_that_wake_further_ones_need_no_deep_stack() {
        let woken = Arc::default();
        wake(Waker::from(Arc::new(Chain(1_000_000, Arc::clone(&woken)))));
        assert_eq!(woken.load(std::sync::atomic::Ordering::Relaxed), 1_000_001);
    }
}
