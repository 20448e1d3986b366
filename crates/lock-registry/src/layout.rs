//! How records are laid out, by a name that holds for all stores.

use std::fmt;
use std::str::FromStr;

use registry_core::ConfigError;

use crate::value::{Problem, choice};

/// How a store lays out its records, and so which other programs contend for the same locks.
///
/// Every store has [`Native`](Self::Native). Layouts of peers, programs in other languages, come with the stores that these share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// This project's own.
    #[default]
    Native,
    /// That of Spring Integration: in Redis, but for quorums, of its `RedisLockRegistry`, whose registry key is the namespace; in PostgreSQL,
    /// MariaDB and MySQL of its `JdbcLockRegistry`.
    Spring,
    /// That of Apache Curator's `InterProcessMutex`, which Spring Integration's `ZookeeperLockRegistry` uses, whose root the option `root` names. For
    /// ZooKeeper.
    Curator,
    /// That of Redisson's `RLock`, whose name is the key, after the namespace and a colon if there is one. For Redis, but for quorums.
    Redisson,
    /// That of `etcdctl lock` and of Go's `concurrency.Mutex`, whose name is the key, after the namespace and a slash if there is one. For etcd.
    Etcdctl,
}

const LAYOUTS: [(&str, Layout); 5] = [
    ("native", Layout::Native),
    ("spring", Layout::Spring),
    ("redisson", Layout::Redisson),
    ("curator", Layout::Curator),
    ("etcdctl", Layout::Etcdctl),
];

/// Reads the name of a layout.
pub(crate) fn layout(text: &str) -> Result<Layout, Problem> {
    choice(text, "layout", &LAYOUTS)
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
        layout(text)
            .map_err(|Problem(problem)| ConfigError::Invalid(format!("{text:?}, {problem}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_reads_as_it_is_written() {
        for (name, layout) in LAYOUTS {
            assert_eq!(
                (layout.to_string().as_str(), name.parse::<Layout>().unwrap()),
                (name, layout)
            );
        }
        let error = "sprnig".parse::<Layout>().unwrap_err().to_string();
        assert!(error.contains("did you mean `spring`? There are `native`"), "{error}");
    }
}
