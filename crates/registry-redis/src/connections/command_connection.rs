//! One multiplexed command connection. If the connection breaks or stops responding, a new
//! connection replaces it. This module repeats a script only if the server has not cached the
//! script. The caller decides about all other retries.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::script::ScriptCall;

/// A connection that is being opened.
pub(crate) type ConnectFuture = BoxFuture<'static, RedisResult<MultiplexedConnection>>;

/// Set when the connection closes.
pub(crate) type ClosedFlag = Arc<AtomicBool>;

pub(crate) struct CommandConnection {
    connect_fn: Box<dyn Fn(ClosedFlag) -> ConnectFuture + Send + Sync>,
    on_loss_detected: Box<dyn Fn() + Send + Sync>,
    /// The time without any response after which a waiting command opens a second connection.
    probe_after: Duration,
    current: Mutex<SharedConnection>,
}

#[derive(Clone)]
struct SharedConnection {
    /// The connection attempt. Every command that waits for the connection polls this future.
    connecting: Shared<ConnectFuture>,
    closed: ClosedFlag,
    activity: Arc<ResponseActivity>,
}

/// Counts the responses of a connection.
#[derive(Default)]
struct ResponseActivity {
    responses: AtomicU64,
    /// A command is opening a second connection as a probe.
    is_probing: AtomicBool,
    replaced: Notify,
}

/// Clears `is_probing` on drop.
struct ProbeGuard<'a>(&'a ResponseActivity);

impl Drop for ProbeGuard<'_> {
    fn drop(&mut self) {
        self.0.is_probing.store(false, Ordering::Release);
    }
}

impl CommandConnection {
    /// Creates a connection. The first command opens it with `connect`.
    ///
    /// `connect` may set the [`ClosedFlag`] when its connection closes. The next command then opens
    /// a new connection. Without the flag, the next command on the closed connection fails,
    /// replaces the connection and calls `on_loss_detected`.
    ///
    /// If a command waits and no response arrives for `probe_after`, the command opens a second
    /// connection as a probe. If the second connection opens before any response arrives, all
    /// commands that wait on the first connection fail with a time-out error. Unless the first
    /// connection was already replaced, the second one replaces it, and the command calls
    /// `on_loss_detected`.
    pub(crate) fn new(
        connect: impl Fn(ClosedFlag) -> ConnectFuture + Send + Sync + 'static,
        on_loss_detected: impl Fn() + Send + Sync + 'static,
        probe_after: Duration,
    ) -> Self {
        let current = Mutex::new(start_connecting(&connect));
        Self {
            connect_fn: Box::new(connect),
            on_loss_detected: Box::new(on_loss_detected),
            probe_after,
            current,
        }
    }

    /// Sends a command and returns its response.
    pub(crate) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        self.with_connection(async |mut connection| {
            connection.send_packed_command(command).await?.extract_error()
        })
        .await
    }

    /// Sends a pipeline and returns one response per command. A response may be a server error.
    pub(crate) async fn send_all(&self, commands: &Pipeline) -> RedisResult<Vec<Value>> {
        let count = commands.len();
        self.with_connection(async |mut connection| {
            connection.send_packed_commands(commands, 0, count).await
        })
        .await
    }

    /// Runs a script. Sends its source if the server has not cached it.
    pub(crate) async fn run(&self, call: &ScriptCall<'_>) -> RedisResult<Value> {
        match self.send(call.evalsha()).await {
            // The box keeps the large, rarely needed future of the second request out of this
            // future.
            Err(error) if is_noscript_error(&error) => Box::pin(self.send(&call.eval())).await,
            response => response,
        }
    }

    /// Drops the connection. The next command opens a new connection.
    pub(crate) fn reset(&self) {
        *self.lock() = start_connecting(&self.connect_fn);
    }

    /// Connects, unless the connection is open.
    pub(crate) async fn connect(&self) -> RedisResult<()> {
        self.with_connection(async |_| Ok(())).await
    }

    async fn with_connection<T, F>(
        &self,
        request: impl FnOnce(MultiplexedConnection) -> F,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let used = {
            let mut current = self.lock();
            if current.closed.load(Ordering::Acquire) {
                *current = start_connecting(&self.connect_fn);
            }
            current.clone()
        };
        let connection = match used.connecting.peek() {
            Some(result) => result.clone(),
            None => used.connecting.clone().await,
        };
        let is_connected = connection.is_ok();
        let response = match connection {
            Ok(connection) => self.await_response(&used, pin!(request(connection))).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &response
            && (!is_connected || is_connection_error(error))
        {
            let is_loss_unreported = is_connected && !used.closed.load(Ordering::Acquire);
            if self.replace(&used, || start_connecting(&self.connect_fn)) && is_loss_unreported {
                (self.on_loss_detected)();
            }
        }
        response
    }

    /// Replaces the connection `used` if it is still current, and returns whether it was. If many
    /// commands fail together, only the first command replaces the connection.
    fn replace(
        &self,
        used: &SharedConnection,
        replacement: impl FnOnce() -> SharedConnection,
    ) -> bool {
        let mut current = self.lock();
        let is_current = current.connecting.ptr_eq(&used.connecting);
        if is_current {
            *current = replacement();
        }
        is_current
    }

    /// Waits for the response over `used`. Returns an error if a second connection opens while
    /// `used` delivers no response.
    ///
    /// A slow server is slow on both connections, so its response usually arrives before the second
    /// connection opens. A connection that died without a TCP reset never delivers a response. For
    /// example, a router on the path may have dropped its state.
    async fn await_response<T>(
        &self,
        used: &SharedConnection,
        mut request: Pin<&mut impl Future<Output = RedisResult<T>>>,
    ) -> RedisResult<T> {
        let activity = &*used.activity;
        let mut replaced = pin!(activity.replaced.notified());
        replaced.as_mut().enable();
        loop {
            let responses = activity.responses.load(Ordering::Acquire);
            let is_unresponsive = || activity.responses.load(Ordering::Acquire) == responses;
            tokio::select! {
                biased;
                response = &mut request => return count_response(activity, response),
                () = &mut replaced => return Err(timed_out()),
                () = sleep(self.probe_after) => {}
            }
            if !is_unresponsive() || activity.is_probing.swap(true, Ordering::AcqRel) {
                continue;
            }
            let _probe = ProbeGuard(activity);
            let replacement = start_connecting(&self.connect_fn);
            let replacement_result = tokio::select! {
                biased;
                response = &mut request => return count_response(activity, response),
                () = &mut replaced => return Err(timed_out()),
                result = replacement.connecting.clone() => result,
            };
            if replacement_result.is_ok() && is_unresponsive() {
                if self.replace(used, || replacement) {
                    (self.on_loss_detected)();
                }
                activity.replaced.notify_waiters();
                return Err(timed_out());
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SharedConnection> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a response of the server. A time-out of the client library is none.
fn count_response<T>(activity: &ResponseActivity, response: RedisResult<T>) -> RedisResult<T> {
    if !response.as_ref().is_err_and(RedisError::is_timeout) {
        activity.responses.fetch_add(1, Ordering::AcqRel);
    }
    response
}

fn start_connecting(connect: &impl Fn(ClosedFlag) -> ConnectFuture) -> SharedConnection {
    let closed = ClosedFlag::default();
    SharedConnection {
        connecting: connect(Arc::clone(&closed)).shared(),
        closed,
        activity: Arc::default(),
    }
}

pub(super) fn timed_out() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// Returns whether the connection is unusable after `error`. A time-out counts, because the
/// connection may have died without a TCP reset.
pub(super) fn is_connection_error(error: &RedisError) -> bool {
    error.is_timeout() || error.is_io_error() || error.is_unrecoverable_error()
}

pub(super) fn is_noscript_error(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript)
}

impl fmt::Debug for CommandConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandConnection").finish_non_exhaustive()
    }
}
