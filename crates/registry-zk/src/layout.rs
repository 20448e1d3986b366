//! The layouts and node names that programs must agree on to share locks. `path` builds the paths,
//! and `queue` builds the node names. `config` selects a layout and a naming.

/// Placement of the lock nodes. Programs share locks only if their layouts agree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// This library's own layout: `ROOT/NAMESPACE/KEY`, where the default root is `/lock-registry`.
    /// In namespace and key, `/`, `%`, spaces, control characters and all non-ASCII characters are
    /// percent-encoded. So are the names `.` and `..`.
    #[default]
    Native,
    /// The layout of Apache Curator's locks, which Spring Integration's `ZookeeperLockRegistry`
    /// uses: `ROOT/KEY`, with the key unchanged. A namespace is above the root. Keys that are not
    /// valid paths, or that would contend for another key's lock, are refused. [`Naming`] selects
    /// the recipe.
    Curator,
}

/// Name of a contender's node. Programs share locks only if they wait for each other's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Naming {
    /// `_c_UUID-lock-NUMBER`, as in Apache Curator's `InterProcessMutex`. Programs with kazoo wait
    /// for such nodes only if they set `extra_lock_patterns=["-lock-"]`.
    #[default]
    Curator,
    /// `HEX__lock__NUMBER`, as in kazoo. Programs with Curator do not wait for such nodes.
    Kazoo,
    /// `_c_UUID-__WRIT__NUMBER` for exclusive claims and `_c_UUID-__READ__NUMBER` for shared
    /// claims, as in Apache Curator's `InterProcessReadWriteLock`. Contenders with these names and
    /// contenders with other names do not wait for each other. Only with [`Layout::Curator`].
    CuratorReadWrite,
    /// Nodes for exclusive claims and permits, as in Apache Curator's `InterProcessSemaphoreV2`:
    /// `locks/_c_UUID-lock-NUMBER` for each waiter and for an exclusive holder, and
    /// `leases/_c_UUID-lease-NUMBER` for each unit. Only with [`Layout::Curator`].
    CuratorSemaphore,
}
