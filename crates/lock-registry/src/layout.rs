//! Names of record formats, common to all stores.

use std::fmt;
use std::str::FromStr;

use registry_core::ConfigError;
use registry_core::config::parse_choice;

use crate::options::{default_row, syntax_error};

/// The format of a store's records, which determines the other programs that share its locks.
///
/// Every store supports [`Native`](Self::Native). Each other layout is the format of a peer, which
/// is another library or program that locks the same keys. Only the stores that the peer uses
/// support its layout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// This project's own layout.
    #[default]
    Native,
    /// The layout of Spring Integration. In Redis (not quorums), the layout of `RedisLockRegistry`,
    /// with the namespace as its registry key. In PostgreSQL, MariaDB and MySQL, the layout of
    /// `JdbcLockRegistry`.
    Spring,
    /// The layout of Apache Curator's `InterProcessMutex`, which Spring Integration's
    /// `ZookeeperLockRegistry` uses. The option `root` sets its root path. For ZooKeeper.
    Curator,
    /// The layout of Redisson's `RLock`. The lock's name is the key. If a namespace is set, the
    /// name begins with the namespace and a colon. For Redis, not for quorums.
    Redisson,
    /// The layout of `etcdctl lock` and of Go's `concurrency.Mutex`. The lock's name is the key. If
    /// a namespace is set, the name begins with the namespace and a slash. For etcd.
    Etcdctl,
}

const LAYOUTS: [(&str, Layout); 5] = [
    ("native", Layout::Native),
    ("spring", Layout::Spring),
    ("redisson", Layout::Redisson),
    ("curator", Layout::Curator),
    ("etcdctl", Layout::Etcdctl),
];

impl Layout {
    /// The names of all layouts.
    pub(crate) const NAMES: [&str; 5] = ["native", "spring", "redisson", "curator", "etcdctl"];
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Spring => "spring",
            Self::Redisson => "redisson",
            Self::Curator => "curator",
            Self::Etcdctl => "etcdctl",
        })
    }
}

impl FromStr for Layout {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        parse_choice(text, &LAYOUTS).map_err(|invalid| {
            let row = default_row("layout");
            let problem = row.and_then(|row| syntax_error(row, text));
            let problem = problem.unwrap_or_else(|| invalid.to_string());
            ConfigError::Invalid(format!("the layout {text:?} {problem}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_parses_from_its_displayed_name() {
        assert_eq!(LAYOUTS.map(|(name, _)| name), Layout::NAMES);
        for (name, layout) in LAYOUTS {
            assert_eq!(
                (layout.to_string().as_str(), name.parse::<Layout>().unwrap()),
                (name, layout)
            );
        }
        let error = "sprnig".parse::<Layout>().unwrap_err().to_string();
        assert!(error.contains("did you mean `spring`? known values: `native`"), "{error}");
    }
}
