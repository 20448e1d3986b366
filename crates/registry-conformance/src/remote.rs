//! Runs the client of a store in another process, to test that the store excludes processes and not
//! only tasks.
//!
//! The other process calls [`serve`] with a client that it opened itself. [`RemoteBackend`] starts
//! the process and sends the requests to its standard input. The replies arrive on its standard
//! output. A helper process for other requests can use the same [`protocol`]. The other process is
//! usually the test program itself:
//!
//! ```no_run
//! # use std::process::Command;
//! # use std::sync::Arc;
//! # use registry_conformance::remote::{RemoteBackend, serve};
//! # use registry_core::{LockBackend, MemoryBackend};
//! #[test]
//! #[ignore = "started by other tests, as another process"]
//! fn the_other_process() {
//!     # fn open() -> Arc<dyn LockBackend> { Arc::new(MemoryBackend::new()) }
//!     let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
//!     runtime.block_on(async { serve(open()).await });
//!     // Exits at once: the test harness would print its own summary.
//!     std::process::exit(0);
//! }
//!
//! async fn remote_client(local: Arc<dyn LockBackend>) -> RemoteBackend {
//!     let mut program = Command::new(std::env::current_exe().unwrap());
//!     program.args(["the_other_process", "--exact", "--ignored", "--nocapture"]);
//!     RemoteBackend::spawn(program, local).await.unwrap()
//! }
//! ```

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Capabilities, Claim, FencingToken, Finding,
    Holder, InvalidKey, Key, LockAdmin, LockBackend, Release, Renewal, ValueRead, ValueStore,
    ValueWrite, WaiterStore,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::oneshot;

mod serve;
pub mod protocol;

use protocol::{Message, Reply};
use serve::BackendRequest;
pub use serve::serve;

/// A backend whose requests are executed by another process.
///
/// A client in this process answers the calls that need no lock request: capabilities, key checks,
/// shards, and the registration and listing of waiters. Invalidations and batches are not
/// forwarded. Dropping this backend kills the other process.
pub struct RemoteBackend {
    local: Arc<dyn LockBackend>,
    child: Mutex<Child>,
    /// `None` after `close`. The other process then reads the end of its input, and ends.
    stdin: Mutex<Option<ChildStdin>>,
    /// The number of the next message.
    next_number: AtomicU64,
    pending: Arc<Mutex<PendingReplies>>,
}

/// Requests without a reply, or `None` once the other process has ended.
type PendingReplies = Option<HashMap<u64, oneshot::Sender<Result<Value, BackendError>>>>;

impl RemoteBackend {
    /// Starts `program`, which must call [`serve`], and waits until it does. `local` is a client of
    /// the same store in this process.
    ///
    /// # Errors
    /// If the program cannot be started, or ends before it calls [`serve`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn spawn(mut program: Command, local: Arc<dyn LockBackend>) -> io::Result<Self> {
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        // The other process sends this reply without a request.
        let (ready_sender, ready) = oneshot::channel();
        let pending = HashMap::from([(protocol::READY, ready_sender)]);
        let pending = Arc::new(Mutex::new(Some(pending)));
        if let Some(stdout) = stdout {
            let pending = Arc::clone(&pending);
            std::thread::spawn(move || read_replies(BufReader::new(stdout), &pending));
        }
        let (child, stdin) = (Mutex::new(child), Mutex::new(stdin));
        let next_number = AtomicU64::new(protocol::READY + 1);
        let backend = Self { local, child, stdin, next_number, pending };
        let ended = |_| io::Error::other("the other process ended before it called `serve`");
        ready.await.map_err(ended)?.map_err(io::Error::other)?;
        Ok(backend)
    }

    /// Executes a request in the other process, even if the future is dropped.
    async fn request<T: DeserializeOwned>(
        &self,
        request: BackendRequest,
    ) -> Result<T, BackendError> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        self.call(number, Message::Request(number, request)).await
    }

    /// Sends a message with this number, waits for the reply, and returns its result.
    async fn call<T: DeserializeOwned>(
        &self,
        number: u64,
        message: Message<BackendRequest>,
    ) -> Result<T, BackendError> {
        let (sender, result) = oneshot::channel();
        let inserted = locked(&self.pending).as_mut().map(|pending| pending.insert(number, sender));
        inserted.ok_or_else(process_ended)?;
        self.send(&message)?;
        let value = result.await.map_err(|_| process_ended())??;
        serde_json::from_value(value).map_err(|error| {
            let message = format!("unexpected reply of the other process: {error}");
            BackendError::new(BackendErrorKind::Protocol, message)
        })
    }

    fn send(&self, message: &Message<BackendRequest>) -> Result<(), BackendError> {
        let mut stdin = locked(&self.stdin);
        let stdin = stdin.as_mut().ok_or_else(process_ended)?;
        let line = protocol::to_line(message);
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).map_err(|_| process_ended())
    }
}

/// A guard whose drop cancels the wait with this number in the other process. After the reply to
/// the wait, the cancellation has no effect.
struct CancelOnDrop<'a>(&'a RemoteBackend, u64);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        // If the message cannot be sent, the other process has ended, and so has the wait.
        let _ = self.0.send(&Message::Cancel(self.1));
    }
}

/// Sends each reply to its caller, until the other process ends.
fn read_replies(stdout: impl BufRead, pending: &Mutex<PendingReplies>) {
    for line in stdout.lines().map_while(Result::ok) {
        // A test program also prints its own lines.
        let Ok(Reply { reply_to, result }) = serde_json::from_str(&line) else { continue };
        let sender = locked(pending).as_mut().and_then(|pending| pending.remove(&reply_to));
        if let Some(sender) = sender {
            // The caller may have been dropped.
            let _ = sender.send(result);
        }
    }
    *locked(pending) = None;
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn process_ended() -> BackendError {
    BackendError::transient("the other process has ended")
}

#[async_trait]
impl LockBackend for RemoteBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.local.capabilities();
        // The local client receives invalidations only for claims of its own.
        capabilities.reports_invalidations = false;
        capabilities
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.local.check_key(key)
    }

    fn shard(&self, claim: &Claim) -> u32 {
        self.local.shard(claim)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.request(BackendRequest::Acquire(claim.clone())).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let answers = self.request(BackendRequest::Renew(claims.to_vec())).await;
        answers.unwrap_or_else(|error| vec![Err(error); claims.len()])
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.request(BackendRequest::Release(claim.clone())).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let _cancel_on_drop = CancelOnDrop(self, number);
        let wait = Message::Request(number, BackendRequest::Wait(claim.clone(), busy.clone()));
        // A wake-up may be lost, so an error of the other process is treated as a lost wake-up.
        if self.call::<()>(number, wait).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.local.admin().map(|_| self as &dyn LockAdmin)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.local.values().map(|_| self as &dyn ValueStore)
    }

    // The registration of a waiter belongs to no client, so the local client can register it.
    fn waiters(&self) -> Option<&dyn WaiterStore> {
        self.local.waiters()
    }

    async fn close(&self) {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        // A process that has ended needs no closing.
        let _ = self.call::<()>(number, Message::Close(number)).await;
        *locked(&self.stdin) = None;
        self.local.close().await;
    }
}

#[async_trait]
impl LockAdmin for RemoteBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        self.request(BackendRequest::Inspect(key.clone())).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.request(BackendRequest::List).await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.request(BackendRequest::ForceRelease(key.clone())).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.request(BackendRequest::Diagnose).await
    }
}

#[async_trait]
impl ValueStore for RemoteBackend {
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        self.request(BackendRequest::Value(key.clone())).await
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        self.request(BackendRequest::SetValue(claim.clone(), token, value.to_vec())).await
    }
}

impl fmt::Debug for RemoteBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteBackend").field("local", &self.local).finish_non_exhaustive()
    }
}

impl Drop for RemoteBackend {
    fn drop(&mut self) {
        let mut child = locked(&self.child);
        // Both fail only if the process has already ended.
        let _ = child.kill();
        let _ = child.wait();
    }
}
