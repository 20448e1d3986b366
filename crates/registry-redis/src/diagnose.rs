//! What is set up wrong in the server, or soon will be.

use registry_core::{BackendError, Finding};

use crate::backend::RedisBackend;

impl RedisBackend {
    pub(crate) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = Vec::new();
        let info: String = self.link.ask(redis::cmd("INFO").arg("everything")).await?;
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
        } else if let Some(fsync) = self.setting("appendfsync").await
            && fsync != "always"
        {
            findings.push(Finding::warning(format!(
                "appendfsync is {fsync}: a power failure may free locks of the last moments; set appendfsync always"
            )));
        }
        if value("connected_slaves").is_some_and(|replicas| replicas != "0")
            && self.setting("min-replicas-to-write").await.is_some_and(|least| least == "0")
        {
            findings.push(Finding::warning(
                "the server has replicas and accepts writes without them (min-replicas-to-write 0): a failover may free locks that \
                 are held",
            ));
        }
        let published: Result<i64, _> =
            self.link.ask(redis::cmd("PUBLISH").arg(self.names.probe()).arg("0")).await;
        if published.is_err() {
            findings.push(Finding::warning(
                "this user may not use the channels of the locks: releases wake nobody, and waiters look by themselves; give it the \
                 channels by &NAMESPACE:*",
            ));
        }
        Ok(findings)
    }

    /// A setting of the server; `None` where this user may not ask, as on most managed servers.
    async fn setting(&self, name: &str) -> Option<String> {
        let command = redis::cmd("CONFIG").arg("GET").arg(name).to_owned();
        let (_, value): (String, String) = self.link.ask(&command).await.ok()?;
        Some(value)
    }
}

/// The oldest version that is known to do what the scripts ask.
const VERSION_MIN: u32 = 7;
