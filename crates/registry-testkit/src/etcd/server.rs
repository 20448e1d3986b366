//! One server process: starts, kills, pauses and queries it.

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::options::{Etcd, EtcdOptions, SERVER_VARIABLE};
use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::ports::Port;
use crate::proxy::{FaultProxy, ProxyMode};
use crate::{programs, run_command};

/// The maximum time for a server to report its health.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// A server. Dropping this handle kills it. Acknowledged writes are on disk, so the server keeps
/// its data when it is killed and started again. A member of a cluster serves only while there is a
/// majority.
pub type EtcdServer = ManagedServer<Etcd>;

/// The name, the further ports and the cluster of a server.
#[derive(Debug)]
pub struct EtcdMember {
    name: String,
    peer_port: Port,
    /// Delays the connections that the other members open to this one.
    peer_proxy: Option<FaultProxy>,
    /// Serves `/health` and `/metrics` without authentication.
    health_port: Port,
    /// All members of its cluster, in the format of `--initial-cluster`.
    members: String,
}

impl ServerDescription for Etcd {
    type State = EtcdMember;

    const PROGRAM: ServerProgram = ServerProgram {
        name: "etcd",
        package: "etcd-server",
        account: None,
        stop: Signal::SIGTERM,
        reap_signal: None,
    };

    fn program() -> PathBuf {
        programs::find(SERVER_VARIABLE, "etcd")
    }

    fn command(server: &EtcdServer) -> io::Result<Command> {
        let EtcdMember { name, peer_port, health_port, members, .. } = &server.state;
        let (client_url, peer_listen_url) = (server.url(), format!("http://{peer_port}"));
        let mut command = server.program_command();
        command.args(["--name", name, "--logger", "zap", "--log-level", "warn"]);
        command.arg("--data-dir").arg(server.data());
        command.args(["--listen-client-urls", &client_url]);
        command.args(["--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_listen_url]);
        command.args(["--initial-advertise-peer-urls", &server.peer_url()]);
        command.args(["--initial-cluster", members, "--initial-cluster-state", "new"]);
        command.args(["--listen-metrics-urls", &format!("http://{health_port}")]);
        // Every client logs in; at the default cost of 10, each login keeps a processor busy.
        command.args(["--bcrypt-cost", "4"]);
        if let Some(tls) = &server.options.tls {
            command.arg("--cert-file").arg(tls.server_cert_file());
            command.arg("--key-file").arg(tls.server_key_file());
            command.arg("--trusted-ca-file").arg(tls.ca_file()).arg("--client-cert-auth");
        }
        command.args(&server.options.args);
        Ok(command)
    }

    async fn is_serving(server: &EtcdServer) -> bool {
        server.is_healthy().await
    }
}

impl EtcdServer {
    /// Starts a single server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(EtcdOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: EtcdOptions) -> io::Result<Self> {
        let mut server = Self::prepare("m0".to_owned(), options)?;
        server.state.members = server.initial_cluster_entry();
        server.restart().await?;
        server.enable_auth().await?;
        Ok(server)
    }

    /// Creates a server that is down and whose cluster is not set yet.
    pub(super) fn prepare(name: String, options: EtcdOptions) -> io::Result<Self> {
        let (peer_port, health_port) = (Port::reserve()?, Port::reserve()?);
        let members = String::new();
        Self::new(options, EtcdMember { name, peer_port, peer_proxy: None, health_port, members })
    }

    /// Returns this server's entry in `--initial-cluster`.
    pub(super) fn initial_cluster_entry(&self) -> String {
        format!("{}={}", self.state.name, self.peer_url())
    }

    /// Returns the URL to which other members connect.
    fn peer_url(&self) -> String {
        let proxied = self.state.peer_proxy.as_ref().map(FaultProxy::addr);
        format!("http://{}", proxied.unwrap_or_else(|| self.state.peer_port.addr()))
    }

    /// Delays all bytes between this member and those that connect to it by `delay`, in each
    /// direction. Call it while the server is down.
    pub(super) async fn delay_peers(&mut self, delay: Duration) -> io::Result<()> {
        let proxy = FaultProxy::start(self.state.peer_port.addr())?;
        proxy.set_mode(ProxyMode::Delay(delay)).await?;
        self.state.peer_proxy = Some(proxy);
        Ok(())
    }

    /// Sets the members of the server's cluster.
    pub(super) fn set_members(&mut self, members: &str) {
        members.clone_into(&mut self.state.members);
    }

    /// Returns whether the server reports that it is healthy.
    pub async fn is_healthy(&self) -> bool {
        let response = timeout(ANSWER_LIMIT, self.http_get("health")).await;
        matches!(response, Ok(Ok(response)) if response.contains(r#""health":"true""#))
    }

    /// Returns the sum of all metrics whose lines begin with `name` and contain `label`. Ignores
    /// values that are not integers.
    pub async fn metric(&self, name: &str, label: &str) -> io::Result<u64> {
        let response = self.http_get("metrics").await?;
        let lines = response.lines().filter(|line| line.starts_with(name) && line.contains(label));
        let metrics = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        Ok(metrics.sum())
    }

    async fn http_get(&self, name: &str) -> io::Result<String> {
        let mut connection = TcpStream::connect(self.state.health_port.addr()).await?;
        let request = format!("GET /{name} HTTP/1.0\r\n\r\n");
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Enables authentication if the options have a login. Call it once, on a single server or on
    /// one member of a cluster.
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
        run_command::run(command, "").await
    }

    /// Returns an `etcdctl` command with the server's address and certificates.
    #[must_use]
    pub fn ctl_command(&self) -> Command {
        let mut command = Command::new(&self.options.store.ctl);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.url()]);
        // The defaults are too short for a loaded machine. A later flag overrides an earlier one.
        command.args(["--dial-timeout", "30s", "--command-timeout", "30s"]);
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
