//! Follows a master through failovers: the sentinels report its address.
//!
//! All sentinels are queried concurrently, and the answer with the newest configuration epoch
//! counts. A sentinel that was cut off from the others may still report an old master. The
//! sentinels are queried after each of their `+switch-master` messages, at regular intervals, and
//! after each error that an old master may cause.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::wire::{Dialled, Wire, is_end};
use super::{Dial, Next, Node, Topology, dialler, without_login};
use crate::config::{Address, RedisConfig};
use crate::ears::Hearing;
use crate::rumours::Rumours;

/// The interval between regular queries.
const LOOK_EACH: Duration = Duration::from_secs(1);
/// The time limit for a sentinel's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// The minimum pause between two rounds of queries.
const PAUSE: Duration = Duration::from_millis(50);

pub(super) struct Follower {
    node: Arc<Node>,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    service: String,
    sentinels: Vec<Sentinel>,
    /// The master that connections lead to, once it is known.
    master: Mutex<Option<Address>>,
    look: Notify,
}

struct Sentinel {
    wire: Wire,
    client: redis::Client,
}

impl Follower {
    pub(super) fn new(
        config: &RedisConfig,
        sentinels: &[Address],
        service: &str,
        hearing: Hearing,
        rumours: &Rumours,
    ) -> RedisResult<Self> {
        let sentinel = |address| {
            let client = config.access.sentinel(address)?;
            let (dialled, connect) = (client.clone(), config.connect_timeout);
            let dial = move |_| -> Dialled {
                let client = dialled.clone();
                let settings = redis::AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(connect))
                    .set_response_timeout(Some(ANSWER_LIMIT));
                Box::pin(async move {
                    let dialled = client.get_multiplexed_async_connection_with_config(&settings);
                    dialled.await.map_err(|error| without_login(&client, error))
                })
            };
            let wire = Wire::new(dial, || {}, ANSWER_LIMIT);
            Ok(Sentinel { wire, client })
        };
        let shared = Arc::new(Shared {
            service: service.to_owned(),
            sentinels: sentinels.iter().map(sentinel).collect::<RedisResult<_>>()?,
            master: Mutex::default(),
            look: Notify::new(),
        });
        let dial = to_master(config.clone(), Arc::clone(&shared));
        let node =
            Arc::new(Node::new(format!("master of {service}"), dial, config, hearing, rumours));
        let task = tokio::spawn(follow(Arc::clone(&shared), Arc::clone(&node)));
        Ok(Self { node, shared, task })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Topology for Follower {
    async fn node(&self, _slot: u16) -> RedisResult<Arc<Node>> {
        Ok(Arc::clone(&self.node))
    }

    fn known(&self, _slot: u16) -> Option<Arc<Node>> {
        Some(Arc::clone(&self.node))
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<Node>>> {
        Ok(vec![Arc::clone(&self.node)])
    }

    async fn heed(&self, _node: &Arc<Node>, error: &RedisError) -> Next {
        let demoted = [
            ErrorKind::Server(ServerErrorKind::ReadOnly),
            ErrorKind::Server(ServerErrorKind::MasterDown),
            ErrorKind::Server(ServerErrorKind::BusyLoading),
        ];
        if is_end(error) || demoted.contains(&error.kind()) || error.code() == Some("UNBLOCKED") {
            if demoted.contains(&error.kind()) {
                // The connection is intact, but its server is no longer the master.
                self.node.renew();
            }
            self.shared.look.notify_one();
        }
        Next::GiveUp
    }
}

impl Shared {
    /// Queries all sentinels for the master's address.
    async fn resolve(&self) -> RedisResult<Address> {
        let question = redis::cmd("SENTINEL").arg("MASTER").arg(&self.service).to_owned();
        let answers = join_all(self.sentinels.iter().map(async |sentinel| {
            let asked = timeout(ANSWER_LIMIT, sentinel.wire.send(&question)).await;
            let timed_out = || Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            read_master(&asked.unwrap_or_else(|_| timed_out())?)
        }))
        .await;
        let mut newest: Option<(u64, Address)> = None;
        let mut trouble = None;
        for answer in answers {
            match answer {
                Ok((epoch, address))
                    if newest.as_ref().is_none_or(|(newest, _)| epoch > *newest) =>
                {
                    newest = Some((epoch, address));
                }
                Ok(_) => {}
                // The answer of a sentinel explains more than the failure to reach another one.
                Err(error) if is_end(&error) => _ = trouble.get_or_insert(error),
                Err(error) => trouble = Some(told_by_sentinel(error)),
            }
        }
        let no_sentinel = || (ErrorKind::Client, "there are no sentinels").into();
        newest.map(|(_, address)| address).ok_or_else(|| trouble.unwrap_or_else(no_sentinel))
    }

    /// Records the master and returns whether it replaces another one.
    fn note(&self, address: &Address) -> bool {
        let mut master = self.master();
        let other = master.as_ref().is_some_and(|master| master != address);
        *master = Some(address.clone());
        other
    }

    fn master(&self) -> std::sync::MutexGuard<'_, Option<Address>> {
        self.master.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Translates an error that a sentinel returned.
fn told_by_sentinel(error: RedisError) -> RedisError {
    let text = error.to_string();
    let says = if text.contains("No such master") {
        "the sentinels know no service of this name"
    } else if text.contains("unknown command") {
        "what is named as a sentinel is none"
    } else if matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
        || error.kind() == ErrorKind::AuthenticationFailed
    {
        return (ErrorKind::AuthenticationFailed, "a sentinel wants its own password").into();
    } else {
        return error;
    };
    (ErrorKind::InvalidClientConfig, says).into()
}

fn read_master(answer: &Value) -> RedisResult<(u64, Address)> {
    let fields: std::collections::HashMap<String, String> = redis::from_redis_value_ref(answer)?;
    let field = |name: &str| fields.get(name).filter(|value| !value.is_empty());
    let unreadable =
        || RedisError::from((ErrorKind::UnexpectedReturnType, "not a sentinel's answer"));
    let host = field("ip").ok_or_else(unreadable)?.clone();
    let port = field("port").and_then(|port| port.parse().ok()).ok_or_else(unreadable)?;
    let epoch = field("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    Ok((epoch, Address::Tcp { host, port }))
}

/// Returns a function that connects to the current master and verifies its role.
fn to_master(config: RedisConfig, shared: Arc<Shared>) -> Dial {
    let config = Arc::new(config);
    Arc::new(move |pushes| {
        let (config, shared) = (Arc::clone(&config), Arc::clone(&shared));
        Box::pin(async move {
            let address = shared.resolve().await?;
            // Only `look` records a change of master, because it must also replace the other
            // connections.
            shared.master().get_or_insert_with(|| address.clone());
            let mut connection = dialler(&config, &address)?(pushes).await?;
            let role =
                connection.send_packed_command(&redis::cmd("ROLE")).await?.extract_error()?;
            let is_master = matches!(
                &role,
                Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master")
            );
            if is_master {
                return Ok(connection);
            }
            // A failover is in progress.
            shared.look.notify_one();
            Err((ErrorKind::Server(ServerErrorKind::ReadOnly), "the server is not the master")
                .into())
        })
    })
}

/// Checks for a new master until aborted.
async fn follow(shared: Arc<Shared>, node: Arc<Node>) {
    let mut sentinel = 0;
    loop {
        let messages = match shared.sentinels.get(sentinel) {
            Some(sentinel) => listen(&sentinel.client).await,
            None => return,
        };
        match messages {
            Some(messages) => {
                let mut messages = messages.into_on_message();
                loop {
                    look(&shared, &node).await;
                    sleep(PAUSE).await;
                    let spoken = tokio::select! {
                        message = messages.next() => message.is_some(),
                        () = shared.look.notified() => true,
                        () = sleep(LOOK_EACH) => true,
                    };
                    if !spoken {
                        break;
                    }
                }
            }
            None => {
                look(&shared, &node).await;
                sleep(PAUSE * 5).await;
            }
        }
        // Another sentinel may be reachable.
        sentinel = (sentinel + 1) % shared.sentinels.len();
    }
}

async fn listen(sentinel: &redis::Client) -> Option<redis::aio::PubSub> {
    let listening = async {
        let mut messages = sentinel.get_async_pubsub().await?;
        messages.subscribe("+switch-master").await?;
        RedisResult::Ok(messages)
    };
    timeout(ANSWER_LIMIT, listening).await.ok()?.ok()
}

async fn look(shared: &Shared, node: &Node) {
    if let Ok(address) = shared.resolve().await
        && shared.note(&address)
    {
        node.renew();
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower")
            .field("service", &self.shared.service)
            .field("master", &*self.shared.master())
            .finish_non_exhaustive()
    }
}
