//! The server in the other process: executes the requests of a remote backend.

use std::sync::Arc;

use registry_core::{BackendError, Busy, Claim, Key, LockBackend};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::protocol::{Reply, execute_messages, print, value};
use crate::context::admin;

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
}

/// Executes through `backend` the requests of a [`RemoteBackend`](super::RemoteBackend) on this
/// process's standard input, until the input ends or a request to close arrives.
///
/// # Cancel safety
/// Dropping the future drops the requests in execution. No further input is read.
pub async fn serve(backend: Arc<dyn LockBackend>) {
    let client = Arc::clone(&backend);
    let (close, tasks) = execute_messages(move |request| {
        let client = Arc::clone(&client);
        async move { execute(&*client, request).await }
    })
    .await;
    if let Some(number) = close {
        tasks.join_all().await;
        backend.close().await;
        print(&Reply::<BackendError> { reply_to: number, result: Ok(Value::Null) });
    }
}

async fn execute(
    backend: &dyn LockBackend,
    request: BackendRequest,
) -> Result<Value, BackendError> {
    match request {
        BackendRequest::Acquire(claim) => value(backend.try_acquire(&claim).await),
        BackendRequest::Renew(claims) => value(Ok(backend.renew(&claims).await)),
        BackendRequest::Release(claim) => value(backend.release(&claim).await),
        BackendRequest::Wait(claim, busy) => {
            backend.wait(&claim, &busy).await;
            Ok(Value::Null)
        }
        BackendRequest::Inspect(key) => value(admin(backend).inspect(&key).await),
        BackendRequest::List => value(admin(backend).list().await),
        BackendRequest::ForceRelease(key) => value(admin(backend).force_release(&key).await),
        BackendRequest::Diagnose => value(admin(backend).diagnose().await),
    }
}
