//! Several servers that form one cluster.

use std::io;

use super::options::EtcdOptions;
use super::server::EtcdServer;
use crate::retry::retry;
use serde::Deserialize;

/// The members of one cluster. Dropping this handle kills all of them.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<EtcdServer>,
}

impl EtcdCluster {
    /// Starts this number of members.
    pub async fn start(members: usize) -> io::Result<Self> {
        Self::start_with(members, &EtcdOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(members: usize, options: &EtcdOptions) -> io::Result<Self> {
        let prepared = (0..members).map(|n| EtcdServer::prepare(format!("m{n}"), options.clone()));
        let mut cluster = Self { members: prepared.collect::<io::Result<_>>()? };
        if let Some(delay) = options.store.peer_delay {
            for member in &mut cluster.members {
                member.delay_peers(delay).await?;
            }
        }
        let all: Vec<_> = cluster.members.iter().map(EtcdServer::initial_cluster_entry).collect();
        for member in &mut cluster.members {
            member.set_members(&all.join(","));
            member.restart_without_waiting().await?;
        }
        for member in &mut cluster.members {
            member.wait_until_serving().await?;
        }
        if let Some(first) = cluster.members.first() {
            first.enable_auth().await?;
        }
        Ok(cluster)
    }

    /// Returns one member.
    ///
    /// # Panics
    /// Panics if there is no member with this number. Numbers start at zero.
    #[must_use]
    pub fn member(&self, number: usize) -> &EtcdServer {
        &self.members[number]
    }

    /// Returns one member, to kill it or start it.
    ///
    /// # Panics
    /// As [`member`](Self::member).
    pub fn member_mut(&mut self, number: usize) -> &mut EtcdServer {
        &mut self.members[number]
    }

    /// Returns all members.
    #[must_use]
    pub fn members(&self) -> &[EtcdServer] {
        &self.members
    }

    /// Waits until the members have a leader, and returns its number.
    pub async fn leader(&self) -> io::Result<usize> {
        retry("the members have a leader", || async {
            let mut statuses = Vec::new();
            for (number, member) in self.members.iter().enumerate() {
                if member.is_responsive() {
                    let status = ["--command-timeout", "2s", "endpoint", "status", "-w", "json"];
                    if let Ok(status) = member.ctl(&status).await {
                        statuses.push((number, parse_status(&status)?));
                    }
                }
            }
            let leader =
                statuses.iter().find(|(_, status)| status.leader == status.header.member_id);
            let (number, leader) = leader.ok_or_else(|| io::Error::other("no member leads"))?;
            // A replaced leader may still claim to lead, so a majority must agree.
            let agree = statuses.iter().filter(|(_, status)| status.leader == leader.leader);
            if agree.count() > self.members.len() / 2 {
                return Ok(*number);
            }
            Err(io::Error::other("no majority has this leader"))
        })
        .await
    }

    /// Returns the store's URL: `etcd://HOST:PORT,…`, or `etcds` for TLS connections.
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
    /// Zero or absent if there is no leader.
    #[serde(default)]
    leader: u64,
}

#[derive(Deserialize)]
struct Header {
    member_id: u64,
}

fn parse_status(output: &str) -> io::Result<Status> {
    let endpoints: Vec<Endpoint> = serde_json::from_str(output).map_err(io::Error::other)?;
    endpoints
        .into_iter()
        .next()
        .map(|endpoint| endpoint.status)
        .ok_or_else(|| io::Error::other("etcdctl printed no endpoint status"))
}
