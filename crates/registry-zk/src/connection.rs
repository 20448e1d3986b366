//! The client of one session: opened, stopped, and replaced by another client for the same session.
//! Called by `session`, which decides when.
//!
//! After a lost connection, the client library doubles its pause between attempts without a limit.
//! For example, it reconnects up to 7 s late if the server was down for 7 s. A client that stays
//! disconnected is therefore stopped, and its session is attached to a new one.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::pin;
use std::sync::Mutex;

use registry_core::{BackendError, Moment};
use spawns_core::{Spawn, Task};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};
use zookeeper_client::{CheckWriteError, Client, Error, SessionInfo, SessionState};

use crate::config::ZkConfig;
use crate::error::to_backend_error;
use crate::mutex::lock;

/// A client of the library that can be stopped.
pub(crate) struct StoppableClient {
    client: Client,
    tasks: ClientTasks,
    is_stopped: watch::Sender<bool>,
}

/// The tasks that the library spawns for one client.
#[derive(Default)]
struct ClientTasks(Mutex<Vec<JoinHandle<()>>>);

impl Spawn for ClientTasks {
    fn spawn(&self, task: Task) {
        lock(&self.0).push(tokio::spawn(Box::into_pin(task.future)));
    }
}

impl StoppableClient {
    /// Opens a session, or attaches to `session`. Tries each server once.
    pub(crate) async fn open(
        config: &ZkConfig,
        session_timeout: Duration,
        session: Option<SessionInfo>,
    ) -> Result<Self, Error> {
        let connector = config.connector(session_timeout).with_fail_eagerly();
        let connector = match session {
            Some(session) => connector.with_session(session),
            None => connector,
        };
        let servers = config.servers();
        let connecting = async {
            #[cfg(feature = "tls")]
            if config.is_encrypted() {
                return connector.secure_connect(&servers).await;
            }
            connector.connect(&servers).await
        };
        let tasks = ClientTasks::default();
        let mut connecting = pin!(connecting);
        let client = poll_fn(|context| {
            // Tasks that the library spawns in this poll go to `tasks`.
            let _scope = spawns_core::enter(&tasks);
            connecting.as_mut().poll(context)
        });
        let client = client.await?;
        Ok(Self { client, tasks, is_stopped: watch::Sender::new(false) })
    }

    /// Attaches to a session of another client, which must have been [stopped](Self::stop). Returns
    /// after the servers have confirmed the session, with the time at which the confirmation was
    /// requested.
    pub(crate) async fn attach(
        config: &ZkConfig,
        session_timeout: Duration,
        session: SessionInfo,
    ) -> Result<(Self, Moment), Error> {
        let id = session.id();
        let connection = Self::open(config, session_timeout, Some(session)).await?;
        let sent_at = Moment::now();
        // The new client does not send the last transaction that its predecessor has seen. A
        // lagging server has caught up when it answers a write.
        let path = config.chroot.as_deref().unwrap_or("/");
        let written = timeout(config.request_timeout, connection.write_check(path)).await;
        let outcome = match written {
            Ok(Ok(_)) if connection.session_id() == id => return Ok((connection, sent_at)),
            // A server that no longer knows the session starts another one.
            Ok(Ok(_)) => Error::SessionExpired,
            Ok(Err(error)) => error,
            Err(_) => Error::ConnectionLoss,
        };
        // Otherwise dropping the client would end the session.
        connection.stop().await;
        Err(outcome)
    }

    /// Stops the client without closing the session, which exists until its time-out.
    pub(crate) async fn stop(&self) {
        // Set first, so that it ends watches and requests. The library's own futures would panic or
        // report a bug.
        self.is_stopped.send_replace(true);
        let tasks = std::mem::take(&mut *lock(&self.tasks.0));
        for task in tasks {
            task.abort();
            // The error of an aborted task.
            drop(task.await);
        }
    }

    /// Waits until the client is stopped. Does not keep the client alive.
    pub(crate) fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut is_stopped = self.is_stopped.subscribe();
        async move {
            // An error means that the connection was dropped, which counts as stopped.
            let _ = is_stopped.wait_for(|is_stopped| *is_stopped).await;
        }
    }

    pub(crate) fn state(&self) -> SessionState {
        if *self.is_stopped.borrow() { SessionState::Disconnected } else { self.client.state() }
    }

    /// Waits until the client is connected. After [`stop`](Self::stop) it waits forever.
    pub(crate) async fn wait_until_connected(&self) -> Result<(), BackendError> {
        let mut states = self.client.state_watcher();
        loop {
            match self.state() {
                SessionState::SyncConnected => return Ok(()),
                SessionState::AuthFailed => return Err(to_backend_error(&Error::AuthFailed)),
                state if state.is_terminated() => {
                    return Err(to_backend_error(&Error::SessionExpired).as_refused());
                }
                _ => states.changed().await,
            };
        }
    }

    /// Returns whether a node exists, decided by a majority with a write that changes nothing.
    pub(crate) async fn write_check(&self, path: &str) -> Result<bool, Error> {
        let writer = self.client.new_check_writer(path, None)?;
        match writer.commit().await {
            // A failed check is committed by a majority like any other write.
            Ok(_) | Err(CheckWriteError::CheckFailed { source: Error::NoAuth }) => Ok(true),
            Err(CheckWriteError::CheckFailed { source: Error::NoNode }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl Deref for StoppableClient {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}
