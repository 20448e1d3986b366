//! Routes commands to the server that has a slot and follows the slot to other servers. Transports
//! scripts and does not interpret locks. Called by `Store` and `FencedWrites`.

mod cluster;
mod node;
mod sentinel;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use registry_core::BackendError;

use crate::config::{Address, RedisConfig, Servers};
use crate::ears::Hearing;
use crate::error::{explain, unusable};
use crate::rumours::Rumours;
use crate::script::Call;

pub(crate) use node::{Dial, Durable, Node, Pushes};

/// How the servers share the slots.
#[async_trait]
pub(crate) trait Topology: fmt::Debug + Send + Sync {
    /// Returns the server that has `slot`. Queries the servers if it is unknown.
    async fn node(&self, slot: u16) -> RedisResult<Arc<Node>>;

    /// Returns the server that has `slot`, without I/O.
    fn known(&self, slot: u16) -> Option<Arc<Node>>;

    /// Returns all servers that hold locks.
    async fn nodes(&self) -> RedisResult<Vec<Arc<Node>>>;

    /// Updates the routing after an error of `node` and returns the next step.
    async fn heed(&self, node: &Arc<Node>, error: &RedisError) -> Next;
}

/// The next step after an error.
pub(crate) enum Next {
    GiveUp,
    /// Try this server. `asking`: the slot is still migrating to it.
    Ask {
        node: Arc<Node>,
        asking: bool,
    },
}

/// The connections of one [`RedisBackend`](crate::RedisBackend), or of one master of its quorum.
pub(crate) struct Link {
    topology: Box<dyn Topology>,
}

impl Link {
    /// Creates the link. `Link::connect` opens the connections.
    pub(crate) async fn open(
        config: &RedisConfig,
        hearing: Hearing,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let topology: Box<dyn Topology> = match &config.servers {
            Servers::Single(address) => {
                let dial = dialler(config, address).map_err(|error| unusable(&error))?;
                let node = Node::new(address.to_string(), dial, config, hearing, rumours);
                Box::new(Single(Arc::new(node)))
            }
            Servers::Sentinel { sentinels, service } => {
                let follower =
                    sentinel::Follower::new(config, sentinels, service, hearing, rumours);
                Box::new(follower.map_err(|error| unusable(&error))?)
            }
            Servers::Cluster(members) => {
                Box::new(cluster::Cluster::new(config, members, hearing, rumours))
            }
            Servers::Quorum(_) => unreachable!("a quorum has a link to each master"),
        };
        Ok(Self { topology })
    }

    /// Creates the link to one quorum master, which may be down.
    pub(crate) fn to(
        address: &Address,
        config: &RedisConfig,
        hearing: Hearing,
        rumours: &Rumours,
    ) -> Result<Self, BackendError> {
        let dial = dialler(config, address).map_err(|error| unusable(&error))?;
        let node = Node::new(address.to_string(), dial, config, hearing, rumours);
        Ok(Self { topology: Box::new(Single(Arc::new(node))) })
    }

    /// Connects to all servers, so that configuration errors surface early.
    pub(crate) async fn connect(&self) -> Result<(), BackendError> {
        let refused = |error: RedisError| explain(&error).as_refused();
        for node in self.topology.nodes().await.map_err(refused)? {
            node.connect().await.map_err(refused)?;
            // A server that does not support the required durability would refuse every grant.
            node.try_durability().await.map_err(|error| {
                if error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError) {
                    unusable(&error)
                } else {
                    refused(error)
                }
            })?;
        }
        Ok(())
    }

    /// Runs a script on the server that has `slot`.
    pub(crate) async fn run(&self, slot: u16, call: &Call<'_>) -> Result<Value, BackendError> {
        Ok(self.follow(slot, call, false).await?.answer)
    }

    /// Runs a script on the server that has `slot`, and waits until its writes have the configured
    /// durability.
    pub(crate) async fn run_durably(
        &self,
        slot: u16,
        call: &Call<'_>,
    ) -> Result<Durable, BackendError> {
        self.follow(slot, call, true).await
    }

    async fn follow(
        &self,
        slot: u16,
        call: &Call<'_>,
        durably: bool,
    ) -> Result<Durable, BackendError> {
        let mut node = match self.topology.known(slot) {
            Some(node) => node,
            None => {
                let found = self.topology.node(slot).await;
                found.map_err(|error| explain(&error).as_refused())?
            }
        };
        let mut asking = false;
        for _ in 0..REDIRECTIONS_MAX {
            let answer = if durably {
                node.run_durably(call, asking).await
            } else {
                node.run(call, asking).await.map(|answer| Durable { answer, missing: None })
            };
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            match self.topology.heed(&node, &error).await {
                Next::GiveUp => return Err(explain(&error)),
                Next::Ask { node: other, asking: on_its_way } => {
                    (node, asking) = (other, on_its_way);
                }
            }
        }
        Err(BackendError::transient("redis: the servers keep sending each other's callers away")
            .as_refused())
    }

    /// Returns the server that has `slot`, without I/O.
    pub(crate) fn known(&self, slot: u16) -> Option<Arc<Node>> {
        self.topology.known(slot)
    }

    /// Returns all servers that hold locks.
    pub(crate) async fn nodes(&self) -> Result<Vec<Arc<Node>>, BackendError> {
        self.topology.nodes().await.map_err(|error| explain(&error).as_refused())
    }

    /// Sends a command to one server.
    pub(crate) async fn ask(&self, node: &Arc<Node>, command: &Cmd) -> Result<Value, BackendError> {
        match node.ask(command).await {
            Ok(answer) => Ok(answer),
            Err(error) => {
                // The next command may need another server.
                let _: Next = self.topology.heed(node, &error).await;
                Err(explain(&error))
            }
        }
    }

    /// Closes the subscriber connections.
    pub(crate) async fn close(&self) {
        for node in self.topology.nodes().await.unwrap_or_default() {
            node.ears.close();
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Link").field(&self.topology).finish()
    }
}

/// A single server that has all slots.
#[derive(Debug)]
struct Single(Arc<Node>);

#[async_trait]
impl Topology for Single {
    async fn node(&self, _slot: u16) -> RedisResult<Arc<Node>> {
        Ok(Arc::clone(&self.0))
    }

    fn known(&self, _slot: u16) -> Option<Arc<Node>> {
        Some(Arc::clone(&self.0))
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<Node>>> {
        Ok(vec![Arc::clone(&self.0)])
    }

    async fn heed(&self, node: &Arc<Node>, error: &RedisError) -> Next {
        let demoted = [ServerErrorKind::ReadOnly, ServerErrorKind::MasterDown];
        if demoted.iter().any(|kind| error.kind() == ErrorKind::Server(*kind)) {
            // Its host name may resolve to another server by now.
            node.renew_seldom();
        }
        Next::GiveUp
    }
}

/// Returns a function that connects to one server.
fn dialler(config: &RedisConfig, address: &Address) -> RedisResult<Dial> {
    let client = config.access.server(address)?;
    let (connect, response) = (config.connect_timeout, config.response_timeout);
    Ok(Arc::new(move |pushes| {
        let client = client.clone();
        Box::pin(async move { dial(&client, connect, response, pushes).await })
    }))
}

async fn dial(
    client: &redis::Client,
    connect: Duration,
    response: Duration,
    pushes: Pushes,
) -> RedisResult<MultiplexedConnection> {
    let settings = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(connect))
        .set_response_timeout(Some(response))
        .set_push_sender(move |push| {
            pushes(push);
            Ok::<(), std::convert::Infallible>(())
        });
    let dialled = client.get_multiplexed_async_connection_with_config(&settings).await;
    dialled.map_err(|error| without_login(client, error))
}

/// Replaces an error that contains credentials: a server that does not know HELLO repeats its
/// arguments, with the password.
fn without_login(client: &redis::Client, error: RedisError) -> RedisError {
    let text = error.to_string();
    let settings = client.get_connection_info().redis_settings();
    // I/O errors repeat no arguments. Only a quoted secret counts, because a short password occurs
    // in many texts.
    let is_shown = |secret: &str| {
        let quotes = ["'", "`", "\""];
        quotes.iter().any(|quote| text.contains(&format!("{quote}{secret}{quote}")))
    };
    let repeats_login = ["AUTH'", "AUTH`", "AUTH\""].iter().any(|part| text.contains(part));
    if text.contains("unknown command") && text.contains("HELLO") {
        return (ErrorKind::RESP3NotSupported, "the server knows no HELLO").into();
    }
    if error.kind() != ErrorKind::Io && (settings.password().is_some_and(is_shown) || repeats_login)
    {
        return (ErrorKind::AuthenticationFailed, "the server refused to set up the connection")
            .into();
    }
    error
}

/// The limit of redirections per command. More than one is rare: a slot that migrates during the
/// call.
const REDIRECTIONS_MAX: usize = 8;
