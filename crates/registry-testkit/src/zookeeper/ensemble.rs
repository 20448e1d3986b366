//! Several servers that form one ensemble.

use std::{fs, io};

use super::options::ZooKeeperOptions;
use super::server::ZooKeeperServer;
use crate::ports::Port;
use crate::proxy::{FaultProxy, ProxyMode};
use crate::retry::retry;

/// The members of one ensemble. Dropping this handle kills them.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    members: Vec<ZooKeeperServer>,
    /// The ports for traffic between members: two for each member.
    ports: Vec<[Port; 2]>,
    /// The proxied connections between members. Empty if the members cannot be cut off.
    links: Vec<MemberProxies>,
}

/// The proxies through which one member connects to another.
#[derive(Debug)]
struct MemberProxies {
    from: usize,
    to: usize,
    /// Carries the replication traffic.
    replication: FaultProxy,
    /// Carries the election traffic. Two members use only the connection from the one with the
    /// larger number. If the member with the smaller number connects first, it sends its true
    /// address and closes its connection. The other member then connects to this address, and votes
    /// bypass the proxies. The proxy from the member with the smaller number therefore refuses
    /// connections.
    election: FaultProxy,
}

impl MemberProxies {
    async fn between(from: usize, to: usize, ports: &[Port; 2]) -> io::Result<Self> {
        let [replication, election] = ports;
        let replication = FaultProxy::start(replication.addr())?;
        let election = FaultProxy::start(election.addr())?;
        let link = Self { from, to, replication, election };
        if !link.carries_election() {
            link.election.set_mode(ProxyMode::Refuse).await?;
        }
        Ok(link)
    }

    /// Returns whether the election traffic uses the proxy `election`.
    fn carries_election(&self) -> bool {
        self.from > self.to
    }

    async fn set_mode(&self, mode: ProxyMode) -> io::Result<()> {
        self.replication.set_mode(mode).await?;
        if self.carries_election() {
            self.election.set_mode(mode).await?;
        }
        Ok(())
    }
}

impl ZooKeeperEnsemble {
    /// Starts three members and waits until they serve.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(3, &ZooKeeperOptions::new()).await
    }

    /// Like [`start`](Self::start), with this number of members and options for each of them.
    pub async fn start_with(members: usize, options: &ZooKeeperOptions) -> io::Result<Self> {
        let mut started = Self { members: Vec::new(), ports: ports(members)?, links: Vec::new() };
        for _ in 0..members {
            started.launch(options).await?;
        }
        started.wait_until_serving().await?;
        Ok(started)
    }

    /// Like [`start`](Self::start), with one member for each of these options. Members can be
    /// [isolated](Self::isolate) from the others.
    ///
    /// The second member leads, because the members start in sequence. Do not kill a member: after
    /// a restart, it cannot connect to members with larger numbers.
    pub async fn start_isolatable(options: &[ZooKeeperOptions; 3]) -> io::Result<Self> {
        let ports = ports(options.len())?;
        let mut links = Vec::new();
        for from in 0..ports.len() {
            for (to, ports) in ports.iter().enumerate().filter(|(to, _)| *to != from) {
                links.push(MemberProxies::between(from, to, ports).await?);
            }
        }
        let mut started = Self { members: Vec::new(), ports, links };
        let [first, second, third] = options;
        started.launch(first).await?;
        started.launch(second).await?;
        started.wait_until_serving().await?;
        started.launch(third).await?;
        started.wait_until_serving().await?;
        Ok(started)
    }

    /// Starts one more member without waiting until it serves.
    async fn launch(&mut self, options: &ZooKeeperOptions) -> io::Result<()> {
        let number = self.members.len();
        let mut member = ZooKeeperServer::prepare(options.clone())?;
        fs::write(member.data().join("myid"), (number + 1).to_string())?;
        member.configure(&self.server_lines_for(number))?;
        member.restart_without_waiting().await?;
        self.members.push(member);
        Ok(())
    }

    /// Returns the configuration lines of all members, with the addresses through which member
    /// `from` reaches them.
    fn server_lines_for(&self, from: usize) -> String {
        let all = self.ports.iter().enumerate().map(|(to, [replication, election])| {
            let link = self.links.iter().find(|link| (link.from, link.to) == (from, to));
            let (replication, election) = match link {
                Some(link) => (link.replication.addr(), link.election.addr()),
                None => (replication.addr(), election.addr()),
            };
            format!("server.{}={replication}:{}\n", to + 1, election.port())
        });
        all.collect()
    }

    /// Cuts a member off from the others without closing connections: the traffic between them
    /// waits, as in a network partition. A leader that is cut off continues alone for its
    /// `syncLimit`. The other members elect a new leader after their own `syncLimit`.
    ///
    /// # Panics
    /// Panics if the ensemble was not started with [`start_isolatable`](Self::start_isolatable).
    pub async fn isolate(&self, member: usize) -> io::Result<()> {
        assert!(!self.links.is_empty(), "these members cannot be cut off");
        for link in self.links.iter().filter(|link| link.from == member || link.to == member) {
            link.set_mode(ProxyMode::BlackHole).await?;
        }
        Ok(())
    }

    /// Reconnects all members and delivers the traffic that has waited.
    pub async fn reconnect(&self) -> io::Result<()> {
        for link in &self.links {
            link.set_mode(ProxyMode::Pass).await?;
        }
        Ok(())
    }

    /// Waits until all running members that are not paused serve.
    pub async fn wait_until_serving(&mut self) -> io::Result<()> {
        for member in &mut self.members {
            if member.is_responsive() {
                member.wait_until_serving().await?;
            }
        }
        Ok(())
    }

    /// Waits until one of the running members that are not paused leads, and returns its index.
    pub async fn leader(&self) -> io::Result<usize> {
        retry("one of the members leads", || async {
            let members = self.members.iter().enumerate();
            for (index, member) in members.filter(|(_, member)| member.is_responsive()) {
                if matches!(member.mode().await, Ok(Some(mode)) if mode == "leader") {
                    return Ok(index);
                }
            }
            Err(io::Error::other("none of them leads"))
        })
        .await
    }

    /// Returns `zk://HOST:PORT,HOST:PORT,…`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses = self.members.iter().map(|member| member.addr().to_string());
        format!("zk://{}", addresses.collect::<Vec<_>>().join(","))
    }

    /// Returns the members, in the order of the URL.
    #[must_use]
    pub fn members(&self) -> &[ZooKeeperServer] {
        &self.members
    }

    /// Returns the members, to kill them and start them again.
    #[must_use]
    pub fn members_mut(&mut self) -> &mut [ZooKeeperServer] {
        &mut self.members
    }
}

fn ports(members: usize) -> io::Result<Vec<[Port; 2]>> {
    (0..members).map(|_| Ok([Port::reserve()?, Port::reserve()?])).collect()
}
