//! Several servers that agree with each other.

use std::time::Duration;
use std::{fs, io};

use tokio::time::{Instant, sleep};

use super::options::ZooKeeperOptions;
use super::server::ZooKeeperServer;
use crate::ports::Port;
use crate::proxy::{FaultProxy, Mode};

/// How long the members may take to agree on a leader. Usually it takes a second.
const ELECTION_LIMIT: Duration = Duration::from_secs(90);

/// Members of one ensemble. They are killed with this handle.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    members: Vec<ZooKeeperServer>,
    /// By which they speak to each other: two for each.
    ports: Vec<[Port; 2]>,
    /// What goes from one to another, if it can be cut.
    links: Vec<Link>,
}

/// By which one member speaks to another.
#[derive(Debug)]
struct Link {
    from: usize,
    to: usize,
    /// By which it follows the other one.
    peers: FaultProxy,
    /// By which it votes. Of two members the one with the smaller number refuses itself a connection in favour of the other one's, but tells
    /// where it is to be found in truth. So that votes do not find a way around the proxies, it finds nobody.
    votes: FaultProxy,
}

impl Link {
    async fn between(from: usize, to: usize, ports: &[Port; 2]) -> io::Result<Self> {
        let [peers, votes] = ports;
        let (peers, votes) = (FaultProxy::start(peers.addr())?, FaultProxy::start(votes.addr())?);
        let link = Self { from, to, peers, votes };
        if !link.has_votes() {
            link.votes.set_mode(Mode::Refuse).await?;
        }
        Ok(link)
    }

    fn has_votes(&self) -> bool {
        self.from > self.to
    }

    async fn set_mode(&self, mode: Mode) -> io::Result<()> {
        self.peers.set_mode(mode).await?;
        if self.has_votes() {
            self.votes.set_mode(mode).await?;
        }
        Ok(())
    }
}

impl ZooKeeperEnsemble {
    /// Starts three members.
    ///
    /// # Errors
    /// As for [`ZooKeeperServer::start`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the members.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(3, &ZooKeeperOptions::new()).await
    }

    /// As [`start`](Self::start), with so many members and options for each of them.
    ///
    /// # Errors
    /// As for [`ZooKeeperServer::start`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the members.
    pub async fn start_with(members: usize, options: &ZooKeeperOptions) -> io::Result<Self> {
        let mut started = Self { members: Vec::new(), ports: ports(members)?, links: Vec::new() };
        for _ in 0..members {
            started.launch(options).await?;
        }
        started.serving().await?;
        Ok(started)
    }

    /// As [`start`](Self::start), with a member for each of these options. Members can be [cut off](Self::cut_off) from the others.
    ///
    /// The second one leads, because they are started one after the other. They are not to be killed: one that comes back does not find
    /// those with greater numbers.
    ///
    /// # Errors
    /// As for [`ZooKeeperServer::start`].
    ///
    /// # Cancel safety
    /// Dropping the future kills the members.
    pub async fn start_apart(options: &[ZooKeeperOptions; 3]) -> io::Result<Self> {
        let ports = ports(options.len())?;
        let mut links = Vec::new();
        for from in 0..ports.len() {
            for (to, ports) in ports.iter().enumerate().filter(|(to, _)| *to != from) {
                links.push(Link::between(from, to, ports).await?);
            }
        }
        let mut started = Self { members: Vec::new(), ports, links };
        let [first, second, third] = options;
        started.launch(first).await?;
        started.launch(second).await?;
        started.serving().await?;
        started.launch(third).await?;
        started.serving().await?;
        Ok(started)
    }

    /// Starts one more member, and does not wait until it serves.
    async fn launch(&mut self, options: &ZooKeeperOptions) -> io::Result<()> {
        let number = self.members.len();
        let mut member = ZooKeeperServer::prepare(options.clone(), Port::reserve()?)?;
        fs::write(member.data().join("myid"), (number + 1).to_string())?;
        member.configure(&self.as_seen_by(number))?;
        member.launch_again().await?;
        self.members.push(member);
        Ok(())
    }

    /// All members, by the ways that lead from one of them to the others.
    fn as_seen_by(&self, from: usize) -> String {
        let all = self.ports.iter().enumerate().map(|(to, [peers, votes])| {
            let link = self.links.iter().find(|link| (link.from, link.to) == (from, to));
            let (peers, votes) = match link {
                Some(link) => (link.peers.addr(), link.votes.addr()),
                None => (peers.addr(), votes.addr()),
            };
            format!("server.{}={peers}:{}\n", to + 1, votes.port())
        });
        all.collect()
    }

    /// Cuts a member off from the others in silence: what they have to say to each other waits, as bytes do that a network loses. One
    /// that leads goes on alone for its `syncLimit`, and the others elect another one when theirs is over.
    ///
    /// # Errors
    /// The operating system's.
    ///
    /// # Panics
    /// If the members were not started [apart](Self::start_apart).
    ///
    /// # Cancel safety
    /// It may be cut off from some of them.
    pub async fn cut_off(&self, member: usize) -> io::Result<()> {
        assert!(!self.links.is_empty(), "these members cannot be cut off");
        for link in self.links.iter().filter(|link| link.from == member || link.to == member) {
            link.set_mode(Mode::BlackHole).await?;
        }
        Ok(())
    }

    /// Lets all members hear of each other again, and first of all what was said meanwhile.
    ///
    /// # Errors
    /// The operating system's.
    ///
    /// # Cancel safety
    /// Some of them may be cut off still.
    pub async fn join_again(&self) -> io::Result<()> {
        for link in &self.links {
            link.set_mode(Mode::Pass).await?;
        }
        Ok(())
    }

    /// Waits until all members that run and are not paused serve.
    ///
    /// # Errors
    /// As [`ZooKeeperServer::serving`].
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn serving(&mut self) -> io::Result<()> {
        for member in &mut self.members {
            if member.is_up() && !member.is_paused() {
                member.serving().await?;
            }
        }
        Ok(())
    }

    /// Waits until there is a leader among the members that run and are not paused, and tells which it is.
    ///
    /// # Errors
    /// That there is none in time; there is no majority, most likely.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn leader(&self) -> io::Result<usize> {
        let deadline = Instant::now() + ELECTION_LIMIT;
        while Instant::now() < deadline {
            for (index, member) in self.members.iter().enumerate() {
                let asked = member.is_up() && !member.is_paused();
                if asked && matches!(member.mode().await, Ok(Some(mode)) if mode == "leader") {
                    return Ok(index);
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "the members have no leader"))
    }

    /// `zk://HOST:PORT,HOST:PORT,…`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses = self.members.iter().map(|member| member.addr().to_string());
        format!("zk://{}", addresses.collect::<Vec<_>>().join(","))
    }

    /// The members, in the order in which the URL names them.
    #[must_use]
    pub fn members(&self) -> &[ZooKeeperServer] {
        &self.members
    }

    /// The members, to be killed and started again.
    #[must_use]
    pub fn members_mut(&mut self) -> &mut [ZooKeeperServer] {
        &mut self.members
    }
}

fn ports(members: usize) -> io::Result<Vec<[Port; 2]>> {
    (0..members).map(|_| Ok([Port::reserve()?, Port::reserve()?])).collect()
}
