//! Checks the servers' settings for hazards, and reads the clock and the process id of quorum
//! masters.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use registry_core::{BackendError, Finding};

use crate::link::Node;
use crate::store::{Store, millis, read, unreadable};

impl Store {
    /// Checks all servers.
    pub(crate) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let nodes = self.link.nodes().await?;
        let looks = join_all(nodes.iter().map(|node| self.look_at(node))).await;
        let mut findings = Vec::new();
        for (node, found) in nodes.iter().zip(looks) {
            findings.extend(found?.into_iter().map(|mut finding| {
                if nodes.len() > 1 || !self.is_alone() {
                    finding.message = format!("{}: {}", node.name(), finding.message);
                }
                finding
            }));
        }
        Ok(findings)
    }

    async fn look_at(&self, node: &Arc<Node>) -> Result<Vec<Finding>, BackendError> {
        let mut findings = Vec::new();
        let info: String = self.info(node, "everything").await?;
        let value = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        if let Some(version) = value("redis_version") {
            findings.push(Finding::note(format!(
                "{} {version}, {}",
                if value("valkey_version").is_some() { "Valkey as Redis" } else { "Redis" },
                value("role").unwrap_or("role unknown"),
            )));
            let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
            if major.is_some_and(|major| major < VERSION_MIN) {
                findings.push(Finding::warning(format!(
                    "this version is older than {VERSION_MIN} and not tested; update the server"
                )));
            }
        }
        if value("role").is_some_and(|role| role != "master") {
            findings.push(Finding::warning(
                "this server is a replica; locks can be taken on a master only",
            ));
        }
        if let Some(policy) = value("maxmemory_policy")
            && policy != "noeviction"
        {
            findings.push(Finding::warning(format!(
                "maxmemory-policy is {policy}: when memory runs short the server may drop locks that are held; set \
                 maxmemory-policy noeviction"
            )));
        }
        if value("aof_enabled") == Some("0") {
            findings.push(Finding::warning(
                "the server keeps no file of its writes: a restart frees all locks; set appendonly yes and appendfsync always",
            ));
        } else if let Some(fsync) = self.setting(node, "appendfsync").await
            && fsync != "always"
        {
            findings.push(Finding::warning(format!(
                "appendfsync is {fsync}: a power failure may free locks of the last moments; set appendfsync always"
            )));
        }
        if value("connected_slaves").is_some_and(|replicas| replicas != "0")
            && self.setting(node, "min-replicas-to-write").await.is_some_and(|least| least == "0")
        {
            findings.push(Finding::warning(
                "the server has replicas and accepts writes without them (min-replicas-to-write 0): a failover may free locks that \
                 are held",
            ));
        }
        let probe = redis::cmd("PUBLISH").arg(self.names.probe()).arg("0").to_owned();
        let published = self.link.ask(node, &probe).await;
        if published.is_err() {
            findings.push(Finding::warning(
                "this user may not use the channels of the locks: releases wake nobody, and waiters look by themselves; give it the \
                 channels by &NAMESPACE:*",
            ));
        }
        Ok(findings)
    }

    /// Returns a server setting; `None` if this user may not read it, as on most managed servers.
    async fn setting(&self, node: &Arc<Node>, name: &str) -> Option<String> {
        let command = redis::cmd("CONFIG").arg("GET").arg(name).to_owned();
        let answer: Vec<(String, String)> = read(self.link.ask(node, &command).await.ok()?).ok()?;
        answer.into_iter().next().map(|(_, value)| value)
    }

    async fn info(&self, node: &Arc<Node>, section: &str) -> Result<String, BackendError> {
        read(self.link.ask(node, &redis::cmd("INFO").arg(section).to_owned()).await?)
    }

    /// Returns how many microseconds a single server's clock is ahead of the local clock. Useful
    /// only for comparing servers with each other.
    pub(crate) async fn clock(&self) -> Result<i64, BackendError> {
        let ours = || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
        };
        let Some(node) = self.link.known(0) else {
            return Err(BackendError::transient("redis: no server"));
        };
        let before = ours();
        let answer = self.link.ask(&node, &redis::cmd("TIME")).await?;
        let after = ours();
        let (seconds, micros): (i64, i64) = read(answer)?;
        Ok(seconds * 1_000_000 + micros - (before + (after - before) / 2))
    }

    /// Returns the id of a single server's process, which changes at each start.
    pub(crate) async fn run_id(&self) -> Result<String, BackendError> {
        let Some(node) = self.link.known(0) else {
            return Err(BackendError::transient("redis: no server"));
        };
        let info = self.info(&node, "server").await?;
        let id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
        id.map(|id| id.trim().to_owned()).ok_or_else(unreadable)
    }

    /// Returns for how long another client has observed the process `run_id` of a single server, at
    /// minimum.
    pub(crate) async fn vouched(&self, run_id: &str) -> Result<Duration, BackendError> {
        let Some(node) = self.link.known(0) else { return Ok(Duration::ZERO) };
        let command = redis::cmd("GETEX").arg(self.names.age()).to_owned();
        let text: Option<String> = read(self.link.ask(&node, &command).await?)?;
        let millis = text.as_deref().and_then(|text| {
            let (id, millis) = text.split_once(' ')?;
            millis.parse().ok().filter(|_| id == run_id)
        });
        Ok(Duration::from_millis(millis.unwrap_or(0)))
    }

    /// Stores that this client has observed the process `run_id` of a single server for `age`.
    pub(crate) async fn vouch(&self, run_id: &str, age: Duration) -> Result<(), BackendError> {
        let Some(node) = self.link.known(0) else { return Ok(()) };
        let says = format!("{run_id} {}", age.as_millis());
        let mut command = redis::cmd("SET");
        command.arg(self.names.age()).arg(says).arg("PX").arg(millis(self.token_memory));
        self.link.ask(&node, &command).await.map(drop)
    }
}

/// The oldest version that is tested to support the scripts.
const VERSION_MIN: u32 = 7;
