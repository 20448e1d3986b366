//! Defines the macro `conformance!`, which emits a test for each clause. The list of clauses is
//! in `list`.

/// Emits the suite for one harness: a test per clause, in a module per theme, and the test
/// `every_clause_is_run_or_declared_as_skipped`. That test compares `runs` and `skips` with the
/// clauses, and `without` with the store.
///
/// Use it once per module, in a test file of the backend's crate:
///
/// ```
/// # use std::sync::Arc;
/// # use async_trait::async_trait;
/// # use registry_core::{LockBackend, MemoryBackend};
/// # use registry_conformance::{Clock, Harness, Store};
/// #[derive(Debug)]
/// struct Memory;
///
/// #[async_trait]
/// impl Harness for Memory {
///     fn clock(&self) -> Clock { Clock::Paused }
///     async fn store(&self) -> Box<dyn Store> { Box::new(OneMemory(MemoryBackend::new())) }
/// }
///
/// #[derive(Debug)]
/// struct OneMemory(MemoryBackend);
///
/// #[async_trait]
/// impl Store for OneMemory {
///     async fn client(&self) -> Arc<dyn LockBackend> { Arc::new(self.0.clone()) }
/// }
///
/// registry_conformance::conformance! {
///     harness = Memory,
///     runs = 420,
///     skips = 15,
///     without = [fair, namespaces, restart, wipe, remote],
/// }
/// # fn main() {}
/// ```
///
/// `without` lists the features that the store lacks, by the names of [`Need`](crate::Need). A
/// clause that needs one of them is emitted as an ignored test with the reason.
/// `every_clause_is_run_or_declared_as_skipped` fails if the store has a listed feature or lacks an
/// unlisted one.
#[macro_export]
macro_rules! conformance {
    (
        harness = $harness:expr,
        runs = $runs:expr,
        skips = $skips:expr,
        without = [$($need:ident),* $(,)?] $(,)?
    ) => {
        $crate::__conformance! { ($) [$harness] [$runs] [$skips] [$($need)*] }
    };
}

// The dollar sign is passed in, because a macro that defines a macro cannot write it otherwise.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance {
    (($d:tt) [$harness:expr] [$runs:expr] [$skips:expr] [$($missing:ident)*]) => {
        fn __harness() -> impl $crate::Harness {
            $harness
        }

        // Removes the needs of a clause one by one. If the store lacks one of them, the clause is
        // ignored.
        macro_rules! __clause {
            ($d theme:ident $d name:ident []) => {
                #[test]
                fn $d name() {
                    $crate::run(super::__harness(), stringify!($d theme), stringify!($d name));
                }
            };
            $(
                ($d theme:ident $d name:ident [$missing $d($d rest:ident)*]) => {
                    $crate::__ignored! { $missing
                        fn $d name() {
                            $crate::run(super::__harness(), stringify!($d theme), stringify!($d name));
                        }
                    }
                };
            )*
            ($d theme:ident $d name:ident [$d met:ident $d($d rest:ident)*]) => {
                __clause! { $d theme $d name [$d($d rest)*] }
            };
        }

        macro_rules! __suite {
            ($d(
                $d theme:ident {
                    $d($d name:ident [$d($d need:ident)*],)*
                }
            )*) => {
                $d(
                    mod $d theme {
                        $d(__clause! { $d theme $d name [$d($d need)*] })*
                    }
                )*

                #[test]
                fn every_clause_is_run_or_declared_as_skipped() {
                    $crate::check(
                        &__harness(),
                        $runs,
                        $skips,
                        &[$(stringify!($missing)),*],
                        &[$d($d((stringify!($d theme), stringify!($d name)),)*)*],
                    );
                }
            };
        }

        $crate::__for_all_clauses! { __suite }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __ignored {
    (fault_free $test:item) => {
        #[test]
        #[ignore = "the harness injects faults, so the replies of the store itself are unknown"]
        $test
    };
    (fencing $test:item) => {
        #[test]
        #[ignore = "the store has no fencing"]
        $test
    };
    (fair $test:item) => {
        #[test]
        #[ignore = "the store has no queue of its own"]
        $test
    };
    (handoff $test:item) => {
        #[test]
        #[ignore = "the store has a queue of its own, so claims are not handed over locally"]
        $test
    };
    (fair_on_request $test:item) => {
        #[test]
        #[ignore = "waiters cannot queue in the store"]
        $test
    };
    (shared $test:item) => {
        #[test]
        #[ignore = "the store has no shared locks"]
        $test
    };
    (upgradable $test:item) => {
        #[test]
        #[ignore = "the store has no upgradable locks"]
        $test
    };
    (permits $test:item) => {
        #[test]
        #[ignore = "the store has no permits"]
        $test
    };
    (values $test:item) => {
        #[test]
        #[ignore = "the store has no value blocks"]
        $test
    };
    (waiters $test:item) => {
        #[test]
        #[ignore = "the store does not list waiters"]
        $test
    };
    (wakes $test:item) => {
        #[test]
        #[ignore = "the store does not wake waiters"]
        $test
    };
    (reports_invalidations $test:item) => {
        #[test]
        #[ignore = "the store does not report invalidations"]
        $test
    };
    (labels $test:item) => {
        #[test]
        #[ignore = "the store keeps no labels"]
        $test
    };
    (inspect $test:item) => {
        #[test]
        #[ignore = "the store cannot be inspected"]
        $test
    };
    (namespaces $test:item) => {
        #[test]
        #[ignore = "the harness opens no second namespace"]
        $test
    };
    (restart $test:item) => {
        #[test]
        #[ignore = "the harness cannot restart the store"]
        $test
    };
    (wipe $test:item) => {
        #[test]
        #[ignore = "the harness cannot delete the data of the store"]
        $test
    };
    (grants_outlive_client $test:item) => {
        #[test]
        #[ignore = "a grant ends with its client"]
        $test
    };
    (remote $test:item) => {
        #[test]
        #[ignore = "the harness starts no other process"]
        $test
    };
}
