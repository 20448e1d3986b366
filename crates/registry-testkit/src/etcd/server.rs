//! One server: started, killed, paused, asked.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::options::EtcdOptions;
use crate::kept::{Kept, START_LIMIT, down};
use crate::ports::Port;
use crate::proxy::{FaultProxy, Mode};

/// How long a server may take to say how it is.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A server that is killed with this handle. What was acknowledged is on the disk, so it can be killed and started again with its data.
#[derive(Debug)]
pub struct EtcdServer {
    name: String,
    port: Port,
    peer_port: Port,
    /// Delays what the other members send to this one.
    peer_proxy: Option<FaultProxy>,
    /// Where it says how it is, to everybody.
    health_port: Port,
    folder: TempDir,
    options: EtcdOptions,
    /// All members of its cluster, as it is told.
    members: String,
    running: Option<Kept>,
}

impl EtcdServer {
    /// Starts a server on its own.
    ///
    /// # Errors
    /// When etcd is not installed, or the server does not serve in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(EtcdOptions::new()).await
    }

    /// As [`start`](Self::start), with other settings, users or certificates.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: EtcdOptions) -> io::Result<Self> {
        let mut server = Self::prepare("m0".to_owned(), options)?;
        server.members = server.as_member();
        server.start_again().await?;
        server.let_in_only_users().await?;
        Ok(server)
    }

    /// A server that is down and does not know its cluster.
    pub(super) fn prepare(name: String, options: EtcdOptions) -> io::Result<Self> {
        Ok(Self {
            name,
            port: Port::reserve()?,
            peer_port: Port::reserve()?,
            peer_proxy: None,
            health_port: Port::reserve()?,
            folder: tempfile::tempdir()?,
            options,
            members: String::new(),
            running: None,
        })
    }

    /// What other members are told of it.
    pub(super) fn as_member(&self) -> String {
        format!("{}={}", self.name, self.peer_url())
    }

    /// Where other members connect to.
    fn peer_url(&self) -> String {
        let proxied = self.peer_proxy.as_ref().map(FaultProxy::addr);
        format!("http://{}", proxied.unwrap_or_else(|| self.peer_port.addr()))
    }

    /// Delays all bytes between this member and those that connect to it by `delay`, in each direction. For a server that is down.
    pub(super) async fn delay_peers(&mut self, delay: Duration) -> io::Result<()> {
        let proxy = FaultProxy::start(self.peer_port.addr())?;
        proxy.set_mode(Mode::Delay(delay)).await?;
        self.peer_proxy = Some(proxy);
        Ok(())
    }

    /// Says who the members of its cluster are.
    pub(super) fn join(&mut self, members: &str) {
        members.clone_into(&mut self.members);
    }

    /// Starts the server after it was killed, on the same ports with the data that it had, and waits until it serves. A member of a cluster
    /// serves when there is a majority.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// The server may be up or down afterwards; it can be killed or started again.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.launch_again().await?;
        self.serving().await
    }

    /// As [`start_again`](Self::start_again), without waiting until it serves.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Cancel safety
    /// As for [`start_again`](Self::start_again).
    pub async fn launch_again(&mut self) -> io::Result<()> {
        self.kill();
        let (own, peer) = (self.url(), format!("http://{}", self.peer_port));
        let mut command = Command::new(&self.options.program);
        command.args(["--name", &self.name, "--logger", "zap", "--log-level", "warn"]);
        command.arg("--data-dir").arg(self.folder.path().join("data"));
        command.args(["--listen-client-urls", &own, "--advertise-client-urls", &own]);
        command.args(["--listen-peer-urls", &peer]);
        command.args(["--initial-advertise-peer-urls", &self.peer_url()]);
        command.args(["--initial-cluster", &self.members, "--initial-cluster-state", "new"]);
        command.args(["--listen-metrics-urls", &format!("http://{}", self.health_port)]);
        if let Some(tls) = &self.options.tls {
            command.arg("--cert-file").arg(tls.server_cert_file());
            command.arg("--key-file").arg(tls.server_key_file());
            command.arg("--trusted-ca-file").arg(tls.ca_file()).arg("--client-cert-auth");
        }
        command.args(&self.options.args);
        self.running.insert(Kept::launch(&command)?).begun().await
    }

    /// Waits until the server serves, which a member of a cluster does while there is a majority.
    ///
    /// # Errors
    /// That it does not in time, or does not run; with what it has logged.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn serving(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while Instant::now() < deadline && self.is_up() {
            if self.is_healthy().await {
                return Ok(());
            }
            sleep(Duration::from_millis(10)).await;
        }
        if let Some(running) = &mut self.running {
            running.last_words().await;
        }
        Err(io::Error::other(format!(
            "etcd does not serve; is it installed (apt-get install etcd-server)? It said:\n{}",
            self.said()
        )))
    }

    /// Whether the server says that it serves.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn is_healthy(&self) -> bool {
        let said = timeout(ANSWER_LIMIT, self.page("health")).await;
        matches!(said, Ok(Ok(said)) if said.contains(r#""health":"true""#))
    }

    /// What the server tells of itself under the figure `name`, added up over all lines with `label`.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn figure(&self, name: &str, label: &str) -> io::Result<u64> {
        let page = self.page("metrics").await?;
        let lines = page.lines().filter(|line| line.starts_with(name) && line.contains(label));
        let figures = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        Ok(figures.sum())
    }

    async fn page(&self, name: &str) -> io::Result<String> {
        let mut connection = TcpStream::connect(self.health_port.addr()).await?;
        let request = format!("GET /{name} HTTP/1.0\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Lets in only those who log in, if that is wanted. For a server that has no users yet, as a member of its cluster or alone.
    pub(super) async fn let_in_only_users(&self) -> io::Result<()> {
        let Some((user, password)) = &self.options.login else { return Ok(()) };
        let user_and_password = format!("{user}:{password}");
        let all: [&[&str]; 8] = [
            &["user", "add", "root:root"],
            &["role", "add", "root"],
            &["user", "grant-role", "root", "root"],
            &["user", "add", &user_and_password],
            &["role", "add", "locks"],
            &["role", "grant-permission", "locks", "readwrite", "lock-registry", "--prefix"],
            &["user", "grant-role", user, "locks"],
            &["auth", "enable"],
        ];
        for args in all {
            self.ask_as(None, args).await?;
        }
        Ok(())
    }

    /// Runs `etcdctl` with these arguments and returns what it prints.
    ///
    /// # Errors
    /// That it is not there, or says no.
    ///
    /// # Cancel safety
    /// The server may have obeyed or not.
    pub async fn ctl(&self, args: &[&str]) -> io::Result<String> {
        let root = self.options.login.as_ref().map(|_| "root:root");
        self.ask_as(root, args).await
    }

    async fn ask_as(&self, login: Option<&str>, args: &[&str]) -> io::Result<String> {
        let mut command = self.ctl_command();
        if let Some(login) = login {
            command.args(["--user", login]);
        }
        command.args(args);
        crate::asked::run(command, "").await
    }

    /// `etcdctl`, told where the server is and how to reach it.
    #[must_use]
    pub fn ctl_command(&self) -> Command {
        let mut command = Command::new(&self.options.ctl);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.url()]);
        if let Some(tls) = &self.options.tls {
            command.arg("--cacert").arg(tls.ca_file());
            command.arg("--cert").arg(tls.client_cert_file());
            command.arg("--key").arg(tls.client_key_file());
        }
        command
    }

    /// What the server has logged since it was started.
    #[must_use]
    pub fn said(&self) -> String {
        self.running.as_ref().map(Kept::said).unwrap_or_default()
    }

    /// Kills the server as a crash would. It is gone when this returns.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
        }
    }

    /// Whether the server runs, paused or not.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.running.as_ref().is_some_and(Kept::is_up)
    }

    /// Whether the server was paused and not resumed since.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.running.as_ref().is_some_and(Kept::is_paused)
    }

    /// Stops the server in its tracks, until [`resume`](Self::resume). When this has returned, it does nothing more.
    ///
    /// # Errors
    /// The operating system's; the server is down, most likely.
    pub fn pause(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down)?.pause()
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub fn resume(&self) -> io::Result<()> {
        self.running.as_ref().ok_or_else(down)?.resume()
    }

    /// Where the server listens for clients.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// The server's URL, as etcd's own programs want it.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.options.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.port)
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // Before the folder and the ports go.
        self.kill();
    }
}
