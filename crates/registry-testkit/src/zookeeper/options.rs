//! How a server is to be started.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// Names another class path than that of Debian's packages, for all servers that are not told theirs: that of a newer ZooKeeper, for
/// example.
pub const CLASSES_VARIABLE: &str = "LOCK_REGISTRY_ZOOKEEPER_CLASSES";
/// Names another program than the `java` on the path.
pub const JAVA_VARIABLE: &str = "LOCK_REGISTRY_JAVA";

/// Where Debian's packages put the classes. What `zookeeper.jar` needs beside itself it names in its manifest, all but what takes
/// encrypted connections, and somebody to write down what is logged.
const CLASSES: &str = "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar:\
     /usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar:\
     /usr/share/java/netty-transport-native-unix-common.jar";

/// What every server is told. Ticks are short, because sessions live at least two of them and end on a tick; what was acknowledged
/// is on the disk.
const SETTINGS: &str = "
tickTime=250
minSessionTimeout=500
maxSessionTimeout=120000
initLimit=40
syncLimit=8
maxClientCnxns=0
admin.enableServer=false
clientPortAddress=127.0.0.1
4lw.commands.whitelist=*
preAllocSize=1024
";

/// How a [`ZooKeeperServer`](super::ZooKeeperServer) is to be started. Without any option, the classes are those of Debian's package,
/// or where [`CLASSES_VARIABLE`] says; sessions may be as short as half a second; empty containers are removed each second.
#[derive(Debug, Clone)]
pub struct ZooKeeperOptions {
    java: PathBuf,
    classes: OsString,
    settings: Vec<String>,
    environment: Vec<(String, OsString)>,
    pub(super) tls: Option<TlsFolder>,
}

impl Default for ZooKeeperOptions {
    fn default() -> Self {
        Self {
            java: programs::server(JAVA_VARIABLE, "java"),
            classes: env::var_os(CLASSES_VARIABLE).unwrap_or_else(|| CLASSES.into()),
            settings: Vec::new(),
            environment: Vec::new(),
            tls: None,
        }
    }
}

impl ZooKeeperOptions {
    /// A server with its defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds lines of the configuration, such as `["maxSessionTimeout=4000"]`. Of two that say different things, the later one counts. What
    /// ZooKeeper reads from a property `zookeeper.NAME` may be told as `NAME`.
    #[must_use]
    pub fn settings(mut self, settings: &[&str]) -> Self {
        self.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
        self
    }

    /// Does not wait for the disk. A killed server still has its data, because the kernel lives on.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["forceSync=no"])
    }

    /// Starts the server from other classes, as `java -cp` takes them.
    #[must_use]
    pub fn classes(mut self, classes: impl Into<OsString>) -> Self {
        self.classes = classes.into();
        self
    }

    /// Gives the server an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Encrypts all connections with the server's certificate from `folder`. Clients need none, unless `["ssl.clientAuth=need"]` is among
    /// the settings; then it is one of the same authority.
    ///
    /// The testkit's own questions are asked through a door of their own, another port.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Lets the server live by these clocks, which must outlive it.
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }

    /// The lines that are the same for all servers.
    pub(super) fn lines(&self) -> String {
        let own = self.settings.iter().flat_map(|setting| [setting, "\n"]);
        SETTINGS.trim_start().chars().chain(own.flat_map(str::chars)).collect()
    }

    /// The virtual machine with the classes; what it is to run comes after it.
    pub(super) fn java(&self) -> Command {
        let mut java = Command::new(&self.java);
        java.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // Small, because many of them run beside each other.
        java.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:-UsePerfData"]);
        java.args([
            "-Dzookeeper.extendedTypesEnabled=true",
            "-Dznode.container.checkIntervalMs=1000",
        ]);
        java.arg("-cp").arg(&self.classes);
        java
    }
}
