//! What the locks in etcd are worth while members stand still, crash and lose each other, leases are ended by others and connections break:
//! clients contend meanwhile, all that happens to them is recorded, and the checks of the testkit decide.
//!
//! No fault here costs exclusion: never are two guards of one key valid at once, tokens grow and fenced writes are safe.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a helper of tests, which may")]
#![expect(clippy::print_stdout, reason = "figures are printed for those who ask for them")]

mod cluster;
mod follower;
mod one;
mod traces;

mod contest;
mod elsewhere;
mod verdict;
