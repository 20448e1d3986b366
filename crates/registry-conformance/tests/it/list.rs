//! Checks that `all_clauses` lists each clause function in `src/clauses`, under a name of its own.

use std::fs;
use std::path::Path;

use registry_conformance::all_clauses;

#[test]
fn every_clause_function_is_in_the_list() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/clauses");
    let mut defined = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let theme = path.file_stem().unwrap().to_str().unwrap().to_owned();
        for line in fs::read_to_string(&path).unwrap().lines() {
            if let Some(rest) = line.strip_prefix("pub async fn ") {
                let (name, _) = rest.split_once('(').unwrap();
                defined.push(format!("{theme}::{name}"));
            }
        }
    }
    let mut listed: Vec<_> = all_clauses().iter().map(|clause| format!("{clause:?}")).collect();
    defined.sort();
    listed.sort();
    assert_eq!(defined, listed);
}

#[test]
fn the_suite_has_at_least_70_clauses_with_unique_names() {
    assert!(all_clauses().len() >= 70);
    let mut names: Vec<_> = all_clauses().iter().map(|clause| clause.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all_clauses().len(), "two clauses have the same name");
}
