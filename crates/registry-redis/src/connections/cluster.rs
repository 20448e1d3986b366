//! Maintains the slot map of a cluster. Follows `MOVED` and `ASK` redirections at once. Refreshes
//! the slot map after errors and at regular intervals.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::command_connection::is_connection_error;
use super::{ErrorAction, RedisNode, Topology, connector};
use crate::config::{RedisConfig, ServerAddress};
use crate::invalidations::InvalidationForwarder;
use crate::listener::ChannelScheme;
use crate::slot::SLOT_COUNT;

/// The interval between regular refreshes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(10);
/// The time limit for a server's response until another server has returned its slot map.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time limit for further responses after the first slot map.
const FURTHER_RESPONSES_TIMEOUT: Duration = Duration::from_millis(50);
/// The minimum pause between two refreshes.
const REFRESH_PAUSE_MIN: Duration = Duration::from_millis(100);
/// The pause before a retry in a slot that is migrating.
const MIGRATION_RETRY_DELAY: Duration = Duration::from_millis(20);

pub(super) struct ClusterTopology {
    state: Arc<ClusterState>,
    task: JoinHandle<()>,
}

struct ClusterState {
    config: RedisConfig,
    seeds: Vec<ServerAddress>,
    channel_scheme: ChannelScheme,
    invalidations: InvalidationForwarder,
    nodes: Mutex<HashMap<ServerAddress, Arc<RedisNode>>>,
    /// The master of each slot, by slot number.
    owners: RwLock<Vec<Option<Arc<RedisNode>>>>,
    /// `MOVED` has changed the master of a slot since the last refresh.
    has_moved: AtomicBool,
    /// An error of the last refresh, if any.
    last_error: Mutex<Option<RedisError>>,
    refresh_requested: Notify,
    /// The number of completed refreshes.
    refresh_count: watch::Sender<u64>,
}

impl ClusterTopology {
    pub(super) fn new(
        config: &RedisConfig,
        seeds: &[ServerAddress],
        channel_scheme: ChannelScheme,
        invalidations: &InvalidationForwarder,
    ) -> Self {
        let state = Arc::new(ClusterState {
            config: config.clone(),
            seeds: seeds.to_vec(),
            channel_scheme,
            invalidations: invalidations.clone(),
            nodes: Mutex::default(),
            owners: RwLock::new(vec![None; SLOT_COUNT]),
            has_moved: AtomicBool::new(false),
            last_error: Mutex::default(),
            refresh_requested: Notify::new(),
            refresh_count: watch::Sender::new(0),
        });
        let task = tokio::spawn(refresh_topology(Arc::clone(&state)));
        Self { state, task }
    }
}

impl Drop for ClusterTopology {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Topology for ClusterTopology {
    async fn resolve_node(&self, slot: u16) -> RedisResult<Arc<RedisNode>> {
        if let Some(node) = self.known_node(slot) {
            return Ok(node);
        }
        // The master of the slot is unknown. A refresh may find it.
        self.state.refresh_now().await;
        self.known_node(slot).ok_or_else(|| {
            let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
            (down, "no server is known for this slot").into()
        })
    }

    fn known_node(&self, slot: u16) -> Option<Arc<RedisNode>> {
        let owners = self.state.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(usize::from(slot)).cloned().flatten()
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<RedisNode>>> {
        let mut nodes = self.state.masters();
        if nodes.is_empty() {
            self.state.refresh_now().await;
            nodes = self.state.masters();
        }
        if nodes.is_empty() {
            let last_error =
                self.state.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
            let no_owner = || (down, "no server is known for any slot").into();
            return Err(last_error.unwrap_or_else(no_owner));
        }
        Ok(nodes)
    }

    async fn on_error(&self, node: &Arc<RedisNode>, error: &RedisError) -> ErrorAction {
        let ErrorKind::Server(kind) = error.kind() else {
            if is_connection_error(error) {
                self.state.refresh_requested.notify_one();
            }
            return ErrorAction::Fail;
        };
        match kind {
            ServerErrorKind::Moved | ServerErrorKind::Ask => {
                let Some((address, slot)) = error.redirect_node() else { return ErrorAction::Fail };
                let is_asking = kind == ServerErrorKind::Ask;
                let target = parse_address(address, node.name());
                let Some(Ok(target)) = target.map(|target| self.state.get_or_create_node(&target))
                else {
                    return ErrorAction::Fail;
                };
                if !is_asking {
                    self.state.set_moved_owner(slot, &target);
                    self.state.refresh_requested.notify_one();
                }
                ErrorAction::Redirect { node: target, is_asking }
            }
            ServerErrorKind::TryAgain => {
                sleep(MIGRATION_RETRY_DELAY).await;
                ErrorAction::Retry
            }
            ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::BusyLoading => {
                self.state.refresh_requested.notify_one();
                ErrorAction::Fail
            }
            _ => ErrorAction::Fail,
        }
    }
}

impl ClusterState {
    /// Returns the server at `address`. Creates its `RedisNode` if necessary.
    fn get_or_create_node(&self, address: &ServerAddress) -> RedisResult<Arc<RedisNode>> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = nodes.get(address) {
            return Ok(Arc::clone(node));
        }
        let connector = connector(&self.config, address)?;
        let name = address.to_string();
        let node = RedisNode::new(
            name,
            connector,
            &self.config,
            self.channel_scheme.clone(),
            &self.invalidations,
        );
        let node = Arc::new(node);
        nodes.insert(address.clone(), Arc::clone(&node));
        Ok(node)
    }

    fn masters(&self) -> Vec<Arc<RedisNode>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        let mut masters: Vec<Arc<RedisNode>> = Vec::new();
        for owner in owners.iter().flatten() {
            // Adjacent slots usually have the same owner.
            let seen = |master: &Arc<RedisNode>| Arc::ptr_eq(master, owner);
            if !masters.last().is_some_and(seen) && !masters.iter().any(seen) {
                masters.push(Arc::clone(owner));
            }
        }
        masters
    }

    /// Sets the master of a slot for which another server has responded `MOVED`.
    fn set_moved_owner(&self, slot: u16, node: &Arc<RedisNode>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(owner) = owners.get_mut(usize::from(slot)) {
            *owner = Some(Arc::clone(node));
            // The next refresh compares its slot map with the updated map and finds no difference.
            // This flag makes it notify the registries.
            self.has_moved.store(true, Ordering::Release);
        }
    }

    /// Requests a refresh and waits until a refresh completes, up to a time limit. If none
    /// completes in time, repeats this once.
    async fn refresh_now(&self) {
        let mut refresh_count = self.refresh_count.subscribe();
        let count_before = *refresh_count.borrow();
        for _ in 0..2 {
            self.refresh_requested.notify_one();
            let limit = (RESPONSE_TIMEOUT + REFRESH_PAUSE_MIN) * 3;
            let refreshed = timeout(limit, refresh_count.wait_for(|count| *count > count_before));
            if refreshed.await.is_ok() {
                return;
            }
        }
    }

    /// Queries all known masters and all seeds for their slot maps. Applies the map with the
    /// highest precedence.
    async fn refresh_slot_map(&self) {
        let mut queried: Vec<Arc<RedisNode>> = self.masters();
        for seed in &self.seeds {
            if let Ok(node) = self.get_or_create_node(seed)
                && !queried.iter().any(|queried| Arc::ptr_eq(queried, &node))
            {
                queried.push(node);
            }
        }
        // The queries run concurrently, so that a dead server does not delay the refresh.
        let mut slot_maps: FuturesUnordered<_> =
            queried.iter().map(async |node| query_slot_map(node).await).collect();
        let mut best: Option<SlotMap> = None;
        let mut last_error = None;
        let mut deadline = std::pin::pin!(sleep(RESPONSE_TIMEOUT));
        loop {
            let response = tokio::select! {
                response = slot_maps.next() => response,
                () = &mut deadline => None,
            };
            match response {
                Some(Ok(slot_map)) => {
                    if best.is_none() {
                        // A server that is partitioned from the cluster may respond first, with an
                        // outdated map.
                        deadline
                            .as_mut()
                            .reset(tokio::time::Instant::now() + FURTHER_RESPONSES_TIMEOUT);
                    }
                    if best.as_ref().is_none_or(|best| slot_map.precedence > best.precedence) {
                        best = Some(slot_map);
                    }
                }
                Some(Err(error)) => last_error = Some(error),
                None => break,
            }
        }
        drop(slot_maps);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = last_error;
        if let Some(slot_map) = best {
            self.apply_slot_map(slot_map.ranges);
        }
    }

    fn apply_slot_map(&self, ranges: Vec<SlotRange>) {
        let mut new_owners = vec![None; SLOT_COUNT];
        for SlotRange { first, last, master } in ranges {
            let Ok(node) = self.get_or_create_node(&master) else { continue };
            if let Some(slots) = new_owners.get_mut(usize::from(first)..=usize::from(last)) {
                slots.fill(Some(node));
            }
        }
        let (old_owners, has_moved) = {
            let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
            let has_moved = owners.iter().zip(&new_owners).any(|(old, new)| match (old, new) {
                (Some(old), Some(new)) => !Arc::ptr_eq(old, new),
                _ => false,
            });
            (std::mem::replace(&mut *owners, new_owners), has_moved)
        };
        if self.has_moved.swap(false, Ordering::AcqRel) || has_moved {
            // The new master may have lost some locks. It sends no invalidations for the remaining
            // locks until their next renewal enables tracking.
            self.invalidations.subscribers().notify_all();
        }
        drop(old_owners);
        // A server without slots has no locks, so the client drops its connections. The configured
        // seeds stay, because each refresh queries them.
        let masters = self.masters();
        let seeds = &self.seeds;
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).retain(|address, node| {
            seeds.contains(address) || masters.iter().any(|master| Arc::ptr_eq(master, node))
        });
    }
}

/// Refreshes the slot map on request and at regular intervals, until aborted.
async fn refresh_topology(state: Arc<ClusterState>) {
    loop {
        state.refresh_slot_map().await;
        state.refresh_count.send_modify(|refresh_count| *refresh_count += 1);
        sleep(REFRESH_PAUSE_MIN).await;
        tokio::select! {
            () = state.refresh_requested.notified() => {}
            () = sleep(REFRESH_INTERVAL) => {}
        }
    }
}

/// One server's view of the cluster.
struct SlotMap {
    /// Whether the server reports a healthy cluster, and the server's `cluster_current_epoch`. The
    /// map of a healthy cluster precedes the map of an unhealthy cluster. Otherwise, the larger
    /// epoch decides.
    precedence: (bool, u64),
    ranges: Vec<SlotRange>,
}

async fn query_slot_map(node: &RedisNode) -> RedisResult<SlotMap> {
    let query = async |subcommand: &str| {
        let command = redis::cmd("CLUSTER").arg(subcommand).to_owned();
        let queried = timeout(RESPONSE_TIMEOUT, node.send_command(&command)).await;
        let timed_out = |_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
        queried.unwrap_or_else(timed_out)
    };
    let (slots, info) = tokio::join!(query("SLOTS"), query("INFO"));
    let slots = slots.map_err(|error| {
        if error.to_string().contains("cluster support disabled") {
            (ErrorKind::InvalidClientConfig, "the server is not part of a cluster").into()
        } else {
            error
        }
    })?;
    let info: String = redis::from_redis_value(info?)?;
    let value = |name: &str| info.lines().find_map(|line| line.trim().strip_prefix(name));
    let is_healthy = value("cluster_state:") == Some("ok");
    let epoch = value("cluster_current_epoch:").and_then(|epoch| epoch.parse().ok());
    let ranges = parse_slots(&slots, node.name()).unwrap_or_default();
    if ranges.is_empty() {
        let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
        return Err((down, "the server reports no slots").into());
    }
    Ok(SlotMap { precedence: (is_healthy, epoch.unwrap_or(0)), ranges })
}

/// A range of slots and its master.
struct SlotRange {
    first: u16,
    last: u16,
    master: ServerAddress,
}

/// Parses the response to `CLUSTER SLOTS`. `queried` is the address of the queried server.
fn parse_slots(response: &Value, queried: &str) -> Option<Vec<SlotRange>> {
    let Value::Array(ranges) = response else { return None };
    ranges.iter().map(|range| parse_range(range, queried)).collect()
}

fn parse_range(range: &Value, queried: &str) -> Option<SlotRange> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &parts[..] else {
        return None;
    };
    let [host, Value::Int(port), ..] = &master[..] else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::Nil => "",
        _ => return None,
    };
    let master = parse_address(&format!("{host}:{port}"), queried)?;
    Some(SlotRange { first: u16::try_from(*first).ok()?, last: u16::try_from(*last).ok()?, master })
}

/// Parses `HOST:PORT`. A server that does not know its own host name omits the host or sends `?`.
/// The host of `queried` then replaces the missing host.
fn parse_address(text: &str, queried: &str) -> Option<ServerAddress> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host {
        "" | "?" => queried.rsplit_once(':')?.0,
        host => host,
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some(ServerAddress::Tcp { host: host.to_owned(), port: port.parse().ok()? })
}

impl fmt::Debug for ClusterTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.state.masters()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_in_the_format_of_the_servers() {
        for (text, address) in [
            ("10.0.0.1:6380", "10.0.0.1:6380"),
            ("::1:6380", "[::1]:6380"),
            (":6380", "queried:6380"),
            ("?:6380", "queried:6380"),
            ("host.example:1", "host.example:1"),
        ] {
            assert_eq!(parse_address(text, "queried:6379").unwrap().to_string(), address, "{text}");
        }
        assert_eq!(parse_address("nonsense", "queried:6379"), None);
    }
}
