//! The commands of the book's runbook are valid, and end on a store where `nightly` is held.

use crate::support::{CommandOutput, TestStore};

#[test]
fn every_command_of_the_runbook_can_be_run() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/operate/runbook.md");
    let page = std::fs::read_to_string(page).unwrap();
    let commands: Vec<&str> =
        page.lines().filter_map(|line| line.strip_prefix("$ lockreg ")).collect();
    assert!(commands.len() > 10, "not all commands are found: {commands:?}");
    let store = TestStore::new();
    let holder = store.start(["hold", "nightly"]);
    holder.next_line();
    for text in commands {
        let mut command = store.lockreg(["--local"]);
        let done = CommandOutput::of(command.args(text.split_whitespace()));
        // Without `--yes`, `break` has the status of an invalid command line on purpose.
        let is_question = text == "break nightly" && done.stderr.contains("add --yes");
        assert!(is_question || [0, 1].contains(&done.status), "{text}: {done:?}");
    }
}
