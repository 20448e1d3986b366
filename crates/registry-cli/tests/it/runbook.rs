//! Runs the commands of the book's runbook and of its recipes on a temporary store.

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
            // The pages leave the choice of the store to the reader's environment. This test adds
            // `--local`.
            let local = (!text.starts_with("--local")).then_some("--local");
            let done = CommandOutput::of(command.args(local).args(text.split_whitespace()));
            // Without `--yes`, `break` has the status of an invalid command line on purpose.
            let is_refused_break = text == "break nightly" && done.stderr.contains("add --yes");
            assert!(is_refused_break || [0, 1].contains(&done.status), "{page}: {text}: {done:?}");
        }
    }
}
