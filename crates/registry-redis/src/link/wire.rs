//! One multiplexed command connection, which is replaced when it breaks or stops answering. Retries
//! no command except a script that the server has not cached: the caller decides about retries.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::script::Call;

/// A connection that is being opened.
pub(crate) type Dialled = BoxFuture<'static, RedisResult<MultiplexedConnection>>;

/// Whether a connection is known to be closed.
pub(crate) type Ended = Arc<AtomicBool>;

pub(crate) struct Wire {
    dial: Box<dyn Fn(Ended) -> Dialled + Send + Sync>,
    given_up: Box<dyn Fn() + Send + Sync>,
    /// How long a command may wait without any response before a second connection is tried.
    silence: Duration,
    current: Mutex<Line>,
}

#[derive(Clone)]
struct Line {
    /// The connection attempt; all its users drive it together.
    dialled: Shared<Dialled>,
    ended: Ended,
    traffic: Arc<Traffic>,
}

/// The responses of a connection.
#[derive(Default)]
struct Traffic {
    answers: AtomicU64,
    /// A second connection is being opened for comparison.
    is_compared: AtomicBool,
    replaced: Notify,
}

/// Marks that a caller is opening the second connection.
struct Comparing<'a>(&'a Traffic);

impl Drop for Comparing<'_> {
    fn drop(&mut self) {
        self.0.is_compared.store(false, Ordering::Release);
    }
}

impl Wire {
    /// Creates a wire that connects by `dial` at its first use.
    ///
    /// `dial` may report that its connection is closed. Otherwise the next command detects that and
    /// calls `given_up`. If a command waits and nothing arrives for `silence`, a second connection
    /// is opened. It replaces the first one if it is ready before anything arrives there.
    pub(crate) fn new(
        dial: impl Fn(Ended) -> Dialled + Send + Sync + 'static,
        given_up: impl Fn() + Send + Sync + 'static,
        silence: Duration,
    ) -> Self {
        let current = Mutex::new(line(&dial));
        Self { dial: Box::new(dial), given_up: Box::new(given_up), silence, current }
    }

    /// Sends a command.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        self.over(async |mut connection| {
            connection.send_packed_command(command).await?.extract_error()
        })
        .await
    }

    /// Sends a pipeline and returns one response per command. Server errors are among the
    /// responses.
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let count = commands.len();
        self.over(async |mut connection| connection.send_packed_commands(commands, 0, count).await)
            .await
    }

    /// Runs a script. Sends its source if the server has not cached it.
    pub(crate) async fn run(&self, call: &Call<'_>) -> RedisResult<Value> {
        match self.send(call.known()).await {
            Err(error) if is_unknown_script(&error) => self.send(&call.unknown()).await,
            answer => answer,
        }
    }

    /// Drops the connection; the next command opens a new one.
    pub(crate) fn renew(&self) {
        *self.lock() = line(&self.dial);
    }

    /// Connects, unless it is connected.
    pub(crate) async fn connect(&self) -> RedisResult<()> {
        self.over(async |_| Ok(())).await
    }

    async fn over<T, F>(&self, work: impl FnOnce(MultiplexedConnection) -> F) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let used = {
            let mut current = self.lock();
            if current.ended.load(Ordering::Acquire) {
                *current = line(&self.dial);
            }
            current.clone()
        };
        let connection = match used.dialled.peek() {
            Some(made) => made.clone(),
            None => used.dialled.clone().await,
        };
        let made = connection.is_ok();
        let answer = match connection {
            Ok(connection) => self.attended(&used, work(connection)).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &answer
            && (!made || is_end(error))
        {
            let is_news = made && !used.ended.load(Ordering::Acquire);
            if self.replace(&used, || line(&self.dial)) && is_news {
                (self.given_up)();
            }
        }
        answer
    }

    /// Replaces the connection `used` by `fresh` if `used` is still current. Of many commands that
    /// fail together, only the first replaces it.
    fn replace(&self, used: &Line, fresh: impl FnOnce() -> Line) -> bool {
        let mut current = self.lock();
        let is_current = current.dialled.ptr_eq(&used.dialled);
        if is_current {
            *current = fresh();
        }
        is_current
    }

    /// Waits for the response over `used`. Returns an error if `used` stays silent while a second
    /// connection can be opened.
    ///
    /// A slow server is slow on both connections, so the response arrives first. A connection that
    /// died silently, for example behind a router that dropped it, stays silent.
    async fn attended<T>(
        &self,
        used: &Line,
        work: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        let traffic = &*used.traffic;
        let mut work = pin!(work);
        let mut replaced = pin!(traffic.replaced.notified());
        replaced.as_mut().enable();
        loop {
            let answers = traffic.answers.load(Ordering::Acquire);
            let is_silent = || traffic.answers.load(Ordering::Acquire) == answers;
            tokio::select! {
                biased;
                answer = &mut work => {
                    if !answer.as_ref().is_err_and(RedisError::is_timeout) {
                        traffic.answers.fetch_add(1, Ordering::AcqRel);
                    }
                    return answer;
                }
                () = &mut replaced => return Err(silent()),
                () = sleep(self.silence) => {}
            }
            if !is_silent() || traffic.is_compared.swap(true, Ordering::AcqRel) {
                continue;
            }
            let _comparing = Comparing(traffic);
            let fresh = line(&self.dial);
            let made = tokio::select! {
                biased;
                answer = &mut work => {
                    traffic.answers.fetch_add(1, Ordering::AcqRel);
                    return answer;
                }
                () = &mut replaced => return Err(silent()),
                made = fresh.dialled.clone() => made,
            };
            if made.is_ok() && is_silent() && self.replace(used, || fresh) {
                (self.given_up)();
                traffic.replaced.notify_waiters();
                return Err(silent());
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Line> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn line(dial: &impl Fn(Ended) -> Dialled) -> Line {
    let ended = Ended::default();
    Line { dialled: dial(Arc::clone(&ended)).shared(), ended, traffic: Arc::default() }
}

fn silent() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// Returns whether the connection is unusable after `error`. A connection that timed out may have
/// died silently.
pub(super) fn is_end(error: &RedisError) -> bool {
    error.is_timeout() || error.is_io_error() || error.is_unrecoverable_error()
}

pub(super) fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript)
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}
