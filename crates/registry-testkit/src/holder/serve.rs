//! The implementation of a lock holder: executes requests over any registry, each in a task of its
//! own.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Debug;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::remote::protocol::{Reply, execute_messages, json_result, print_line};
use registry_core::{
    ClaimMode, DistributedLock, LockError, LockGuard, LockOptions, LockRegistry, LostReason,
};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::{HolderLock, HolderRequest, HolderShare, failure};
use crate::history::{Recorder, host_clock};
use crate::recording_client::{RecordedGuard, RecordingClient};

/// The maximum time for the registry to release all locks when it closes.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Executes the requests from standard input. Prints the replies, and each step of each lock except
/// those of [`HolderRequest::Contend`]. After a request to close or the end of the input, drops all
/// guards, closes the registry and returns.
///
/// # Cancel safety
/// Dropping the future drops all guards and stops reading the input.
pub async fn serve(registry: Arc<dyn LockRegistry>) {
    execute_requests(registry, None).await;
}

/// Executes the requests as [`serve`] does, and [`HolderRequest::Write`] with `writer`.
///
/// # Cancel safety
/// Dropping the future drops all guards and stops reading the input.
pub async fn serve_with_writer(registry: Arc<dyn LockRegistry>, writer: Arc<dyn FencedWriter>) {
    execute_requests(registry, Some(writer)).await;
}

/// Writes to data that a lock protects.
#[async_trait]
pub trait FencedWriter: Debug + Send + Sync {
    /// Writes `value` with the token, or the claim, of `guard`, whether the lock is held or lost.
    /// If the guard refuses because its lock is lost, sends the request without the guard.
    ///
    /// # Errors
    /// [`write_refused_by_server`](super::write_refused_by_server) if the server refused the write,
    /// and another error if its outcome is unknown.
    async fn write(
        &self,
        guard: &LockGuard,
        value: &str,
    ) -> Result<(), Box<dyn Error + Send + Sync>>;
}

async fn execute_requests(registry: Arc<dyn LockRegistry>, writer: Option<Arc<dyn FencedWriter>>) {
    let recorder = Recorder::forwarding(host_clock(), process::id(), print_line);
    let client = RecordingClient::new(&recorder, process::id());
    let server =
        Arc::new(HolderServer { registry, recorder, client, writer, locks: Mutex::default() });
    let request_server = Arc::clone(&server);
    let (close_request, mut tasks) = execute_messages(move |request| {
        let server = Arc::clone(&request_server);
        async move { server.execute(request).await }
    })
    .await;
    server.locks().clear();
    tasks.shutdown().await;
    let closed = server.registry.close(CLOSE_LIMIT).await;
    if let Some(reply_to) = close_request {
        print_line(&Reply { reply_to, result: json_result(Ok::<_, String>(closed.is_clean())) });
    }
}

#[derive(Debug)]
struct HolderServer {
    registry: Arc<dyn LockRegistry>,
    recorder: Recorder,
    client: RecordingClient,
    writer: Option<Arc<dyn FencedWriter>>,
    locks: Mutex<HashMap<String, Arc<RequestedLock>>>,
}

#[derive(Debug)]
struct RequestedLock {
    /// `None` once it is released.
    guard: tokio::sync::Mutex<Option<RecordedGuard>>,
    /// Records the loss of the lock. Ends with this lock.
    _loss_recorder: JoinSet<()>,
}

impl HolderServer {
    async fn execute(&self, request: HolderRequest) -> Result<Value, String> {
        match request {
            HolderRequest::Lock { key, mode, fair, wait } => {
                let mut options = LockOptions::new();
                if fair {
                    options = options.fair(true);
                }
                if let Some(wait) = wait {
                    options = options.wait(wait);
                }
                let locked = self.lock(&key, mode, options).await;
                json_result(locked.map_err(|error| failure("acquire", &error)))
            }
            HolderRequest::Upgrade { key } => json_result(self.upgrade(&key).await),
            HolderRequest::Unlock { key } => json_result(self.unlock(&key).await),
            HolderRequest::Drop { key } => json_result(self.remove(&key).map(drop)),
            HolderRequest::Status { key } => json_result(Ok(self.status(&key).await)),
            HolderRequest::Lost { key } => json_result(self.lost(&key).await),
            HolderRequest::Write { key, value: text } => json_result(self.write(&key, &text).await),
            HolderRequest::Repeat { key, rounds } => {
                let repeated = self.repeat(&key, rounds).await;
                json_result(repeated.map_err(|error| failure("repeat", &error)))
            }
            HolderRequest::Contend { key, tasks, hold, span } => {
                let contended = contend(&self.registry.obtain(&key), tasks, hold, span).await;
                json_result(contended.map_err(|error| failure("contend", &error)))
            }
            HolderRequest::Compete(competition) => {
                let competed = competition.run(&self.registry, &self.recorder).await;
                json_result(competed.map_err(|error| failure("compete", &error)))
            }
        }
    }

    fn locks(&self) -> MutexGuard<'_, HashMap<String, Arc<RequestedLock>>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, key: &str) -> Result<Arc<RequestedLock>, String> {
        self.locks().get(key).cloned().ok_or_else(not_requested)
    }

    fn remove(&self, key: &str) -> Result<Arc<RequestedLock>, String> {
        self.locks().remove(key).ok_or_else(not_requested)
    }

    async fn lock(
        &self,
        key: &str,
        mode: ClaimMode,
        options: LockOptions,
    ) -> Result<Option<HolderLock>, LockError> {
        // Releases the lock of an earlier request.
        _ = self.remove(key);
        let acquired = self.client.acquire(&*self.registry, key, mode, options).await?;
        Ok(acquired.map(|guard| self.hold(key, guard)))
    }

    async fn upgrade(&self, key: &str) -> Result<Option<HolderLock>, String> {
        let lock = self.remove(key)?;
        let guard = lock.guard.lock().await.take().ok_or_else(not_requested)?;
        let upgraded = guard.upgrade().await.map_err(|error| failure("upgrade", &error))?;
        Ok(upgraded.map(|guard| self.hold(key, guard)))
    }

    fn hold(&self, key: &str, guard: RecordedGuard) -> HolderLock {
        let (held, lost) = (HolderLock::of(&guard), guard.lost());
        let lock = Arc::new_cyclic(|lock: &Weak<RequestedLock>| {
            let lock = Weak::clone(lock);
            let mut loss_recorder = JoinSet::new();
            loss_recorder.spawn(async move {
                lost.await;
                let Some(lock) = lock.upgrade() else { return };
                if let Some(guard) = &*lock.guard.lock().await {
                    guard.record_state();
                }
            });
            RequestedLock { guard: Some(guard).into(), _loss_recorder: loss_recorder }
        });
        self.locks().insert(key.into(), lock);
        held
    }

    async fn unlock(&self, key: &str) -> Result<(), String> {
        let lock = self.remove(key)?;
        let guard = lock.guard.lock().await.take().ok_or_else(not_requested)?;
        guard.unlock().await.map_err(|error| failure("release", &error))
    }

    async fn status(&self, key: &str) -> Option<HolderLock> {
        let lock = self.get(key).ok()?;
        let guard = lock.guard.lock().await;
        guard.as_ref().filter(|guard| guard.is_held()).map(|guard| HolderLock::of(guard))
    }

    async fn lost(&self, key: &str) -> Result<LostReason, String> {
        let lock = self.get(key)?;
        let lost = lock.guard.lock().await.as_ref().map(|guard| guard.lost());
        Ok(lost.ok_or_else(not_requested)?.await)
    }

    async fn write(&self, key: &str, text: &str) -> Result<(), String> {
        let lock = self.get(key)?;
        let guard = lock.guard.lock().await;
        let guard = guard.as_ref().ok_or_else(not_requested)?;
        let writer = self.writer.as_ref().ok_or("this program has no writer")?;
        writer.write(guard, text).await.map_err(|error| failure("write", &*error))
    }

    async fn repeat(&self, key: &str, rounds: u32) -> Result<(), LockError> {
        let lock = self.registry.obtain(key);
        for _ in 0..rounds {
            let Some(guard) = self.client.lock_with(&lock, LockOptions::new()).await? else {
                continue;
            };
            match guard.unlock().await {
                // A lost lease is a recorded event and does not end the rounds.
                Ok(()) | Err(LockError::Lost { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn not_requested() -> String {
    "the lock was not requested".into()
}

/// Counts the acquisitions of `tasks` tasks within `span`, and measures the longest time without a
/// holder among them.
async fn contend(
    lock: &DistributedLock,
    tasks: u32,
    hold: Duration,
    span: Duration,
) -> Result<HolderShare, LockError> {
    let end = Instant::now() + span;
    // The share so far, and the start of the current wait.
    let share = HolderShare { grants: 0, longest_wait: Duration::ZERO };
    let share = Arc::new(Mutex::new((share, Instant::now())));
    let mut workers = JoinSet::new();
    for _ in 0..tasks {
        let (lock, share) = (lock.clone(), Arc::clone(&share));
        workers.spawn(async move {
            while Instant::now() < end {
                let left = end.saturating_duration_since(Instant::now());
                let guard = lock.try_lock_for(left).await?;
                {
                    let (share, wait_start) =
                        &mut *share.lock().unwrap_or_else(PoisonError::into_inner);
                    share.grants += u32::from(guard.is_some());
                    share.longest_wait = share.longest_wait.max(wait_start.elapsed());
                    *wait_start = Instant::now();
                }
                let Some(guard) = guard else { break };
                sleep(hold).await;
                share.lock().unwrap_or_else(PoisonError::into_inner).1 = Instant::now();
                guard.unlock().await?;
            }
            Ok(())
        });
    }
    workers.join_all().await.into_iter().collect::<Result<(), LockError>>()?;
    Ok(share.lock().unwrap_or_else(PoisonError::into_inner).0)
}
