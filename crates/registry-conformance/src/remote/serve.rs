//! The server in the other process: executes the requests from its standard input.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::sync::Arc;

use registry_core::{Busy, LockBackend};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::protocol::{self, RemoteReply, RemoteRequest};
use crate::context::admin;

/// Executes through `backend` the requests of a [`RemoteBackend`](super::RemoteBackend) on this
/// process's standard input, until the input ends or a request to close arrives.
///
/// # Cancel safety
/// Dropping the future drops the requests in execution. No further input is read.
pub async fn serve(backend: Arc<dyn LockBackend>) {
    let mut requests = read_requests();
    let mut tasks = JoinSet::new();
    let mut running: HashMap<u64, AbortHandle> = HashMap::new();
    // A test program may have printed the start of a line.
    print("\n");
    answer(protocol::READY, &RemoteReply::Done);
    while let Some((number, request)) = requests.recv().await {
        while tasks.try_join_next().is_some() {}
        running.retain(|_, task| !task.is_finished());
        match request {
            RemoteRequest::Cancel => {
                // Only waits may be dropped. All other requests are executed even if their caller
                // was dropped.
                if let Some(task) = running.remove(&number) {
                    task.abort();
                }
            }
            RemoteRequest::Close => {
                tasks.join_all().await;
                backend.close().await;
                answer(number, &RemoteReply::Done);
                return;
            }
            request => {
                let is_wait = matches!(request, RemoteRequest::Wait(..));
                let backend = Arc::clone(&backend);
                let task = tasks.spawn(async move {
                    answer(number, &execute(&*backend, request).await);
                });
                if is_wait {
                    running.insert(number, task);
                }
            }
        }
    }
}

async fn execute(backend: &dyn LockBackend, request: RemoteRequest) -> RemoteReply {
    let reply = match request {
        RemoteRequest::Acquire(claim) => {
            backend.try_acquire(&claim).await.map(RemoteReply::Attempt)
        }
        RemoteRequest::Renew(claims) => Ok(RemoteReply::Renewals(backend.renew(&claims).await)),
        RemoteRequest::Release(claim) => backend.release(&claim).await.map(RemoteReply::Release),
        RemoteRequest::Wait(claim, mark) => {
            backend.wait(&claim, &Busy::new().with_mark(mark)).await;
            Ok(RemoteReply::Done)
        }
        RemoteRequest::Inspect(key) => admin(backend)
            .inspect(&key)
            .await
            .map(|holder| RemoteReply::Holders(holder.into_iter().collect())),
        RemoteRequest::List => admin(backend).list().await.map(RemoteReply::Holders),
        RemoteRequest::ForceRelease(key) => {
            admin(backend).force_release(&key).await.map(RemoteReply::Release)
        }
        RemoteRequest::Diagnose => admin(backend).diagnose().await.map(|findings| {
            RemoteReply::Findings(findings.into_iter().map(|finding| finding.message).collect())
        }),
        RemoteRequest::Cancel | RemoteRequest::Close => Ok(RemoteReply::Done),
    };
    reply.unwrap_or_else(RemoteReply::Failed)
}

/// Reads the input on a thread, because a task that waits for input would keep the runtime from
/// shutting down.
fn read_requests() -> mpsc::UnboundedReceiver<(u64, RemoteRequest)> {
    let (sender, requests) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if let Some(request) = protocol::read_request(&line)
                && sender.send(request).is_err()
            {
                return;
            }
        }
    });
    requests
}

fn answer(number: u64, reply: &RemoteReply) {
    print(&format!("{}\n", protocol::write_reply(number, reply)));
}

fn print(text: &str) {
    // One write per line. A failure has no effect, because it means that the reader has ended.
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}
