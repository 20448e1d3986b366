//! The server in the other process: executes the requests from its standard input.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::sync::Arc;

use registry_core::{Busy, LockBackend};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::wire::{self, Reply, Request};

/// Executes through `backend` the requests of a [`DistantBackend`](super::DistantBackend) on this
/// process's standard input, until the input ends or a request to close arrives.
///
/// # Cancel safety
/// Dropping the future drops the requests in execution. No further input is read.
pub async fn serve(backend: Arc<dyn LockBackend>) {
    let mut requests = listen();
    let mut tasks = JoinSet::new();
    let mut running: HashMap<u64, AbortHandle> = HashMap::new();
    // A test program may have printed the start of a line.
    say("\n");
    answer(wire::READY, &Reply::Done);
    while let Some((number, request)) = requests.recv().await {
        while tasks.try_join_next().is_some() {}
        running.retain(|_, task| !task.is_finished());
        match request {
            Request::Cancel => {
                // Only waits may be dropped. All other requests are executed even if their caller
                // was dropped.
                if let Some(task) = running.remove(&number) {
                    task.abort();
                }
            }
            Request::Close => {
                tasks.join_all().await;
                backend.close().await;
                answer(number, &Reply::Done);
                return;
            }
            request => {
                let is_wait = matches!(request, Request::Wait(..));
                let backend = Arc::clone(&backend);
                let task = tasks.spawn(async move {
                    answer(number, &carry_out(&*backend, request).await);
                });
                if is_wait {
                    running.insert(number, task);
                }
            }
        }
    }
}

async fn carry_out(backend: &dyn LockBackend, request: Request) -> Reply {
    let reply = match request {
        Request::Acquire(claim) => backend.try_acquire(&claim).await.map(Reply::Attempt),
        Request::Renew(claims) => Ok(Reply::Renewals(backend.renew(&claims).await)),
        Request::Release(claim) => backend.release(&claim).await.map(Reply::Release),
        Request::Wait(claim, mark) => {
            backend.wait(&claim, &Busy::new().with_mark(mark)).await;
            Ok(Reply::Done)
        }
        Request::Inspect(key) => {
            backend.inspect(&key).await.map(|holder| Reply::Holders(holder.into_iter().collect()))
        }
        Request::List => backend.list().await.map(Reply::Holders),
        Request::ForceRelease(key) => backend.force_release(&key).await.map(Reply::Release),
        Request::Diagnose => backend.diagnose().await.map(|findings| {
            Reply::Findings(findings.into_iter().map(|finding| finding.message).collect())
        }),
        Request::Cancel | Request::Close => Ok(Reply::Done),
    };
    reply.unwrap_or_else(Reply::Failed)
}

/// Reads the input on a thread, because a task that waits for input would keep the runtime from
/// shutting down.
fn listen() -> mpsc::UnboundedReceiver<(u64, Request)> {
    let (heard, requests) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if let Some(request) = wire::read_request(&line)
                && heard.send(request).is_err()
            {
                return;
            }
        }
    });
    requests
}

fn answer(number: u64, reply: &Reply) {
    say(&format!("{}\n", wire::write_reply(number, reply)));
}

fn say(text: &str) {
    // One write per line. A failure has no effect, because it means that the reader has ended.
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}
