//! The commands of the book's runbook and of its recipes can be run, on a store of the user.

use crate::support::{CommandOutput, TestStore};

#[test]
fn every_command_of_the_runbook_and_of_the_recipes_can_be_run() {
    for (page, count) in [
        ("operate/runbook.md", 14),
        ("cookbook/cron.md", 2),
        ("cookbook/leader.md", 2),
        ("cookbook/ci-jobs.md", 6),
    ] {
        let path = format!("{}/../../book/src/{page}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let commands: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("$ lockreg ")).collect();
        assert!(commands.len() >= count, "{page}: not all commands are found: {commands:?}");
        let store = TestStore::new();
        let holder = store.start(["hold", "nightly"]);
        holder.next_line();
        for text in commands {
            let mut command = store.lockreg([]);
            // The runbook leaves the store to the environment of its reader.
            let local = (!text.starts_with("--local")).then_some("--local");
            let done = CommandOutput::of(command.args(local).args(text.split_whitespace()));
            // Without `--yes`, `break` has the status of an invalid command line on purpose.
            let is_question = text == "break nightly" && done.stderr.contains("add --yes");
            assert!(is_question || [0, 1].contains(&done.status), "{page}: {text}: {done:?}");
        }
    }
}
