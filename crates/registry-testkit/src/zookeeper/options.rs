//! The options with which a server starts.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use crate::clock::ClockShim;
use crate::programs;
use crate::tls::TlsFolder;

/// The environment variable that names another class path than that of Debian's packages, such as
/// that of a newer ZooKeeper. Ignored by servers whose options set a class path.
pub const CLASSES_VARIABLE: &str = "LOCK_REGISTRY_ZOOKEEPER_CLASSES";
/// The environment variable that names a program to use instead of the `java` on `PATH`.
pub const JAVA_VARIABLE: &str = "LOCK_REGISTRY_JAVA";

/// The class path of Debian's packages. The manifest of `zookeeper.jar` names its dependencies,
/// except those for TLS connections and a logging backend.
const CLASSES: &str = "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar:\
     /usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar:\
     /usr/share/java/netty-transport-native-unix-common.jar";

/// The settings of every server. Ticks are short, because sessions last at least two ticks and
/// expire on a tick. Acknowledged writes are on disk.
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

/// The options of a [`ZooKeeperServer`](super::ZooKeeperServer). By default, the class path is that
/// in [`CLASSES_VARIABLE`], or else that of Debian's packages. Sessions may be as short as half a
/// second. The server removes empty containers every second.
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
    /// Creates the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds configuration lines, such as `["maxSessionTimeout=4000"]`. A later line overrides an
    /// earlier one. A system property `zookeeper.NAME` can be set as `NAME`.
    #[must_use]
    pub fn settings(mut self, settings: &[&str]) -> Self {
        self.settings.extend(settings.iter().map(|&setting| setting.to_owned()));
        self
    }

    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["forceSync=no"])
    }

    /// Sets another class path, in the format of `java -cp`.
    #[must_use]
    pub fn classes(mut self, classes: impl Into<OsString>) -> Self {
        self.classes = classes.into();
        self
    }

    /// Sets an environment variable of the server.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Accepts TLS connections from clients on a separate port, with the server's certificate from
    /// `folder`. Clients need a certificate of the same authority only with the setting
    /// `["ssl.clientAuth=need"]`.
    ///
    /// The testkit's own queries use the unencrypted port.
    #[must_use]
    pub fn tls(mut self, folder: &TlsFolder) -> Self {
        self.tls = Some(folder.clone());
        self
    }

    /// Makes the server use these clocks, which must outlive it.
    #[must_use]
    pub fn clock(self, clock: &ClockShim) -> Self {
        clock
            .environment()
            .into_iter()
            .fold(self, |options, (name, value)| options.env(name, value))
    }

    /// Returns the configuration lines common to all servers with these options.
    pub(super) fn lines(&self) -> String {
        let own = self.settings.iter().flat_map(|setting| [setting, "\n"]);
        SETTINGS.trim_start().chars().chain(own.flat_map(str::chars)).collect()
    }

    /// Returns the `java` command with the class path. The caller adds the program to run.
    pub(super) fn java(&self) -> Command {
        let mut java = Command::new(&self.java);
        java.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // Small, because many servers run concurrently. They end before the optimizing compiler
        // would pay off.
        java.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1"]);
        java.args([
            "-Dzookeeper.extendedTypesEnabled=true",
            "-Dznode.container.checkIntervalMs=1000",
        ]);
        java.arg("-cp").arg(&self.classes);
        java
    }
}
