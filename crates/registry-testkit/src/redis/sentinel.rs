//! A master, its replicas, and the sentinels that promote a replica if the master fails.

use std::io;
use std::net::SocketAddr;

use super::options::RedisOptions;
use super::quorum::url;
use super::reply::RedisReply;
use super::server::RedisServer;
use crate::retry::retry;

/// The name of the master in the sentinels' configuration.
const NAME: &str = "mymaster";
const REPLICAS: usize = 2;
const SENTINELS: usize = 3;
/// The number of sentinels that must consider the master down.
const QUORUM: usize = 2;

/// The options of a [`SentinelSetup`].
#[derive(Debug, Clone, Default)]
pub struct SentinelOptions {
    servers: RedisOptions,
    sentinels: RedisOptions,
    sentinel_lines: Vec<String>,
}

impl SentinelOptions {
    /// Creates the default options, without logins.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the options of the master and its replicas. The sentinels and the replicas connect to
    /// them with the [login](RedisOptions::login) of `options`. If the servers use TLS, the
    /// sentinels use it as well.
    #[must_use]
    pub fn servers(mut self, options: RedisOptions) -> Self {
        self.servers = options;
        self
    }

    /// Makes the sentinels require this login.
    #[must_use]
    pub fn sentinel_login(mut self, user: &str, password: &str) -> Self {
        self.sentinels = self.sentinels.login(user, password);
        self
    }

    /// Adds a line to the sentinels' configuration, such as
    /// `sentinel failover-timeout mymaster 60000`.
    #[must_use]
    pub fn sentinel_line(mut self, line: &str) -> Self {
        self.sentinel_lines.push(line.to_owned());
        self
    }

    /// Returns the options of a sentinel, with its initial configuration.
    fn sentinel(&self, master: SocketAddr) -> RedisOptions {
        let (host, port) = (master.ip(), master.port());
        let mut lines = vec![
            format!("sentinel monitor {NAME} {host} {port} {QUORUM}"),
            format!("sentinel down-after-milliseconds {NAME} 1000"),
            format!("sentinel failover-timeout {NAME} 3000"),
            format!("sentinel parallel-syncs {NAME} 1"),
        ];
        if let Some((user, password)) = &self.servers.store.login {
            lines.push(format!("sentinel auth-user {NAME} {user}"));
            lines.push(format!("sentinel auth-pass {NAME} {password}"));
        }
        if let Some((user, password)) = &self.sentinels.store.login {
            if user != "default" {
                lines.push(format!("sentinel sentinel-user {user}"));
            }
            lines.push(format!("sentinel sentinel-pass {password}"));
        }
        lines.extend(self.sentinel_lines.iter().cloned());
        let mut options = self.sentinels.clone();
        options.program.clone_from(&self.servers.program);
        options.tls.clone_from(&self.servers.tls);
        options.store.sentinel = Some(lines.join("\n"));
        options
    }

    /// Returns the options of a server that may be a master or a replica.
    fn server(&self) -> RedisOptions {
        let mut options = self.servers.clone();
        // By default, a master waits five seconds for further replicas before it synchronizes the
        // first one. Until then, a failover would find no replica.
        let mut args = vec!["--repl-diskless-sync-delay".to_owned(), "0".to_owned()];
        if let Some((user, password)) = &options.store.login {
            let login = ["--masteruser", user, "--masterauth", password];
            args.extend(login.map(ToOwned::to_owned));
        }
        args.append(&mut options.args);
        options.args = args;
        options
    }
}

/// One master, two replicas and three sentinels. Dropping this handle kills all of them.
///
/// The sentinels consider a master down after one second. The methods query only servers and
/// sentinels that are neither down nor paused. Exception: [`Self::cut_replica_links`] and
/// [`Self::isolate_replicas`] need a master that responds.
#[derive(Debug)]
pub struct SentinelSetup {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl SentinelSetup {
    /// Starts all processes. Returns once all sentinels know each other, the master and both
    /// replicas, and the replicas are synchronized.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(&SentinelOptions::new()).await
    }

    /// Like [`start`](Self::start), with options.
    pub async fn start_with(options: &SentinelOptions) -> io::Result<Self> {
        let master = RedisServer::start_with(options.server()).await?;
        let addr = master.addr();
        let mut servers = vec![master];
        for _ in 0..REPLICAS {
            let port = addr.port().to_string();
            let replica = options.server().args(&["--replicaof", "127.0.0.1", &port]);
            servers.push(RedisServer::launch_with(replica)?);
        }
        for replica in &mut servers[1..] {
            replica.wait_until_serving().await?;
        }
        let mut setup = Self { servers, sentinels: Vec::new() };
        // The sentinels start last, because a sentinel asks the master for its replicas at once and
        // then only every ten seconds.
        retry("the replicas are synchronized", || setup.check_replicas_online(addr)).await?;
        for _ in 0..SENTINELS {
            setup.sentinels.push(RedisServer::launch_with(options.sentinel(addr))?);
        }
        for sentinel in &mut setup.sentinels {
            sentinel.wait_until_serving().await?;
        }
        setup.wait_until_consistent().await?;
        Ok(setup)
    }

    /// Returns `redis+sentinel://HOST:PORT,HOST:PORT,HOST:PORT/mymaster`, without logins; the
    /// scheme is `rediss+sentinel` for TLS connections.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}/{NAME}", url("sentinel", &self.sentinels))
    }

    /// Returns the address of the master, according to a sentinel.
    pub async fn master(&self) -> io::Result<SocketAddr> {
        match self.sentinels.iter().find(|sentinel| sentinel.is_responsive()) {
            Some(sentinel) => query_master(sentinel).await,
            None => Err(io::Error::other("no sentinel responds")),
        }
    }

    /// Returns the addresses of the servers that report that they are replicas.
    pub async fn replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let mut replicas = Vec::new();
        for server in self.servers.iter().filter(|server| server.is_responsive()) {
            if query_role(server).await? == "slave" {
                replicas.push(server.addr());
            }
        }
        Ok(replicas)
    }

    /// Returns the master or replica at `addr`.
    ///
    /// # Panics
    /// Panics if the setup never had such a server.
    #[must_use]
    pub fn server(&self, addr: SocketAddr) -> &RedisServer {
        let mut servers = self.servers.iter();
        servers.find(|server| server.addr() == addr).expect("one of the setup's servers")
    }

    /// Returns the server at `addr`, to kill it and start it again.
    ///
    /// # Panics
    /// Panics if the setup never had such a server.
    #[must_use]
    pub fn server_mut(&mut self, addr: SocketAddr) -> &mut RedisServer {
        let mut servers = self.servers.iter_mut();
        servers.find(|server| server.addr() == addr).expect("one of the setup's servers")
    }

    /// Returns the master and the replicas. Their order does not depend on their present roles.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// Returns the sentinels, in the order of the URL.
    #[must_use]
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// Returns the sentinels, to kill them and start them again.
    #[must_use]
    pub fn sentinels_mut(&mut self) -> &mut [RedisServer] {
        &mut self.sentinels
    }

    /// Makes the sentinels replace a healthy master, and returns the address of the new one. The
    /// old master continues as a master for about ten seconds, until the sentinels reconfigure it.
    pub async fn failover(&self) -> io::Result<SocketAddr> {
        let old = self.master().await?;
        retry("a failover begins", || self.request_failover()).await?;
        self.wait_for_new_master(old).await
    }

    /// Requests a failover. A sentinel refuses until it considers a replica suitable.
    async fn request_failover(&self) -> io::Result<()> {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.is_responsive());
        let sentinel = sentinel.ok_or_else(|| io::Error::other("no sentinel responds"))?;
        sentinel.send_command_args(&["SENTINEL", "FAILOVER", NAME]).await?.into_result()?;
        Ok(())
    }

    /// Kills the master and returns its address.
    pub async fn kill_master(&mut self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        self.server_mut(master).kill();
        Ok(master)
    }

    /// Stops the master (SIGSTOP) and returns its address, for [`resume`](Self::resume).
    pub async fn pause_master(&self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        self.server(master).pause()?;
        Ok(master)
    }

    /// Resumes the paused server at `addr`.
    ///
    /// # Panics
    /// Panics if the setup never had such a server.
    pub fn resume(&self, addr: SocketAddr) -> io::Result<()> {
        self.server(addr).resume()
    }

    /// Pauses the replicas so that no later write of the master reaches them, and returns their
    /// addresses. To lose exactly these writes: write, [kill the master](Self::kill_master),
    /// [resume the replicas](Self::resume_all_except), and [wait for the new
    /// master](Self::wait_for_new_master).
    pub async fn isolate_replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.pause_replicas().await?;
        self.cut_replica_links().await?;
        Ok(replicas)
    }

    /// Stops the replicas (SIGSTOP) and returns their addresses. Later writes of the master still
    /// queue in the replicas' sockets; see [`isolate_replicas`](Self::isolate_replicas).
    pub async fn pause_replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.replicas().await?;
        for &replica in &replicas {
            self.server(replica).pause()?;
        }
        Ok(replicas)
    }

    /// Closes the connections of the replicas to the master and discards all data in transit.
    /// Replicas that are not paused reconnect.
    pub async fn cut_replica_links(&self) -> io::Result<()> {
        let master = self.master().await?;
        self.server(master).client_kill("replica").await?;
        Ok(())
    }

    /// Resumes all paused servers except the master `old`.
    pub fn resume_all_except(&self, old: SocketAddr) -> io::Result<()> {
        let others = self.servers.iter().filter(|server| server.addr() != old);
        others.filter(|server| server.is_paused()).try_for_each(|server| server.resume())
    }

    /// Waits until all responding sentinels name the same master other than `old`, and that server
    /// reports that it is a master. Returns its address.
    pub async fn wait_for_new_master(&self, old: SocketAddr) -> io::Result<SocketAddr> {
        retry("all nodes know a new master", || async {
            require_new_master(old, self.confirmed_master().await?)
        })
        .await
    }

    /// Waits until all running sentinels and servers are consistent. The sentinels agree on the
    /// master and know each other. All other servers are synchronized replicas. After a failover
    /// this takes ten to twenty seconds, because sentinels wait that long before they turn the old
    /// master into a replica.
    pub async fn wait_until_consistent(&self) -> io::Result<()> {
        retry("sentinels and servers agree", || self.check_consistency()).await
    }

    /// Returns the master if all responding sentinels agree on it and it reports that role.
    async fn confirmed_master(&self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.is_responsive()) {
            let named = query_master(sentinel).await?;
            if named != master {
                return Err(io::Error::other(format!(
                    "one sentinel names {master}, another {named}"
                )));
            }
        }
        if !self.server(master).is_responsive() {
            return Err(io::Error::other(format!("{master} does not answer")));
        }
        match &*query_role(self.server(master)).await? {
            "master" => Ok(master),
            other => Err(io::Error::other(format!("{master} reports the role {other}"))),
        }
    }

    async fn check_replicas_online(&self, master: SocketAddr) -> io::Result<()> {
        let expected = self.servers.iter().filter(|server| server.is_responsive()).count() - 1;
        let online = self.server(master).replicas_online().await?;
        if online != expected {
            return Err(io::Error::other(format!("{online} of {expected} replicas are online")));
        }
        Ok(())
    }

    async fn check_consistency(&self) -> io::Result<()> {
        let master = self.confirmed_master().await?;
        self.check_replicas_online(master).await?;
        let up = self.servers.iter().filter(|server| server.is_responsive()).count();
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.is_responsive()) {
            let known =
                sentinel.send_command_args(&["SENTINEL", "MASTER", NAME]).await?.into_result()?;
            let number = |name| known.field(name)?.parse::<usize>().ok();
            let others = number("num-other-sentinels");
            if others != Some(SENTINELS - 1) || known.field("flags").as_deref() != Some("master") {
                return Err(io::Error::other(format!("a sentinel knows only this: {known:?}")));
            }
            let replicas =
                sentinel.send_command_args(&["SENTINEL", "REPLICAS", NAME]).await?.into_result()?;
            let is_healthy = |replica: &&RedisReply| {
                replica.field("flags").as_deref() == Some("slave")
                    && replica.field("master-link-status").as_deref() == Some("ok")
            };
            if replicas.items().iter().filter(is_healthy).count() + 1 != up {
                return Err(io::Error::other(format!(
                    "a sentinel knows only these replicas: {replicas:?}"
                )));
            }
        }
        Ok(())
    }
}

/// Returns `master`, or an error if it is still `old`.
pub(super) fn require_new_master(old: SocketAddr, master: SocketAddr) -> io::Result<SocketAddr> {
    if master == old { Err(io::Error::other("it is still the old master")) } else { Ok(master) }
}

/// Returns the address of the master according to this sentinel.
async fn query_master(sentinel: &RedisServer) -> io::Result<SocketAddr> {
    let command = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
    let answer = sentinel.send_command_args(&command).await?.into_result()?;
    let words: Vec<String> = answer.items().iter().filter_map(RedisReply::text).collect();
    words.join(":").parse().map_err(|_| io::Error::other(format!("a sentinel names {words:?}")))
}

/// Returns the role of a server: `master` or `slave`.
async fn query_role(server: &RedisServer) -> io::Result<String> {
    let role = server.send_command_args(&["ROLE"]).await?.into_result()?;
    role.items()
        .first()
        .and_then(RedisReply::text)
        .ok_or_else(|| io::Error::other(format!("{role:?}")))
}
