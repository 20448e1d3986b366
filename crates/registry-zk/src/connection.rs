//! The client of one session. Opens a client, stops it, and attaches a new client to the same
//! session. `session` calls this module.
//!
//! After a lost connection, the client library doubles its pause between attempts until the session
//! has expired. For example, after an outage of 7 s, it may reconnect only 7 s after the server has
//! returned. `session` therefore stops a client that stays disconnected, and attaches the session
//! to a new client.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use registry_core::{BackendError, Moment};
use spawns_core::{Spawn, Task};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use zookeeper_client::{CheckWriteError, Client, Error, SessionInfo, SessionState};

use crate::config::ZkConfig;
use crate::error::to_backend_error;
use crate::mutex::lock;
use crate::timer::timeout;

/// A client of the library that can be stopped.
pub(crate) struct StoppableClient {
    client: Client,
    tasks: ClientTasks,
}

/// The tasks that the library spawns for one client.
struct ClientTasks {
    runtime: Handle,
    handles: Mutex<Vec<JoinHandle<()>>>,
    /// The tasks have weak references, so a client that is dropped ends all waits for its stop.
    run_state: Arc<watch::Sender<RunState>>,
}

/// Whether the library's tasks of a client run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunState {
    Running,
    /// [`StoppableClient::stop`] was called. The session can be attached to a new client.
    Stopped,
    /// A task has ended or was dropped with its runtime, or no new client continues the session.
    Ended,
}

impl ClientTasks {
    fn new(runtime: Handle) -> Self {
        let run_state = Arc::new(watch::Sender::new(RunState::Running));
        Self { runtime, handles: Mutex::default(), run_state }
    }
}

impl Spawn for ClientTasks {
    fn spawn(&self, task: Task) {
        let future = Box::into_pin(task.future);
        let task = LibraryTask { future, run_state: Arc::downgrade(&self.run_state) };
        lock(&self.handles).push(self.runtime.spawn(task));
    }
}

/// A task of the library that records its end.
struct LibraryTask {
    future: Pin<Box<dyn Future<Output = ()> + Send>>,
    run_state: Weak<watch::Sender<RunState>>,
}

impl Future for LibraryTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.future.as_mut().poll(context)
    }
}

impl Drop for LibraryTask {
    fn drop(&mut self) {
        // At an abort and at the end of the runtime, this runs before the drop of `future`, which
        // drops the senders of all watches and responses. Without the sender, a watch panics and a
        // request returns an unexpected error.
        if let Some(run_state) = self.run_state.upgrade() {
            mark_ended(&run_state);
        }
    }
}

/// Records that a task has ended, unless the client was stopped before.
fn mark_ended(run_state: &watch::Sender<RunState>) {
    run_state.send_if_modified(|run_state| {
        let is_running = *run_state == RunState::Running;
        if is_running {
            *run_state = RunState::Ended;
        }
        is_running
    });
}

impl StoppableClient {
    /// Opens a new session, or attaches to the given `session`. Tries each server at most once, and
    /// ends at the first success. The tasks of the client run in `runtime`.
    pub(crate) async fn open(
        config: &ZkConfig,
        session_timeout: Duration,
        session: Option<SessionInfo>,
        runtime: &Handle,
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
        let tasks = ClientTasks::new(runtime.clone());
        let mut connecting = pin!(connecting);
        let client = poll_fn(|context| {
            // `tasks` collects the tasks that the library spawns in this poll.
            let _scope = spawns_core::enter(&tasks);
            connecting.as_mut().poll(context)
        });
        let client = client.await?;
        Ok(Self { client, tasks })
    }

    /// Attaches to a session of another client. The other client must have been
    /// [stopped](Self::stop). Waits until a majority has confirmed the session. Returns the client
    /// and the time at which it requested the confirmation. The tasks of the client run in the
    /// current runtime.
    pub(crate) async fn attach(
        config: &ZkConfig,
        session_timeout: Duration,
        session: SessionInfo,
    ) -> Result<(Self, Moment), Error> {
        let id = session.id();
        let runtime = Handle::current();
        let client = Self::open(config, session_timeout, Some(session), &runtime).await?;
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
        // `run_state` is set first, which ends the waits for watches and responses. After the tasks
        // are aborted, the library's futures would panic or return an unexpected error.
        self.tasks.run_state.send_replace(RunState::Stopped);
        let handles = std::mem::take(&mut *lock(&self.tasks.handles));
        for task in handles {
            task.abort();
            // The result is the error of an aborted task.
            drop(task.await);
        }
    }

    /// Records that no new client will continue the session of this client.
    pub(crate) fn end(&self) {
        self.tasks.run_state.send_replace(RunState::Ended);
    }

    /// Waits until the client is stopped or has ended. Does not keep the client alive.
    pub(crate) fn wait_until_stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut run_state = self.tasks.run_state.subscribe();
        async move {
            // An error means that the client was dropped, which counts as stopped.
            let _ = run_state.wait_for(|run_state| *run_state != RunState::Running).await;
        }
    }

    pub(crate) fn state(&self) -> SessionState {
        let run_state = *self.tasks.run_state.borrow();
        match (run_state, self.client.state()) {
            (RunState::Stopped, _) => SessionState::Disconnected,
            // The library reports the reason, unless its task was dropped or has panicked. Then no
            // task sends the pings of the session any more.
            (RunState::Ended, state) if !state.is_terminated() => SessionState::Closed,
            (_, state) => state,
        }
    }

    /// Waits until the client is connected. Waits forever if the client is [stopped](Self::stop),
    /// or if its tasks are dropped with their runtime during this call.
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

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::mpsc;

    use super::*;

    /// Sends the run state when it is dropped.
    struct DropProbe(watch::Receiver<RunState>, mpsc::Sender<RunState>);

    impl Drop for DropProbe {
        fn drop(&mut self) {
            self.1.send(*self.0.borrow()).unwrap();
        }
    }

    #[test]
    fn a_client_counts_as_ended_before_the_end_of_its_runtime_drops_its_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let tasks = ClientTasks::new(runtime.handle().clone());
        let (sender, states) = mpsc::channel();
        let probe = DropProbe(tasks.run_state.subscribe(), sender);
        {
            let _scope = spawns_core::enter(&tasks);
            drop(spawns_core::spawn(async move {
                pending::<()>().await;
                drop(probe);
            }));
        }
        assert_eq!(*tasks.run_state.borrow(), RunState::Running);
        drop(runtime);
        assert_eq!(states.recv(), Ok(RunState::Ended));
    }
}
