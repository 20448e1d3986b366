//! A time limit for futures that several runtimes may poll, one after the other. Callers in several
//! runtimes may wait for the same confirmation; see also [`registry_core::sleep`].

use std::time::Duration;

use registry_core::sleep;

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
