//! Maintains the slot map of a cluster. Applies `MOVED` and `ASK` redirections at once. Queries the
//! servers again after errors and at regular intervals.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::wire::is_end;
use super::{Next, Node, Topology, dialler};
use crate::config::{Address, RedisConfig};
use crate::ears::Hearing;
use crate::rumours::Rumours;
use crate::slot::SLOTS;

/// The interval between regular queries.
const LOOK_EACH: Duration = Duration::from_secs(10);
/// The time limit for a server's answer while no other server has answered.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// How long the other servers are awaited after the first answer.
const OTHERS_LIMIT: Duration = Duration::from_millis(50);
/// The minimum pause between two rounds of queries.
const PAUSE: Duration = Duration::from_millis(100);
/// The pause before a retry in a slot that is migrating.
const MOVING: Duration = Duration::from_millis(20);

pub(super) struct Cluster {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    config: RedisConfig,
    members: Vec<Address>,
    hearing: Hearing,
    rumours: Rumours,
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    /// The owner of each slot.
    owners: RwLock<Vec<Option<Arc<Node>>>>,
    /// An error of the last round of queries.
    trouble: Mutex<Option<RedisError>>,
    look: Notify,
    /// The number of completed rounds of queries.
    looked: watch::Sender<u64>,
}

impl Cluster {
    pub(super) fn new(
        config: &RedisConfig,
        members: &[Address],
        hearing: Hearing,
        rumours: &Rumours,
    ) -> Self {
        let shared = Arc::new(Shared {
            config: config.clone(),
            members: members.to_vec(),
            hearing,
            rumours: rumours.clone(),
            nodes: Mutex::default(),
            owners: RwLock::new(vec![None; SLOTS]),
            trouble: Mutex::default(),
            look: Notify::new(),
            looked: watch::Sender::new(0),
        });
        let task = tokio::spawn(scout(Arc::clone(&shared)));
        Self { shared, task }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[async_trait]
impl Topology for Cluster {
    async fn node(&self, slot: u16) -> RedisResult<Arc<Node>> {
        if let Some(node) = self.known(slot) {
            return Ok(node);
        }
        // No owner is known; the next round of queries may find one.
        self.shared.look_now().await;
        self.known(slot).ok_or_else(|| {
            let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
            (down, "no server is known to have this slot").into()
        })
    }

    fn known(&self, slot: u16) -> Option<Arc<Node>> {
        let owners = self.shared.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(usize::from(slot)).cloned().flatten()
    }

    async fn nodes(&self) -> RedisResult<Vec<Arc<Node>>> {
        let mut nodes = self.shared.masters();
        if nodes.is_empty() {
            self.shared.look_now().await;
            nodes = self.shared.masters();
        }
        if nodes.is_empty() {
            let trouble =
                self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
            let silent = || (down, "no server is known to have any slot").into();
            return Err(trouble.unwrap_or_else(silent));
        }
        Ok(nodes)
    }

    async fn heed(&self, node: &Arc<Node>, error: &RedisError) -> Next {
        let ErrorKind::Server(kind) = error.kind() else {
            if is_end(error) {
                self.shared.look.notify_one();
            }
            return Next::GiveUp;
        };
        match kind {
            ServerErrorKind::Moved | ServerErrorKind::Ask => {
                let Some((address, slot)) = error.redirect_node() else { return Next::GiveUp };
                let asking = kind == ServerErrorKind::Ask;
                let there = read_address(address, node.name());
                let Some(Ok(there)) = there.map(|there| self.shared.server(&there)) else {
                    return Next::GiveUp;
                };
                if !asking {
                    self.shared.moved(slot, &there);
                    self.shared.look.notify_one();
                }
                Next::Ask { node: there, asking }
            }
            ServerErrorKind::TryAgain => {
                sleep(MOVING).await;
                Next::Ask { node: Arc::clone(node), asking: false }
            }
            ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::BusyLoading => {
                self.shared.look.notify_one();
                Next::GiveUp
            }
            _ => Next::GiveUp,
        }
    }
}

impl Shared {
    /// Returns the server at `address`. Creates its `Node` if necessary.
    fn server(&self, address: &Address) -> RedisResult<Arc<Node>> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = nodes.get(address) {
            return Ok(Arc::clone(node));
        }
        let dial = dialler(&self.config, address)?;
        let name = address.to_string();
        let node = Node::new(name, dial, &self.config, self.hearing.clone(), &self.rumours);
        let node = Arc::new(node);
        nodes.insert(address.clone(), Arc::clone(&node));
        Ok(node)
    }

    fn masters(&self) -> Vec<Arc<Node>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for owner in owners.iter().flatten() {
            // Adjacent slots usually have the same owner.
            let seen = |master: &Arc<Node>| Arc::ptr_eq(master, owner);
            if !masters.last().is_some_and(seen) && !masters.iter().any(seen) {
                masters.push(Arc::clone(owner));
            }
        }
        masters
    }

    fn moved(&self, slot: u16, to: &Arc<Node>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(owner) = owners.get_mut(usize::from(slot)) {
            *owner = Some(Arc::clone(to));
        }
    }

    /// Waits for a round of queries that begins after this call.
    async fn look_now(&self) {
        let mut looked = self.looked.subscribe();
        // The current round may have queried the servers before this call.
        let enough = *looked.borrow() + 2;
        for _ in 0..2 {
            self.look.notify_one();
            let limit = (ANSWER_LIMIT + PAUSE) * 3;
            let changed = timeout(limit, looked.wait_for(|looked| *looked + 1 >= enough));
            if changed.await.is_ok() {
                return;
            }
        }
    }

    /// Queries the servers for the slot map, until one answers.
    async fn ask_around(&self) {
        let mut asked: Vec<Arc<Node>> = self.masters();
        for member in &self.members {
            if let Ok(node) = self.server(member)
                && !asked.iter().any(|asked| Arc::ptr_eq(asked, &node))
            {
                asked.push(node);
            }
        }
        // All servers are queried concurrently, so that dead servers do not delay the others.
        let mut views: FuturesUnordered<_> =
            asked.iter().map(async |node| view(node).await).collect();
        let mut best: Option<View> = None;
        let mut trouble = None;
        let mut enough = std::pin::pin!(sleep(ANSWER_LIMIT));
        loop {
            let heard = tokio::select! {
                heard = views.next() => heard,
                () = &mut enough => None,
            };
            match heard {
                Some(Ok(view)) => {
                    if best.is_none() {
                        // A server that was cut off from the others may answer first, with an
                        // outdated map.
                        enough.as_mut().reset(tokio::time::Instant::now() + OTHERS_LIMIT);
                    }
                    if best.as_ref().is_none_or(|best| view.rank > best.rank) {
                        best = Some(view);
                    }
                }
                Some(Err(error)) => trouble = Some(error),
                None => break,
            }
        }
        drop(views);
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        if let Some(view) = best {
            self.learn(view.ranges);
        }
    }

    fn learn(&self, ranges: Vec<Range>) {
        let mut fresh = vec![None; SLOTS];
        for Range { first, last, master } in ranges {
            let Ok(node) = self.server(&master) else { continue };
            if let Some(slots) = fresh.get_mut(usize::from(first)..=usize::from(last)) {
                slots.fill(Some(node));
            }
        }
        let (old, moved) = {
            let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
            let moved = owners.iter().zip(&fresh).any(|(old, new)| match (old, new) {
                (Some(old), Some(new)) => !Arc::ptr_eq(old, new),
                _ => false,
            });
            (std::mem::replace(&mut *owners, fresh), moved)
        };
        if moved {
            // Locks that the new owner does not have are lost. It sends no invalidations for the
            // others until it is asked to track them.
            self.rumours.spread_all();
        }
        drop(old);
        // A server without slots has no locks, so its connections are not needed.
        let masters = self.masters();
        let members = &self.members;
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).retain(|address, node| {
            members.contains(address) || masters.iter().any(|master| Arc::ptr_eq(master, node))
        });
    }
}

/// Keeps the slot map up to date until aborted.
async fn scout(shared: Arc<Shared>) {
    loop {
        shared.ask_around().await;
        shared.looked.send_modify(|looked| *looked += 1);
        sleep(PAUSE).await;
        tokio::select! {
            () = shared.look.notified() => {}
            () = sleep(LOOK_EACH) => {}
        }
    }
}

/// One server's view of the cluster.
struct View {
    /// Whether the server reports a healthy cluster, then its configuration epoch.
    rank: (bool, u64),
    ranges: Vec<Range>,
}

async fn view(node: &Node) -> RedisResult<View> {
    let ask = async |what: &str| {
        let question = redis::cmd("CLUSTER").arg(what).to_owned();
        let asked = timeout(ANSWER_LIMIT, node.ask(&question)).await;
        let timed_out = |_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
        asked.unwrap_or_else(timed_out)
    };
    let (slots, info) = tokio::join!(ask("SLOTS"), ask("INFO"));
    let slots = slots.map_err(|error| {
        if error.to_string().contains("cluster support disabled") {
            (ErrorKind::InvalidClientConfig, "the server is part of no cluster").into()
        } else {
            error
        }
    })?;
    let info: String = redis::from_redis_value(info?)?;
    let value = |name: &str| info.lines().find_map(|line| line.trim().strip_prefix(name));
    let is_well = value("cluster_state:") == Some("ok");
    let epoch = value("cluster_current_epoch:").and_then(|epoch| epoch.parse().ok());
    let ranges = read_slots(&slots, node.name()).unwrap_or_default();
    if ranges.is_empty() {
        let down = ErrorKind::Server(ServerErrorKind::ClusterDown);
        return Err((down, "the server knows of no slots").into());
    }
    Ok(View { rank: (is_well, epoch.unwrap_or(0)), ranges })
}

/// A range of slots and its owner.
struct Range {
    first: u16,
    last: u16,
    master: Address,
}

/// Parses the answer to `CLUSTER SLOTS`; `asked` is the address of the queried server.
fn read_slots(answer: &Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(ranges) = answer else { return None };
    ranges.iter().map(|range| read_range(range, asked)).collect()
}

fn read_range(range: &Value, asked: &str) -> Option<Range> {
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
    let master = read_address(&format!("{host}:{port}"), asked)?;
    Some(Range { first: u16::try_from(*first).ok()?, last: u16::try_from(*last).ok()?, master })
}

/// Parses `HOST:PORT`. A server that does not know its own host name omits it; the host of `asked`
/// replaces it.
fn read_address(text: &str, asked: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host {
        "" | "?" => asked.rsplit_once(':')?.0,
        host => host,
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some(Address::Tcp { host: host.to_owned(), port: port.parse().ok()? })
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.shared.masters()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_servers_write_them() {
        for (text, address) in [
            ("10.0.0.1:6380", "10.0.0.1:6380"),
            ("::1:6380", "[::1]:6380"),
            (":6380", "asked:6380"),
            ("?:6380", "asked:6380"),
            ("host.example:1", "host.example:1"),
        ] {
            assert_eq!(read_address(text, "asked:6379").unwrap().to_string(), address, "{text}");
        }
        assert_eq!(read_address("nonsense", "asked:6379"), None);
    }
}
