//! Checks of the workspace itself: dependencies between crates, package metadata, terminology and
//! links. The tests read files and `cargo metadata`, and run none of the product code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates that each implement one kind of store.
const BACKENDS: &[&str] = &["registry-jdbc", "registry-redis", "registry-zk", "registry-etcd"];

/// Client libraries of stores. The engine must never depend on one.
const CLIENTS: &[&str] =
    &["sqlx", "redis", "zookeeper-client", "etcd-client", "tonic", "rusqlite", "tokio-postgres"];

/// The unpublished packages: tests, examples and benchmarks.
const UNPUBLISHED: &[&str] = &[
    "registry-testkit",
    "lock-registry-examples",
    "lock-registry-simulation",
    "lock-registry-tests",
    "lock-registry-benches",
];

#[test]
fn the_engine_depends_on_no_store_and_on_no_other_crate_of_ours() {
    let packages = packages();
    for dependency in &packages["registry-core"].dependencies {
        assert!(
            !CLIENTS.contains(&&*dependency.name),
            "registry-core depends on {}",
            dependency.name
        );
        assert!(
            !packages.contains_key(&dependency.name),
            "registry-core depends on {}",
            dependency.name
        );
    }
}

#[test]
fn backends_depend_on_the_engine_and_not_on_each_other() {
    let packages = packages();
    for backend in BACKENDS {
        let normal = workspace_dependencies(&packages, backend, "normal");
        assert_eq!(normal, BTreeSet::from(["registry-core".to_owned()]), "{backend}");
    }
    for backend in packages
        .keys()
        .filter(|name| name.starts_with("registry-") && !BACKENDS.contains(&name.as_str()))
    {
        let known = ["registry-core", "registry-cli", "registry-conformance", "registry-testkit"];
        assert!(known.contains(&backend.as_str()), "{backend} is new: is it a backend?");
    }
}

#[test]
fn the_conformance_suite_depends_on_the_engine_alone() {
    let normal = workspace_dependencies(&packages(), "registry-conformance", "normal");
    assert_eq!(normal, BTreeSet::from(["registry-core".to_owned()]));
}

#[test]
fn published_crates_need_nothing_unpublished() {
    let packages = packages();
    let unpublished: BTreeSet<&str> = packages
        .values()
        .filter(|package| !package.published)
        .map(|package| &*package.name)
        .collect();
    assert_eq!(unpublished, UNPUBLISHED.iter().copied().collect());
    for package in packages.values().filter(|package| package.published) {
        for kind in ["normal", "build"] {
            for dependency in workspace_dependencies(&packages, &package.name, kind) {
                assert!(packages[&dependency].published, "{} needs {dependency}", package.name);
            }
        }
    }
}

#[test]
fn published_crates_say_what_they_are() {
    for package in packages().values().filter(|package| package.published) {
        for field in ["description", "license", "readme", "rust_version"] {
            assert!(package.json[field].is_string(), "{} has no {field}", package.name);
        }
        for field in ["keywords", "categories", "authors"] {
            assert!(
                package.json[field].as_array().is_some_and(|list| !list.is_empty()),
                "{} has no {field}",
                package.name
            );
        }
        let readme = package.folder.join(package.json["readme"].as_str().expect("checked above"));
        let text = read(&readme);
        assert!(text.lines().count() > 5, "{} says next to nothing", readme.display());
    }
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    for package in packages().values() {
        let manifest = read(&package.folder.join("Cargo.toml"));
        let inherits = manifest.contains("[lints]\nworkspace = true");
        // Examples and benchmarks may print, unwrap and measure.
        let relaxed = ["lock-registry-examples", "lock-registry-benches"].contains(&&*package.name);
        let forbids = manifest.contains("[lints.rust]\nunsafe_code = \"forbid\"");
        assert!(inherits || (relaxed && forbids), "{} goes without lints", package.name);
    }
}

#[test]
fn every_public_async_fn_says_what_dropping_its_future_does() {
    let published: Vec<_> = packages().into_values().filter(|package| package.published).collect();
    let mut silent = Vec::new();
    for file in files().iter().filter(|file| file.extension().is_some_and(|ext| ext == "rs")) {
        let Some(package) =
            published.iter().find(|package| file.starts_with(package.folder.join("src")))
        else {
            continue;
        };
        // A program has no public API. Clauses are tests, and their module documents dropped
        // futures for all of them.
        let is_program = !package.folder.join("src/lib.rs").exists();
        if is_program || file.starts_with(package.folder.join("src/clauses")) {
            continue;
        }
        let text = read(file);
        let mut docs = String::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_start();
            if let Some(doc) = line.strip_prefix("///") {
                docs.push_str(doc.trim());
                docs.push('\n');
            } else if line.starts_with("pub async fn") {
                if !docs.contains("# Cancel safety") {
                    silent.push(format!("{}:{}: {line}", file.display(), number + 1));
                }
                docs.clear();
            } else if !line.starts_with("#[") && !line.starts_with("reason =") && line != ")]" {
                docs.clear();
            }
        }
    }
    assert!(silent.is_empty(), "no `# Cancel safety`:\n{}", silent.join("\n"));
}

/// Synonyms, each with the term to use instead. The glossary is in ARCHITECTURE.md.
const SYNONYMS: &[(&str, &str)] = &[
    ("time-to-live", "lease"),
    ("ttl", "lease"),
    ("lease duration", "lease"),
    ("lease time", "lease"),
    ("heartbeat", "renewal"),
    ("heart beat", "renewal"),
    ("keep-alive", "renewal"),
    ("hand-off", "hand-over"),
    ("lock manager", "registry"),
    ("lock server", "store"),
    ("lock service", "store"),
    ("storage backend", "store, or backend for the code that speaks to it"),
    ("fence token", "fencing token"),
    ("lock token", "fencing token"),
    ("lock id", "key, or claim id"),
    ("reentrant lock", "re-entry"),
];

/// Pages that may use the terms of other products: those for users of other libraries, and the
/// architecture.
const PAGES_WITH_FOREIGN_TERMS: &[&str] = &["book/src/come-from/", "ARCHITECTURE.md"];

#[test]
fn each_thing_has_one_name_in_what_users_read() {
    let mut found = Vec::new();
    for file in files() {
        let path = relative(&file);
        if PAGES_WITH_FOREIGN_TERMS.iter().any(|page| path.starts_with(page)) {
            continue;
        }
        let is_doc = path.ends_with(".md");
        let is_code = path.ends_with(".rs")
            && path.starts_with("crates/")
            && path.contains("/src/")
            && !path.starts_with("crates/registry-testkit/");
        if !is_doc && !is_code {
            continue;
        }
        for (number, line) in read(&file).lines().enumerate() {
            let line = line.trim_start();
            if is_code && !line.starts_with("///") && !line.starts_with("//!") {
                continue;
            }
            // Text in backticks is code.
            let prose: String =
                line.split('`').step_by(2).collect::<Vec<_>>().join(" ").to_lowercase();
            for (synonym, term) in SYNONYMS {
                if has_word(&prose, synonym) {
                    found.push(format!("{path}:{}: {synonym:?}; the word is {term}", number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Words that do not say which component does what. Each has a standard term: `release` for "let
/// go", `notified` for "told", `another client` for "somebody else".
const VAGUE_WORDS: &[&str] = &[
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "those who",
    "tell",
    "tells",
    "told",
    "telling",
    "let go",
    "lets go",
    "letting go",
    "give back",
    "gives back",
    "giving back",
    "given back",
    "gave back",
    "look after",
    "looks after",
    "looked after",
    "ears",
    "hands",
    "heart",
    "rumour",
    "courtesy",
    "desk",
    "errand",
    "seat",
    "door",
    "keeper",
    "janitor",
    "trouble",
    "stray",
    "by hand",
];

/// Places that need such a word: the beginning of the path, the text, and the reason.
const VAGUE_WORDS_ALLOWED: &[(&str, &str, &str)] = &[
    ("", "zookeeper", "the name of the product"),
    ("", "by hand over", "hand-over"),
    ("", "hands over", "the verb of hand-over"),
    ("", "hands the", "the verb of hand-over"),
    ("", "hands it", "the verb of hand-over"),
    ("", "hands a", "the verb of hand-over"),
    ("", "hands its", "the verb of hand-over"),
    ("tests/tests/tidy.rs", "", "this list"),
    ("_typos.toml", "", "a list of words"),
    ("crates/registry-cli/src/doctor.rs", "tells losses", "a field of the JSON output"),
    ("book/src/come-from/spring.md", "heart beat millis", "an option of Spring Integration"),
    ("crates/registry-jdbc/tests/it/sqlite/opening.rs", "nobody", "the name of a user"),
];

#[test]
fn names_and_prose_use_standard_words() {
    let mut found = Vec::new();
    for file in files() {
        let path = relative(&file);
        let is_read = [".rs", ".md", ".lua", ".sql", ".py", ".java", ".toml"]
            .iter()
            .any(|extension| path.ends_with(extension));
        let allowed: Vec<_> =
            VAGUE_WORDS_ALLOWED.iter().filter(|(start, ..)| path.starts_with(start)).collect();
        let is_exempt = allowed.iter().any(|(_, text, _)| text.is_empty());
        if is_exempt || !(is_read || path.starts_with(".ci/")) {
            continue;
        }
        for (number, line) in read(&file).lines().enumerate() {
            let mut text = words_of(line);
            for (_, text_allowed, _) in &allowed {
                text = text.replace(text_allowed, " ");
            }
            found.extend(
                VAGUE_WORDS
                    .iter()
                    .filter(|word| has_word(&text, word))
                    .map(|word| format!("{path}:{}: {word:?}: {}", number + 1, line.trim())),
            );
        }
    }
    assert!(found.is_empty(), "{} vague words:\n{}", found.len(), found.join("\n"));
}

/// The words of a line in lower case, with identifiers split at `_` and before capitals.
fn words_of(line: &str) -> String {
    let line = line.replace("ZooKeeper", "zookeeper");
    let mut words = String::with_capacity(line.len() + 16);
    let mut before_is_lower = false;
    for c in line.chars() {
        if c.is_uppercase() && before_is_lower {
            words.push(' ');
        }
        before_is_lower = c.is_lowercase();
        if c == '_' || c == '-' {
            words.push(' ');
        } else {
            words.extend(c.to_lowercase());
        }
    }
    words
}

#[test]
fn comments_have_at_most_100_columns() {
    let mut found = Vec::new();
    for file in files() {
        let path = relative(&file);
        let comment_sign = match path.rsplit_once('.').map(|(_, extension)| extension) {
            Some("rs") => "//",
            Some("lua" | "sql") => "--",
            _ => continue,
        };
        let mut in_code = false;
        for (number, line) in read(&file).lines().enumerate() {
            let comment = line.trim_start();
            if comment.starts_with(comment_sign) && comment.contains("```") {
                in_code = !in_code;
            }
            // A link cannot be broken, and a table row can only be read on one line.
            let is_breakable = !in_code && !line.contains("://") && !line.contains("| ");
            if comment.starts_with(comment_sign) && is_breakable && line.chars().count() > 100 {
                found.push(format!("{path}:{}", number + 1));
            }
        }
    }
    assert!(found.is_empty(), "comments of more than 100 columns:\n{}", found.join("\n"));
}

#[test]
fn unit_tests_are_at_the_end_of_their_file() {
    let mut found = Vec::new();
    for file in files() {
        let path = relative(&file);
        if !(path.starts_with("crates/") && path.contains("/src/") && path.ends_with(".rs")) {
            continue;
        }
        let text = read(&file);
        let module = text.split_once("\nmod tests").map(|(_, module)| module);
        let is_last = |module: &str| {
            module.starts_with(" {\n")
                && module.split_once("\n}\n").is_some_and(|(_, rest)| rest.is_empty())
        };
        if path.contains("/tests/") || module.is_some_and(|module| !is_last(module)) {
            found.push(path);
        }
    }
    assert!(found.is_empty(), "unit tests in a place of their own: {found:#?}");
}

/// Files that import each other in a circle cannot be understood one at a time. A folder counts as
/// one file.
#[test]
fn at_most_three_files_of_a_crate_import_each_other_in_a_circle() {
    const CIRCLE_MAX: usize = 3;
    for package in BACKENDS.iter().chain(&["registry-core"]) {
        let imports = imports(&root().join("crates").join(package).join("src"));
        assert!(imports.len() > 5, "{package}: not all files are found: {imports:?}");
        for file in imports.keys() {
            let imported = reachable(&imports, file);
            let is_in_circle = |other: &&&String| reachable(&imports, other).contains(file);
            let circle: Vec<_> = imported.iter().filter(is_in_circle).collect();
            assert!(circle.len() <= CIRCLE_MAX, "{package}: these files form a circle: {circle:?}");
        }
    }
}

/// Returns the modules that each module at the root of a crate imports.
fn imports(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let module_of = |file: &Path| {
        let path = file.strip_prefix(src).ok()?.with_extension("");
        Some(path.iter().next()?.to_string_lossy().into_owned())
    };
    let sources: Vec<_> = files()
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"))
        .filter_map(|file| Some((module_of(&file)?, code_of(&read(&file)))))
        .filter(|(module, _)| module != "tests")
        .collect();
    let modules: BTreeSet<_> = sources.iter().map(|(module, _)| module.clone()).collect();
    // The module of each name that the root re-exports.
    let mut exported = BTreeMap::new();
    for (_, code) in sources.iter().filter(|(module, _)| module == "lib") {
        for item in code.split("use ").skip(1) {
            let item = item.split(';').next().unwrap_or_default();
            let (module, names) = item.split_once("::").unwrap_or_default();
            for name in names.split(|c: char| !c.is_alphanumeric() && c != '_') {
                exported.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, code) in sources.iter().filter(|(module, _)| module != "lib") {
        let imported = imports.entry(module.clone()).or_default();
        for path in code.split("crate::").skip(1) {
            let first = path.split(|c: char| !c.is_alphanumeric() && c != '_').next();
            let first = first.unwrap_or_default();
            assert!(!first.is_empty(), "`crate::{{` hides imports in {module}");
            let target = modules.get(first).or_else(|| exported.get(first));
            imported.extend(target.filter(|target| *target != module).cloned());
        }
    }
    imports
}

/// Returns the code of a file without comments and unit tests.
fn code_of(text: &str) -> String {
    let code = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// Returns the modules that `module` imports, directly and indirectly.
fn reachable<'a>(
    imports: &'a BTreeMap<String, BTreeSet<String>>,
    module: &str,
) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut open: Vec<_> = imports.get(module).into_iter().flatten().collect();
    while let Some(next) = open.pop() {
        if found.insert(next) {
            open.extend(imports.get(next).into_iter().flatten());
        }
    }
    found
}

/// The root contains only the names that every user needs. All others are in modules.
#[test]
fn the_root_of_the_facade_has_at_most_35_names() {
    let text = read(&root().join("crates/lock-registry/src/lib.rs"));
    let mut names = Vec::new();
    for item in text.split("\npub ").skip(1) {
        match item.split_once(char::is_whitespace) {
            Some(("mod", rest)) => names.push(rest.split([' ', ';']).next().unwrap_or_default()),
            Some(("use", rest)) => {
                let path = rest.split(';').next().unwrap_or_default();
                let list = path.rsplit_once("::").map_or(path, |(_, last)| last);
                let list = path.split_once('{').map_or(list, |(_, inside)| inside);
                let list = list.trim_end_matches('}').split(',').map(str::trim);
                names.extend(list.filter(|name| !name.is_empty()));
            }
            _ => names.push(item.lines().next().unwrap_or_default()),
        }
    }
    assert!(names.len() >= 25, "not all names are found: {names:?}");
    assert!(names.len() <= 35, "{} names: {names:?}", names.len());
}

#[test]
fn the_architecture_page_and_its_glossary_stay_small() {
    const WORDS_MAX: usize = 3_000;
    const GLOSSARY_MAX: usize = 30;
    let text = read(&root().join("ARCHITECTURE.md"));
    let words = text.split_whitespace().count();
    assert!(words <= WORDS_MAX, "ARCHITECTURE.md has {words} words, more than {WORDS_MAX}");
    let (_, glossary) = text.split_once("## Glossary").expect("the page ends with a glossary");
    // The first two rows are the head of the table.
    let entries = glossary.lines().filter(|line| line.starts_with('|')).count() - 2;
    assert!(entries <= GLOSSARY_MAX, "{entries} entries, more than {GLOSSARY_MAX}");
}

/// Readers search the code for the functions that these pages name, such as `Type::function`.
#[test]
fn every_function_that_the_pages_for_developers_name_exists() {
    let sources: Vec<String> = files()
        .iter()
        .filter(|file| relative(file).ends_with(".rs"))
        .map(|file| read(file))
        .collect();
    let mut missing = Vec::new();
    for page in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        for name in read(&root().join(page)).split('`').skip(1).step_by(2) {
            let Some((path, function)) = name.rsplit_once("::") else { continue };
            let is_function =
                function.chars().all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c));
            let owner = path.rsplit("::").next().unwrap_or(path);
            if !is_function || !owner.starts_with(|c: char| c.is_ascii_uppercase()) {
                continue;
            }
            let definition = format!("fn {function}");
            let field = format!("{function}:");
            let exists = sources.iter().any(|source| {
                has_word(source, owner)
                    && (has_word(source, &definition) || source.contains(&field))
            });
            if !exists {
                missing.push(format!("{page}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "no such functions:\n{}", missing.join("\n"));
}

#[test]
fn nothing_names_a_machine_a_ticket_or_a_package_registry() {
    // Split, so that this file does not contain the names either.
    let hosts = [
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("npmjs", ".com"),
        concat!("npmjs", ".org"),
    ];
    let folders = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    let mut found = Vec::new();
    for file in files() {
        let path = relative(&file);
        // Cargo generates this file.
        if path == "Cargo.lock" {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        for (number, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            let named = hosts.iter().any(|host| lower.contains(host))
                || folders.iter().any(|folder| starts_a_path(line, folder))
                || has_ticket(line);
            if named {
                found.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_test_that_a_page_names_as_proof_exists() {
    let files: Vec<_> = files().iter().map(|file| (relative(file), read(file))).collect();
    // `place` is a file or folder, relative to the root or to `crates/`.
    let contains = |place: &str, text_wanted: &str| {
        files.iter().any(|(file, text)| {
            let rest = file.strip_prefix(place);
            let rest = rest.or_else(|| file.strip_prefix("crates/")?.strip_prefix(place));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || place.is_empty())
                && text.contains(text_wanted)
        })
    };
    let mut absent = Vec::new();
    // The third value is the place of tests that the table names without a path.
    for (page, heading, default_place) in [
        ("CONTRIBUTING.md", "## Pairs of features", "registry-conformance/src/clauses"),
        ("book/src/concepts/guarantees.md", "## Tests of the promises", ""),
        ("book/src/concepts/guarantees.md", "## Tests of the faults", ""),
    ] {
        let text = read(&root().join(page));
        let (_, rest) = text.split_once(heading).expect("the table is there");
        let table = rest.split("\n## ").next().unwrap_or(rest);
        for row in table.lines().filter(|line| line.starts_with('|')) {
            for proof in row.split('|').nth(2).unwrap_or_default().split("; ") {
                let mut place = default_place;
                for name in proof.split('`').skip(1).step_by(2) {
                    let exists = if name.contains(['.', '/']) {
                        place = name;
                        contains(place, "")
                    } else {
                        !name.contains('_') || contains(place, &format!("fn {name}("))
                    };
                    if !exists {
                        absent.push(format!("{page}: {name} in {place:?}"));
                    }
                }
            }
        }
    }
    assert!(absent.is_empty(), "no such test: {absent:#?}");
}

#[test]
fn every_relative_link_and_include_leads_somewhere() {
    let mut dead = Vec::new();
    for file in files().into_iter().filter(|file| file.extension().is_some_and(|ext| ext == "md")) {
        let text = read(&file);
        let folder = file.parent().expect("a file is in a folder").to_owned();
        let mut complain = |what: &str| dead.push(format!("{}: {what}", relative(&file)));
        for target in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let linked = if path.is_empty() { file.clone() } else { folder.join(path) };
            if !linked.exists() {
                complain(target);
            } else if !heading.is_empty() && !headings(&read(&linked)).contains(heading) {
                complain(&format!("{target}: no such heading"));
            }
        }
        for include in text
            .split("{{#include ")
            .skip(1)
            .filter_map(|rest| rest.split_once("}}"))
            .map(|(include, _)| include.trim())
        {
            let (path, anchor) = include.split_once(':').unwrap_or((include, ""));
            match std::fs::read_to_string(folder.join(path)) {
                Err(_) => complain(include),
                Ok(source) => {
                    let marked = |mark: &str| {
                        source
                            .lines()
                            .any(|line| line.trim().ends_with(&format!("{mark}: {anchor}")))
                    };
                    let whole = marked("ANCHOR") && marked("ANCHOR_END");
                    if !anchor.is_empty() && !whole {
                        complain(&format!("{include}: no such anchor"));
                    }
                }
            }
        }
    }
    assert!(dead.is_empty(), "\n{}", dead.join("\n"));
}

#[test]
fn every_page_is_in_the_book_and_its_rust_is_compiled() {
    let book = root().join("book/src");
    let summary = read(&book.join("SUMMARY.md"));
    let listed: BTreeSet<&str> = links(&summary).into_iter().collect();
    let files: Vec<_> = files().into_iter().filter(|file| file.starts_with(&book)).collect();
    let (pages, others): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| file.extension().is_some_and(|it| it == "md"));
    // Other files are copied into the book, and a page links to them.
    let linked_from = |page: &&PathBuf| {
        let (text, folder) = (read(page), page.parent().expect("a file is in a folder"));
        links(&text)
            .into_iter()
            .filter_map(|link| folder.join(link).canonicalize().ok())
            .collect::<Vec<_>>()
    };
    let linked: BTreeSet<PathBuf> = pages.iter().flat_map(linked_from).collect();
    for file in others {
        assert!(
            linked.contains(&file.canonicalize().expect("it exists")),
            "no page links to {}",
            relative(file)
        );
    }
    for file in pages {
        let page = file.strip_prefix(&book).expect("checked above").to_string_lossy().into_owned();
        assert!(page == "SUMMARY.md" || listed.contains(&*page), "{page} is not in SUMMARY.md");
        let text = read(file);
        for block in text.split("```rust").skip(1) {
            let code = block.split_once('\n').map_or("", |(_, rest)| rest);
            assert!(
                code.starts_with("{{#include "),
                "{page}: Rust that is not included from an example:\n{code:.200}"
            );
        }
    }
}

/// A reader who arrives from a search engine must see at once what the page is for.
#[test]
fn every_page_begins_with_a_title_and_what_the_reader_gets() {
    for file in files() {
        let path = relative(&file);
        let is_page = path.starts_with("book/src/") && path.ends_with(".md");
        if !is_page || path.ends_with("SUMMARY.md") {
            continue;
        }
        let text = read(&file);
        let mut lines = text.lines().filter(|line| !line.is_empty());
        assert!(lines.next().is_some_and(|line| line.starts_with("# ")), "{path}: no title");
        let first = lines.next().unwrap_or_default();
        let is_prose = first.starts_with(|c: char| c.is_alphabetic() || c == '`');
        assert!(is_prose, "{path} begins with: {first}");
    }
}

#[test]
fn readmes_show_programs_that_are_run() {
    for (readme, fence, program) in [
        ("README.md", "```rust,no_run\n", "examples/src/bin/hello.rs"),
        ("crates/registry-conformance/README.md", "```rust\n", "examples/tests/conformance.rs"),
    ] {
        let text = read(&root().join(readme));
        let shown = text.split(fence).nth(1).and_then(|rest| rest.split_once("```"));
        let (shown, _) = shown.unwrap_or_else(|| panic!("{readme} shows no program"));
        let run = read(&root().join(program));
        assert!(run.contains(shown), "{program} has not, as {readme} says:\n{shown}");
    }
}

/// The documentation tests compile each README with Rust in it, unless
/// `readmes_show_programs_that_are_run` covers it.
#[test]
fn every_readme_with_rust_is_compiled() {
    let sources: Vec<(PathBuf, String)> = files()
        .into_iter()
        .filter(|file| file.extension().is_some_and(|ext| ext == "rs"))
        .map(|file| (file.clone(), read(&file)))
        .collect();
    for readme in files().into_iter().filter(|file| file.ends_with("README.md")) {
        let path = relative(&readme);
        if !read(&readme).contains("```rust") || path == "crates/registry-conformance/README.md" {
            continue;
        }
        let is_included = sources.iter().any(|(file, text)| {
            let folder = file.parent().expect("a file is in a folder");
            text.split("include_str!(\"").skip(1).any(|rest| {
                let included = rest.split('"').next().unwrap_or_default();
                included.ends_with("README.md")
                    && folder.join(included).canonicalize().ok() == readme.canonicalize().ok()
            })
        });
        assert!(is_included, "{path} is included by no documentation");
    }
}

/// A reader can repeat each measurement.
#[test]
fn every_benchmark_has_a_results_file_that_names_its_command() {
    let (mut found, mut expected) = (BTreeSet::new(), BTreeSet::new());
    for manifest in ["benches/Cargo.toml", "benches/rivals/Cargo.toml"] {
        let text = read(&root().join(manifest));
        let names = text.split("[[bench]]\nname = \"").skip(1);
        expected.extend(names.filter_map(|rest| rest.split('"').next()).map(|name| {
            let command = match manifest {
                "benches/Cargo.toml" => format!("-p lock-registry-benches --bench {name}"),
                _ => format!("--manifest-path {manifest}"),
            };
            (name.to_owned(), format!("cargo bench {command}"))
        }));
    }
    for file in files().into_iter().filter(|file| file.starts_with(root().join("benches/results")))
    {
        let name = file.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let results: Value = serde_json::from_str(&read(&file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let command = results["command"].as_str().unwrap_or_default();
        found.insert((name, command.to_owned()));
    }
    assert_eq!(found, expected);
}

#[test]
fn every_measured_table_of_the_book_is_generated_from_a_results_file() {
    let stores = ["in-process", "sqlite", "postgres", "mysql", "redis", "zookeeper", "etcd"];
    let stores = stores.map(|store| (format!("stores/{store}.md"), "## Throughput", "\n## "));
    let performance =
        ("reference/performance.md".to_owned(), "# Performance", "## Requests per operation");
    let mut found = Vec::new();
    for (page, start, end) in stores.into_iter().chain([performance]) {
        let text = read(&root().join("book/src").join(&page));
        let (_, section) = text.split_once(start).expect("the page has this heading");
        let section = section.split(end).next().unwrap_or_default();
        // Each part except the first begins with a generated table.
        let parts = section.split("<!-- generated: ").enumerate();
        let written = parts.flat_map(|(number, part)| {
            match number {
                0 => part,
                _ => part.split_once("<!-- end -->").map_or("", |(_, written)| written),
            }
            .lines()
        });
        found.extend(
            written.filter(|line| line.starts_with('|')).map(|row| format!("{page}: {row}")),
        );
        assert!(section.contains("<!-- generated: results "), "{page}: no figures");
    }
    assert!(found.is_empty(), "not generated:\n{}", found.join("\n"));
}

/// One package of the workspace.
struct Package {
    name: String,
    folder: PathBuf,
    published: bool,
    dependencies: Vec<Dependency>,
    json: Value,
}

struct Dependency {
    name: String,
    kind: String,
}

fn packages() -> BTreeMap<String, Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let list = metadata["packages"].as_array().expect("a workspace has packages").clone();
    list.into_iter().map(Package::read).map(|package| (package.name.clone(), package)).collect()
}

impl Package {
    fn read(json: Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let manifest = PathBuf::from(text(&json["manifest_path"]));
        let dependencies = json["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
        Self {
            name: text(&json["name"]),
            folder: manifest.parent().expect("a manifest is in a folder").to_owned(),
            // In this JSON, `publish = false` is an empty list of registries. The default is null.
            published: json["publish"].is_null(),
            dependencies: dependencies
                .iter()
                .map(|dependency| Dependency {
                    name: text(&dependency["name"]),
                    kind: dependency["kind"].as_str().unwrap_or("normal").to_owned(),
                })
                .collect(),
            json,
        }
    }
}

/// The workspace members that `package` depends on with this kind of dependency.
fn workspace_dependencies(
    packages: &BTreeMap<String, Package>,
    package: &str,
    kind: &str,
) -> BTreeSet<String> {
    packages[package]
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind == kind && packages.contains_key(&dependency.name))
        .map(|dependency| dependency.name.clone())
        .collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this package is in the workspace")
        .to_owned()
}

/// Every file that is tracked or would be added by the next commit.
fn files() -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root())
        .output()
        .expect("git can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let files: Vec<_> =
        names.split('\0').filter(|name| !name.is_empty()).map(|name| root().join(name)).collect();
    assert!(files.len() > 50, "only {} files: is this the workspace?", files.len());
    // A deleted file stays tracked until the next commit. Screenshots are not text.
    let is_text = |file: &PathBuf| file.extension().is_none_or(|extension| extension != "png");
    files.into_iter().filter(|file| file.exists() && is_text(file)).collect()
}

fn relative(file: &Path) -> String {
    file.strip_prefix(root()).unwrap_or(file).to_string_lossy().into_owned()
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].trim_start_matches('s').chars().next();
        let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !inside(before) && !inside(after)
    })
}

fn starts_a_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !"._~}/-".contains(c))
    })
}

/// Whether the line has `#` and a number, the form of a ticket reference.
fn has_ticket(line: &str) -> bool {
    line.match_indices('#').any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let digits = line[at + 1..].chars().take_while(char::is_ascii_digit).count();
        let after = line[at + 1 + digits..].chars().next();
        digits > 0
            && before.is_none_or(|c| c.is_whitespace() || c == '(')
            && after.is_none_or(|c| !c.is_alphanumeric())
    })
}

/// The targets of Markdown links outside of code blocks.
fn links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if !in_code {
            links.extend(
                line.split("](")
                    .skip(1)
                    .filter_map(|rest| rest.split_once(')'))
                    .map(|(target, _)| target),
            );
        }
    }
    links
}

/// The anchors of the headings.
fn headings(text: &str) -> BTreeSet<String> {
    let titles = text
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim());
    titles
        .map(|title| {
            let kept = title.to_lowercase().replace(' ', "-");
            kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
        })
        .collect()
}
