//! A client of a store that runs in another process, for stores that must exclude processes and not
//! only tasks.
//!
//! The other process calls [`serve`] with a client that it opened itself. [`RemoteBackend`] starts
//! the process and sends every call to it, over its standard input and output. The other process is
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
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, Holder, InvalidKey, Key, LockAdmin,
    LockBackend, Release, Renewal,
};
use tokio::sync::oneshot;

mod serve;
mod protocol;

use protocol::{RemoteReply, RemoteRequest};
pub use serve::serve;

/// A backend whose requests are executed by another process.
///
/// Calls that need no store (capabilities, key checks, shards) are answered by a client in this
/// process. Dropping this backend kills the other process.
pub struct RemoteBackend {
    local: Arc<dyn LockBackend>,
    child: Mutex<Child>,
    /// Set to `None` at the end. The other process then reads the end of its input, and ends.
    stdin: Mutex<Option<ChildStdin>>,
    next: AtomicU64,
    pending: Arc<Mutex<PendingReplies>>,
}

/// Requests without a reply, or `None` once the other process has ended.
type PendingReplies = Option<HashMap<u64, oneshot::Sender<RemoteReply>>>;

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
        let (ready, is_ready) = oneshot::channel();
        let pending = Arc::new(Mutex::new(Some(HashMap::from([(protocol::READY, ready)]))));
        if let Some(stdout) = stdout {
            let pending = Arc::clone(&pending);
            std::thread::spawn(move || read_replies(BufReader::new(stdout), &pending));
        }
        let (child, stdin) = (Mutex::new(child), Mutex::new(stdin));
        let backend =
            Self { local, child, stdin, next: AtomicU64::new(protocol::READY + 1), pending };
        is_ready
            .await
            .map_err(|_| io::Error::other("the other process ended before it called `serve`"))?;
        Ok(backend)
    }

    async fn request(&self, request: RemoteRequest) -> Result<RemoteReply, BackendError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match locked(&self.pending).as_mut() {
            Some(pending) => drop(pending.insert(number, answer)),
            None => return Err(process_ended()),
        }
        // If the caller's future is dropped, the other process must cancel the request.
        let mut cancel_on_drop = CancelOnDrop { backend: self, number, answered: false };
        self.send(number, &request)?;
        let reply = answered.await;
        cancel_on_drop.answered = true;
        match reply.map_err(|_| process_ended())? {
            RemoteReply::Failed(error) => Err(error),
            reply => Ok(reply),
        }
    }

    fn send(&self, number: u64, request: &RemoteRequest) -> Result<(), BackendError> {
        let mut stdin = locked(&self.stdin);
        let stdin = stdin.as_mut().ok_or_else(process_ended)?;
        let line = format!("{number} {}\n", protocol::write_request(request));
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).map_err(|_| process_ended())
    }
}

/// A request that was sent, until it is answered or dropped.
struct CancelOnDrop<'a> {
    backend: &'a RemoteBackend,
    number: u64,
    answered: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if !self.answered {
            if let Some(pending) = locked(&self.backend.pending).as_mut() {
                pending.remove(&self.number);
            }
            // Its failure has no effect, because no caller waits for this request any more.
            let _ = self.backend.send(self.number, &RemoteRequest::Cancel);
        }
    }
}

/// Sends each reply to its caller, until the other process ends.
fn read_replies(stdout: impl BufRead, pending: &Mutex<PendingReplies>) {
    for line in stdout.lines().map_while(Result::ok) {
        // A test program also prints its own lines.
        let Some((number, reply)) = protocol::read_reply(&line) else { continue };
        let answer = locked(pending).as_mut().and_then(|pending| pending.remove(&number));
        if let Some(answer) = answer {
            // The caller may have been dropped.
            let _ = answer.send(reply);
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

fn unexpected_reply(reply: &RemoteReply) -> BackendError {
    BackendError::new(
        registry_core::BackendErrorKind::Protocol,
        format!("unexpected reply of the other process: {reply:?}"),
    )
}

#[async_trait]
impl LockBackend for RemoteBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.local.capabilities();
        // The local client receives loss notifications only for its own claims.
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
        match self.request(RemoteRequest::Acquire(claim.clone())).await? {
            RemoteReply::Attempt(attempt) => Ok(attempt),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let error = match self.request(RemoteRequest::Renew(claims.to_vec())).await {
            Ok(RemoteReply::Renewals(answers)) => return answers,
            Ok(other) => unexpected_reply(&other),
            Err(error) => error,
        };
        vec![Err(error); claims.len()]
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        match self.request(RemoteRequest::Release(claim.clone())).await? {
            RemoteReply::Release(release) => Ok(release),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        // A hint may never arrive, so an error of the process is treated as a missing hint.
        if self.request(RemoteRequest::Wait(claim.clone(), busy.mark)).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.local.admin().map(|_| self as &dyn LockAdmin)
    }

    async fn close(&self) {
        // A process that has ended needs no closing.
        let _ = self.request(RemoteRequest::Close).await;
        *locked(&self.stdin) = None;
        self.local.close().await;
    }
}

#[async_trait]
impl LockAdmin for RemoteBackend {
    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        match self.request(RemoteRequest::Inspect(key.clone())).await? {
            RemoteReply::Holders(mut holders) => Ok(holders.pop()),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        match self.request(RemoteRequest::List).await? {
            RemoteReply::Holders(holders) => Ok(holders),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        match self.request(RemoteRequest::ForceRelease(key.clone())).await? {
            RemoteReply::Release(release) => Ok(release),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        match self.request(RemoteRequest::Diagnose).await? {
            RemoteReply::Findings(notes) => Ok(notes.into_iter().map(Finding::note).collect()),
            other => Err(unexpected_reply(&other)),
        }
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
