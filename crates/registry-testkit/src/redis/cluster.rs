//! A cluster: masters that share the slots, and a replica of each.

mod view;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::options::ServerOptions;
use super::quorum::url;
use super::reply::Reply;
use super::server::RedisServer;
use super::waiting::{Waiting, not_yet};
use crate::ports::Port;
use view::{Member, View, slot_of};

/// The slots that the masters share.
const SLOTS: u16 = 16_384;
const MASTERS: u16 = 3;
/// How many keys are moved at once.
const KEYS_AT_ONCE: &str = "100";
/// How long a node may take to swallow the keys that are moved to it.
const MOVE_LIMIT_MS: &str = "10000";
/// After five seconds a replica gives up taking over from a master that answers too slowly.
const FAILOVER_LIMIT: Duration = Duration::from_secs(6);

/// Three masters with a replica each. All of them are killed with this handle.
///
/// A node is missed after one second. What is asked here is asked only of nodes that are neither down nor paused.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<Node>,
}

#[derive(Debug)]
struct Node {
    server: RedisServer,
    /// Where the nodes speak to each other.
    bus: Port,
    id: String,
}

/// A slot that is on its way to another master: see [`RedisCluster::begin_migration`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "until it is finished, the slot belongs half to each"]
pub struct Migration {
    slot: u16,
    from: SocketAddr,
    to: SocketAddr,
}

impl Migration {
    /// Which slot.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Whose it is until the migration is finished.
    #[must_use]
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whose it will be.
    #[must_use]
    pub fn to(&self) -> SocketAddr {
        self.to
    }
}

impl RedisCluster {
    /// Starts the nodes, and returns when all of them say that the cluster is well and the replicas are in step.
    ///
    /// # Errors
    /// As for [`RedisServer::start`], or that they do not agree in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills the nodes.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(&ServerOptions::new()).await
    }

    /// As [`start`](Self::start), with options for each node.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the nodes.
    pub async fn start_with(options: &ServerOptions) -> io::Result<Self> {
        let launch = |_| Node::launch(options);
        let mut nodes = (0..2 * MASTERS).map(launch).collect::<io::Result<Vec<_>>>()?;
        for node in &mut nodes {
            node.server.ready().await?;
            node.id = text(&node.server, &["CLUSTER", "MYID"]).await?;
        }
        let cluster = Self { nodes };
        cluster.share_slots().await?;
        cluster.meet().await?;
        let (masters, replicas) = cluster.nodes.split_at(MASTERS.into());
        for (master, replica) in masters.iter().zip(replicas) {
            order(&replica.server, &["CLUSTER", "REPLICATE", &master.id]).await?;
        }
        cluster.settle().await?;
        Ok(cluster)
    }

    async fn share_slots(&self) -> io::Result<()> {
        for (number, node) in (0..).zip(&self.nodes) {
            // Nodes with the same epoch would have to sort that out first.
            let epoch = (number + 1).to_string();
            order(&node.server, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).await?;
            if number < MASTERS {
                let bound = |number: u16| u32::from(SLOTS) * u32::from(number) / u32::from(MASTERS);
                let (first, last) = (bound(number), bound(number + 1) - 1);
                let (first, last) = (first.to_string(), last.to_string());
                order(&node.server, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]).await?;
            }
        }
        Ok(())
    }

    /// Makes the nodes known to each other.
    async fn meet(&self) -> io::Result<()> {
        let Some((first, others)) = self.nodes.split_first() else { return Ok(()) };
        for node in others {
            let addr = node.server.addr();
            let (host, port) = (addr.ip().to_string(), addr.port().to_string());
            let bus = node.bus.number().to_string();
            order(&first.server, &["CLUSTER", "MEET", &host, &port, &bus]).await?;
        }
        let waiting = Waiting::new("the nodes know each other");
        while let Err(why) = self.look_whether_met().await {
            waiting.again(why).await?;
        }
        Ok(())
    }

    async fn look_whether_met(&self) -> io::Result<()> {
        for node in &self.nodes {
            let view = View::of(&node.server).await?;
            let known = |node: &Node| view.member(&node.id).is_some_and(Member::is_met);
            if !self.nodes.iter().all(known) {
                return Err(not_yet(format!("one of them sees {view:?}")));
            }
        }
        Ok(())
    }

    /// `redis+cluster://HOST:PORT,HOST:PORT,HOST:PORT`, without a login; `rediss` for encrypted connections. It names the nodes that were masters at the start; the
    /// others are to be found.
    #[must_use]
    pub fn url(&self) -> String {
        let named = self.nodes.iter().take(MASTERS.into());
        url("cluster", named.map(|node| &node.server))
    }

    /// Where the nodes are.
    #[must_use]
    pub fn nodes(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.server.addr()).collect()
    }

    /// The node at `addr`.
    ///
    /// # Panics
    /// When there never was one.
    #[must_use]
    pub fn node(&self, addr: SocketAddr) -> &RedisServer {
        &self.at(addr).server
    }

    /// The node at `addr`, to be killed and started again.
    ///
    /// # Panics
    /// When there never was one.
    #[must_use]
    pub fn node_mut(&mut self, addr: SocketAddr) -> &mut RedisServer {
        let mut nodes = self.nodes.iter_mut();
        let node = nodes.find(|node| node.server.addr() == addr);
        &mut node.expect("one of the cluster's nodes").server
    }

    fn at(&self, addr: SocketAddr) -> &Node {
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.server.addr() == addr).expect("one of the cluster's nodes")
    }

    fn answering(&self) -> impl Iterator<Item = &Node> + Send {
        self.nodes.iter().filter(|node| node.server.answers())
    }

    /// The slot of a key, as clients compute it.
    #[must_use]
    pub fn slot_of(key: impl AsRef<[u8]>) -> u16 {
        slot_of(key.as_ref())
    }

    /// Where the master of `slot` is. Of several that think so, the one that the others would believe.
    ///
    /// # Errors
    /// The connections', or that there is none.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let mut claims = Vec::new();
        for node in self.answering() {
            let view = View::of(&node.server).await?;
            if view.owner(slot).is_some_and(|owner| owner.id == node.id) {
                claims.push((view.myself().map(|member| member.epoch), node.server.addr()));
            }
        }
        let master = claims.into_iter().max().map(|(_, addr)| addr);
        master.ok_or_else(|| not_yet(format!("slot {slot} has no master")))
    }

    /// Where the nodes are that say that they are replicas of the master of `slot`.
    ///
    /// # Errors
    /// As for [`master_of`](Self::master_of).
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn replicas_of(&self, slot: u16) -> io::Result<Vec<SocketAddr>> {
        let master = &self.at(self.master_of(slot).await?).id;
        let mut replicas = Vec::new();
        for node in self.answering() {
            let view = View::of(&node.server).await?;
            if view.myself().is_some_and(|member| member.master.as_ref() == Some(master)) {
                replicas.push(node.server.addr());
            }
        }
        Ok(replicas)
    }

    /// Lets the replica of the master of `slot` take over while all is well, without losing anything, and returns where the new
    /// master is.
    ///
    /// # Errors
    /// When there is no replica, or it could not take over in time.
    ///
    /// # Cancel safety
    /// The failover may take place or not.
    pub async fn failover(&self, slot: u16) -> io::Result<SocketAddr> {
        let old = self.master_of(slot).await?;
        let replicas = self.replicas_of(slot).await?;
        let replica = replicas.first().ok_or_else(|| not_yet("there is no replica"))?;
        let waiting = Waiting::new("a replica takes over");
        let mut asked_at: Option<Instant> = None;
        loop {
            if asked_at.is_none_or(|asked_at| asked_at.elapsed() > FAILOVER_LIMIT) {
                asked_at = Some(Instant::now());
                order(self.node(*replica), &["CLUSTER", "FAILOVER"]).await?;
            }
            match self.look_at_master_of(slot).await {
                Ok(master) if master != old => return Ok(master),
                Ok(_) => waiting.again(not_yet("it is still the old one")).await?,
                Err(why) => waiting.again(why).await?,
            }
        }
    }

    /// Kills the master of `slot`, and returns where it was.
    ///
    /// # Errors
    /// As for [`master_of`](Self::master_of).
    ///
    /// # Cancel safety
    /// Until the future is done, the master lives.
    pub async fn kill_master_of(&mut self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        self.node_mut(master).kill();
        Ok(master)
    }

    /// Stops the master of `slot` in its tracks, and returns where it is, for [`resume`](Self::resume).
    ///
    /// # Errors
    /// As for [`master_of`](Self::master_of).
    ///
    /// # Cancel safety
    /// Until the future is done, the master goes on.
    pub async fn pause_master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        self.node(master).pause()?;
        Ok(master)
    }

    /// Stops the node at `addr` in its tracks.
    ///
    /// # Errors
    /// When it is down.
    ///
    /// # Panics
    /// When there never was one.
    pub fn pause(&self, addr: SocketAddr) -> io::Result<()> {
        self.node(addr).pause()
    }

    /// Lets the paused node at `addr` go on.
    ///
    /// # Errors
    /// When it is down.
    ///
    /// # Panics
    /// When there never was one.
    pub fn resume(&self, addr: SocketAddr) -> io::Result<()> {
        self.node(addr).resume()
    }

    /// Makes sure that nothing that the master of `slot` accepts from now on reaches its replicas, which are paused, and returns where they
    /// are. To lose exactly these writes: write, [kill the master](Self::kill_master_of), [resume](Self::resume) the replicas, and
    /// [wait for the new master](Self::wait_for_new_master_of).
    ///
    /// # Errors
    /// The connections', or that a replica is down.
    ///
    /// # Cancel safety
    /// Some of the replicas may be paused afterwards.
    pub async fn isolate_replicas_of(&self, slot: u16) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.replicas_of(slot).await?;
        for &replica in &replicas {
            self.pause(replica)?;
        }
        // What waits in the sockets of the paused would still arrive.
        self.node(self.master_of(slot).await?).client_kill("replica").await?;
        Ok(replicas)
    }

    /// Waits until all nodes that answer take another one than `old` for the master of `slot`, and think that the cluster is well.
    /// Returns where it is.
    ///
    /// # Errors
    /// When this does not happen in time.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn wait_for_new_master_of(
        &self,
        slot: u16,
        old: SocketAddr,
    ) -> io::Result<SocketAddr> {
        let waiting = Waiting::new("there is a new master");
        loop {
            match self.look_at_master_of(slot).await {
                Ok(master) if master != old => return Ok(master),
                Ok(_) => waiting.again(not_yet("it is still the old one")).await?,
                Err(why) => waiting.again(why).await?,
            }
        }
    }

    /// Waits until all is as at the start, as far as nodes are up: all think that the cluster is well, agree on whose the slots
    /// are, and replicas are in step.
    ///
    /// # Errors
    /// When this does not happen in time.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn settle(&self) -> io::Result<()> {
        let waiting = Waiting::new("the nodes agree");
        while let Err(why) = self.look_at_all().await {
            waiting.again(why).await?;
        }
        Ok(())
    }

    /// Moves `slot` with its keys to the master at `to`, while clients use it. Returns when all nodes know.
    ///
    /// # Errors
    /// The connections', or a node's refusal.
    ///
    /// # Cancel safety
    /// The slot may be on its way afterwards.
    pub async fn migrate(&self, slot: u16, to: SocketAddr) -> io::Result<()> {
        let migration = self.begin_migration(slot, to).await?;
        self.finish_migration(migration).await
    }

    /// Begins to move `slot` to the master at `to`, and stops before the first key. From now on its old master says `ASK` for keys that it
    /// does not have, and the new one serves those who then ask it.
    ///
    /// # Errors
    /// The connections', or a node's refusal.
    ///
    /// # Cancel safety
    /// The migration may have begun or not.
    pub async fn begin_migration(&self, slot: u16, to: SocketAddr) -> io::Result<Migration> {
        let from = self.master_of(slot).await?;
        let number = slot.to_string();
        let (giver, taker) = (&self.at(from).id, &self.at(to).id);
        order(self.node(to), &["CLUSTER", "SETSLOT", &number, "IMPORTING", giver]).await?;
        order(self.node(from), &["CLUSTER", "SETSLOT", &number, "MIGRATING", taker]).await?;
        Ok(Migration { slot, from, to })
    }

    /// Moves one key, and returns whether there was one to move.
    ///
    /// # Errors
    /// The connections', or a node's refusal.
    ///
    /// # Cancel safety
    /// The key is with the one or with the other.
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
            ["MIGRATE", &*host, &*port, "", "0", MOVE_LIMIT_MS].map(str::as_bytes).to_vec();
        if let Some((user, password)) = self.node(migration.to).login() {
            words.extend([&b"AUTH2"[..], user.as_bytes(), password.as_bytes()]);
        }
        words.push(b"KEYS");
        words.extend(keys.iter().map(Vec::as_slice));
        let moved = self.node(migration.from).ask_args(&words).await?.granted()?;
        Ok(moved.text().as_deref() != Some("NOKEY"))
    }

    /// Moves the keys that are left and gives the slot away. Returns when all nodes know.
    ///
    /// # Errors
    /// The connections', or a node's refusal.
    ///
    /// # Cancel safety
    /// The slot may be on its way afterwards.
    pub async fn finish_migration(&self, migration: Migration) -> io::Result<()> {
        let Migration { slot, from, to } = migration;
        let number = slot.to_string();
        let waiting = Waiting::new("the slot is empty");
        loop {
            let question = ["CLUSTER", "GETKEYSINSLOT", &number, KEYS_AT_ONCE];
            let keys = self.node(from).ask_args(&question).await?.granted()?;
            let values = keys.items().iter().map(|key| match key {
                Reply::Value(bytes) => bytes.clone(),
                other => other.text().unwrap_or_default().into_bytes(),
            });
            let keys: Vec<Vec<u8>> = values.collect();
            if keys.is_empty() {
                break;
            }
            self.migrate_keys(&migration, &keys).await?;
            // Nobody can add keys here any more, but keys can run out before they are moved.
            waiting.again(not_yet("keys are left")).await?;
        }
        // The new owner first: the other way round, there would be a moment without one.
        for addr in [to, from] {
            let words = ["CLUSTER", "SETSLOT", &number, "NODE", &self.at(to).id];
            order(self.node(addr), &words).await?;
        }
        let waiting = Waiting::new("all nodes know the slot's new master");
        loop {
            match self.look_at_master_of(slot).await {
                Ok(master) if master == to => return Ok(()),
                Ok(_) => waiting.again(not_yet("it is still the old one")).await?,
                Err(why) => waiting.again(why).await?,
            }
        }
    }

    /// The master of `slot` on which all agree.
    async fn look_at_master_of(&self, slot: u16) -> io::Result<SocketAddr> {
        let master = self.master_of(slot).await?;
        for node in self.answering() {
            let seen = look_whether_well(node).await?.owner(slot).map(|owner| owner.id.clone());
            if seen.as_ref() != Some(&self.at(master).id) {
                return Err(not_yet(format!("{master} is the master, but one node sees {seen:?}")));
            }
        }
        Ok(master)
    }

    async fn look_at_all(&self) -> io::Result<()> {
        let mut owners = None;
        let mut replicas = 0;
        let mut online = 0;
        for node in self.answering() {
            let view = look_whether_well(node).await?;
            let seen = view.owners();
            let first = owners.get_or_insert_with(|| seen.clone());
            if *first != seen {
                return Err(not_yet(format!("one node sees {first:?}, another {seen:?}")));
            }
            if view.myself().is_some_and(|member| member.master.is_some()) {
                replicas += 1;
                let link = node.server.info("replication", "master_link_status").await?;
                if link.as_deref() != Some("up") {
                    return Err(not_yet(format!("a replica's link is {link:?}")));
                }
            } else {
                online += node.server.replicas_online().await?;
            }
            // A replica of which nobody knows yet would be one to whom no client goes.
            let known = view.members().filter(|member| member.master.is_some()).count();
            if known < usize::from(MASTERS) {
                return Err(not_yet(format!("one node knows of {known} replicas only")));
            }
        }
        if online < replicas {
            return Err(not_yet(format!("{online} of {replicas} replicas are online")));
        }
        Ok(())
    }
}

impl Node {
    fn launch(options: &ServerOptions) -> io::Result<Self> {
        let bus = Port::reserve()?;
        let number = bus.number().to_string();
        let mut options = options.clone();
        let mut args: Vec<String> = [
            ["--cluster-enabled", "yes"],
            ["--cluster-port", &number],
            ["--cluster-node-timeout", "1000"],
            // However long a replica was paused, it may take over.
            ["--cluster-replica-validity-factor", "0"],
            // A replica stays with the master that it was given.
            ["--cluster-allow-replica-migration", "no"],
            ["--repl-diskless-sync-delay", "0"],
        ]
        .concat()
        .iter()
        .map(|&arg| arg.to_owned())
        .collect();
        if let Some((user, password)) = &options.login {
            let login = ["--masteruser", user, "--masterauth", password];
            args.extend(login.map(ToOwned::to_owned));
        }
        args.append(&mut options.args);
        options.args = args;
        let server = RedisServer::launch(Port::reserve()?, options)?;
        Ok(Self { server, bus, id: String::new() })
    }
}

/// What a node sees that thinks that the cluster is well.
async fn look_whether_well(node: &Node) -> io::Result<View> {
    let state = text(&node.server, &["CLUSTER", "INFO"]).await?;
    if !state.contains("cluster_state:ok") {
        return Err(not_yet(format!("{} says {state}", node.server.addr())));
    }
    View::of(&node.server).await
}

async fn order(server: &RedisServer, words: &[&str]) -> io::Result<()> {
    let reply = server.ask_args(words).await?;
    match reply.granted() {
        Ok(_) => Ok(()),
        Err(refusal) => Err(io::Error::other(format!("{}: {refusal}", words.join(" ")))),
    }
}

async fn text(server: &RedisServer, words: &[&str]) -> io::Result<String> {
    let reply = server.ask_args(words).await?.granted()?;
    reply.text().ok_or_else(|| not_yet(format!("{reply:?} is no text")))
}
