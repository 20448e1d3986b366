//! One server process: starts, kills, pauses and queries it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::Signal;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::options::{JAVA_VARIABLE, ZooKeeper, ZooKeeperOptions};
use super::session::{self, ClientStats};
use crate::managed_server::{ManagedServer, ServerDescription, ServerProgram};
use crate::ports::Port;
use crate::{programs, run_command};

/// The maximum time for a reply to the `srvr` query of [`ZooKeeperServer::mode`].
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// A Java program that edits the data of a server that is down. It restores the data as a starting
/// server does, edits it, and writes a snapshot. The edit either sets the count of children ever
/// created under a node, or adds an ephemeral node of a session. The count determines the name of
/// the next sequential child.
const EDIT: &str = r#"
import java.io.File;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.zookeeper.ZooDefs;
import org.apache.zookeeper.server.DataNode;
import org.apache.zookeeper.server.DataTree;
import org.apache.zookeeper.server.persistence.FileTxnSnapLog;

public class Edit {
    public static void main(String[] args) throws Exception {
        FileTxnSnapLog log = new FileTxnSnapLog(new File(args[0]), new File(args[0]));
        DataTree tree = new DataTree();
        ConcurrentHashMap<Long, Integer> sessions = new ConcurrentHashMap<>();
        tree.lastProcessedZxid = log.restore(tree, sessions, (header, txn, digest) -> { });
        long zxid = tree.lastProcessedZxid;
        if (args[1].equals("node")) {
            long owner = Long.parseLong(args[3]);
            tree.createNode(args[2], new byte[0], ZooDefs.Ids.OPEN_ACL_UNSAFE, owner, -1, zxid, 0);
        } else {
            DataNode node = tree.getNode(args[2]);
            if (node == null) {
                throw new IllegalArgumentException("there is no " + args[2]);
            }
            node.stat.setCversion(Integer.parseInt(args[3]));
        }
        log.save(tree, sessions, true);
        log.close();
    }
}
"#;

/// A server. Dropping this handle kills it. Acknowledged writes are on disk, so the server keeps
/// its data when it is killed and started again. A member of an ensemble serves only while there is
/// a majority.
pub type ZooKeeperServer = ManagedServer<ZooKeeper>;

impl ServerDescription for ZooKeeper {
    /// The port for TLS clients. The server's own port is for unencrypted clients, and for the
    /// testkit's queries.
    type State = Option<Port>;

    const PROGRAM: ServerProgram = ServerProgram {
        name: "ZooKeeper",
        package: "zookeeper",
        account: None,
        stop: Signal::SIGTERM,
        reap_signal: None,
    };

    fn program() -> PathBuf {
        programs::find(JAVA_VARIABLE, "java")
    }

    fn command(server: &ZooKeeperServer) -> io::Result<Command> {
        let mut command = server.java();
        command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain");
        command.arg(server.file("server.cfg"));
        Ok(command)
    }

    async fn is_serving(server: &ZooKeeperServer) -> bool {
        let serves = server.mode().await.is_ok_and(|mode| mode.is_some());
        // The TLS port opens later than the port of the testkit's queries.
        serves && TcpStream::connect(server.addr()).await.is_ok()
    }

    fn client_port(server: &ZooKeeperServer) -> &Port {
        server.state.as_ref().unwrap_or_else(|| server.port())
    }
}

impl ZooKeeperServer {
    /// Starts a single server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(ZooKeeperOptions::new()).await
    }

    /// Like [`start`](Self::start), with the given options.
    pub async fn start_with(options: ZooKeeperOptions) -> io::Result<Self> {
        let mut server = Self::prepare(options)?;
        server.configure("")?;
        server.restart().await?;
        Ok(server)
    }

    /// Creates a server that is down and has no configuration.
    pub(super) fn prepare(options: ZooKeeperOptions) -> io::Result<Self> {
        let secure_port = options.tls.as_ref().map(|_| Port::reserve()).transpose()?;
        let server = Self::new(options, secure_port)?;
        fs::create_dir(server.data())?;
        Ok(server)
    }

    /// Writes the server's configuration file. `others` contains the lines for the members of an
    /// ensemble.
    pub(super) fn configure(&self, others: &str) -> io::Result<()> {
        let mut lines = self.options.lines();
        lines.push_str(others);
        lines.push_str(&format!("clientPort={}\n", self.port().number()));
        lines.push_str(&format!("dataDir={}\n", self.data().display()));
        if let (Some(tls), Some(port)) = (&self.options.tls, &self.state) {
            // The server reads its key and certificate from one file.
            let key_and_cert = self.file("server.pem");
            let [key, cert] = [tls.server_key_file(), tls.server_cert_file()].map(fs::read);
            fs::write(&key_and_cert, [key?, cert?].concat())?;
            let tls_lines = [
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
                format!("secureClientPort={}", port.number()),
                "secureClientPortAddress=127.0.0.1".to_owned(),
                format!("ssl.keyStore.location={}", key_and_cert.display()),
                format!("ssl.trustStore.location={}", tls.ca_file().display()),
            ];
            // The options come later, so that they override this default.
            let auth = "ssl.clientAuth=none\n";
            lines = format!("{auth}{lines}{}\n", tls_lines.join("\n"));
        }
        fs::write(self.file("server.cfg"), lines)
    }

    /// Returns the server's mode, such as `standalone`, `leader` or `follower`. Returns `None`
    /// while the server does not serve.
    pub async fn mode(&self) -> io::Result<Option<String>> {
        timeout(ANSWER_LIMIT, self.mode_without_timeout()).await?
    }

    async fn mode_without_timeout(&self) -> io::Result<Option<String>> {
        let answer = self.send_command("srvr").await?;
        Ok(answer.lines().find_map(|line| line.strip_prefix("Mode: ")).map(ToOwned::to_owned))
    }

    /// Sends one of ZooKeeper's four-letter words, such as `mntr`, `cons` or `wchp`, and returns
    /// the answer.
    ///
    /// # Errors
    /// Returns the connection's error. The answer of a server that does not serve contains the
    /// reason.
    pub async fn send_command(&self, word: &str) -> io::Result<String> {
        session::send_command(self.port().addr(), word).await
    }

    /// Returns the metric `name` of `mntr`, such as `zk_watch_count`.
    pub async fn metric(&self, name: &str) -> io::Result<u64> {
        let metrics = self.send_command("mntr").await?;
        let mut lines = metrics.lines().filter_map(|line| line.split_once('\t'));
        let found = lines.find(|(field, _)| *field == name);
        let missing = || io::Error::other(format!("the server has no metric {name}:\n{metrics}"));
        found.and_then(|(_, value)| value.trim().parse().ok()).ok_or_else(missing)
    }

    /// Returns the clients that are connected to this server and have a session.
    pub async fn clients(&self) -> io::Result<Vec<ClientStats>> {
        Ok(self.send_command("cons").await?.lines().filter_map(ClientStats::parse).collect())
    }

    /// Ends a session from a second connection, as its own client could. The client then receives a
    /// session expiry.
    ///
    /// In an ensemble, call this on a member other than the one to which the session's client is
    /// connected. If the client reconnects just before the session ends, its own member may answer
    /// pings forever. A single server has no such race.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached or does not know the session, or if this is
    /// the client's own member of an ensemble. Returns `TimedOut` if the session does not end after
    /// 500 attempts.
    pub async fn end_session(&self, session: i64) -> io::Result<()> {
        let is_own_client = self.clients().await?.iter().any(|client| client.session == session);
        if is_own_client
            && self.mode_without_timeout().await?.is_some_and(|mode| mode != "standalone")
        {
            let why = format!(
                "session {session:#x} belongs to this member; end it through another member"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        session::end(self.port().addr(), session).await
    }

    /// Sets the number of children ever created under the node at `path`, as after a long lifetime.
    /// The name of the next sequential child contains this number. Call it while the server is
    /// down. The server must have data.
    pub async fn set_child_counter(&self, path: &str, count: i32) -> io::Result<()> {
        self.edit(["count", path, &count.to_string()]).await
    }

    /// Adds an ephemeral node of `session`, as if this member of an ensemble had kept a node that
    /// the others do not have. Call it while the server is down. The server must have data, and the
    /// parent node must exist.
    pub async fn add_ephemeral_node(&self, path: &str, session: i64) -> io::Result<()> {
        self.edit(["node", path, &session.to_string()]).await
    }

    async fn edit(&self, args: [&str; 3]) -> io::Result<()> {
        let program = self.file("Edit.java");
        fs::write(&program, EDIT)?;
        let mut java = self.java();
        java.arg(program).arg(self.data()).args(args);
        run_command::run(java, "").await.map(drop)
    }

    /// Removes all data of the server. Call it only while the server is down. A member of an
    /// ensemble receives its data again from the others.
    pub fn delete_data(&self) -> io::Result<()> {
        fs::remove_dir_all(self.data().join("version-2"))
    }

    /// Returns `zk://HOST:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("zk://{}", self.addr())
    }

    /// Creates a `java` command with the class path. The caller adds the program to run.
    fn java(&self) -> Command {
        let mut java = self.program_command();
        // Small, because many servers run concurrently. They end before the optimizing compiler
        // would pay off.
        java.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1"]);
        java.args([
            "-Dzookeeper.extendedTypesEnabled=true",
            "-Dznode.container.checkIntervalMs=1000",
        ]);
        java.arg("-cp").arg(&self.options.store.classes);
        java
    }
}
