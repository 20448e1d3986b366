//! A real Prometheus that scrapes one program, and `promtool`, its checker of rules.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::server_options::ServerOptions;
use crate::{programs, run_command};

/// The environment variable that names a program to use instead of `prometheus`.
pub const SERVER_VARIABLE: &str = "LOCK_REGISTRY_PROMETHEUS_SERVER";
/// The environment variable that names a program to use instead of `promtool`.
pub const TOOL_VARIABLE: &str = "LOCK_REGISTRY_PROMTOOL";

/// A Prometheus. Dropping this handle kills it.
pub type Prometheus = ManagedServer<Scraper>;

/// Describes the program to [`ManagedServer`]. Prometheus has no options of its own.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Scraper;

impl ServerDescription for Scraper {
    type State = ();

    const PROGRAM: ServerProgram = ServerProgram {
        name: "prometheus",
        package: "prometheus",
        account: None,
        stop: Signal::SIGTERM,
        reap_signal: None,
    };

    fn program() -> PathBuf {
        programs::find(SERVER_VARIABLE, "prometheus")
    }

    fn command(server: &Prometheus) -> io::Result<Command> {
        let mut command = server.program_command();
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        command.arg(option("config.file", server.file("settings.yml")));
        command.arg(option("storage.tsdb.path", server.data()));
        command.arg(format!("--web.listen-address={}", server.port()));
        Ok(command)
    }

    async fn is_serving(server: &Prometheus) -> bool {
        let response = server.http_get("/-/ready").await;
        response.is_ok_and(|response| response.contains(" 200 "))
    }
}

impl Prometheus {
    /// Starts a Prometheus that scrapes `http://TARGET/metrics` and evaluates `rules` five times
    /// per second.
    pub async fn start(target: SocketAddr, rules: &Path) -> io::Result<Self> {
        let mut server = Self::new(ServerOptions::new(), ())?;
        let settings = format!(
            "global:\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\n  \
             evaluation_interval: 200ms\nrule_files:\n  - {}\nscrape_configs:\n  \
             - job_name: test\n    static_configs:\n      - targets: ['{target}']\n",
            rules.display()
        );
        server.write_file("settings.yml", settings)?;
        server.restart().await?;
        Ok(server)
    }

    /// Evaluates an expression now, and returns the series of the result.
    pub async fn query(&self, expression: &str) -> io::Result<Vec<Value>> {
        let mut path = String::from("/api/v1/query?query=");
        for byte in expression.bytes() {
            // Writing to a string does not fail.
            let _ = write!(path, "%{byte:02X}");
        }
        let data = self.api(&path).await?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    /// Returns the alerting rules with the state of their evaluation.
    pub async fn rules(&self) -> io::Result<Vec<Value>> {
        let data = self.api("/api/v1/rules?type=alert").await?;
        let groups = data["groups"].as_array().cloned().unwrap_or_default();
        Ok(groups
            .iter()
            .flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default())
            .collect())
    }

    async fn api(&self, path: &str) -> io::Result<Value> {
        let response = self.http_get(path).await?;
        let (_, body) = response.split_once("\r\n\r\n").unwrap_or(("", &response));
        let json: Value = serde_json::from_str(body)?;
        if json["status"] != "success" {
            return Err(io::Error::other(body.to_owned()));
        }
        Ok(json["data"].clone())
    }

    async fn http_get(&self, path: &str) -> io::Result<String> {
        let mut connection = TcpStream::connect(self.addr()).await?;
        // HTTP/1.0 has no chunked encoding, so the rest of the response is its body.
        connection.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
        let mut response = String::new();
        connection.read_to_string(&mut response).await?;
        Ok(response)
    }
}

/// Runs `promtool` with these arguments and returns its output.
pub async fn promtool(args: &[&str]) -> io::Result<String> {
    let mut command = Command::new(programs::find(TOOL_VARIABLE, "promtool"));
    command.args(args);
    run_command::run(command, "").await
}
