//! Tests that need what users cannot reach. The others are in `tests/`.
