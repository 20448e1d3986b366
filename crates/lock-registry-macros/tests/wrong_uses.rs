//! Compiles wrong uses of `#[locked]` and compares the error messages. The tests of correct uses
//! are in `tests/tests/engine/locked.rs`. In this crate, their dependencies would be compiled once
//! more: cargo builds the dependencies of a crate of macros for the host.

/// If you change the messages, run this test with `TRYBUILD=overwrite`.
#[test]
fn wrong_uses_are_refused_with_a_reason() {
    trybuild::TestCases::new().compile_fail("tests/wrong/*.rs");
}

/// Like the test above, for messages of rustc, which change with its version.
#[cfg(feature = "rustc-messages")]
#[test]
fn type_errors_are_shown_where_they_are() {
    trybuild::TestCases::new().compile_fail("tests/wrong_types/*.rs");
}
