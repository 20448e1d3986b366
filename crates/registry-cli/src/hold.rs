//! `lockreg hold`: holds a lock for a script or a program in any language, until the stdin of
//! `lockreg` ends.

use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;

use lock_registry::{Key, LockError, LockGuard, LockRegistry, LostReason, Observer};
use serde::Serialize;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::args;
use crate::exit::{self, Failure};
use crate::say::{Say, json_to_stdout, millis, printable};
use crate::signals::{Signals, asks_to_end};
use crate::store::Store;
use crate::take::{Ear, Taken, Wait, close_after, take, warn_of_short_reach};

/// A checked `lockreg hold`, before any access to the store.
#[derive(Debug)]
pub(crate) struct Hold {
    key: Key,
    store: Store,
    wait: Wait,
}

#[derive(Debug, Serialize)]
struct Held {
    key: String,
    token: Option<u64>,
    valid_for_ms: u64,
}

#[derive(Debug, Serialize)]
struct Lost {
    key: String,
    lost: LostReason,
}

impl Hold {
    pub(crate) fn check(global: &args::Global, hold: &args::Hold) -> Result<Self, Failure> {
        let key = args::key(&hold.key)?;
        let store = Store::choose(global)?.taking(&hold.taking)?;
        Ok(Self { key, store, wait: Wait::of(&hold.taking) })
    }

    /// Acquires the lock, holds it until a reason to stop, and releases it. Returns the exit
    /// status.
    pub(crate) async fn carry_out(self, mut signals: Signals, say: Say) -> Result<u8, Failure> {
        let Self { key, store, wait } = self;
        let began = Instant::now();
        let ear = Ear::new();
        let registry = tokio::select! {
            registry = store.observed(Arc::clone(&ear) as Arc<dyn Observer>).open(say) => registry?,
            signal = signals.end() => return Ok(exit::by_signal(signal as i32)),
        };
        warn_of_short_reach(&registry, say);
        let lock = registry.obtain(key.as_str());
        let status = match take(&lock, &wait, began, &ear, &mut signals, say).await {
            Ok(Taken::Busy) => Ok(wait.busy_status),
            Ok(Taken::Signal(signal)) => Ok(exit::by_signal(signal as i32)),
            Ok(Taken::Guard(guard)) => hold(guard, &mut signals, say).await,
            Err(failure) => Err(failure),
        };
        close_after(&registry, &status, wait.min_hold, &mut signals).await;
        status
    }
}

async fn hold(guard: LockGuard, signals: &mut Signals, say: Say) -> Result<u8, Failure> {
    let key = guard.key().to_owned();
    let token = guard.fencing_token().map(u64::from);
    let held = Held { key: key.clone(), token, valid_for_ms: millis(guard.valid_for()) };
    let mut telling = Box::pin(line_on_stdout(held));
    let mut told = None;
    let mut done = Box::pin(async {
        tokio::select! {
            () = asked_to_end(signals) => {}
            () = end_of_stdin() => {}
        }
    });
    // If the line cannot be written, the reader cannot know of the lock, so the lock is released.
    while !matches!(told, Some(Err(_))) {
        tokio::select! {
            biased;
            reason = guard.lost() => {
                // The engine knows of the loss, so the drop releases nothing.
                drop(guard);
                tell_lost(say, key, reason).await;
                return Ok(exit::LOST);
            }
            written = &mut telling, if told.is_none() => told = Some(written),
            () = &mut done => break,
        }
    }
    if told.is_none() {
        // The reader may still want the line, even if it has closed our stdin. The limit applies
        // because it may never read.
        told = timeout(READ_LIMIT, telling).await.ok();
    }
    let released = guard.unlock().await;
    match (released, told) {
        (Err(LockError::Lost { reason, .. }), _) => {
            tell_lost(say, key, reason).await;
            Ok(exit::LOST)
        }
        (_, Some(Err(failure))) => Err(failure),
        (Err(error), _) => Err(error.into()),
        (Ok(()), _) => Ok(0),
    }
}

/// Prints the loss on stdout, or on stderr if no reader accepts it within [`READ_LIMIT`].
async fn tell_lost(say: Say, key: String, reason: LostReason) {
    let line = line_on_stdout(Lost { key: key.clone(), lost: reason });
    if !matches!(timeout(READ_LIMIT, line).await, Ok(Ok(()))) {
        say.notice(
            "lost",
            &format!("the lock {} was lost: {reason}", printable(&key)),
            json!({ "key": key, "lost": reason }),
        );
    }
}

/// Prints `value` on stdout and waits for it asynchronously. Signals and a loss must be handled
/// even if no process reads stdout.
async fn line_on_stdout(value: impl Serialize + Send + 'static) -> Result<(), Failure> {
    let (tell, written) = oneshot::channel();
    // A separate thread, which ends with the process. The runtime would wait for one of its own
    // threads.
    std::thread::Builder::new()
        .name("stdout".to_owned())
        .spawn(move || {
            let _ = tell.send(json_to_stdout(&value));
        })
        .map_err(Failure::os("cannot start a thread"))?;
    written.await.unwrap_or_else(|error| Err(Failure::Output(io::Error::other(error))))
}

/// How long a reader of stdout has for the last line before `lockreg` ends.
const READ_LIMIT: Duration = Duration::from_secs(1);

async fn asked_to_end(signals: &mut Signals) {
    while !asks_to_end(signals.end().await) {}
}

/// Waits until the other end of stdin is closed, and ignores the input.
async fn end_of_stdin() {
    let (tell, ended) = oneshot::channel();
    // A separate thread, which ends with the process. The runtime would wait for one of its own
    // threads.
    let reader = std::thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let mut bin = [0; 4_096];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut bin) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
            }
        }
        let _ = tell.send(());
    });
    if reader.is_ok() {
        let _ = ended.await;
    }
}
