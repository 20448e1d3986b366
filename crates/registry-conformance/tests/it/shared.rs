//! Tests `assert_conformance_on_shared_servers`, with in-process stores as servers. Each clause has
//! its own namespace, a wrong number of clauses is an error, and the error names failed clauses.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use registry_conformance::{
    Clause, Need, SharedServers, all_clauses, assert_conformance_on_shared_servers,
};
use registry_core::{LockBackend, MemoryBackend};

#[derive(Debug, Default)]
struct MemoryServers {
    namespaces: Mutex<HashMap<String, MemoryBackend>>,
    /// Each client has a store of its own, so that no lock excludes another client.
    is_broken: bool,
}

#[async_trait]
impl SharedServers for MemoryServers {
    async fn client(&self, namespace: &str) -> Arc<dyn LockBackend> {
        if self.is_broken {
            return Arc::new(MemoryBackend::new());
        }
        let mut namespaces = self.namespaces.lock().unwrap();
        Arc::new(namespaces.entry(namespace.to_owned()).or_default().clone())
    }

    fn lacks(&self) -> &[Need] {
        &[Need::Restart, Need::Wipe]
    }

    fn applies(&self, clause: &Clause) -> bool {
        clause.theme == "exclusion"
    }
}

/// Returns how many clauses run, and how many are skipped.
fn counts() -> (usize, usize) {
    let unmet = [Need::Fair, Need::Restart, Need::Wipe, Need::Remote];
    let runs = all_clauses().iter().filter(|clause| {
        clause.theme == "exclusion" && !clause.needs.iter().any(|need| unmet.contains(need))
    });
    let runs = runs.count();
    (runs, all_clauses().len() - runs)
}

fn run(is_broken: bool, runs: usize, skips: usize) -> Result<(), String> {
    let start = move || async move { MemoryServers { is_broken, ..MemoryServers::default() } };
    let run = || assert_conformance_on_shared_servers(start, runs, skips);
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| *panic.downcast::<String>().unwrap())
}

#[test]
fn correct_servers_pass_and_clauses_share_no_key() {
    let (runs, skips) = counts();
    assert!(runs > 5, "{runs}");
    run(false, runs, skips).unwrap();
}

#[test]
fn another_number_of_clauses_is_a_failure() {
    let (runs, skips) = counts();
    let failure = run(false, runs + 1, skips - 1).unwrap_err();
    assert!(failure.contains("skipped"), "{failure}");
}

#[test]
fn each_failed_clause_is_named() {
    let (runs, skips) = counts();
    let failure = run(true, runs, skips).unwrap_err();
    let name = "exclusion::a_claim_of_another_client_is_busy_while_the_first_holds";
    assert!(failure.contains("clauses failed") && failure.contains(name), "{failure}");
}
