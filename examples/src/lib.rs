//! Code that several example programs share. The programs are in `src/bin`; the book includes them,
//! and `tests/run_all.rs` runs them.

pub mod table;

/// Compiles the Rust code of the main README.
#[cfg(doctest)]
mod readme {
    #[doc = include_str!("../../README.md")]
    struct Workspace;

    #[doc = include_str!("../../crates/registry-core/README.md")]
    struct Core;
}
