//! Tests of private items. The other tests are in `tests/`.
