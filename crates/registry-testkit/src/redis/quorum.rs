//! Several independent servers, for locks that need a majority of them.

use std::io;

use super::options::RedisOptions;
use super::server::RedisServer;

/// Independent masters. Dropping this handle kills them.
#[derive(Debug)]
pub struct RedisQuorum {
    servers: Vec<RedisServer>,
}

impl RedisQuorum {
    /// Starts this number of masters and waits until they serve.
    pub async fn start(servers: usize) -> io::Result<Self> {
        Self::start_with(servers, &RedisOptions::new()).await
    }

    /// Like [`start`](Self::start), with the same `options` for each server.
    pub async fn start_with(servers: usize, options: &RedisOptions) -> io::Result<Self> {
        let launch = |_| RedisServer::launch_with(options.clone());
        let mut servers = (0..servers).map(launch).collect::<io::Result<Vec<_>>>()?;
        for server in &mut servers {
            server.wait_until_serving().await?;
        }
        Ok(Self { servers })
    }

    /// Returns `redis+quorum://HOST:PORT,HOST:PORT,…`, without a login; the scheme is
    /// `rediss+quorum` for TLS connections.
    #[must_use]
    pub fn url(&self) -> String {
        url("quorum", &self.servers)
    }

    /// Returns the servers, in the order of the URL.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// Returns the servers, to kill them and start them again.
    #[must_use]
    pub fn servers_mut(&mut self) -> &mut [RedisServer] {
        &mut self.servers
    }
}

/// Returns the URL of several servers of one kind.
pub(super) fn url<'a>(
    kind: &str,
    servers: impl IntoIterator<Item = &'a RedisServer> + Clone,
) -> String {
    let scheme = servers.clone().into_iter().next().map_or("redis", RedisServer::scheme);
    let addresses = servers.into_iter().map(|server| server.addr().to_string());
    format!("{scheme}+{kind}://{}", addresses.collect::<Vec<_>>().join(","))
}
