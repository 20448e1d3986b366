//! One connection that carries commands, made again when it breaks or falls silent. Repeats nothing: who asked knows best whether it is
//! worth another try.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};

use crate::script::Call;

/// A connection that is being made.
pub(crate) type Dialled = BoxFuture<'static, RedisResult<MultiplexedConnection>>;

/// Whether a connection is known to have ended.
pub(crate) type Ended = Arc<AtomicBool>;

pub(crate) struct Wire {
    dial: Box<dyn Fn(Ended) -> Dialled + Send + Sync>,
    given_up: Box<dyn Fn() + Send + Sync>,
    current: Mutex<Line>,
}

struct Line {
    /// Made by those who use it, all together.
    dialled: Shared<Dialled>,
    ended: Ended,
}

impl Wire {
    /// A wire that `dial` connects, at its first use. `dial` may tell that a connection has ended; else the next command finds out, and
    /// `given_up` is called.
    pub(crate) fn new(
        dial: impl Fn(Ended) -> Dialled + Send + Sync + 'static,
        given_up: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let current = Mutex::new(line(&dial));
        Self { dial: Box::new(dial), given_up: Box::new(given_up), current }
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
            current.dialled.clone()
        };
        let connection = match used.peek() {
            Some(made) => made.clone(),
            None => used.clone().await,
        };
        let made = connection.is_ok();
        let answer = match connection {
            Ok(connection) => work(connection).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &answer
            && (!made || is_end(error))
        {
            let mut current = self.lock();
            // Of many commands that fail together the first does it.
            if current.dialled.ptr_eq(&used) {
                let is_news = made && !current.ended.load(Ordering::Acquire);
                *current = line(&self.dial);
                drop(current);
                if is_news {
                    (self.given_up)();
                }
            }
        }
        answer
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Line> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn line(dial: &impl Fn(Ended) -> Dialled) -> Line {
    let ended = Ended::default();
    Line { dialled: dial(Arc::clone(&ended)).shared(), ended }
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
