//! The generated tables of the documentation agree with the code, and the pictures and charts with
//! their sources.

use std::path::Path;

use lock_registry_tests::book_tables::stale_pages;
use lock_registry_tests::charts::stale_charts;
use lock_registry_tests::pictures::stale_pictures;
use registry_core::{InvalidKey, Key, LostReason};

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
    let mut stale = stale_pictures(&root).unwrap();
    stale.extend(stale_charts(&root).unwrap());
    let stale: Vec<_> = stale.into_iter().map(|(path, _)| path).collect();
    assert!(
        stale.is_empty(),
        "stale: {stale:?}; run `cargo run -p lock-registry-tests --features server-tests --bin book-tables`"
    );
}

/// A reader who compares stores finds each answer under the same heading.
#[test]
fn the_pages_of_the_stores_have_the_same_headings() {
    const HEADINGS: &[&str] = &[
        "## URL",
        "## When to choose it",
        "## Guarantee",
        "## Settings of the server",
        "## What a fault does",
        "## Options",
        "## Limits",
        "## Throughput",
    ];
    let stores = Path::new(env!("CARGO_MANIFEST_DIR")).join("../book/src/stores");
    for page in ["in-process", "sqlite", "postgres", "mysql", "redis", "zookeeper", "etcd"] {
        let text = std::fs::read_to_string(stores.join(format!("{page}.md"))).unwrap();
        let headings: Vec<&str> =
            text.lines().filter(|line| line.starts_with("## ")).take(HEADINGS.len()).collect();
        assert_eq!(headings, HEADINGS, "{page}");
    }
}

/// The page has sections for these texts. Their causes must match the code, also where no generated
/// table contains them.
#[test]
fn the_page_of_errors_has_every_reason_of_a_loss_and_of_an_invalid_key() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("book/src/operate/errors.md")).unwrap();
    let reasons = [LostReason::Expired, LostReason::Gone, LostReason::MaxHold, LostReason::Closed];
    let mut texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    for key in ["", &"x".repeat(Key::BYTES_MAX + 1)] {
        texts.push(Key::new(key).unwrap_err().to_string());
    }
    texts.push(InvalidKey::layout("").to_string());
    for text in texts {
        let cause = text.split("; ").next().unwrap();
        let text = cause.split(" has 4097").next().unwrap();
        assert!(page.contains(text.trim_end()), "the page lacks: {text}");
    }
}

/// Readers who cannot see a picture need its text. A picture that no page shows is superfluous.
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
