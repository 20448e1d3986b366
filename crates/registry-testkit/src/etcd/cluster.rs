//! Several servers with one history.

use std::io;

use serde::Deserialize;
use tokio::time::{Duration, Instant, sleep};

use super::options::EtcdOptions;
use super::server::EtcdServer;

/// How long the members may take to have a leader.
const LEADER_LIMIT: Duration = Duration::from_secs(60);

/// Members of one cluster, all of which are killed with this handle.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<EtcdServer>,
}

impl EtcdCluster {
    /// Starts this many members.
    ///
    /// # Errors
    /// When etcd is not installed, or the members do not serve in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills the members.
    pub async fn start(members: usize) -> io::Result<Self> {
        Self::start_with(members, &EtcdOptions::new()).await
    }

    /// As [`start`](Self::start), with other settings, users or certificates.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the members.
    pub async fn start_with(members: usize, options: &EtcdOptions) -> io::Result<Self> {
        let prepared = (0..members).map(|n| EtcdServer::prepare(format!("m{n}"), options.clone()));
        let mut cluster = Self { members: prepared.collect::<io::Result<_>>()? };
        if let Some(delay) = options.peer_delay {
            for member in &mut cluster.members {
                member.delay_peers(delay).await?;
            }
        }
        let all: Vec<_> = cluster.members.iter().map(EtcdServer::as_member).collect();
        for member in &mut cluster.members {
            member.join(&all.join(","));
            member.launch_again().await?;
        }
        for member in &mut cluster.members {
            member.serving().await?;
        }
        if let Some(first) = cluster.members.first() {
            first.let_in_only_users().await?;
        }
        Ok(cluster)
    }

    /// One member.
    ///
    /// # Panics
    /// If there is none of this number; they count from zero.
    #[must_use]
    pub fn member(&self, number: usize) -> &EtcdServer {
        &self.members[number]
    }

    /// One member, to be killed or started.
    ///
    /// # Panics
    /// As [`member`](Self::member).
    pub fn member_mut(&mut self, number: usize) -> &mut EtcdServer {
        &mut self.members[number]
    }

    /// All members.
    #[must_use]
    pub fn members(&self) -> &[EtcdServer] {
        &self.members
    }

    /// Which member leads, as those that answer say. Waits until there is one.
    ///
    /// # Errors
    /// That none does in time.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn leader(&self) -> io::Result<usize> {
        let deadline = Instant::now() + LEADER_LIMIT;
        while Instant::now() < deadline {
            let mut told = Vec::new();
            for (number, member) in self.members.iter().enumerate() {
                if member.is_up() && !member.is_paused() {
                    let status = ["--command-timeout", "2s", "endpoint", "status", "-w", "json"];
                    if let Ok(status) = member.ctl(&status).await {
                        told.push((number, read(&status)?));
                    }
                }
            }
            let leader = told.iter().find(|(_, status)| status.leader == status.header.member_id);
            // One that was replaced may not know it yet: most must agree.
            if let Some((number, leader)) = leader {
                let agree = told.iter().filter(|(_, status)| status.leader == leader.leader);
                if agree.count() > self.members.len() / 2 {
                    return Ok(*number);
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
        Err(io::Error::other("the members have no leader"))
    }

    /// The store's URL: `etcd://HOST:PORT,…`, or `etcds` for encrypted connections.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = match self.members.first() {
            Some(first) if first.url().starts_with("https") => "etcds",
            _ => "etcd",
        };
        let all: Vec<_> = self.members.iter().map(|member| member.addr().to_string()).collect();
        format!("{scheme}://{}", all.join(","))
    }
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(rename = "Status")]
    status: Status,
}

#[derive(Deserialize)]
struct Status {
    header: Header,
    /// Zero, or nothing, for none.
    #[serde(default)]
    leader: u64,
}

#[derive(Deserialize)]
struct Header {
    member_id: u64,
}

fn read(status: &str) -> io::Result<Status> {
    let read: Vec<Endpoint> = serde_json::from_str(status).map_err(io::Error::other)?;
    read.into_iter()
        .next()
        .map(|endpoint| endpoint.status)
        .ok_or_else(|| io::Error::other("etcdctl tells nothing"))
}
