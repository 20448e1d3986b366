//! What the locks in Redis are worth while servers stand still, crash, forget, fail over and jump in time: clients contend meanwhile, all
//! that happens to them is recorded, and the checks of the testkit decide.
//!
//! A single server that keeps its data breaks no promise. Where a fault may cost exclusion, the test says from when to when. Tokens grow and
//! fenced writes are safe in any case.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]
#![expect(clippy::print_stdout, reason = "figures are printed for those who ask for them")]

mod standalone;
mod sentinel;
mod cluster;
mod quorum;
mod told;
mod rates;

mod contest;
mod verdict;
mod elsewhere;
