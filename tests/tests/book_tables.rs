//! The generated tables of the documentation agree with the code.

use std::path::Path;

use lock_registry_tests::book_tables::stale_pages;

#[test]
fn no_generated_table_is_stale() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let stale: Vec<_> = stale_pages(&root).unwrap().into_iter().map(|(page, _)| page).collect();
    assert!(
        stale.is_empty(),
        "stale: {stale:?}; run `cargo run -p lock-registry-tests --features server-tests --bin book-tables`"
    );
}
