//! Finds which labelled processes wait for which others, and which of them may be deadlocked.
//!
//! The graph treats a label as one process, which continues only when all its waits have ended. If
//! the tasks of a process wait independently, a reported deadlock may therefore be false. Claims
//! without a label are ignored.

use std::collections::{HashMap, HashSet};

use lock_registry::modes::{ClaimMode, WaitingClaim};
use lock_registry::{Holder, Key};
use petgraph::algo::kosaraju_scc;
use petgraph::graph::DiGraph;
use serde::Serialize;

use crate::snapshot::Snapshot;

/// A process that waits for another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Wait {
    pub(crate) waiter: String,
    pub(crate) key: Key,
    pub(crate) mode: String,
    pub(crate) holder: String,
    /// The index in [`WaitGraph::deadlocks`] of the deadlock that this wait is part of.
    pub(crate) deadlock: Option<usize>,
}

/// The answer of `/api/waits`.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct WaitGraph {
    /// The waits of deadlocks come first.
    pub(crate) waits: Vec<Wait>,
    /// The number of further waits, which `waits` does not contain.
    pub(crate) omitted: usize,
    /// Whether all waits were examined. If not, deadlocks may be missing.
    pub(crate) is_complete: bool,
    /// Groups of labels that wait for each other in a cycle.
    pub(crate) deadlocks: Vec<Vec<String>>,
}

/// The maximum number of waits in [`WaitGraph::waits`].
const SHOWN_WAITS_MAX: usize = 500;

/// The approximate maximum number of waits that are examined. Each waiter of a key waits for each
/// holder of the key: 1,000 waiters and 1,000 holders result in a million waits.
const EXAMINED_WAITS_MAX: usize = 100_000;

/// A waiting claim, and the labels for which it waits.
struct Request<'a> {
    claim: &'a WaitingClaim,
    waiter: &'a str,
    /// The labels of the holders that block the claim, each with the units that it withholds.
    blockers: HashMap<&'a str, u32>,
    /// The maximum number of units that blockers may still hold when the claim is granted.
    allowed: u32,
}

impl WaitGraph {
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let (requests, is_complete) = requests_of(snapshot);
        let stuck = stuck_labels(&requests);
        let deadlocks = cycles(&requests, &stuck);
        let cycle_of: HashMap<&str, usize> = (deadlocks.iter().enumerate())
            .flat_map(|(index, labels)| labels.iter().map(move |label| (label.as_str(), index)))
            .collect();
        let mut waits: Vec<Wait> = requests
            .iter()
            .flat_map(|request| request.blockers.keys().map(move |holder| (request, *holder)))
            .map(|(request, holder)| Wait {
                waiter: request.waiter.to_owned(),
                key: request.claim.key.clone(),
                mode: request.claim.mode.to_string(),
                holder: holder.to_owned(),
                deadlock: (cycle_of.get(request.waiter).copied())
                    .filter(|cycle| cycle_of.get(holder) == Some(cycle)),
            })
            .collect();
        waits.sort_by(|a, b| (a.deadlock.is_none(), a).cmp(&(b.deadlock.is_none(), b)));
        waits.dedup();
        let omitted = waits.len().saturating_sub(SHOWN_WAITS_MAX);
        waits.truncate(SHOWN_WAITS_MAX);
        Self { waits, omitted, is_complete, deadlocks }
    }
}

/// Returns the waiting claims with their blockers, and whether all waits were examined.
fn requests_of(snapshot: &Snapshot) -> (Vec<Request<'_>>, bool) {
    let mut holders: HashMap<&Key, Vec<&Holder>> = HashMap::new();
    for holder in &snapshot.holders {
        holders.entry(&holder.key).or_default().push(holder);
    }
    let mut requests = Vec::new();
    let mut examined = 0;
    for claim in &snapshot.waiters {
        let (Some(waiter), Some(holders)) = (claim.label.as_deref(), holders.get(&claim.key))
        else {
            continue;
        };
        if examined > EXAMINED_WAITS_MAX {
            return (requests, false);
        }
        let mut blockers = HashMap::new();
        for holder in holders {
            let Some(units) = blocking_units(claim.mode, holder.mode) else { continue };
            // A holder with the same label is the same process, which would wait for itself. The
            // graph ignores such a wait, because another task of the process may release the lock.
            if let Some(label) = holder.label.as_deref().filter(|label| *label != waiter) {
                let taken: &mut u32 = blockers.entry(label).or_default();
                *taken = taken.saturating_add(units);
            }
        }
        examined += holders.len();
        let allowed = match claim.mode {
            ClaimMode::Permits { take, of } => of.saturating_sub(take),
            _ => 0,
        };
        requests.push(Request { claim, waiter, blockers, allowed });
    }
    (requests, true)
}

/// Returns the units that a holder with the mode `held` keeps from a claim with the mode `wanted`.
/// Returns `None` if the modes never exclude each other.
fn blocking_units(wanted: ClaimMode, held: ClaimMode) -> Option<u32> {
    match (wanted, held) {
        (ClaimMode::Shared, ClaimMode::Shared | ClaimMode::Upgradable)
        | (ClaimMode::Upgradable, ClaimMode::Shared) => None,
        (ClaimMode::Permits { .. }, ClaimMode::Permits { take, .. }) => Some(take),
        (ClaimMode::Permits { of, .. }, _) => Some(of),
        _ => Some(1),
    }
}

/// Returns the labels whose waits never end: those of deadlocks, and labels that wait for them.
///
/// Reduces the graph (Holt, "Some deadlock properties of computer systems", 1972): a process whose
/// claims can all be granted continues and releases its locks. Then, other processes may continue.
fn stuck_labels<'a>(requests: &[Request<'a>]) -> HashSet<&'a str> {
    let mut open_requests: HashMap<&str, usize> = HashMap::new();
    let mut blocked_by: HashMap<&str, Vec<usize>> = HashMap::new();
    // For each request, the units of those blockers that are not known to continue.
    let mut taken: Vec<u64> = Vec::with_capacity(requests.len());
    for (index, request) in requests.iter().enumerate() {
        *open_requests.entry(request.waiter).or_default() += 1;
        for label in request.blockers.keys() {
            blocked_by.entry(label).or_default().push(index);
        }
        taken.push(request.blockers.values().map(|units| u64::from(*units)).sum());
    }
    let mut stuck: HashSet<&str> = open_requests.keys().copied().collect();
    let mut runnable: Vec<&str> =
        blocked_by.keys().copied().filter(|label| !stuck.contains(label)).collect();
    let grant = |index: usize, open: &mut HashMap<&'a str, usize>| {
        let waiter = requests[index].waiter;
        let left = open.entry(waiter).or_default();
        *left = left.saturating_sub(1);
        (*left == 0).then_some(waiter)
    };
    let is_granted = |index: usize, taken: u64| taken <= u64::from(requests[index].allowed);
    for (index, taken) in taken.iter().enumerate() {
        if is_granted(index, *taken) {
            runnable.extend(grant(index, &mut open_requests));
        }
    }
    while let Some(label) = runnable.pop() {
        stuck.remove(label);
        for &index in blocked_by.get(label).into_iter().flatten() {
            let before = taken[index];
            taken[index] -= u64::from(requests[index].blockers[label]);
            if is_granted(index, taken[index]) && !is_granted(index, before) {
                runnable.extend(grant(index, &mut open_requests));
            }
        }
    }
    stuck
}

/// Returns the groups of stuck labels in which each label waits for each other one, directly or
/// through others.
fn cycles(requests: &[Request<'_>], stuck: &HashSet<&str>) -> Vec<Vec<String>> {
    let mut graph = DiGraph::<&str, ()>::new();
    let nodes: HashMap<&str, _> =
        stuck.iter().map(|label| (*label, graph.add_node(label))).collect();
    for request in requests {
        for holder in request.blockers.keys() {
            if let (Some(from), Some(to)) = (nodes.get(request.waiter), nodes.get(holder)) {
                graph.update_edge(*from, *to, ());
            }
        }
    }
    let mut cycles: Vec<Vec<String>> = kosaraju_scc(&graph)
        .into_iter()
        .filter(|group| group.len() > 1)
        .map(|group| {
            let mut labels: Vec<_> = group.iter().map(|node| graph[*node].to_owned()).collect();
            labels.sort();
            labels
        })
        .collect();
    cycles.sort();
    cycles
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn mode(text: &str) -> ClaimMode {
        text.parse().unwrap()
    }

    /// Returns the deadlocks of these holders and waiters, each a label, a key and a mode.
    fn deadlocks(
        holders: &[(&str, &str, &str)],
        waiters: &[(&str, &str, &str)],
    ) -> Vec<Vec<String>> {
        graph(holders, waiters).deadlocks
    }

    fn graph(holders: &[(&str, &str, &str)], waiters: &[(&str, &str, &str)]) -> WaitGraph {
        let text = |label: &str| Some(label.to_owned()).filter(|label| !label.is_empty());
        let holder = |(label, key, held): &(&str, &str, &str)| {
            Holder::new(Key::new(key).unwrap()).with_mode(mode(held)).with_label(text(label))
        };
        let waiter = |(label, key, wanted): &(&str, &str, &str)| {
            WaitingClaim::new(Key::new(key).unwrap())
                .with_mode(mode(wanted))
                .with_label(text(label))
        };
        WaitGraph::of(&Snapshot {
            holders: holders.iter().map(holder).collect(),
            waiters: waiters.iter().map(waiter).collect(),
            taken_at: Instant::now(),
        })
    }

    const X: &str = "exclusive";

    #[test]
    fn processes_that_wait_in_a_cycle_are_a_deadlock() {
        let holders = [("a", "1", X), ("b", "2", X), ("c", "3", X)];
        let cycle = [("a", "2", X), ("b", "3", X), ("c", "1", X)];
        assert_eq!(deadlocks(&holders, &cycle), [["a", "b", "c"]]);
        assert_eq!(deadlocks(&holders, &cycle[..2]), [[""; 0]; 0]);
    }

    #[test]
    fn a_waiter_behind_a_deadlock_is_not_part_of_it() {
        let graph = graph(
            &[("a", "1", X), ("b", "2", X), ("d", "4", X)],
            &[("d", "1", X), ("a", "2", X), ("b", "1", X), ("e", "4", X)],
        );
        assert_eq!(graph.deadlocks, [["a", "b"]]);
        let in_deadlock: Vec<_> =
            graph.waits.iter().map(|wait| (&*wait.waiter, wait.deadlock)).collect();
        assert_eq!(in_deadlock, [("a", Some(0)), ("b", Some(0)), ("d", None), ("e", None)]);
    }

    #[test]
    fn readers_wait_only_for_writers() {
        let shared = "shared";
        let holders = [("a", "1", shared), ("b", "2", shared)];
        assert_eq!(deadlocks(&holders, &[("a", "2", shared), ("b", "1", shared)]), [[""; 0]; 0]);
        assert_eq!(deadlocks(&holders, &[("a", "2", X), ("b", "1", X)]), [["a", "b"]]);
    }

    #[test]
    fn a_permit_waits_until_enough_units_are_free() {
        let (one, two) = ("permits 1 of 2", "permits 2 of 2");
        let holders = [("a", "1", one), ("b", "2", X), ("c", "1", one)];
        // The process c continues and releases one unit. This is enough if b wants one unit, but
        // not if b wants two.
        assert_eq!(deadlocks(&holders, &[("a", "2", X), ("b", "1", one)]), [[""; 0]; 0]);
        assert_eq!(deadlocks(&holders, &[("a", "2", X), ("b", "1", two)]), [["a", "b"]]);
    }

    #[test]
    fn claims_of_one_label_and_claims_without_label_are_no_deadlock() {
        assert_eq!(deadlocks(&[("a", "1", X)], &[("a", "1", X)]), [[""; 0]; 0]);
        let holders = [("a", "1", X), ("", "2", X)];
        assert_eq!(deadlocks(&holders, &[("a", "2", X), ("", "1", X)]), [[""; 0]; 0]);
    }

    #[test]
    fn a_search_that_ends_early_says_so() {
        let labels: Vec<String> = (0..400).map(|index| index.to_string()).collect();
        let holders: Vec<_> = labels.iter().map(|label| (&**label, "1", "shared")).collect();
        let waiters: Vec<_> = labels.iter().map(|label| (&**label, "1", X)).collect();
        assert!(graph(&holders, &waiters[..200]).is_complete);
        assert!(!graph(&holders, &waiters).is_complete);
    }

    #[test]
    fn a_chain_of_ten_thousand_processes_is_examined() {
        let labels: Vec<String> = (0..10_000).map(|index| index.to_string()).collect();
        let holders: Vec<_> = labels.iter().map(|label| (&**label, &**label, X)).collect();
        let mut waiters: Vec<_> = labels.windows(2).map(|pair| (&*pair[0], &*pair[1], X)).collect();
        let chain = graph(&holders, &waiters);
        assert_eq!((chain.deadlocks.len(), chain.waits.len(), chain.omitted), (0, 500, 9_499));
        waiters.push(("9999", "0", X));
        let cycle = deadlocks(&holders, &waiters);
        assert_eq!((cycle.len(), cycle[0].len()), (1, 10_000));
    }
}
