//! The program `book-tables`: writes the generated tables of the documentation, and the pictures
//! and charts of the book. With `--check`, it writes nothing, and fails if one of them is stale.

#![expect(clippy::print_stderr, reason = "a program reports what it writes")]

use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use lock_registry_tests::book_tables::stale_pages;
use lock_registry_tests::charts::stale_charts;
use lock_registry_tests::pictures::stale_pictures;

fn main() -> io::Result<ExitCode> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let is_check = env::args().nth(1).as_deref() == Some("--check");
    let pages = stale_pages(&root)?.into_iter().map(|(page, text)| (page.to_owned(), text));
    let stale: Vec<_> = pages.chain(stale_pictures(&root)?).chain(stale_charts(&root)?).collect();
    for (page, text) in &stale {
        if is_check {
            eprintln!("{page}: stale");
        } else {
            fs::write(root.join(page), text)?;
            eprintln!("{page}: written");
        }
    }
    Ok(if is_check && !stale.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
