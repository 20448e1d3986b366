//! The way to the server: one connection that carries all commands, made again when it breaks. Knows nothing of locks.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig, PubSub};
use redis::io::tcp::TcpSettings;
use redis::{Client, Cmd, ConnectionInfo, FromRedisValue, RedisResult, ScriptInvocation};
use registry_core::BackendError;

use crate::config::RedisConfig;
use crate::error::explain;

/// A connection for messages that is being made.
pub(crate) type Listening = Pin<Box<dyn Future<Output = RedisResult<PubSub>> + Send>>;

/// One server, or whatever answers like one.
pub(crate) struct Link {
    server: ConnectionInfo,
    connect_timeout: Duration,
    commands: ConnectionManager,
}

impl Link {
    /// Connects.
    pub(crate) async fn open(config: &RedisConfig) -> Result<Self, BackendError> {
        // Without TCP_NODELAY each command would wait for the acknowledgement of the last.
        let tcp = TcpSettings::default().set_nodelay(true);
        let server = config.server.clone().set_tcp_settings(tcp);
        let client = Client::open(server.clone()).map_err(|error| explain(&error))?;
        let settings = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(config.connect_timeout))
            .set_response_timeout(Some(config.response_timeout))
            // The engine knows better when it is worth another try.
            .set_number_of_retries(0);
        let commands = ConnectionManager::new_with_config(client, settings)
            .await
            .map_err(|error| explain(&error).as_refused())?;
        Ok(Self { server, connect_timeout: config.connect_timeout, commands })
    }

    /// Runs a script.
    pub(crate) async fn run<T: FromRedisValue>(
        &self,
        call: &ScriptInvocation<'_>,
    ) -> Result<T, BackendError> {
        let mut commands = self.commands.clone();
        call.invoke_async(&mut commands).await.map_err(|error| explain(&error))
    }

    /// Runs a command.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, BackendError> {
        let mut commands = self.commands.clone();
        command.query_async(&mut commands).await.map_err(|error| explain(&error))
    }

    /// Makes connections for messages. Commands and messages never share one: a message that nobody asked for could be taken for the
    /// answer to a command.
    pub(crate) fn listener(&self) -> impl Fn() -> Listening + Send + use<> {
        let (server, limit) = (self.server.clone(), self.connect_timeout);
        move || {
            let server = server.clone();
            Box::pin(async move {
                let client = Client::open(server)?;
                let connecting = client.get_async_pubsub();
                tokio::time::timeout(limit, connecting).await.unwrap_or_else(|_| {
                    Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())
                })
            })
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("server", &self.server.addr().to_string())
            .finish_non_exhaustive()
    }
}
