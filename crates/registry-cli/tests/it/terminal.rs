//! `lockreg run` on a real terminal: its command behaves as if a shell had started it directly.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use nix::pty::{Winsize, openpty};

use crate::support::{TEST_TIMEOUT, TestStore, remove_lock_variables};

/// A shell with job control on its own terminal.
struct Shell {
    input: File,
    terminal_output: Receiver<String>,
    output: String,
    shell: Child,
}

impl Shell {
    fn start(store: &TestStore) -> Self {
        let pty = openpty(Some(&SIZE), None).unwrap();
        let slave = || File::from(pty.slave.try_clone().unwrap());
        // `setsid --ctty` makes the stdin of the shell its controlling terminal, which would
        // otherwise need `unsafe` code.
        let mut command = Command::new("setsid");
        remove_lock_variables(&mut command);
        let shell = command
            .args(["--ctty", "--wait", "sh", "-m", "-i"])
            .env("PS1", "$ ")
            // Without it, a progress line cannot be drawn.
            .env("TERM", "xterm")
            .env("XDG_STATE_HOME", store.folder())
            .env("LOCKREG", env!("CARGO_BIN_EXE_lockreg"))
            .env_remove("ENV")
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .spawn()
            .expect("setsid of util-linux");
        let mut master = File::from(pty.master);
        let input = master.try_clone().unwrap();
        let (sender, terminal_output) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 1_024];
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                if sender.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { input, terminal_output, output: String::new(), shell }
    }

    fn type_keys(&mut self, keys: &str) {
        self.input.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows `text`, and removes the output up to there. Returns the output
    /// before `text`.
    #[track_caller]
    fn wait_for(&mut self, text: &str) -> String {
        let started = Instant::now();
        while !self.output.contains(text) {
            match self.terminal_output.recv_timeout(TEST_TIMEOUT.saturating_sub(started.elapsed()))
            {
                Ok(more) => self.output.push_str(&more),
                Err(error) => panic!("no {text:?} on the screen ({error}), only {:?}", self.output),
            }
        }
        let start = self.output.find(text).unwrap();
        let before = self.output.drain(..start).collect();
        self.output.drain(..text.len());
        before
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // When the shell ends, the foreground process group gets SIGHUP.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };

// The empty quotes in `u''p` and `in''t` keep the echo of the typed command from matching `up` and
// `int`, for which the test waits.
const COMMAND: &str = r#"'trap "echo in''t" INT; echo u''p; while test "$line" != bye; do read -r line && echo "got ${line}!"; done; exit 5'"#;

#[test]
fn the_command_reads_the_terminal_and_receives_ctrl_c_once() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    shell.type_keys(&format!("$LOCKREG run key -- sh -c {COMMAND}; echo \"status $?.\"\n"));
    shell.wait_for("up\r\n");
    shell.type_keys("hello\n");
    shell.wait_for("got hello!");
    shell.type_keys("\x03");
    shell.wait_for("int\r\n");
    shell.type_keys("more\n");
    let before = shell.wait_for("got more!");
    assert!(!before.contains("int\r\n"), "the command received a second SIGINT: {before:?}");
    shell.type_keys("bye\n");
    shell.wait_for("status 5.");
}

#[test]
fn ctrl_z_stops_the_job_and_fg_resumes_it() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    shell.type_keys(&format!("$LOCKREG run --lease 5m key -- sh -c {COMMAND}\n"));
    shell.wait_for("up\r\n");
    shell.type_keys("\x1a");
    shell.wait_for("Stopped");
    // The shell has its terminal back.
    shell.type_keys("echo he''re\n");
    shell.wait_for("here");
    shell.type_keys("fg\n");
    shell.wait_for("run --lease 5m key");
    shell.type_keys("again\n");
    shell.wait_for("got again!");
    shell.type_keys("bye\n");
    shell.wait_for("got bye!");
}

#[test]
fn a_job_that_is_stopped_beyond_its_lease_loses_its_lock() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    shell.type_keys(&format!("$LOCKREG run --lease 2s --grace 1s key -- sh -c {COMMAND}\n"));
    shell.wait_for("up\r\n");
    shell.type_keys("\x1a");
    shell.wait_for("Stopped");
    shell.type_keys("$LOCKREG run --wait 80s key -- echo mi''ne\n");
    shell.wait_for("mine");
    shell.type_keys("fg; echo \"status $?.\"\n");
    shell.wait_for("was lost");
    shell.wait_for("status 76.");
}

#[test]
fn after_ctrl_c_the_lock_is_held_until_the_last_process_of_the_command_has_ended() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    // SIGINT ends only `sleep`. A shell starts its background processes with SIGINT ignored.
    let script = r#"echo up; while kill -0 $PPID; do sleep 0.1; done 2> /dev/null; sleep 1; $LOCKREG show key; echo "shown $?.""#;
    std::fs::write(store.path("script"), script).unwrap();
    let script = store.path("script").display().to_string();
    shell.type_keys(&format!(
        "$LOCKREG run --grace 80s key -- sh -c 'sh {script} & exec sleep 1000'; echo \"status $?.\"\n"
    ));
    shell.wait_for("up\r\n");
    shell.type_keys("\x03");
    shell.wait_for("shown 0.");
    shell.wait_for("status 130.");
    shell.type_keys("$LOCKREG show key; echo \"status $?.\"\n");
    shell.wait_for("status 1.");
}

#[test]
fn in_a_pipeline_the_command_gets_the_terminal_when_it_reads_from_it() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    let script = r#"'echo u''p; read -r line < /dev/tty; echo "got ${line}!"'"#;
    shell.type_keys(&format!("$LOCKREG run key -- sh -c {script} | cat\n"));
    shell.wait_for("up\r\n");
    shell.type_keys("hello\n");
    shell.wait_for("got hello!");
    shell.type_keys("echo do''ne\n");
    shell.wait_for("done");
}

#[test]
fn in_a_pipeline_ctrl_c_ends_the_command() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    shell.type_keys("$LOCKREG run key -- sh -c 'echo u''p; exec sleep 1000' | cat\n");
    shell.wait_for("up\r\n");
    shell.type_keys("\x03");
    // The terminal discards pending input when it handles Ctrl-C, so the test waits for the prompt.
    shell.wait_for("$ ");
    shell.type_keys("$LOCKREG show key; echo \"status $?.\"\n");
    shell.wait_for("key is not locked");
    shell.wait_for("status 1.");
}

#[test]
fn in_a_pipeline_that_was_stopped_and_resumed_the_other_program_keeps_the_terminal() {
    let store = TestStore::new();
    let mut shell = Shell::start(&store);
    let reader =
        r#"'read -r up; echo "$up"; while read -r line < /dev/tty; do echo "got ${line}!"; done'"#;
    shell.type_keys(&format!(
        "$LOCKREG run --lease 5m key -- sh -c 'echo u''p; exec sleep 1000' | sh -c {reader}\n"
    ));
    shell.wait_for("up\r\n");
    shell.type_keys("\x1a");
    shell.wait_for("Stopped");
    shell.type_keys("fg\n");
    shell.wait_for("run --lease 5m key");
    for line in ["one", "two"] {
        shell.type_keys(&format!("{line}\n"));
        shell.wait_for(&format!("got {line}!"));
    }
    shell.type_keys("\x03");
    shell.wait_for("$ ");
    shell.type_keys("$LOCKREG show key\n");
    shell.wait_for("key is not locked");
}

#[test]
fn a_waiter_on_a_dumb_terminal_prints_a_line() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.next_line();
    let mut shell = Shell::start(&store);
    shell.type_keys("TERM=dumb $LOCKREG run key -- echo mi''ne\n");
    shell.wait_for(" for key, held by worker 7");
    assert_eq!(holder.finish(), 0);
    shell.wait_for("mine");
}

#[test]
fn a_waiter_shows_one_progress_line() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.next_line();
    let mut shell = Shell::start(&store);
    shell.type_keys("$LOCKREG run key -- echo mi''ne\n");
    shell.wait_for(" for key, held by worker 7 (for ");
    shell.wait_for("waited ");
    assert_eq!(holder.finish(), 0);
    shell.wait_for("mine");
}
