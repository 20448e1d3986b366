//! One server process: starts, kills, pauses and queries it.

use std::io;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::options::EtcdOptions;
use crate::managed_server::{ManagedServer, ServerProgram, impl_managed_server, wait_until_ready};
use crate::ports::Port;
use crate::proxy::{FaultProxy, ProxyMode};

const PROGRAM: ServerProgram = ServerProgram {
    name: "etcd",
    package: "etcd-server",
    account: None,
    stop: Signal::SIGTERM,
    reap: None,
};

/// The maximum time for a server to report its health.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A server. Dropping this handle kills it. Acknowledged writes are on disk, so the server keeps
/// its data when it is killed and started again.
#[derive(Debug)]
pub struct EtcdServer {
    /// The first field, because the process must end before the ports are dropped.
    server: ManagedServer,
    name: String,
    peer_port: Port,
    /// Delays the traffic from the other members to this one.
    peer_proxy: Option<FaultProxy>,
    /// Serves `/health` and `/metrics` without authentication.
    health_port: Port,
    options: EtcdOptions,
    /// All members of its cluster, in the format of `--initial-cluster`.
    members: String,
}

impl EtcdServer {
    /// Starts a single server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(EtcdOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: EtcdOptions) -> io::Result<Self> {
        let mut server = Self::prepare("m0".to_owned(), options)?;
        server.members = server.initial_cluster_entry();
        server.start_again().await?;
        server.enable_auth().await?;
        Ok(server)
    }

    /// Creates a server that is down and whose cluster is not set yet.
    pub(super) fn prepare(name: String, options: EtcdOptions) -> io::Result<Self> {
        Ok(Self {
            server: ManagedServer::new(&PROGRAM)?,
            name,
            peer_port: Port::reserve()?,
            peer_proxy: None,
            health_port: Port::reserve()?,
            options,
            members: String::new(),
        })
    }

    /// Returns this server's entry in `--initial-cluster`.
    pub(super) fn initial_cluster_entry(&self) -> String {
        format!("{}={}", self.name, self.peer_url())
    }

    /// Returns the URL to which other members connect.
    fn peer_url(&self) -> String {
        let proxied = self.peer_proxy.as_ref().map(FaultProxy::addr);
        format!("http://{}", proxied.unwrap_or_else(|| self.peer_port.addr()))
    }

    /// Delays all bytes between this member and those that connect to it by `delay`, in each
    /// direction. Call it while the server is down.
    pub(super) async fn delay_peers(&mut self, delay: Duration) -> io::Result<()> {
        let proxy = FaultProxy::start(self.peer_port.addr())?;
        proxy.set_mode(ProxyMode::Delay(delay)).await?;
        self.peer_proxy = Some(proxy);
        Ok(())
    }

    /// Sets the members of the server's cluster.
    pub(super) fn join(&mut self, members: &str) {
        members.clone_into(&mut self.members);
    }

    /// Kills the server if it runs, starts it on the same ports with its previous data, and waits
    /// until it serves. A member of a cluster serves only while there is a majority.
    pub async fn start_again(&mut self) -> io::Result<()> {
        self.launch_again().await?;
        self.wait_until_serving().await
    }

    /// Like [`start_again`](Self::start_again), without waiting until the server serves.
    pub async fn launch_again(&mut self) -> io::Result<()> {
        let (own, peer) = (self.url(), format!("http://{}", self.peer_port));
        let mut command = self.command(&self.options.program);
        self.options.set_environment(&mut command);
        command.args(["--name", &self.name, "--logger", "zap", "--log-level", "warn"]);
        command.arg("--data-dir").arg(self.file("data"));
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
        self.launch(&command)?;
        self.wait_until_started().await
    }

    /// Waits until the server serves. A member of a cluster serves only while there is a majority.
    pub async fn wait_until_serving(&mut self) -> io::Result<()> {
        wait_until_ready(self, Self::is_healthy).await
    }

    /// Returns whether the server reports that it is healthy.
    pub async fn is_healthy(&self) -> bool {
        let output_text = timeout(ANSWER_LIMIT, self.http_get("health")).await;
        matches!(output_text, Ok(Ok(output_text)) if output_text.contains(r#""health":"true""#))
    }

    /// Returns the metric `name`, summed over all lines that contain `label`.
    pub async fn metric(&self, name: &str, label: &str) -> io::Result<u64> {
        let http_get = self.http_get("metrics").await?;
        let lines = http_get.lines().filter(|line| line.starts_with(name) && line.contains(label));
        let metrics = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        Ok(metrics.sum())
    }

    async fn http_get(&self, name: &str) -> io::Result<String> {
        let mut connection = TcpStream::connect(self.health_port.addr()).await?;
        let request = format!("GET /{name} HTTP/1.0\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Enables authentication if the options have a login. Call it on a single server, or one
    /// member of a cluster, without users.
    pub(super) async fn enable_auth(&self) -> io::Result<()> {
        let Some((user, password)) = &self.options.store.login else { return Ok(()) };
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
            self.ctl_as(None, args).await?;
        }
        Ok(())
    }

    /// Runs `etcdctl` with these arguments and returns its output.
    pub async fn ctl(&self, args: &[&str]) -> io::Result<String> {
        let root = self.options.store.login.as_ref().map(|_| "root:root");
        self.ctl_as(root, args).await
    }

    async fn ctl_as(&self, login: Option<&str>, args: &[&str]) -> io::Result<String> {
        let mut command = self.ctl_command();
        if let Some(login) = login {
            command.args(["--user", login]);
        }
        command.args(args);
        crate::run_command::run(command, "").await
    }

    /// Returns an `etcdctl` command with the server's address and certificates.
    #[must_use]
    pub fn ctl_command(&self) -> Command {
        let mut command = Command::new(&self.options.store.ctl);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.url()]);
        if let Some(tls) = &self.options.tls {
            command.arg("--cacert").arg(tls.ca_file());
            command.arg("--cert").arg(tls.client_cert_file());
            command.arg("--key").arg(tls.client_key_file());
        }
        command
    }

    /// Returns the server's URL in the form that etcd's own programs expect.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.options.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr())
    }
}

impl_managed_server!(EtcdServer);
