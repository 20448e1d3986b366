//! `lockreg hold`: a lock for scripts and programs in any language, held for as long as their end of a pipe is open.

use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;

use lock_registry::{Key, LockError, LockGuard, LockRegistry, LostReason, Observer};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::args;
use crate::exit::{self, Failure};
use crate::say::{Say, json_to_stdout, millis};
use crate::signals::{Signals, asks_to_end};
use crate::store::Store;
use crate::take::{Ear, Taken, close, take, warn_of_short_reach};

/// `lockreg hold`, checked: nothing was touched yet.
#[derive(Debug)]
pub(crate) struct Hold {
    key: Key,
    store: Store,
    patience: Option<Duration>,
}

#[derive(Debug, Serialize)]
struct Held<'a> {
    key: &'a str,
    token: Option<u64>,
    valid_for_ms: u64,
}

#[derive(Debug, Serialize)]
struct Lost<'a> {
    key: &'a str,
    lost: LostReason,
}

impl Hold {
    pub(crate) fn check(global: &args::Global, hold: &args::Hold) -> Result<Self, Failure> {
        let key = args::key(&hold.key)?;
        let store = Store::choose(global)?.taking(&hold.taking)?;
        Ok(Self { key, store, patience: hold.taking.patience() })
    }

    /// Takes the lock, holds it until there is a reason not to, frees it. Answers the exit status.
    pub(crate) async fn carry_out(self, mut signals: Signals, say: Say) -> Result<u8, Failure> {
        let Self { key, store, patience } = self;
        let ear = Ear::new();
        let registry = tokio::select! {
            registry = store.observed(Arc::clone(&ear) as Arc<dyn Observer>).open() => registry?,
            signal = signals.end() => return Ok(exit::by_signal(signal as i32)),
        };
        warn_of_short_reach(&registry, say);
        let lock = registry.obtain(key.as_str());
        let status = match take(&lock, patience, &ear, &mut signals, say).await {
            Ok(Taken::Busy) => Ok(exit::NOT_OBTAINED),
            Ok(Taken::Signal(signal)) => Ok(exit::by_signal(signal as i32)),
            Ok(Taken::Guard(guard)) => hold(guard, &mut signals).await,
            Err(failure) => Err(failure),
        };
        close(&registry).await;
        status
    }
}

async fn hold(guard: LockGuard, signals: &mut Signals) -> Result<u8, Failure> {
    let key = guard.key().to_owned();
    let token = guard.fencing_token().map(u64::from);
    let told = json_to_stdout(&Held { key: &key, token, valid_for_ms: millis(guard.valid_for()) });
    if told.is_ok() {
        tokio::select! {
            biased;
            reason = guard.lost() => {
                // Nothing is left to free; the engine knows.
                drop(guard);
                json_to_stdout(&Lost { key: &key, lost: reason })?;
                return Ok(exit::LOST);
            }
            () = asked_to_end(signals) => {}
            () = end_of_stdin() => {}
        }
    }
    // Nobody who cannot read the line holds the lock.
    let released = guard.unlock().await;
    told?;
    match released {
        Ok(()) => Ok(0),
        Err(LockError::Lost { reason, .. }) => {
            json_to_stdout(&Lost { key: &key, lost: reason })?;
            Ok(exit::LOST)
        }
        Err(error) => Err(error.into()),
    }
}

async fn asked_to_end(signals: &mut Signals) {
    while !asks_to_end(signals.end().await) {}
}

/// Waits until whoever started us closes our stdin. What they write is thrown away.
async fn end_of_stdin() {
    let (tell, ended) = oneshot::channel();
    // A thread of its own, which dies with the process: the runtime would wait for one of its threads.
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
