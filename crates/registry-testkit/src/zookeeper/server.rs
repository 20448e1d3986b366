//! One server: started, killed, paused, asked.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use super::options::ZooKeeperOptions;
use super::session::{self, ClientOfServer};
use crate::kept::{Kept, START_LIMIT, down};
use crate::ports::Port;

/// How long a server may take to answer an operator, while it is waited for to serve.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Changes what a server has written, while it is down: it reads the data as a server does when it starts, and writes a snapshot. Sets a
/// parent's count of children that were ever made, which is what the next sequential child is called after; or adds a node that lives with a
/// session.
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

/// A server that is killed with this handle. What was acknowledged is on the disk, so it can be killed and started again with its data.
#[derive(Debug)]
pub struct ZooKeeperServer {
    /// For clients that encrypt nothing, and for the testkit's questions.
    port: Port,
    /// For clients that encrypt.
    secure_port: Option<Port>,
    folder: TempDir,
    options: ZooKeeperOptions,
    running: Option<Kept>,
}

impl ZooKeeperServer {
    /// Starts a server on its own.
    ///
    /// # Errors
    /// When Java or ZooKeeper is not installed, or the server does not serve in time.
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(ZooKeeperOptions::new()).await
    }

    /// As [`start`](Self::start), with other settings, classes, clocks or certificates.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    ///
    /// # Cancel safety
    /// Dropping the future kills the server.
    pub async fn start_with(options: ZooKeeperOptions) -> io::Result<Self> {
        let mut server = Self::prepare(options, Port::reserve()?)?;
        server.configure("")?;
        server.start_again().await?;
        Ok(server)
    }

    /// A server that is down and is not configured.
    pub(super) fn prepare(options: ZooKeeperOptions, port: Port) -> io::Result<Self> {
        let secure_port = options.tls.as_ref().map(|_| Port::reserve()).transpose()?;
        let folder = tempfile::tempdir()?;
        fs::create_dir(folder.path().join("data"))?;
        Ok(Self { port, secure_port, folder, options, running: None })
    }

    /// Writes what the server is told when it starts; `others` is what it has to know of the members of an ensemble.
    pub(super) fn configure(&self, others: &str) -> io::Result<()> {
        let mut lines = self.options.lines();
        lines.push_str(others);
        let folder = self.folder.path();
        lines.push_str(&format!("clientPort={}\n", self.port.number()));
        lines.push_str(&format!("dataDir={}\n", folder.join("data").display()));
        if let (Some(tls), Some(port)) = (&self.options.tls, &self.secure_port) {
            // Of a server's key and certificate it wants one file.
            let both = folder.join("server.pem");
            let [key, cert] = [tls.server_key_file(), tls.server_cert_file()].map(fs::read);
            fs::write(&both, [key?, cert?].concat())?;
            let ours = [
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
                format!("secureClientPort={}", port.number()),
                "secureClientPortAddress=127.0.0.1".to_owned(),
                format!("ssl.keyStore.location={}", both.display()),
                format!("ssl.trustStore.location={}", tls.ca_file().display()),
            ];
            // What the options say counts more, so it comes later.
            let auth = "ssl.clientAuth=none\n";
            lines = format!("{auth}{lines}{}\n", ours.join("\n"));
        }
        fs::write(folder.join("server.cfg"), lines)
    }

    /// Starts the server after it was killed, on the same port with the data that it had, and waits until it serves. A member of an
    /// ensemble serves when there is a majority.
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
        let mut command = self.options.java();
        command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain");
        command.arg(self.folder.path().join("server.cfg"));
        self.running.insert(Kept::launch(&command)?).begun().await
    }

    /// Waits until the server serves, which a member of an ensemble does while there is a majority.
    ///
    /// # Errors
    /// That it does not in time, or does not run; with what it has logged.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn serving(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        while Instant::now() < deadline && self.is_up() {
            if self.mode().await.is_ok_and(|mode| mode.is_some()) && self.is_open().await {
                return Ok(());
            }
            sleep(Duration::from_millis(10)).await;
        }
        if let Some(running) = &mut self.running {
            running.last_words().await;
        }
        Err(io::Error::other(format!(
            "ZooKeeper does not serve; is it installed (apt-get install zookeeper)? It said:\n{}",
            self.said()
        )))
    }

    /// Whether clients get through, who may have another door than the testkit's questions, which opens later.
    async fn is_open(&self) -> bool {
        tokio::net::TcpStream::connect(self.addr()).await.is_ok()
    }

    /// What the server is: `standalone`, `leader` or `follower`; nothing as long as it serves nobody.
    ///
    /// # Errors
    /// That it cannot be reached, or says nothing for a second.
    ///
    /// # Cancel safety
    /// May be dropped at any time, without any effect.
    pub async fn mode(&self) -> io::Result<Option<String>> {
        let answer = timeout(ANSWER_LIMIT, self.ask("srvr")).await??;
        Ok(answer.lines().find_map(|line| line.strip_prefix("Mode: ")).map(ToOwned::to_owned))
    }

    /// Asks one of ZooKeeper's four-letter words, such as `mntr`, `cons` or `wchp`.
    ///
    /// # Errors
    /// The connection's. One that does not serve says so in its answer.
    ///
    /// # Cancel safety
    /// May be dropped at any time; the server then has a connection to close.
    pub async fn ask(&self, word: &str) -> io::Result<String> {
        session::ask(self.port.addr(), word).await
    }

    /// The number that the server tells of `name` (`mntr`), such as `zk_watch_count`.
    ///
    /// # Errors
    /// The connection's, or that it tells no such number.
    ///
    /// # Cancel safety
    /// As for [`ask`](Self::ask).
    pub async fn figure(&self, name: &str) -> io::Result<u64> {
        let figures = self.ask("mntr").await?;
        let mut lines = figures.lines().filter_map(|line| line.split_once('\t'));
        let found = lines.find(|(field, _)| *field == name);
        let missing = || io::Error::other(format!("the server does not tell {name}:\n{figures}"));
        found.and_then(|(_, value)| value.trim().parse().ok()).ok_or_else(missing)
    }

    /// Those who are connected to this server and have a session.
    ///
    /// # Errors
    /// The connection's.
    ///
    /// # Cancel safety
    /// As for [`ask`](Self::ask).
    pub async fn clients(&self) -> io::Result<Vec<ClientOfServer>> {
        Ok(self.ask("cons").await?.lines().filter_map(ClientOfServer::read).collect())
    }

    /// Ends a session from a second connection, as if its own client had. Its client hears that it has expired.
    ///
    /// A member of an ensemble must not be the one that the session's client is connected to. That one may go on answering the client's
    /// pings for ever if the client comes back just before the end of its session; a server on its own has no such gap.
    ///
    /// # Errors
    /// The connection's, that the server knows no such session, or that it is the client's own member of an ensemble.
    ///
    /// # Cancel safety
    /// The session may have ended or not.
    pub async fn end_session(&self, session: i64) -> io::Result<()> {
        let ours = self.clients().await?.iter().any(|client| client.session == session);
        if ours && self.mode().await?.is_some_and(|mode| mode != "standalone") {
            let why = format!("session {session:#x} is this member's; another one must end it");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        session::end(self.port.addr(), session).await
    }

    /// Makes the node at `path` remember that it has had `count` children, as it would after a long life. The next sequential one is called
    /// after that number. To be called while the server is down; it must have data.
    ///
    /// # Errors
    /// That there is no such node; or Java's.
    ///
    /// # Cancel safety
    /// It may be done or not.
    pub async fn set_children_ever(&self, path: &str, count: i32) -> io::Result<()> {
        self.edit(["count", path, &count.to_string()]).await
    }

    /// Adds a node that lives with `session`, as if one of the members of an ensemble had kept what the others do not have. To be called while
    /// the server is down; it must have data, and the node above.
    ///
    /// # Errors
    /// Java's.
    ///
    /// # Cancel safety
    /// It may be done or not.
    pub async fn keep_node(&self, path: &str, session: i64) -> io::Result<()> {
        self.edit(["node", path, &session.to_string()]).await
    }

    async fn edit(&self, what: [&str; 3]) -> io::Result<()> {
        let program = self.folder.path().join("Edit.java");
        fs::write(&program, EDIT)?;
        let mut java = self.options.java();
        java.arg(program).arg(self.data()).args(what);
        crate::asked::run(java, "").await.map(drop)
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

    /// Removes all that the server has written. To be called while it is down. A member of an ensemble learns it again from the others.
    ///
    /// # Errors
    /// The operating system's.
    pub fn lose_data(&self) -> io::Result<()> {
        fs::remove_dir_all(self.data().join("version-2"))
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

    /// Where the server listens for clients; encrypted, if it was told to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.secure_port.as_ref().unwrap_or(&self.port).addr()
    }

    /// `zk://HOST:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("zk://{}", self.addr())
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn data(&self) -> std::path::PathBuf {
        self.folder.path().join("data")
    }
}

impl Drop for ZooKeeperServer {
    fn drop(&mut self) {
        // Before the folder and the port go.
        self.kill();
    }
}
