//! A client of a store that runs in another process, for stores that must exclude processes and not
//! only tasks.
//!
//! The other process calls [`serve`] with a client that it opened itself. [`DistantBackend`] starts
//! the process and sends every call to it, over its standard input and output. The other process is
//! usually the test program itself:
//!
//! ```no_run
//! # use std::process::Command;
//! # use std::sync::Arc;
//! # use registry_conformance::distant::{DistantBackend, serve};
//! # use registry_core::{LockBackend, MemoryBackend};
//! #[test]
//! #[ignore = "started by other tests, as another process"]
//! fn the_other_process() {
//!     # fn open() -> Arc<dyn LockBackend> { Arc::new(MemoryBackend::new()) }
//!     let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
//!     runtime.block_on(async { serve(open()).await });
//!     // At once: the test program has nothing more to say, and nobody to say it to.
//!     std::process::exit(0);
//! }
//!
//! async fn distant_client(near: Arc<dyn LockBackend>) -> DistantBackend {
//!     let mut program = Command::new(std::env::current_exe().unwrap());
//!     program.args(["the_other_process", "--exact", "--ignored", "--nocapture"]);
//!     DistantBackend::spawn(program, near).await.unwrap()
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
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, Holder, InvalidKey, Key,
    LockBackend, Release, Renewal,
};
use tokio::sync::oneshot;

mod serve;
mod wire;

pub use serve::serve;
use wire::{Reply, Request};

/// A backend whose requests are executed by another process.
///
/// Calls that need no store (capabilities, key checks, shards) are answered by a client in this
/// process. Dropping this backend kills the other process.
pub struct DistantBackend {
    near: Arc<dyn LockBackend>,
    child: Mutex<Child>,
    /// Set to `None` at the end. The other process then reads the end of its input, and ends.
    stdin: Mutex<Option<ChildStdin>>,
    next: AtomicU64,
    open: Arc<Mutex<Open>>,
}

/// Requests without a reply, or `None` once the other process has ended.
type Open = Option<HashMap<u64, oneshot::Sender<Reply>>>;

impl DistantBackend {
    /// Starts `program`, which must call [`serve`], and waits until it does. `near` is a client of
    /// the same store in this process.
    ///
    /// # Errors
    /// If the program cannot be started, or ends before it calls [`serve`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn spawn(mut program: Command, near: Arc<dyn LockBackend>) -> io::Result<Self> {
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        // The other process sends this reply without a request.
        let (ready, is_ready) = oneshot::channel();
        let open = Arc::new(Mutex::new(Some(HashMap::from([(wire::READY, ready)]))));
        if let Some(stdout) = stdout {
            let open = Arc::clone(&open);
            std::thread::spawn(move || listen(BufReader::new(stdout), &open));
        }
        let (child, stdin) = (Mutex::new(child), Mutex::new(stdin));
        let backend = Self { near, child, stdin, next: AtomicU64::new(wire::READY + 1), open };
        is_ready.await.map_err(|_| io::Error::other("the other process ended before it served"))?;
        Ok(backend)
    }

    async fn ask(&self, request: Request) -> Result<Reply, BackendError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match locked(&self.open).as_mut() {
            Some(open) => drop(open.insert(number, answer)),
            None => return Err(gone()),
        }
        // If the caller's future is dropped, the other process must cancel the request.
        let mut asked = Asked { backend: self, number, answered: false };
        self.say(number, &request)?;
        let reply = answered.await;
        asked.answered = true;
        match reply.map_err(|_| gone())? {
            Reply::Failed(error) => Err(error),
            reply => Ok(reply),
        }
    }

    fn say(&self, number: u64, request: &Request) -> Result<(), BackendError> {
        let mut stdin = locked(&self.stdin);
        let stdin = stdin.as_mut().ok_or_else(gone)?;
        let line = format!("{number} {}\n", wire::write_request(request));
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).map_err(|_| gone())
    }
}

/// A request that was sent, until it is answered or dropped.
struct Asked<'a> {
    backend: &'a DistantBackend,
    number: u64,
    answered: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.answered {
            if let Some(open) = locked(&self.backend.open).as_mut() {
                open.remove(&self.number);
            }
            // Its failure has no effect, because no caller waits for this request any more.
            let _ = self.backend.say(self.number, &Request::Cancel);
        }
    }
}

/// Sends each reply to its caller, until the other process ends.
fn listen(stdout: impl BufRead, open: &Mutex<Open>) {
    for line in stdout.lines().map_while(Result::ok) {
        // A test program also prints its own lines.
        let Some((number, reply)) = wire::read_reply(&line) else { continue };
        let answer = locked(open).as_mut().and_then(|open| open.remove(&number));
        if let Some(answer) = answer {
            // The caller may have been dropped.
            let _ = answer.send(reply);
        }
    }
    *locked(open) = None;
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gone() -> BackendError {
    BackendError::transient("the other process has ended")
}

fn unexpected(reply: &Reply) -> BackendError {
    BackendError::new(
        registry_core::BackendErrorKind::Protocol,
        format!("the other process answered something else: {reply:?}"),
    )
}

#[async_trait]
impl LockBackend for DistantBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.near.capabilities();
        // The near client receives loss notifications only for its own claims.
        capabilities.reports_invalidations = false;
        capabilities
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.near.check_key(key)
    }

    fn shard(&self, claim: &Claim) -> u32 {
        self.near.shard(claim)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        match self.ask(Request::Acquire(claim.clone())).await? {
            Reply::Attempt(attempt) => Ok(attempt),
            other => Err(unexpected(&other)),
        }
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let error = match self.ask(Request::Renew(claims.to_vec())).await {
            Ok(Reply::Renewals(answers)) => return answers,
            Ok(other) => unexpected(&other),
            Err(error) => error,
        };
        vec![Err(error); claims.len()]
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        match self.ask(Request::Release(claim.clone())).await? {
            Reply::Release(release) => Ok(release),
            other => Err(unexpected(&other)),
        }
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        // A hint may never arrive, so an error of the process is treated as a missing hint.
        if self.ask(Request::Wait(claim.clone(), busy.mark)).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        match self.ask(Request::Inspect(key.clone())).await? {
            Reply::Holders(mut holders) => Ok(holders.pop()),
            other => Err(unexpected(&other)),
        }
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        match self.ask(Request::List).await? {
            Reply::Holders(holders) => Ok(holders),
            other => Err(unexpected(&other)),
        }
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        match self.ask(Request::ForceRelease(key.clone())).await? {
            Reply::Release(release) => Ok(release),
            other => Err(unexpected(&other)),
        }
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        match self.ask(Request::Diagnose).await? {
            Reply::Findings(notes) => Ok(notes.into_iter().map(Finding::note).collect()),
            other => Err(unexpected(&other)),
        }
    }

    async fn close(&self) {
        // A process that has ended needs no closing.
        let _ = self.ask(Request::Close).await;
        *locked(&self.stdin) = None;
        self.near.close().await;
    }
}

impl fmt::Debug for DistantBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistantBackend").field("near", &self.near).finish_non_exhaustive()
    }
}

impl Drop for DistantBackend {
    fn drop(&mut self) {
        let mut child = locked(&self.child);
        // Both fail only if the process has already ended.
        let _ = child.kill();
        let _ = child.wait();
    }
}
