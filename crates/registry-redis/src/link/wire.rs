//! One connection that carries commands, made again when it breaks or falls silent. Repeats nothing: who asked knows best whether it is
//! worth another try.

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

/// A connection that is being made.
pub(crate) type Dialled = BoxFuture<'static, RedisResult<MultiplexedConnection>>;

/// Whether a connection is known to have ended.
pub(crate) type Ended = Arc<AtomicBool>;

pub(crate) struct Wire {
    dial: Box<dyn Fn(Ended) -> Dialled + Send + Sync>,
    given_up: Box<dyn Fn() + Send + Sync>,
    /// How long nothing may arrive while a command waits, until a second connection is tried.
    silence: Duration,
    current: Mutex<Line>,
}

#[derive(Clone)]
struct Line {
    /// Made by those who use it, all together.
    dialled: Shared<Dialled>,
    ended: Ended,
    traffic: Arc<Traffic>,
}

/// What a connection has answered.
#[derive(Default)]
struct Traffic {
    answers: AtomicU64,
    /// A second connection is being made, to compare with.
    is_compared: AtomicBool,
    replaced: Notify,
}

/// The task or command that makes the second connection.
struct Comparing<'a>(&'a Traffic);

impl Drop for Comparing<'_> {
    fn drop(&mut self) {
        self.0.is_compared.store(false, Ordering::Release);
    }
}

impl Wire {
    /// A wire that `dial` connects, at its first use. `dial` may tell that a connection has ended; else the next command finds out, and
    /// `given_up` is called. If nothing arrives for `silence` while a command waits, a second connection is made; if that is
    /// answered first, it replaces the first one.
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

    /// Sends commands that are answered one by one; errors of the server are among the answers.
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let count = commands.len();
        self.over(async |mut connection| connection.send_packed_commands(commands, 0, count).await)
            .await
    }

    /// Runs a script.
    pub(crate) async fn run(&self, call: &Call<'_>) -> RedisResult<Value> {
        match self.send(call.known()).await {
            Err(error) if is_unknown_script(&error) => self.send(&call.unknown()).await,
            answer => answer,
        }
    }

    /// Gives the connection up; the next command makes a new one.
    pub(crate) fn renew(&self) {
        *self.lock() = line(&self.dial);
    }

    /// Connects, if that is yet to be done.
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

    /// Replaces a line unless that was done. Of many commands that fail together the first does it.
    fn replace(&self, used: &Line, fresh: impl FnOnce() -> Line) -> bool {
        let mut current = self.lock();
        let is_current = current.dialled.ptr_eq(&used.dialled);
        if is_current {
            *current = fresh();
        }
        is_current
    }

    /// Waits for the answer over `used`, as long as that is not silent while another connection is answered.
    ///
    /// A server that is slow is slow on both, and the answer to the command comes first. A connection that has died without a word, behind
    /// a router that forgot it or a host that is gone, stays silent.
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

/// Whether the connection is of no use after `error`. One that did not answer in time may have died without a word.
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
