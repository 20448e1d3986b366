//! A cluster of masters that share the slots, each with a replica.

mod view;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;

use super::options::RedisOptions;
use super::quorum::url;
use super::reply::RedisReply;
use super::sentinel::require_new_master;
use super::server::RedisServer;
use crate::ports::Port;
use crate::retry::retry;
use view::{ClusterView, NodeInfo, slot_of};

/// The number of slots that the masters share.
const SLOTS: u16 = 16_384;
const MASTERS: u16 = 3;
/// The maximum number of keys moved by one `MIGRATE`.
const KEYS_AT_ONCE: &str = "100";
/// The timeout of `MIGRATE`, in milliseconds.
const MIGRATE_TIMEOUT_MS: &str = "10000";
/// The time limit for moving the keys of a slot.
const SLOT_MIGRATION_LIMIT: Duration = Duration::from_secs(60);
/// The interval after which `CLUSTER FAILOVER` is repeated. A replica abandons a manual failover
/// after five seconds if its master responds too slowly.
const FAILOVER_RETRY_INTERVAL: Duration = Duration::from_secs(6);
/// The maximum number of requests for one failover.
const FAILOVER_ATTEMPTS_MAX: u32 = 15;

/// Three masters with one replica each. Dropping this handle kills all of them.
///
/// The node timeout is one second. The methods query only nodes that are neither down nor paused.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<ClusterNode>,
}

#[derive(Debug)]
struct ClusterNode {
    server: RedisServer,
    /// The port of the cluster bus.
    bus: Port,
    id: String,
}

/// A slot in migration to another master: see [`RedisCluster::begin_migration`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "call `finish_migration`: until then, one node reports the slot as MIGRATING and the other as IMPORTING"]
pub struct Migration {
    slot: u16,
    from: SocketAddr,
    to: SocketAddr,
}

impl Migration {
    /// Returns the slot.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Returns the address of the slot's owner until the migration is finished.
    #[must_use]
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Returns the address of the slot's future owner.
    #[must_use]
    pub fn to(&self) -> SocketAddr {
        self.to
    }
}

impl RedisCluster {
    /// Starts the nodes and returns once all of them report a healthy cluster and all replicas are
    /// synchronized.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(&RedisOptions::new()).await
    }

    /// Like [`start`](Self::start), with options for each node.
    pub async fn start_with(options: &RedisOptions) -> io::Result<Self> {
        let launch = |_| ClusterNode::launch(options);
        let mut nodes = (0..2 * MASTERS).map(launch).collect::<io::Result<Vec<_>>>()?;
        for node in &mut nodes {
            node.server.wait_until_serving().await?;
            node.id = query_text(&node.server, &["CLUSTER", "MYID"]).await?;
        }
        let cluster = Self { nodes };
        cluster.assign_slots().await?;
        cluster.meet().await?;
        let (masters, replicas) = cluster.nodes.split_at(MASTERS.into());
        for (master, replica) in masters.iter().zip(replicas) {
            execute(&replica.server, &["CLUSTER", "REPLICATE", &master.id]).await?;
        }
        cluster.wait_until_consistent().await?;
        Ok(cluster)
    }

    async fn assign_slots(&self) -> io::Result<()> {
        for (number, node) in (0..).zip(&self.nodes) {
            // Nodes with equal epochs would first have to resolve the conflict.
            let epoch = (number + 1).to_string();
            execute(&node.server, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).await?;
            if number < MASTERS {
                let bound = |number: u16| u32::from(SLOTS) * u32::from(number) / u32::from(MASTERS);
                let (first, last) = (bound(number), bound(number + 1) - 1);
                let (first, last) = (first.to_string(), last.to_string());
                execute(&node.server, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]).await?;
            }
        }
        Ok(())
    }

    /// Introduces the nodes to each other.
    async fn meet(&self) -> io::Result<()> {
        let Some((first, others)) = self.nodes.split_first() else { return Ok(()) };
        for node in others {
            let addr = node.server.addr();
            let (host, port) = (addr.ip().to_string(), addr.port().to_string());
            let bus = node.bus.number().to_string();
            execute(&first.server, &["CLUSTER", "MEET", &host, &port, &bus]).await?;
        }
        retry("all nodes have met", || self.check_nodes_have_met()).await
    }

    async fn check_nodes_have_met(&self) -> io::Result<()> {
        for node in &self.nodes {
            let view = ClusterView::query(&node.server).await?;
            let known = |node: &ClusterNode| view.member(&node.id).is_some_and(NodeInfo::is_met);
            if !self.nodes.iter().all(known) {
                let addr = node.server.addr();
                return Err(io::Error::other(format!("{addr} has not met all nodes: {view:?}")));
            }
        }
        Ok(())
    }

    /// Returns `redis+cluster://HOST:PORT,HOST:PORT,HOST:PORT`, without a login; the scheme is
    /// `rediss+cluster` for TLS connections. The URL contains the initial masters. Clients must
    /// discover the other nodes.
    #[must_use]
    pub fn url(&self) -> String {
        let initial_masters = self.nodes.iter().take(MASTERS.into());
        url("cluster", initial_masters.map(|node| &node.server))
    }

    /// Returns the addresses of all nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.server.addr()).collect()
    }

    /// Returns the node at `addr`.
    ///
    /// # Panics
    /// Panics if the cluster never had such a node.
    #[must_use]
    pub fn node(&self, addr: SocketAddr) -> &RedisServer {
        &self.node_at(addr).server
    }

    /// Returns the node at `addr`, to kill it and start it again.
    ///
    /// # Panics
    /// Panics if the cluster never had such a node.
    #[must_use]
    pub fn node_mut(&mut self, addr: SocketAddr) -> &mut RedisServer {
        let mut nodes = self.nodes.iter_mut();
        let node = nodes.find(|node| node.server.addr() == addr);
        &mut node.expect("one of the cluster's nodes").server
    }

    fn node_at(&self, addr: SocketAddr) -> &ClusterNode {
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.server.addr() == addr).expect("one of the cluster's nodes")
    }

    fn responsive_nodes(&self) -> impl Iterator<Item = &ClusterNode> + Send {
        self.nodes.iter().filter(|node| node.server.is_responsive())
    }

    /// Returns the slot of a key, as clients compute it.
    #[must_use]
    pub fn slot_of(key: impl AsRef<[u8]>) -> u16 {
        slot_of(key.as_ref())
    }

    /// Returns the address of the master of `slot`. If several nodes claim the slot, returns the
    /// one with the largest epoch, which prevails.
    pub async fn master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let mut claims = Vec::new();
        for node in self.responsive_nodes() {
            let view = ClusterView::query(&node.server).await?;
            if view.owner(slot).is_some_and(|owner| owner.id == node.id) {
                claims.push((view.myself().map(|member| member.epoch), node.server.addr()));
            }
        }
        let master = claims.into_iter().max().map(|(_, addr)| addr);
        master.ok_or_else(|| io::Error::other(format!("slot {slot} has no master")))
    }

    /// Returns the addresses of the nodes that report that they replicate the master of `slot`.
    pub async fn replicas_of(&self, slot: u16) -> io::Result<Vec<SocketAddr>> {
        let master = &self.node_at(self.master_of(slot).await?).id;
        let mut replicas = Vec::new();
        for node in self.responsive_nodes() {
            let view = ClusterView::query(&node.server).await?;
            if view.myself().is_some_and(|member| member.master.as_ref() == Some(master)) {
                replicas.push(node.server.addr());
            }
        }
        Ok(replicas)
    }

    /// Makes the replica of the master of `slot` take over from a healthy master, without losing
    /// data. Returns the address of the new master.
    pub async fn failover(&self, slot: u16) -> io::Result<SocketAddr> {
        let old = self.master_of(slot).await?;
        let replicas = self.replicas_of(slot).await?;
        let no_replica = || {
            io::Error::other(format!(
                "no node reports that it replicates the master of slot {slot}"
            ))
        };
        let replica = *replicas.first().ok_or_else(no_replica)?;
        for attempt in 0..FAILOVER_ATTEMPTS_MAX {
            let requested = execute(self.node(replica), &["CLUSTER", "FAILOVER"]).await;
            // A replica that has taken over after an earlier attempt refuses the request.
            if attempt == 0 {
                requested?;
            }
            let new = self.wait_for_new_master_of(slot, old);
            if let Ok(result) = timeout(FAILOVER_RETRY_INTERVAL, new).await {
                return result;
            }
        }
        Err(io::Error::other(format!(
            "{replica} is not the confirmed master of slot {slot} after {FAILOVER_ATTEMPTS_MAX} intervals of {FAILOVER_RETRY_INTERVAL:?}"
        )))
    }

    /// Kills the master of `slot` and returns its address.
    pub async fn kill_master_of(&mut self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        self.node_mut(master).kill();
        Ok(master)
    }

    /// Stops the master of `slot` (SIGSTOP) and returns its address, for [`resume`](Self::resume).
    pub async fn pause_master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        self.node(master).pause()?;
        Ok(master)
    }

    /// Stops the node at `addr` (SIGSTOP).
    ///
    /// # Panics
    /// Panics if the cluster never had such a node.
    pub fn pause(&self, addr: SocketAddr) -> io::Result<()> {
        self.node(addr).pause()
    }

    /// Resumes the paused node at `addr`.
    ///
    /// # Panics
    /// Panics if the cluster never had such a node.
    pub fn resume(&self, addr: SocketAddr) -> io::Result<()> {
        self.node(addr).resume()
    }

    /// Pauses the replicas of the master of `slot`, so that no later write reaches them, and
    /// returns their addresses. To lose exactly these writes: write, [kill the
    /// master](Self::kill_master_of), [resume](Self::resume) the replicas, and [wait for the new
    /// master](Self::wait_for_new_master_of).
    pub async fn isolate_replicas_of(&self, slot: u16) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.replicas_of(slot).await?;
        for &replica in &replicas {
            self.pause(replica)?;
        }
        // Otherwise, writes queued in the paused replicas' sockets would still arrive.
        self.node(self.master_of(slot).await?).client_kill("replica").await?;
        Ok(replicas)
    }

    /// Waits until all responding nodes agree on a master of `slot` other than `old`, and report a
    /// healthy cluster. Returns the address of the new master.
    pub async fn wait_for_new_master_of(
        &self,
        slot: u16,
        old: SocketAddr,
    ) -> io::Result<SocketAddr> {
        retry("all nodes know a new master", || async {
            require_new_master(old, self.confirmed_master_of(slot).await?)
        })
        .await
    }

    /// Waits until all responding nodes report a healthy cluster, agree on the slot owners and know
    /// all replicas, and all responding replicas are synchronized.
    pub async fn wait_until_consistent(&self) -> io::Result<()> {
        retry("the nodes agree", || self.check_consistency()).await
    }

    /// Moves `slot` with its keys to the master at `to`, while clients use it. Returns once all
    /// responding nodes know the new owner.
    pub async fn migrate(&self, slot: u16, to: SocketAddr) -> io::Result<()> {
        let migration = self.begin_migration(slot, to).await?;
        self.finish_migration(migration).await
    }

    /// Starts to move `slot` to the master at `to`, without moving a key. From now on, the old
    /// master replies `ASK` for keys that it does not have. The new master serves clients that
    /// follow this redirection.
    pub async fn begin_migration(&self, slot: u16, to: SocketAddr) -> io::Result<Migration> {
        let from = self.master_of(slot).await?;
        let number = slot.to_string();
        let (source_id, target_id) = (&self.node_at(from).id, &self.node_at(to).id);
        execute(self.node(to), &["CLUSTER", "SETSLOT", &number, "IMPORTING", source_id]).await?;
        execute(self.node(from), &["CLUSTER", "SETSLOT", &number, "MIGRATING", target_id]).await?;
        Ok(Migration { slot, from, to })
    }

    /// Moves one key and returns whether the key existed.
    pub async fn migrate_key(
        &self,
        migration: &Migration,
        key: impl AsRef<[u8]> + Send,
    ) -> io::Result<bool> {
        self.migrate_keys(migration, &[key.as_ref().to_vec()]).await
    }

    async fn migrate_keys(&self, migration: &Migration, keys: &[Vec<u8>]) -> io::Result<bool> {
        let (host, port) = (migration.to.ip().to_string(), migration.to.port().to_string());
        let mut words: Vec<&[u8]> =
            ["MIGRATE", &*host, &*port, "", "0", MIGRATE_TIMEOUT_MS].map(str::as_bytes).to_vec();
        if let Some((user, password)) = self.node(migration.to).login() {
            words.extend([&b"AUTH2"[..], user.as_bytes(), password.as_bytes()]);
        }
        words.push(b"KEYS");
        words.extend(keys.iter().map(Vec::as_slice));
        let moved = self.node(migration.from).send_command_args(&words).await?.into_result()?;
        Ok(moved.text().as_deref() != Some("NOKEY"))
    }

    async fn keys_in_slot(&self, addr: SocketAddr, slot: &str) -> io::Result<Vec<Vec<u8>>> {
        let command = ["CLUSTER", "GETKEYSINSLOT", slot, KEYS_AT_ONCE];
        let keys = self.node(addr).send_command_args(&command).await?.into_result()?;
        let bytes = |key: &RedisReply| match key {
            RedisReply::Value(bytes) => bytes.clone(),
            other => other.text().unwrap_or_default().into_bytes(),
        };
        Ok(keys.items().iter().map(bytes).collect())
    }

    /// Moves the remaining keys and assigns the slot to its new owner. Returns once all responding
    /// nodes know the new owner.
    pub async fn finish_migration(&self, migration: Migration) -> io::Result<()> {
        let Migration { slot, from, to } = migration;
        let number = slot.to_string();
        let move_keys = async {
            loop {
                let keys = self.keys_in_slot(from, &number).await?;
                if keys.is_empty() {
                    return io::Result::Ok(());
                }
                // Clients can no longer create keys here, but keys can expire before they are
                // moved.
                self.migrate_keys(&migration, &keys).await?;
            }
        };
        timeout(SLOT_MIGRATION_LIMIT, move_keys).await??;
        // The new owner first: in the reverse order, the slot would briefly have no owner.
        for addr in [to, from] {
            let words = ["CLUSTER", "SETSLOT", &number, "NODE", &self.node_at(to).id];
            execute(self.node(addr), &words).await?;
        }
        retry("all nodes know the slot's new master", || async {
            match self.confirmed_master_of(slot).await? {
                master if master == to => Ok(()),
                master => {
                    Err(io::Error::other(format!("slot {slot} belongs to {master}, not to {to}")))
                }
            }
        })
        .await
    }

    /// Returns the master of `slot` if all responding nodes agree on it.
    async fn confirmed_master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        for node in self.responsive_nodes() {
            let seen = healthy_view(node).await?.owner(slot).map(|owner| owner.id.clone());
            let (addr, id) = (node.server.addr(), &self.node_at(master).id);
            if seen.as_ref() != Some(id) {
                return Err(io::Error::other(format!(
                    "slot {slot} belongs to {master} ({id}), but {addr} sees the owner {seen:?}"
                )));
            }
        }
        Ok(master)
    }

    async fn check_consistency(&self) -> io::Result<()> {
        let mut owners = None;
        let mut replicas = 0;
        let mut online = 0;
        for node in self.responsive_nodes() {
            let view = healthy_view(node).await?;
            let seen = view.owners();
            let first = owners.get_or_insert_with(|| seen.clone());
            if *first != seen {
                return Err(io::Error::other(format!("one node sees {first:?}, another {seen:?}")));
            }
            if view.myself().is_some_and(|member| member.master.is_some()) {
                replicas += 1;
                let link = node.server.info("replication", "master_link_status").await?;
                if link.as_deref() != Some("up") {
                    let addr = node.server.addr();
                    return Err(io::Error::other(format!(
                        "the replication link of {addr} is {link:?}"
                    )));
                }
            } else {
                online += node.server.replicas_online().await?;
            }
            // Clients do not connect to a replica that the nodes do not know yet.
            let known = view.members().filter(|member| member.master.is_some()).count();
            if known < usize::from(MASTERS) {
                return Err(io::Error::other(format!("one node knows only {known} replicas")));
            }
        }
        if online < replicas {
            return Err(io::Error::other(format!("{online} of {replicas} replicas are online")));
        }
        Ok(())
    }
}

impl ClusterNode {
    fn launch(options: &RedisOptions) -> io::Result<Self> {
        let bus = Port::reserve()?;
        let number = bus.number().to_string();
        let mut options = options.clone();
        let mut args: Vec<String> = [
            ["--cluster-enabled", "yes"],
            ["--cluster-port", &number],
            ["--cluster-node-timeout", "1000"],
            // With 0, a replica may take over no matter how long it was paused.
            ["--cluster-replica-validity-factor", "0"],
            // Each replica stays with its initial master.
            ["--cluster-allow-replica-migration", "no"],
            ["--repl-diskless-sync-delay", "0"],
        ]
        .concat()
        .iter()
        .map(|&arg| arg.to_owned())
        .collect();
        if let Some((user, password)) = &options.store.login {
            let login = ["--masteruser", user, "--masterauth", password];
            args.extend(login.map(ToOwned::to_owned));
        }
        args.append(&mut options.args);
        options.args = args;
        let server = RedisServer::launch_with(options)?;
        Ok(Self { server, bus, id: String::new() })
    }
}

/// Returns the view of `node`, or an error unless the node reports a healthy cluster.
async fn healthy_view(node: &ClusterNode) -> io::Result<ClusterView> {
    let info = query_text(&node.server, &["CLUSTER", "INFO"]).await?;
    if !info.contains("cluster_state:ok") {
        return Err(io::Error::other(format!("{} reports {info}", node.server.addr())));
    }
    ClusterView::query(&node.server).await
}

async fn execute(server: &RedisServer, words: &[&str]) -> io::Result<()> {
    let reply = server.send_command_args(words).await?;
    match reply.into_result() {
        Ok(_) => Ok(()),
        Err(refusal) => Err(io::Error::other(format!("{}: {refusal}", words.join(" ")))),
    }
}

async fn query_text(server: &RedisServer, words: &[&str]) -> io::Result<String> {
    let reply = server.send_command_args(words).await?.into_result()?;
    reply.text().ok_or_else(|| io::Error::other(format!("{reply:?} is not text")))
}
