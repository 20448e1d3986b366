//! Follows a master through failovers. The sentinels report the master's address.
//!
//! A refresh queries all sentinels concurrently and uses the response with the newest configuration
//! epoch. A sentinel that is partitioned from the other sentinels may still report an old master.
//! The client therefore ignores a smaller epoch than that of an earlier response, unless a majority
//! of the sentinels reports it. The client receives the `+switch-master` messages of one sentinel.
//! A refresh follows each of these messages and each error that an old master may cause. Refreshes
//! also run at regular intervals.

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

use super::command_connection::{CommandConnection, ConnectFuture, is_connection_error, timed_out};
use super::{
    Connector, ErrorAction, RedisNode, Topology, connector, join_addresses, redact_credentials,
};
use crate::config::{RedisConfig, ServerAddress};
use crate::invalidations::InvalidationForwarder;
use crate::listener::ChannelScheme;

/// The interval between regular refreshes while a sentinel sends failover messages. Without such a
/// sentinel, a refresh follows each failed subscription.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit for a sentinel's response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// The minimum pause between two refreshes.
const REFRESH_PAUSE_MIN: Duration = Duration::from_millis(50);

pub(super) struct SentinelTopology {
    node: Arc<RedisNode>,
    state: Arc<SentinelState>,
    task: JoinHandle<()>,
}

struct SentinelState {
    service: String,
    sentinels: Vec<Sentinel>,
    /// The addresses of the sentinels, for messages.
    addresses: String,
    /// The current master, once it is known.
    master: Mutex<Option<ServerAddress>>,
    /// The report with the largest epoch so far. `master` follows it at the next refresh.
    newest: Mutex<Option<MasterReport>>,
    refresh_requested: Notify,
}

/// A sentinel's response.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MasterReport {
    /// The epoch of the sentinel's configuration. Each failover increases it.
    epoch: u64,
    address: ServerAddress,
}

struct Sentinel {
    connection: CommandConnection,
    client: redis::Client,
}

impl SentinelTopology {
    pub(super) fn new(
        config: &RedisConfig,
        sentinels: &[ServerAddress],
        service: &str,
        channel_scheme: ChannelScheme,
        invalidations: &InvalidationForwarder,
    ) -> RedisResult<Self> {
        let sentinel = |address| {
            let client = config.connection.sentinel_client(address)?;
            let (connect_client, connect_timeout) = (client.clone(), config.connect_timeout);
            let connect = move |_| -> ConnectFuture {
                let client = connect_client.clone();
                let settings = redis::AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(connect_timeout))
                    .set_response_timeout(Some(RESPONSE_TIMEOUT));
                Box::pin(async move {
                    let connecting = client.get_multiplexed_async_connection_with_config(&settings);
                    connecting.await.map_err(|error| redact_credentials(&client, error))
                })
            };
            let connection = CommandConnection::new(connect, || {}, RESPONSE_TIMEOUT);
            Ok(Sentinel { connection, client })
        };
        let state = Arc::new(SentinelState {
            service: service.to_owned(),
            sentinels: sentinels.iter().map(sentinel).collect::<RedisResult<_>>()?,
            addresses: join_addresses(sentinels),
            master: Mutex::default(),
            newest: Mutex::default(),
            refresh_requested: Notify::new(),
        });
        let connector = master_connector(config.clone(), Arc::clone(&state));
        let node = Arc::new(RedisNode::new(
            format!("master of {service}"),
            connector,
            config,
            channel_scheme,
            invalidations,
        ));
        let task = tokio::spawn(follow_master(Arc::clone(&state), Arc::clone(&node)));
        Ok(Self { node, state, task })
    }
}

impl Drop for SentinelTopology {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Topology for SentinelTopology {
    async fn resolve_node(&self, _slot: u16) -> RedisResult<Arc<RedisNode>> {
        Ok(Arc::clone(&self.node))
    }

    fn known_node(&self, _slot: u16) -> Option<Arc<RedisNode>> {
        Some(Arc::clone(&self.node))
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<RedisNode>>> {
        Ok(vec![Arc::clone(&self.node)])
    }

    async fn on_error(&self, _node: &Arc<RedisNode>, error: &RedisError) -> ErrorAction {
        let demotion_errors = [
            ErrorKind::Server(ServerErrorKind::ReadOnly),
            ErrorKind::Server(ServerErrorKind::MasterDown),
            ErrorKind::Server(ServerErrorKind::BusyLoading),
        ];
        if is_connection_error(error)
            || demotion_errors.contains(&error.kind())
            || error.code() == Some("UNBLOCKED")
        {
            if demotion_errors.contains(&error.kind()) {
                // The connection is intact, but its server is not the master or still loads its
                // data.
                self.node.reset_connections();
            }
            self.state.refresh_requested.notify_one();
        }
        ErrorAction::Fail
    }

    /// Returns the address of the master. If the master is unknown, returns the addresses of the
    /// sentinels.
    fn address(&self, _node: &RedisNode) -> String {
        match &*self.state.master() {
            Some(master) => master.to_string(),
            None => self.state.addresses.clone(),
        }
    }
}

impl SentinelState {
    /// Queries all sentinels for the master's address.
    async fn resolve_master(&self) -> RedisResult<ServerAddress> {
        let command = redis::cmd("SENTINEL").arg("MASTER").arg(&self.service).to_owned();
        let responses = join_all(self.sentinels.iter().map(async |sentinel| {
            let response = timeout(RESPONSE_TIMEOUT, sentinel.connection.send(&command)).await;
            parse_master(&response.unwrap_or_else(|_| Err(timed_out()))?)
        }))
        .await;
        let mut reports = Vec::new();
        let mut last_error = None;
        for response in responses {
            match response {
                Ok(report) => reports.push(report),
                // An error response of a sentinel explains more than a failed connection to another
                // sentinel.
                Err(error) if is_connection_error(&error) => _ = last_error.get_or_insert(error),
                Err(error) => last_error = Some(translate_sentinel_error(error)),
            }
        }
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(report) = newest_report(newest.as_ref(), &reports, self.sentinels.len()) else {
            let no_sentinel = || (ErrorKind::Client, "no sentinel is configured").into();
            return Err(last_error.unwrap_or_else(no_sentinel));
        };
        Ok(newest.insert(report).address.clone())
    }

    /// Records the master and returns whether it replaces a different master.
    fn record_master(&self, address: &ServerAddress) -> bool {
        let mut master = self.master();
        let replaces_other = master.as_ref().is_some_and(|master| master != address);
        *master = Some(address.clone());
        replaces_other
    }

    fn master(&self) -> std::sync::MutexGuard<'_, Option<ServerAddress>> {
        self.master.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the newest of the `reports` of one query and the `known` report, or `None` without a
/// report. `sentinels` is the number of configured sentinels.
fn newest_report(
    known: Option<&MasterReport>,
    reports: &[MasterReport],
    sentinels: usize,
) -> Option<MasterReport> {
    let votes = |report: &&MasterReport| reports.iter().filter(|other| other == report).count();
    let newest_epoch = reports.iter().map(|report| report.epoch).max()?;
    // Of several reports with the largest epoch, the most frequent one counts, and of these the
    // first one.
    let newest = reports.iter().filter(|report| report.epoch == newest_epoch);
    let newest = newest.rev().max_by_key(votes);
    let Some(known) = known.filter(|known| newest_epoch <= known.epoch) else {
        return newest.cloned();
    };
    // Sentinels that were set up anew begin with a small epoch.
    let has_majority = |report: &&MasterReport| votes(report) > sentinels / 2;
    if let Some(agreed) = reports.iter().find(has_majority) {
        return Some(agreed.clone());
    }
    // During a failover, the sentinel that leads it already reports the new epoch, but still the
    // old master.
    let is_confirmed = newest_epoch < known.epoch || reports.contains(known);
    if is_confirmed { Some(known.clone()) } else { newest.cloned() }
}

/// Translates an error that a sentinel returned.
fn translate_sentinel_error(error: RedisError) -> RedisError {
    let text = error.to_string();
    let message = if text.contains("No such master") {
        "the sentinels monitor no service of this name"
    } else if text.contains("unknown command") {
        "the server is not a sentinel"
    } else if matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
        || error.kind() == ErrorKind::AuthenticationFailed
    {
        return (
            ErrorKind::AuthenticationFailed,
            "a sentinel requires its own login, or rejects the given one",
        )
            .into();
    } else {
        return error;
    };
    (ErrorKind::InvalidClientConfig, message).into()
}

fn parse_master(response: &Value) -> RedisResult<MasterReport> {
    let fields: std::collections::HashMap<String, String> = redis::from_redis_value_ref(response)?;
    let field = |name: &str| fields.get(name).filter(|value| !value.is_empty());
    let unexpected_response =
        || RedisError::from((ErrorKind::UnexpectedReturnType, "not a sentinel's response"));
    let host = field("ip").ok_or_else(unexpected_response)?.clone();
    let port = field("port").and_then(|port| port.parse().ok()).ok_or_else(unexpected_response)?;
    let epoch = field("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    Ok(MasterReport { epoch, address: ServerAddress::Tcp { host, port } })
}

/// Returns a function that connects to the current master and verifies its role.
fn master_connector(config: RedisConfig, state: Arc<SentinelState>) -> Connector {
    let config = Arc::new(config);
    Arc::new(move |on_push| {
        let (config, state) = (Arc::clone(&config), Arc::clone(&state));
        Box::pin(async move {
            let address = state.resolve_master().await?;
            // Only `refresh_master` records a change of the master, because it also replaces all
            // connections.
            state.master().get_or_insert_with(|| address.clone());
            let mut connection = connector(&config, &address)?(on_push).await?;
            let command = redis::cmd("ROLE");
            let role = connection.send_packed_command(&command);
            let role = timeout(config.connect_timeout, role).await;
            let role = role.unwrap_or_else(|_| Err(timed_out()))?.extract_error()?;
            let is_master = matches!(
                &role,
                Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master")
            );
            if is_master {
                return Ok(connection);
            }
            // A failover may be in progress.
            state.refresh_requested.notify_one();
            Err((ErrorKind::Server(ServerErrorKind::ReadOnly), "the server is not the master")
                .into())
        })
    })
}

/// Refreshes the master's address after failover messages, on request, and at regular intervals,
/// until aborted.
async fn follow_master(state: Arc<SentinelState>, node: Arc<RedisNode>) {
    let mut index = 0;
    loop {
        let messages = match state.sentinels.get(index) {
            Some(sentinel) => subscribe_to_failovers(&sentinel.client).await,
            None => return,
        };
        match messages {
            Some(messages) => {
                let mut messages = messages.into_on_message();
                loop {
                    refresh_master(&state, &node).await;
                    sleep(REFRESH_PAUSE_MIN).await;
                    let is_subscribed = tokio::select! {
                        message = messages.next() => message.is_some(),
                        () = state.refresh_requested.notified() => true,
                        () = sleep(REFRESH_INTERVAL) => true,
                    };
                    if !is_subscribed {
                        break;
                    }
                }
            }
            None => {
                refresh_master(&state, &node).await;
                sleep(REFRESH_PAUSE_MIN * 5).await;
            }
        }
        // Another sentinel may be reachable.
        index = (index + 1) % state.sentinels.len();
    }
}

async fn subscribe_to_failovers(sentinel: &redis::Client) -> Option<redis::aio::PubSub> {
    let listening = async {
        let mut messages = sentinel.get_async_pubsub().await?;
        messages.subscribe("+switch-master").await?;
        RedisResult::Ok(messages)
    };
    timeout(RESPONSE_TIMEOUT, listening).await.ok()?.ok()
}

async fn refresh_master(state: &SentinelState, node: &RedisNode) {
    if let Ok(address) = state.resolve_master().await
        && state.record_master(&address)
    {
        node.reset_connections();
    }
}

impl fmt::Debug for SentinelTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SentinelTopology")
            .field("service", &self.state.service)
            .field("master", &*self.state.master())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(epoch: u64, host: &str) -> MasterReport {
        MasterReport { epoch, address: ServerAddress::Tcp { host: host.to_owned(), port: 6379 } }
    }

    #[test]
    fn an_outdated_report_never_replaces_a_newer_master() {
        let (old, new, reset) = (report(4, "old"), report(5, "new"), report(0, "reset"));
        let newest = |known: Option<&MasterReport>, reports: &[&MasterReport]| {
            let reports: Vec<_> = reports.iter().copied().cloned().collect();
            newest_report(known, &reports, 3)
        };
        assert_eq!(newest(None, &[]), None);
        assert_eq!(newest(Some(&new), &[]), None, "no sentinel responds");
        assert_eq!(newest(None, &[&old]), Some(old.clone()));
        assert_eq!(newest(Some(&old), &[&old, &new]), Some(new.clone()));
        assert_eq!(newest(Some(&new), &[&old]), Some(new.clone()));
        assert_eq!(newest(Some(&new), &[&old, &reset]), Some(new.clone()));
        let of_majority = newest(Some(&new), &[&old, &reset, &reset]);
        assert_eq!(of_majority, Some(reset), "the sentinels were set up anew");
        // The sentinel that leads a failover still reports the old master.
        let leader = report(5, "old");
        assert_eq!(newest(None, &[&leader, &new, &new]), Some(new.clone()));
        assert_eq!(newest(Some(&new), &[&leader, &new]), Some(new.clone()));
        assert_eq!(newest(Some(&leader), &[&leader, &new, &new]), Some(new.clone()));
        assert_eq!(newest(Some(&leader), &[&new]), Some(new.clone()), "the leader has followed");
    }
}
