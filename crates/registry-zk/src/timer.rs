//! Timers that several runtimes may poll, one after the other.
//!
//! The background releaser of a registry may complete a request that began in another runtime.
//! Callers in several runtimes may also wait for the same confirmation. A timer of tokio panics
//! after its runtime has shut down. These timers therefore create a new one in each runtime.

use std::future::poll_fn;
use std::mem;
use std::pin::pin;
use std::time::Duration;

use tokio::runtime::Handle;

/// The error of a future that is not complete at its time limit.
#[derive(Debug)]
pub(crate) struct Elapsed;

/// Waits for `future`, for at most `limit`.
pub(crate) async fn timeout<T>(
    limit: Duration,
    future: impl Future<Output = T>,
) -> Result<T, Elapsed> {
    tokio::select! {
        biased;
        output = future => Ok(output),
        () = sleep(limit) => Err(Elapsed),
    }
}

/// Waits for `span`.
pub(crate) async fn sleep(span: Duration) {
    let mut timer = pin!(tokio::time::sleep(span));
    let mut runtime = Handle::current().id();
    poll_fn(|context| {
        let current = Handle::current().id();
        if mem::replace(&mut runtime, current) != current {
            let deadline = timer.deadline();
            timer.set(tokio::time::sleep_until(deadline));
        }
        timer.as_mut().poll(context)
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures_util::poll;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn a_time_limit_applies_after_the_shutdown_of_its_first_runtime() {
        let mut limited = Box::pin(timeout(Duration::from_millis(20), pending::<()>()));
        let first = runtime();
        first.block_on(async { assert!(poll!(&mut limited).is_pending()) });
        drop(first);
        assert!(runtime().block_on(limited).is_err());
    }
}
