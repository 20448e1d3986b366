//! The connections of a backend. [`RedisConnections`] routes each command to the server of its slot
//! and follows redirections. It transports scripts and does not interpret locks. `RedisStore`,
//! `Quorum` and `FencedWrites` call it.

mod cluster;
mod node;
mod sentinel;
mod command_connection;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use registry_core::BackendError;

use crate::config::{RedisConfig, ServerAddress, ServerAddresses};
use crate::error::{
    error_of_script_command, invalid_client_config, to_backend_error, unsupported_durability,
};
use crate::invalidations::InvalidationForwarder;
use crate::listener::ChannelScheme;
use crate::script::ScriptCall;

pub(crate) use node::{Connector, DurableResponse, PushHandler, RedisNode};

/// Maps hash slots to servers.
#[async_trait]
pub(crate) trait Topology: fmt::Debug + Send + Sync {
    /// Returns the server of `slot`. Queries the servers if the server of the slot is unknown.
    async fn resolve_node(&self, slot: u16) -> RedisResult<Arc<RedisNode>>;

    /// Returns the server of `slot` if it is known. Performs no I/O.
    fn known_node(&self, slot: u16) -> Option<Arc<RedisNode>>;

    /// Returns all servers that hold locks.
    async fn nodes(&self) -> RedisResult<Vec<Arc<RedisNode>>>;

    /// Updates the routing after an error of `node`, and returns whether the command can be
    /// retried.
    async fn on_error(&self, node: &Arc<RedisNode>, error: &RedisError) -> ErrorAction;

    /// Returns the address of `node`, for messages.
    fn address(&self, node: &RedisNode) -> String {
        node.name().to_owned()
    }
}

/// Whether a command can be retried after an error.
pub(crate) enum ErrorAction {
    Fail,
    /// Send the same command to the same node again, after `ASKING` if it was sent after `ASKING`.
    Retry,
    /// Send the command to `node`. `is_asking`: the slot is migrating to `node`.
    Redirect {
        node: Arc<RedisNode>,
        is_asking: bool,
    },
}

/// The event that completes the run of a script.
#[derive(Clone, Copy)]
enum Completion {
    /// The server has executed the script.
    Executed,
    /// The script's writes also have the configured durability, or the time limit for it is over.
    Durable,
}

/// The connections of one [`RedisBackend`](crate::RedisBackend), or of one master of a quorum.
pub(crate) struct RedisConnections {
    topology: Box<dyn Topology>,
}

impl RedisConnections {
    /// Creates the topology. Its background tasks may connect to sentinels or cluster members at
    /// once. [`connect`](Self::connect) opens the other connections.
    pub(crate) async fn new(
        config: &RedisConfig,
        channel_scheme: ChannelScheme,
        invalidations: &InvalidationForwarder,
    ) -> Result<Self, BackendError> {
        let topology: Box<dyn Topology> = match &config.servers {
            ServerAddresses::Single(address) => {
                let connector =
                    connector(config, address).map_err(|error| invalid_client_config(&error))?;
                let node = RedisNode::new(
                    address.to_string(),
                    connector,
                    config,
                    channel_scheme,
                    invalidations,
                );
                Box::new(SingleTopology(Arc::new(node)))
            }
            ServerAddresses::Sentinel { sentinels, service } => {
                let topology = sentinel::SentinelTopology::new(
                    config,
                    sentinels,
                    service,
                    channel_scheme,
                    invalidations,
                );
                Box::new(topology.map_err(|error| invalid_client_config(&error))?)
            }
            ServerAddresses::Cluster(members) => Box::new(cluster::ClusterTopology::new(
                config,
                members,
                channel_scheme,
                invalidations,
            )),
            ServerAddresses::Quorum(_) => {
                unreachable!("a quorum has separate connections to each master")
            }
        };
        Ok(Self { topology })
    }

    /// Creates the connections to one quorum master, which may be down.
    pub(crate) fn for_quorum_master(
        address: &ServerAddress,
        config: &RedisConfig,
        channel_scheme: ChannelScheme,
        invalidations: &InvalidationForwarder,
    ) -> Result<Self, BackendError> {
        let connector =
            connector(config, address).map_err(|error| invalid_client_config(&error))?;
        let node =
            RedisNode::new(address.to_string(), connector, config, channel_scheme, invalidations);
        Ok(Self { topology: Box::new(SingleTopology(Arc::new(node))) })
    }

    /// Connects to all servers, so that the caller receives configuration errors before the first
    /// lock.
    pub(crate) async fn connect(&self) -> Result<(), BackendError> {
        for node in self.nodes().await? {
            let refused = |error: RedisError| self.classify(&error, &node).as_refused();
            node.connect().await.map_err(refused)?;
            // Without this check, each grant would be released again if a server does not support
            // the required durability.
            node.check_durability().await.map_err(|error| {
                if error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError) {
                    unsupported_durability(&error).with_address(self.topology.address(&node))
                } else {
                    refused(error)
                }
            })?;
        }
        Ok(())
    }

    /// Runs a script on the server of `slot`.
    pub(crate) async fn run(
        &self,
        slot: u16,
        call: &ScriptCall<'_>,
    ) -> Result<Value, BackendError> {
        Ok(self.run_with_redirects(slot, call, Completion::Executed).await?.response)
    }

    /// Runs a script on the server of `slot`. Waits until the script's writes have the configured
    /// durability, or the time limit for it is over.
    pub(crate) async fn run_durably(
        &self,
        slot: u16,
        call: &ScriptCall<'_>,
    ) -> Result<DurableResponse, BackendError> {
        self.run_with_redirects(slot, call, Completion::Durable).await
    }

    async fn run_with_redirects(
        &self,
        slot: u16,
        call: &ScriptCall<'_>,
        completion: Completion,
    ) -> Result<DurableResponse, BackendError> {
        let mut node = match self.topology.known_node(slot) {
            Some(node) => node,
            None => {
                let resolved = self.topology.resolve_node(slot).await;
                resolved.map_err(|error| to_backend_error(&error).as_refused())?
            }
        };
        let mut is_asking = false;
        for _ in 0..REDIRECTIONS_MAX {
            let response = match completion {
                // The box makes the future smaller for calls without durability.
                Completion::Durable => Box::pin(node.run_durably(call, is_asking)).await,
                Completion::Executed => node
                    .run(call, is_asking)
                    .await
                    .map(|response| DurableResponse { response, shortfall: None }),
            };
            let error = match response {
                Ok(response) => return Ok(response),
                Err(error) => error_of_script_command(error),
            };
            match self.topology.on_error(&node, &error).await {
                ErrorAction::Fail => return Err(self.classify(&error, &node)),
                ErrorAction::Retry => {}
                ErrorAction::Redirect { node: next_node, is_asking: must_ask } => {
                    (node, is_asking) = (next_node, must_ask);
                }
            }
        }
        Err(BackendError::transient(format!(
            "redis: the limit of {REDIRECTIONS_MAX} redirections per command is reached; check that the cluster's nodes agree on its slots"
        ))
        .with_address(self.topology.address(&node))
        .as_refused())
    }

    /// Returns the server of `slot` if it is known. Performs no I/O.
    pub(crate) fn known_node(&self, slot: u16) -> Option<Arc<RedisNode>> {
        self.topology.known_node(slot)
    }

    /// Returns all servers that hold locks.
    pub(crate) async fn nodes(&self) -> Result<Vec<Arc<RedisNode>>, BackendError> {
        self.topology.nodes().await.map_err(|error| to_backend_error(&error).as_refused())
    }

    /// Sends a command to one server.
    pub(crate) async fn send_command(
        &self,
        node: &Arc<RedisNode>,
        command: &Cmd,
    ) -> Result<Value, BackendError> {
        match node.send_command(command).await {
            Ok(response) => Ok(response),
            Err(error) => {
                // The topology updates its routing for the next command.
                let _: ErrorAction = self.topology.on_error(node, &error).await;
                Err(self.classify(&error, node))
            }
        }
    }

    /// Classifies an error of `node` and adds its address.
    fn classify(&self, error: &RedisError, node: &RedisNode) -> BackendError {
        to_backend_error(error).with_address(self.topology.address(node))
    }

    /// Closes the subscriber connections. The command connections close when they are dropped.
    pub(crate) async fn close(&self) {
        for node in self.topology.nodes().await.unwrap_or_default() {
            node.listener.close();
        }
    }
}

impl fmt::Debug for RedisConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisConnections").field(&self.topology).finish()
    }
}

/// A single server that has all slots.
#[derive(Debug)]
struct SingleTopology(Arc<RedisNode>);

#[async_trait]
impl Topology for SingleTopology {
    async fn resolve_node(&self, _slot: u16) -> RedisResult<Arc<RedisNode>> {
        Ok(Arc::clone(&self.0))
    }

    fn known_node(&self, _slot: u16) -> Option<Arc<RedisNode>> {
        Some(Arc::clone(&self.0))
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<RedisNode>>> {
        Ok(vec![Arc::clone(&self.0)])
    }

    async fn on_error(&self, node: &Arc<RedisNode>, error: &RedisError) -> ErrorAction {
        let demotion_errors = [ServerErrorKind::ReadOnly, ServerErrorKind::MasterDown];
        if demotion_errors.iter().any(|kind| error.kind() == ErrorKind::Server(*kind)) {
            // The host name may resolve to another server after a failover.
            node.reset_connections_throttled();
        }
        ErrorAction::Fail
    }
}

/// Returns the addresses of all configured servers, for messages.
pub(crate) fn all_addresses(servers: &ServerAddresses) -> String {
    match servers {
        ServerAddresses::Single(address) => address.to_string(),
        ServerAddresses::Sentinel { sentinels: all, .. }
        | ServerAddresses::Cluster(all)
        | ServerAddresses::Quorum(all) => join_addresses(all),
    }
}

fn join_addresses(all: &[ServerAddress]) -> String {
    all.iter().map(ServerAddress::to_string).collect::<Vec<_>>().join(",")
}

/// Returns a function that connects to one server.
fn connector(config: &RedisConfig, address: &ServerAddress) -> RedisResult<Connector> {
    let client = config.connection.server_client(address)?;
    let (connect_timeout, response_timeout) = (config.connect_timeout, config.response_timeout);
    Ok(Arc::new(move |on_push| {
        let client = client.clone();
        Box::pin(async move {
            open_connection(&client, connect_timeout, response_timeout, on_push).await
        })
    }))
}

async fn open_connection(
    client: &redis::Client,
    connect_timeout: Duration,
    response_timeout: Duration,
    on_push: PushHandler,
) -> RedisResult<MultiplexedConnection> {
    let settings = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect_timeout))
        .set_response_timeout(Some(response_timeout))
        .set_push_sender(move |push| {
            on_push(push);
            Ok::<(), std::convert::Infallible>(())
        });
    let connecting = client.get_multiplexed_async_connection_with_config(&settings).await;
    connecting.map_err(|error| redact_credentials(client, error))
}

/// Replaces an error that contains credentials. A server that does not support HELLO repeats the
/// arguments of HELLO, including the password.
fn redact_credentials(client: &redis::Client, error: RedisError) -> RedisError {
    let text = error.to_string();
    let settings = client.get_connection_info().redis_settings();
    // I/O errors repeat no arguments. The check ignores unquoted text, because a short password
    // occurs in many texts.
    let is_quoted = |secret: &str| {
        let quotes = ["'", "`", "\""];
        quotes.iter().any(|quote| text.contains(&format!("{quote}{secret}{quote}")))
    };
    let repeats_login = ["AUTH'", "AUTH`", "AUTH\""].iter().any(|part| text.contains(part));
    if text.contains("unknown command") && text.contains("HELLO") {
        return (ErrorKind::RESP3NotSupported, "the server does not support HELLO").into();
    }
    if error.kind() != ErrorKind::Io
        && (settings.password().is_some_and(is_quoted) || repeats_login)
    {
        return (ErrorKind::AuthenticationFailed, "the server refused to set up the connection")
            .into();
    }
    error
}

/// The maximum number of `MOVED`, `ASK` and `TRYAGAIN` responses per command. A command receives
/// more than one of them if a slot migrates or the slot maps of the servers differ.
const REDIRECTIONS_MAX: usize = 8;
