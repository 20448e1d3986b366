//! The client of one session. Opens a client, stops it, and attaches a new client to the same
//! session. `session` calls this module.
//!
//! After a lost connection, the client library doubles its pause between attempts until the session
//! has expired. For example, it reconnects up to 7 s late if the server was down for 7 s. `session`
//! therefore stops a client that stays disconnected, and attaches the session to a new client.

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
    /// Opens a new session, or attaches to the given `session`. Tries each server at most once, and
    /// ends at the first success.
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
            // `tasks` collects the tasks that the library spawns in this poll.
            let _scope = spawns_core::enter(&tasks);
            connecting.as_mut().poll(context)
        });
        let client = client.await?;
        Ok(Self { client, tasks, is_stopped: watch::Sender::new(false) })
    }

    /// Attaches to a session of another client. The other client must have been
    /// [stopped](Self::stop). Waits until a majority has confirmed the session. Returns the client
    /// and the time at which it requested the confirmation.
    pub(crate) async fn attach(
        config: &ZkConfig,
        session_timeout: Duration,
        session: SessionInfo,
    ) -> Result<(Self, Moment), Error> {
        let id = session.id();
        let client = Self::open(config, session_timeout, Some(session)).await?;
        let sent_at = Moment::now();
        // The new client does not send the id of the last transaction that the old client has seen.
        // A lagging server may therefore accept the new client. A server that answers a write has
        // applied all earlier transactions.
        let path = config.chroot.as_deref().unwrap_or("/");
        let written = timeout(config.request_timeout, client.exists_by_write(path)).await;
        let outcome = match written {
            Ok(Ok(_)) if client.session_id() == id => return Ok((client, sent_at)),
            // If the server has opened another session, the given session counts as expired.
            Ok(Ok(_)) => Error::SessionExpired,
            Ok(Err(error)) => error,
            Err(_) => Error::ConnectionLoss,
        };
        // Without the stop, the drop of the client would end the session.
        client.stop().await;
        Err(outcome)
    }

    /// Stops the client without ending the session. The session exists until its time-out.
    pub(crate) async fn stop(&self) {
        // `is_stopped` is set first, which ends the waits for watches and responses. After the
        // tasks are aborted, the library's futures would panic or return an unexpected error.
        self.is_stopped.send_replace(true);
        let tasks = std::mem::take(&mut *lock(&self.tasks.0));
        for task in tasks {
            task.abort();
            // The result is the error of an aborted task.
            drop(task.await);
        }
    }

    /// Waits until the client is stopped. Does not keep the client alive.
    pub(crate) fn wait_until_stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut is_stopped = self.is_stopped.subscribe();
        async move {
            // An error means that the client was dropped, which counts as stopped.
            let _ = is_stopped.wait_for(|is_stopped| *is_stopped).await;
        }
    }

    pub(crate) fn state(&self) -> SessionState {
        if *self.is_stopped.borrow() { SessionState::Disconnected } else { self.client.state() }
    }

    /// Waits until the client is connected. Waits forever after [`stop`](Self::stop).
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

    /// Returns whether a node exists, as decided by a majority with a write that changes nothing.
    pub(crate) async fn exists_by_write(&self, path: &str) -> Result<bool, Error> {
        let writer = self.client.new_check_writer(path, None)?;
        match writer.commit().await {
            // A majority commits a failed check too.
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
