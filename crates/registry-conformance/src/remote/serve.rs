//! Runs in the helper process: executes the requests that `RemoteBackend` sends from the test
//! process.

use std::sync::Arc;

use registry_core::{BackendError, Busy, Claim, FencingToken, Key, LockBackend};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::protocol::{Reply, execute_messages, json_result, print_line, resume_panic};
use crate::context::{admin, values};

/// A call of a backend. Only a [`Wait`](Self::Wait) is ever cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum BackendRequest {
    Acquire(Claim),
    Renew(Vec<Claim>),
    Release(Claim),
    Wait(Claim, Busy),
    Inspect(Key),
    List,
    ForceRelease(Key),
    Diagnose,
    Value(Key),
    SetValue(Claim, FencingToken, Vec<u8>),
}

/// Executes the requests of a [`RemoteBackend`](super::RemoteBackend) through `backend`. Reads them
/// from this process's standard input, until the input ends or a
/// [`Message::Close`](super::protocol::Message::Close) arrives. After a `Close`, completes the
/// requests in execution and closes `backend`. At the end of the input, drops these requests.
///
/// # Cancel safety
/// Dropping the future drops the requests in execution. Further messages are ignored.
///
/// # Panics
/// If a request panicked. Panics at the next message, or at a `Close`.
pub async fn serve(backend: Arc<dyn LockBackend>) {
    let backend_of_requests = Arc::clone(&backend);
    let (close, mut tasks) = execute_messages(move |request| {
        let backend = Arc::clone(&backend_of_requests);
        async move { execute(&*backend, request).await }
    })
    .await;
    if let Some(number) = close {
        while let Some(ended) = tasks.join_next().await {
            resume_panic(ended);
        }
        backend.close().await;
        print_line(&Reply::<BackendError> { reply_to: number, result: Ok(Value::Null) });
    }
}

async fn execute(
    backend: &dyn LockBackend,
    request: BackendRequest,
) -> Result<Value, BackendError> {
    match request {
        BackendRequest::Acquire(claim) => json_result(backend.try_acquire(&claim).await),
        BackendRequest::Renew(claims) => json_result(Ok(backend.renew(&claims).await)),
        BackendRequest::Release(claim) => json_result(backend.release(&claim).await),
        BackendRequest::Wait(claim, busy) => {
            backend.wait(&claim, &busy).await;
            Ok(Value::Null)
        }
        BackendRequest::Inspect(key) => json_result(admin(backend).inspect(&key).await),
        BackendRequest::List => json_result(admin(backend).list().await),
        BackendRequest::ForceRelease(key) => json_result(admin(backend).force_release(&key).await),
        BackendRequest::Diagnose => json_result(admin(backend).diagnose().await),
        BackendRequest::Value(key) => json_result(values(backend).value(&key).await),
        BackendRequest::SetValue(claim, token, bytes) => {
            json_result(values(backend).set_value(&claim, token, &bytes).await)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use registry_core::{Attempt, ClaimMode, Holder, Queueing};
    use serde::de::DeserializeOwned;

    use super::*;

    fn round_trip<T: Serialize + DeserializeOwned>(value: &T) -> T {
        serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
    }

    /// If a field were not serialized, the other process would execute a different request.
    #[test]
    fn requests_and_replies_of_all_modes_arrive_unchanged() {
        let modes = [
            ClaimMode::Exclusive,
            ClaimMode::Shared,
            ClaimMode::Upgradable,
            ClaimMode::Permits { take: 2, of: 5 },
        ];
        let key = Key::new("orders:42").unwrap();
        for mode in modes {
            for queueing in [Queueing::Join, Queueing::ExclusiveIntent, Queueing::Skip] {
                let claim = Claim::new(key.clone(), Duration::from_secs(30))
                    .with_mode(mode)
                    .with_queueing(queueing)
                    .with_token_block(7)
                    .with_label(Some("host:1".into()));
                let conversion = claim.clone().converted_to(mode);
                let conversion = conversion.restricted_to_grant(FencingToken::new(9).unwrap());
                for claim in [claim, conversion] {
                    let request = BackendRequest::Acquire(claim);
                    assert_eq!(round_trip(&request), request);
                }
            }
            let holder = Holder::new(key.clone()).with_mode(mode);
            let busy = Busy::new().with_holder(holder).with_queue_entry().with_units_in_store(3);
            for reply in [Attempt::Busy(busy), Attempt::Gone] {
                assert_eq!(round_trip(&reply), reply);
            }
        }
    }
}
