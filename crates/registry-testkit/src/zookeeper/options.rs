//! The options with which a server starts.

use std::env;
use std::ffi::OsString;

use crate::server_options::ServerOptions;

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
pub type ZooKeeperOptions = ServerOptions<ZooKeeper>;

/// The options that only ZooKeeper has.
#[derive(Debug, Clone)]
pub struct ZooKeeper {
    pub(super) classes: OsString,
}

impl Default for ZooKeeper {
    fn default() -> Self {
        Self { classes: env::var_os(CLASSES_VARIABLE).unwrap_or_else(|| CLASSES.into()) }
    }
}

impl ZooKeeperOptions {
    /// Adds configuration lines, such as `["maxSessionTimeout=4000"]`. A later line overrides an
    /// earlier one. A system property `zookeeper.NAME` can be set as `NAME`.
    #[must_use]
    pub fn settings(self, settings: &[&str]) -> Self {
        self.args(settings)
    }

    /// Disables fsync. A killed server still keeps its data, which is in the kernel's page cache.
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings(&["forceSync=no"])
    }

    /// Sets another class path, in the format of `java -cp`.
    #[must_use]
    pub fn classes(mut self, classes: impl Into<OsString>) -> Self {
        self.store.classes = classes.into();
        self
    }

    /// Returns the configuration lines common to all servers with these options.
    pub(super) fn lines(&self) -> String {
        let settings = self.args.iter().flat_map(|setting| [setting, "\n"]);
        SETTINGS.trim_start().chars().chain(settings.flat_map(str::chars)).collect()
    }
}
