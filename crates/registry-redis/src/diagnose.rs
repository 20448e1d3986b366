//! Checks the servers' settings for hazards. Reads the clock and the `run_id` of quorum masters.
//! Loads and stores their process ages.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use registry_core::{BackendError, BackendErrorKind, Finding};

use crate::connections::RedisNode;
use crate::error::is_redirection;
use crate::store::{RedisStore, ceil_millis, parse_response, unexpected_response};

impl RedisStore {
    /// Checks the settings of all servers.
    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let nodes = self.connections.nodes().await?;
        let diagnoses = join_all(nodes.iter().map(|node| self.diagnose_node(node))).await;
        let mut findings = Vec::new();
        for (node, found) in nodes.iter().zip(diagnoses) {
            findings.extend(found?.into_iter().map(|mut finding| {
                if nodes.len() > 1 || !self.is_single_server() {
                    finding.message = format!("{}: {}", node.name(), finding.message);
                }
                finding
            }));
        }
        Ok(findings)
    }

    async fn diagnose_node(&self, node: &Arc<RedisNode>) -> Result<Vec<Finding>, BackendError> {
        let mut findings = Vec::new();
        let info: String = self.fetch_info(node, "everything").await?;
        let value = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        if let Some(version) = value("redis_version") {
            findings.push(Finding::note(format!(
                "{} {version}, {}",
                if value("valkey_version").is_some() {
                    "Valkey, compatible with Redis"
                } else {
                    "Redis"
                },
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
                "this server is a replica; locks can be acquired on a master only",
            ));
        }
        if let Some(policy) = value("maxmemory_policy")
            && policy != "noeviction"
        {
            findings.push(Finding::warning(format!(
                "maxmemory-policy is {policy}: the server may evict held locks when memory is short; set \
                 maxmemory-policy noeviction"
            )));
        }
        if value("aof_enabled") == Some("0") {
            findings.push(Finding::warning(
                "the server does not log its writes: a restart may free held locks; set appendonly yes and appendfsync always",
            ));
        } else if let Some(fsync) = self.fetch_setting(node, "appendfsync").await
            && fsync != "always"
        {
            findings.push(Finding::warning(format!(
                "appendfsync is {fsync}: a power failure may free the locks of the last seconds; set appendfsync always"
            )));
        }
        if value("connected_slaves").is_some_and(|replicas| replicas != "0")
            && self
                .fetch_setting(node, "min-replicas-to-write")
                .await
                .is_some_and(|value| value == "0")
        {
            findings.push(Finding::warning(
                "the server has replicas and accepts writes that no replica has received (min-replicas-to-write 0): a failover may free held locks; \
                 set min-replicas-to-write 1",
            ));
        }
        let publish =
            redis::cmd(self.publish_command).arg(self.names.probe_channel()).arg("0").to_owned();
        match self.connections.send_command(node, &publish).await {
            Err(error) if error.kind() == BackendErrorKind::Denied => {
                findings.push(Finding::warning(
                    "this user may not publish on the channels of the locks: releases wake no waiter, and waiters poll; grant the \
                     channels and commands that the book lists for this layout",
                ));
            }
            // The probe channel belongs to another server's slot. The redirection shows that this
            // server supports `SPUBLISH`.
            Err(error) if is_redirection(&error) => {}
            Err(error) if !error.is_retryable() => findings.push(Finding::warning(format!(
                "the server does not execute {}: releases wake no waiter, and waiters poll; set publish=plain",
                self.publish_command
            ))),
            _ => {}
        }
        Ok(findings)
    }

    /// Fetches a server setting. Returns `None` after any error, because most managed servers
    /// forbid `CONFIG`.
    async fn fetch_setting(&self, node: &Arc<RedisNode>, name: &str) -> Option<String> {
        let command = redis::cmd("CONFIG").arg("GET").arg(name).to_owned();
        let pairs: Vec<(String, String)> =
            parse_response(self.connections.send_command(node, &command).await.ok()?).ok()?;
        pairs.into_iter().next().map(|(_, value)| value)
    }

    async fn fetch_info(
        &self,
        node: &Arc<RedisNode>,
        section: &str,
    ) -> Result<String, BackendError> {
        parse_response(
            self.connections
                .send_command(node, &redis::cmd("INFO").arg(section).to_owned())
                .await?,
        )
    }

    /// Measures by how many microseconds the clock of a single server is ahead of the local clock.
    /// Callers compare these offsets between servers.
    pub(crate) async fn measure_clock_offset(&self) -> Result<i64, BackendError> {
        let local_time = || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
        };
        let Some(node) = self.connections.known_node(0) else {
            return Err(BackendError::transient(
                "redis: no server is known; check that the cluster is up",
            ));
        };
        let before = local_time();
        let response = self.connections.send_command(&node, &redis::cmd("TIME")).await?;
        let after = local_time();
        let (seconds, micros): (i64, i64) = parse_response(response)?;
        let local = before + (after - before) / 2;
        let server = seconds.checked_mul(1_000_000).and_then(|us| us.checked_add(micros));
        server.and_then(|us| us.checked_sub(local)).ok_or_else(unexpected_response)
    }

    /// Fetches the `run_id` of a single server. Each start of the server process changes the
    /// `run_id`.
    pub(crate) async fn fetch_run_id(&self) -> Result<String, BackendError> {
        let Some(node) = self.connections.known_node(0) else {
            return Err(BackendError::transient(
                "redis: no server is known; check that the cluster is up",
            ));
        };
        let info = self.fetch_info(&node, "server").await?;
        let id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
        id.map(|id| id.trim().to_owned()).ok_or_else(unexpected_response)
    }

    /// Loads the time for which a client has observed the process `run_id` of a single server.
    /// Returns zero if no time is stored for this `run_id`.
    pub(crate) async fn load_process_age(&self, run_id: &str) -> Result<Duration, BackendError> {
        let Some(node) = self.connections.known_node(0) else { return Ok(Duration::ZERO) };
        let command = redis::cmd("GETEX").arg(self.names.process_age_key()).to_owned();
        let text: Option<String> =
            parse_response(self.connections.send_command(&node, &command).await?)?;
        let age_ms = text.as_deref().and_then(|text| {
            let (id, age_ms) = text.split_once(' ')?;
            age_ms.parse().ok().filter(|_| id == run_id)
        });
        Ok(Duration::from_millis(age_ms.unwrap_or(0)))
    }

    /// Stores `age` on a single server as the minimum age of the process `run_id`. The stored age
    /// expires after `token_memory`.
    pub(crate) async fn save_process_age(
        &self,
        run_id: &str,
        age: Duration,
    ) -> Result<(), BackendError> {
        let Some(node) = self.connections.known_node(0) else { return Ok(()) };
        let value = format!("{run_id} {}", age.as_millis());
        let mut command = redis::cmd("SET");
        command
            .arg(self.names.process_age_key())
            .arg(value)
            .arg("PX")
            .arg(ceil_millis(self.token_memory));
        self.connections.send_command(&node, &command).await.map(drop)
    }
}

/// The oldest major version with which the scripts are tested.
const VERSION_MIN: u32 = 7;
