//! What several example programs share. The programs are in `src/bin`; the book includes them, and `tests/run_all.rs` runs them.

pub mod table;

/// The code that people see first compiles.
#[cfg(doctest)]
mod readme {
    #[doc = include_str!("../../README.md")]
    struct Workspace;

    #[doc = include_str!("../../crates/registry-core/README.md")]
    struct Core;
}
