//! A registry that routes each key to one of several registries, by pattern.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;

use crate::capabilities::Capabilities;
use crate::lock::DistributedLock;
use crate::registry::{CloseReport, LockRegistry};

/// A registry that selects another registry by key. The first matching pattern selects the
/// registry. A key without a matching pattern goes to the default registry.
///
/// In a pattern, `*` matches any number of characters, including none. Other characters match
/// themselves.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use registry_core::{LockRegistry, Registry, RoutingRegistry};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let everything_else = Arc::new(Registry::in_memory()?);
/// let payments = Arc::new(Registry::in_memory()?);
/// let registry = RoutingRegistry::new(everything_else).route("payments/*", payments);
/// let guard = registry.obtain("payments/42").lock().await?;
/// guard.unlock().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RoutingRegistry {
    routes: Vec<(String, Arc<dyn LockRegistry>)>,
    default: Arc<dyn LockRegistry>,
}

impl RoutingRegistry {
    /// Creates a registry that routes all keys to `default`, until routes are added.
    #[must_use]
    pub fn new(default: Arc<dyn LockRegistry>) -> Self {
        Self { routes: Vec::new(), default }
    }

    /// Adds a route: keys that match `pattern`, and no earlier pattern, go to `registry`.
    #[must_use]
    pub fn route(mut self, pattern: impl Into<String>, registry: Arc<dyn LockRegistry>) -> Self {
        self.routes.push((pattern.into(), registry));
        self
    }

    fn registry_for(&self, key: &str) -> &Arc<dyn LockRegistry> {
        let route = self.routes.iter().find(|(pattern, _)| matches(pattern, key));
        route.map_or(&self.default, |(_, registry)| registry)
    }

    /// Returns each registry once, even if it has several routes.
    fn distinct_registries(&self) -> Vec<&Arc<dyn LockRegistry>> {
        let mut distinct: Vec<&Arc<dyn LockRegistry>> = vec![&self.default];
        for (_, registry) in &self.routes {
            if !distinct.iter().any(|known| Arc::ptr_eq(known, registry)) {
                distinct.push(registry);
            }
        }
        distinct
    }
}

#[async_trait]
impl LockRegistry for RoutingRegistry {
    fn obtain(&self, key: &str) -> DistributedLock {
        self.registry_for(key).obtain(key)
    }

    /// Returns the capabilities that apply to every key.
    fn capabilities(&self) -> Capabilities {
        let all = self.distinct_registries();
        all.iter().skip(1).fold(self.default.capabilities(), |common, registry| {
            common.intersection(&registry.capabilities())
        })
    }

    /// Closes all registries concurrently and adds up their reports. If two different [`Arc`]s
    /// contain clones of one registry, its report is added twice.
    ///
    /// # Cancel safety
    /// If the future is dropped, all registries stay in the closing state. Another call of `close`
    /// continues.
    async fn close(&self, limit: Duration) -> CloseReport {
        let reports =
            join_all(self.distinct_registries().into_iter().map(|registry| registry.close(limit)))
                .await;
        reports.into_iter().fold(CloseReport::default(), CloseReport::plus)
    }
}

impl fmt::Debug for RoutingRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut map = f.debug_map();
        for (pattern, registry) in &self.routes {
            map.entry(pattern, registry);
        }
        map.entry(&"*", &self.default).finish()
    }
}

/// Returns whether `key` matches `pattern`. Each part between two stars is searched after the match
/// of the previous part. The leftmost match suffices, because it leaves the longest remainder.
fn matches(pattern: &str, key: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == key;
    };
    let Some(mut key) = key.strip_prefix(head) else {
        return false;
    };
    let (middle, tail) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match key.find(part) {
            Some(at) => key = &key[at + part.len()..],
            None => return false,
        }
    }
    key.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, key, expected) in [
            ("orders/*", "orders/42", true),
            ("orders/*", "orders/", true),
            ("orders/*", "order", false),
            ("*", "anything", true),
            ("*/42", "orders/42", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("exact", "exact", true),
            ("exact", "exactly", false),
            ("é*", "éa", true),
            ("", "a", false),
            ("**", "a", true),
        ] {
            assert_eq!(matches(pattern, key), expected, "{pattern:?} on {key:?}");
        }
    }
}
