//! A master, its replicas, and the sentinels that choose another master when it is gone.

use std::io;
use std::net::SocketAddr;

use super::options::ServerOptions;
use super::quorum::url;
use super::reply::Reply;
use super::server::RedisServer;
use super::waiting::{Waiting, not_yet};
use crate::ports::Port;

/// Under which name the sentinels know the master.
const NAME: &str = "mymaster";
const REPLICAS: usize = 2;
const SENTINELS: usize = 3;
/// How many sentinels must miss the master.
const QUORUM: usize = 2;

/// How a [`SentinelSetup`] is to be started.
#[derive(Debug, Clone, Default)]
pub struct SentinelOptions {
    servers: ServerOptions,
    sentinels: ServerOptions,
    sentinel_lines: Vec<String>,
}

impl SentinelOptions {
    /// Open to everybody, with the defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Options of the master and its replicas. Their [login](ServerOptions::login) is told to the sentinels and to the replicas; that
    /// they encrypt holds for the sentinels as well.
    #[must_use]
    pub fn servers(mut self, options: ServerOptions) -> Self {
        self.servers = options;
        self
    }

    /// A login without which the sentinels answer nobody.
    #[must_use]
    pub fn sentinel_login(mut self, user: &str, password: &str) -> Self {
        self.sentinels = self.sentinels.login(user, password);
        self
    }

    /// Adds a line to the configuration of the sentinels, such as `sentinel failover-timeout mymaster 60000`.
    #[must_use]
    pub fn sentinel_line(mut self, line: &str) -> Self {
        self.sentinel_lines.push(line.to_owned());
        self
    }

    /// What a sentinel is told at first.
    fn sentinel(&self, master: SocketAddr) -> ServerOptions {
        let (host, port) = (master.ip(), master.port());
        let mut lines = vec![
            format!("sentinel monitor {NAME} {host} {port} {QUORUM}"),
            format!("sentinel down-after-milliseconds {NAME} 1000"),
            format!("sentinel failover-timeout {NAME} 3000"),
            format!("sentinel parallel-syncs {NAME} 1"),
        ];
        if let Some((user, password)) = &self.servers.login {
            lines.push(format!("sentinel auth-user {NAME} {user}"));
            lines.push(format!("sentinel auth-pass {NAME} {password}"));
        }
        if let Some((user, password)) = &self.sentinels.login {
            if user != "default" {
                lines.push(format!("sentinel sentinel-user {user}"));
            }
            lines.push(format!("sentinel sentinel-pass {password}"));
        }
        lines.extend(self.sentinel_lines.iter().cloned());
        let mut options = self.sentinels.clone();
        options.program.clone_from(&self.servers.program);
        options.tls.clone_from(&self.servers.tls);
        options.sentinel = Some(lines.join("\n"));
        options
    }

    /// A master that may become a replica at any time.
    fn server(&self) -> ServerOptions {
        let mut options = self.servers.clone();
        // By default a master waits five seconds for other replicas before it serves the first; until then a failover would
        // find none.
        let mut args = vec!["--repl-diskless-sync-delay".to_owned(), "0".to_owned()];
        if let Some((user, password)) = &options.login {
            let login = ["--masteruser", user, "--masterauth", password];
            args.extend(login.map(ToOwned::to_owned));
        }
        args.append(&mut options.args);
        options.args = args;
        options
    }
}

/// One master, two replicas and three sentinels. All of them are killed with this handle.
///
/// A master is missed after one second. What is asked here is asked only of servers and sentinels that are neither down nor paused.
#[derive(Debug)]
pub struct SentinelSetup {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl SentinelSetup {
    /// Starts them all, and returns when all sentinels know each other, the master, and both replicas, which are in step.
    ///
    /// # Errors
    /// As for [`RedisServer::start`], or that they do not find each other in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills them all.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(&SentinelOptions::new()).await
    }

    /// As [`start`](Self::start), with options.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills them all.
    pub async fn start_with(options: &SentinelOptions) -> io::Result<Self> {
        let master = RedisServer::start_with(options.server()).await?;
        let addr = master.addr();
        let mut servers = vec![master];
        for _ in 0..REPLICAS {
            let port = addr.port().to_string();
            let replica = options.server().args(&["--replicaof", "127.0.0.1", &port]);
            servers.push(RedisServer::launch(Port::reserve()?, replica)?);
        }
        for replica in &mut servers[1..] {
            replica.ready().await?;
        }
        let mut setup = Self { servers, sentinels: Vec::new() };
        // A sentinel that comes too early learns of the replicas only ten seconds later.
        let waiting = Waiting::new("the replicas are in step");
        while let Err(why) = setup.look_at_replicas(addr).await {
            waiting.again(why).await?;
        }
        for _ in 0..SENTINELS {
            setup.sentinels.push(RedisServer::launch(Port::reserve()?, options.sentinel(addr))?);
        }
        for sentinel in &mut setup.sentinels {
            sentinel.ready().await?;
        }
        setup.settle().await?;
        Ok(setup)
    }

    /// `redis+sentinel://HOST:PORT,HOST:PORT,HOST:PORT/mymaster`, without logins; `rediss` for encrypted connections.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}/{NAME}", url("sentinel", &self.sentinels))
    }

    /// Where the master is, as a sentinel says.
    ///
    /// # Errors
    /// When no sentinel answers.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn master(&self) -> io::Result<SocketAddr> {
        match self.sentinels.iter().find(|sentinel| sentinel.answers()) {
            Some(sentinel) => named_master(sentinel).await,
            None => Err(not_yet("no sentinel is left")),
        }
    }

    /// Where the servers are that say that they are replicas.
    ///
    /// # Errors
    /// The connections'.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let mut replicas = Vec::new();
        for server in self.servers.iter().filter(|server| server.answers()) {
            if role(server).await? == "slave" {
                replicas.push(server.addr());
            }
        }
        Ok(replicas)
    }

    /// The server at `addr`: master or replica.
    ///
    /// # Panics
    /// When there never was one.
    #[must_use]
    pub fn server(&self, addr: SocketAddr) -> &RedisServer {
        let mut servers = self.servers.iter();
        servers.find(|server| server.addr() == addr).expect("one of the setup's servers")
    }

    /// The server at `addr`, to be killed and started again.
    ///
    /// # Panics
    /// When there never was one.
    #[must_use]
    pub fn server_mut(&mut self, addr: SocketAddr) -> &mut RedisServer {
        let mut servers = self.servers.iter_mut();
        servers.find(|server| server.addr() == addr).expect("one of the setup's servers")
    }

    /// The master and the replicas, whichever is which by now.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The sentinels, in the order in which the URL names them.
    #[must_use]
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The sentinels, to be killed and started again.
    #[must_use]
    pub fn sentinels_mut(&mut self) -> &mut [RedisServer] {
        &mut self.sentinels
    }

    /// Lets the sentinels choose another master while the present one is well, and returns where the new one is. The old one
    /// goes on as a master for some ten seconds, until they tell it.
    ///
    /// # Errors
    /// When no replica could take over in time.
    ///
    /// # Cancel safety
    /// The failover may take place or not.
    pub async fn failover(&self) -> io::Result<SocketAddr> {
        let old = self.master().await?;
        let waiting = Waiting::new("a failover begins");
        while let Err(why) = self.ask_for_failover().await {
            waiting.again(why).await?;
        }
        self.wait_for_new_master(old).await
    }

    /// A sentinel that is not sure of a replica yet refuses.
    async fn ask_for_failover(&self) -> io::Result<()> {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.answers());
        let sentinel = sentinel.ok_or_else(|| not_yet("no sentinel is left"))?;
        sentinel.ask_args(&["SENTINEL", "FAILOVER", NAME]).await?.granted()?;
        Ok(())
    }

    /// Kills the master, and returns where it was.
    ///
    /// # Errors
    /// When no sentinel answers.
    ///
    /// # Cancel safety
    /// Until the future is done, the master lives.
    pub async fn kill_master(&mut self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        self.server_mut(master).kill();
        Ok(master)
    }

    /// Stops the master in its tracks, and returns where it is, for [`resume`](Self::resume).
    ///
    /// # Errors
    /// When no sentinel answers, or the master is down.
    ///
    /// # Cancel safety
    /// Until the future is done, the master goes on.
    pub async fn pause_master(&self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        self.server(master).pause()?;
        Ok(master)
    }

    /// Lets the paused server at `addr` go on.
    ///
    /// # Errors
    /// When it is down.
    ///
    /// # Panics
    /// When there never was one.
    pub fn resume(&self, addr: SocketAddr) -> io::Result<()> {
        self.server(addr).resume()
    }

    /// Makes sure that nothing that the master accepts from now on reaches a replica, and returns where the replicas are. To lose
    /// exactly these writes: write, [kill the master](Self::kill_master), [resume the replicas](Self::resume_replicas), and
    /// [wait for the new master](Self::wait_for_new_master).
    ///
    /// # Errors
    /// The connections', or that a replica is down.
    ///
    /// # Cancel safety
    /// Some of the replicas may be paused afterwards.
    pub async fn isolate_replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.pause_replicas().await?;
        self.cut_replica_links().await?;
        Ok(replicas)
    }

    /// Stops the replicas in their tracks, and returns where they are. What the master writes now still waits for them in their
    /// sockets; see [`isolate_replicas`](Self::isolate_replicas).
    ///
    /// # Errors
    /// The connections'.
    ///
    /// # Cancel safety
    /// Some of the replicas may be paused afterwards.
    pub async fn pause_replicas(&self) -> io::Result<Vec<SocketAddr>> {
        let replicas = self.replicas().await?;
        for &replica in &replicas {
            self.server(replica).pause()?;
        }
        Ok(replicas)
    }

    /// Cuts the connections of the replicas to the master, and with them all that was on its way. Replicas that are not paused
    /// connect again.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Cancel safety
    /// The connections may be cut or not.
    pub async fn cut_replica_links(&self) -> io::Result<()> {
        let master = self.master().await?;
        self.server(master).client_kill("replica").await?;
        Ok(())
    }

    /// Lets all paused servers go on that are not the master `old`.
    ///
    /// # Errors
    /// The operating system's.
    pub fn resume_replicas(&self, old: SocketAddr) -> io::Result<()> {
        let others = self.servers.iter().filter(|server| server.addr() != old);
        others.filter(|server| server.is_paused()).try_for_each(RedisServer::resume)
    }

    /// Waits until all sentinels that answer name another master than `old`, and it says that it is one. Returns where it is.
    ///
    /// # Errors
    /// When this does not happen in time.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn wait_for_new_master(&self, old: SocketAddr) -> io::Result<SocketAddr> {
        let waiting = Waiting::new("there is a new master");
        loop {
            match self.look_at_master().await {
                Ok(master) if master != old => return Ok(master),
                Ok(_) => waiting.again(not_yet("it is still the old one")).await?,
                Err(why) => waiting.again(why).await?,
            }
        }
    }

    /// Waits until all is as at the start, as far as servers and sentinels are up: the sentinels agree on the master and have found each
    /// other, and all others are replicas in step. After a failover this takes ten to twenty seconds: sentinels wait for so long
    /// before they make a replica of the old master.
    ///
    /// # Errors
    /// When this does not happen in time.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn settle(&self) -> io::Result<()> {
        let waiting = Waiting::new("sentinels and servers agree");
        while let Err(why) = self.look_at_all().await {
            waiting.again(why).await?;
        }
        Ok(())
    }

    /// The master on which all agree.
    async fn look_at_master(&self) -> io::Result<SocketAddr> {
        let master = self.master().await?;
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.answers()) {
            let named = named_master(sentinel).await?;
            if named != master {
                return Err(not_yet(format!("one sentinel names {master}, another {named}")));
            }
        }
        if !self.server(master).answers() {
            return Err(not_yet(format!("{master} does not answer")));
        }
        match &*role(self.server(master)).await? {
            "master" => Ok(master),
            other => Err(not_yet(format!("{master} says that it is a {other}"))),
        }
    }

    async fn look_at_replicas(&self, master: SocketAddr) -> io::Result<()> {
        let expected = self.servers.iter().filter(|server| server.answers()).count() - 1;
        let online = self.server(master).replicas_online().await?;
        if online != expected {
            return Err(not_yet(format!("{online} of {expected} replicas are online")));
        }
        Ok(())
    }

    async fn look_at_all(&self) -> io::Result<()> {
        let master = self.look_at_master().await?;
        self.look_at_replicas(master).await?;
        let up = self.servers.iter().filter(|server| server.answers()).count();
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.answers()) {
            let known = sentinel.ask_args(&["SENTINEL", "MASTER", NAME]).await?.granted()?;
            let number = |name| known.field(name)?.parse::<usize>().ok();
            let others = number("num-other-sentinels");
            if others != Some(SENTINELS - 1) || known.field("flags").as_deref() != Some("master") {
                return Err(not_yet(format!("a sentinel knows only this: {known:?}")));
            }
            let replicas = sentinel.ask_args(&["SENTINEL", "REPLICAS", NAME]).await?.granted()?;
            let well = |replica: &&Reply| {
                replica.field("flags").as_deref() == Some("slave")
                    && replica.field("master-link-status").as_deref() == Some("ok")
            };
            if replicas.items().iter().filter(well).count() + 1 != up {
                return Err(not_yet(format!("a sentinel knows only these replicas: {replicas:?}")));
            }
        }
        Ok(())
    }
}

/// Where this sentinel thinks that the master is.
async fn named_master(sentinel: &RedisServer) -> io::Result<SocketAddr> {
    let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
    let answer = sentinel.ask_args(&question).await?.granted()?;
    let words: Vec<String> = answer.items().iter().filter_map(Reply::text).collect();
    words.join(":").parse().map_err(|_| not_yet(format!("a sentinel names {words:?}")))
}

/// `master` or `slave`.
async fn role(server: &RedisServer) -> io::Result<String> {
    let role = server.ask_args(&["ROLE"]).await?.granted()?;
    role.items().first().and_then(Reply::text).ok_or_else(|| not_yet(format!("{role:?}")))
}
