//! The way to the server: one connection that carries all commands, made again when it breaks. Knows nothing of locks.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig, PubSub};
use redis::io::tcp::TcpSettings;
use redis::{Client, Cmd, ErrorKind, FromRedisValue, RedisError, RedisResult, ScriptInvocation};
use registry_core::BackendError;

use crate::config::RedisConfig;
use crate::error::explain;

/// A connection for messages that is being made.
pub(crate) type Listening = Pin<Box<dyn Future<Output = RedisResult<PubSub>> + Send>>;

/// One server, or whatever answers like one.
pub(crate) struct Link {
    client: Client,
    connect_timeout: Duration,
    settings: ConnectionManagerConfig,
    commands: Mutex<Arc<ConnectionManager>>,
}

impl Link {
    /// Connects.
    pub(crate) async fn open(config: &RedisConfig) -> Result<Self, BackendError> {
        // Without TCP_NODELAY each command would wait for the acknowledgement of the last.
        let tcp = TcpSettings::default().set_nodelay(true);
        let server = config.server.clone().set_tcp_settings(tcp);
        let client = Client::open(server).map_err(|error| explain(&error))?;
        let settings = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(config.connect_timeout))
            .set_response_timeout(Some(config.response_timeout))
            // The engine knows better when it is worth another try.
            .set_number_of_retries(0);
        let commands = ConnectionManager::new_with_config(client.clone(), settings.clone())
            .await
            .map_err(|error| explain(&error).as_refused())?;
        let commands = Mutex::new(Arc::new(commands));
        Ok(Self { client, connect_timeout: config.connect_timeout, settings, commands })
    }

    /// Runs a script.
    pub(crate) async fn run<T: FromRedisValue>(
        &self,
        call: &ScriptInvocation<'_>,
    ) -> Result<T, BackendError> {
        let used = self.commands();
        let answer = call.invoke_async(&mut (*used).clone()).await;
        answer.map_err(|error| self.failed(&used, &error))
    }

    /// Runs a command.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, BackendError> {
        let used = self.commands();
        let answer = command.query_async(&mut (*used).clone()).await;
        answer.map_err(|error| self.failed(&used, &error))
    }

    fn commands(&self) -> Arc<ConnectionManager> {
        Arc::clone(&self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Explains an error, and gives up a connection that its manager would keep for ever.
    fn failed(&self, used: &Arc<ConnectionManager>, error: &RedisError) -> BackendError {
        if is_kept_after(error) {
            let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
            // Of many commands that fail together the first does it. Connecting is left to the next command.
            if Arc::ptr_eq(&commands, used)
                && let Ok(fresh) = ConnectionManager::new_lazy_with_config(
                    self.client.clone(),
                    self.settings.clone(),
                )
            {
                *commands = Arc::new(fresh);
            }
        }
        explain(error)
    }

    /// Makes connections for messages. Commands and messages never share one: a message that nobody asked for could be taken for the
    /// answer to a command.
    pub(crate) fn listener(&self) -> impl Fn() -> Listening + Send + use<> {
        let (client, limit) = (self.client.clone(), self.connect_timeout);
        move || {
            let client = client.clone();
            Box::pin(async move {
                let connecting = client.get_async_pubsub();
                tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| {
                    Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())
                })
            })
        }
    }
}

/// The manager connects anew after a connection that broke, not after one that fell silent, nor after a server that took the
/// connection and refused to set it up: a login that is wrong for a moment would be wrong for ever.
fn is_kept_after(error: &RedisError) -> bool {
    error.is_timeout()
        || matches!(
            error.kind(),
            ErrorKind::AuthenticationFailed
                | ErrorKind::Client
                | ErrorKind::Parse
                | ErrorKind::RESP3NotSupported
        )
        // SELECT while connecting; the client has no kind of its own for it.
        || error.to_string().contains("refused to switch database")
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("server", &self.client.get_connection_info().addr().to_string())
            .finish_non_exhaustive()
    }
}
