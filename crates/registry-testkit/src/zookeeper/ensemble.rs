//! Several servers that agree with each other.

use std::time::Duration;
use std::{fs, io};

use tokio::time::{Instant, sleep};

use super::options::ZooKeeperOptions;
use super::server::ZooKeeperServer;
use crate::ports::Port;

/// How long the members may take to agree on a leader. Usually it takes a second.
const ELECTION_LIMIT: Duration = Duration::from_secs(90);

/// Members of one ensemble. They are killed with this handle.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    members: Vec<ZooKeeperServer>,
    /// By which they speak to each other: two for each.
    _ports: Vec<[Port; 2]>,
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
        let ports = (0..members).map(|_| Ok([Port::reserve()?, Port::reserve()?]));
        let ports = ports.collect::<io::Result<Vec<_>>>()?;
        let all = (1..).zip(&ports).map(|(id, [peers, election])| {
            format!("server.{id}=127.0.0.1:{}:{}\n", peers.number(), election.number())
        });
        let all: String = all.collect();
        let mut started = Self { members: Vec::new(), _ports: ports };
        for id in 1..=members {
            let mut member = ZooKeeperServer::prepare(options.clone(), Port::reserve()?)?;
            fs::write(member.data().join("myid"), id.to_string())?;
            member.configure(&all)?;
            member.launch_again().await?;
            started.members.push(member);
        }
        started.serving().await?;
        Ok(started)
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
