//! The generated tables of the documentation agree with the code, and the pictures with their text.

use std::path::Path;

use lock_registry_tests::book_tables::stale_pages;
use lock_registry_tests::pictures::stale_pictures;

#[test]
fn no_generated_table_is_stale() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let stale: Vec<_> = stale_pages(&root).unwrap().into_iter().map(|(page, _)| page).collect();
    assert!(
        stale.is_empty(),
        "stale: {stale:?}; run `cargo run -p lock-registry-tests --features server-tests --bin book-tables`"
    );
}

#[test]
fn no_picture_is_stale() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let stale: Vec<_> = stale_pictures(&root).unwrap().into_iter().map(|(path, _)| path).collect();
    assert!(
        stale.is_empty(),
        "stale: {stale:?}; run `cargo run -p lock-registry-tests --features server-tests --bin book-tables`"
    );
}

/// A picture without text is lost for readers who cannot see it, and one that no page shows is
/// drawn in vain.
#[test]
fn each_picture_is_shown_with_the_text_that_describes_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut pages = Vec::new();
    for folder in std::fs::read_dir(root.join("book/src")).unwrap() {
        let folder = folder.unwrap().path();
        if folder.is_dir() {
            for page in std::fs::read_dir(folder).unwrap() {
                pages.push(page.unwrap().path());
            }
        }
    }
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    let text: String = pages.iter().map(|page| std::fs::read_to_string(page).unwrap()).collect();
    for picture in std::fs::read_dir(root.join("book/pictures")).unwrap() {
        let picture = picture.unwrap().path();
        let name = picture.file_stem().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(&picture).unwrap();
        let alt = source.lines().find_map(|line| line.strip_prefix("alt \"")).unwrap();
        let shown = format!("![{}](../pictures/{name}.svg)", alt.trim_end_matches('"'));
        assert!(text.contains(&shown), "no page has: {shown}");
    }
}
