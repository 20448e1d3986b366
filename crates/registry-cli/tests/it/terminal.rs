//! On a terminal, the command behaves as if a shell had started it directly.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use nix::pty::{Winsize, openpty};

use crate::support::{PATIENCE, Store};

/// A shell with job control on its own terminal.
struct Shell {
    keyboard: File,
    screen: Receiver<String>,
    seen: String,
    shell: Child,
}

impl Shell {
    fn start(store: &Store) -> Self {
        let pty = openpty(Some(&SIZE), None).unwrap();
        let slave = || File::from(pty.slave.try_clone().unwrap());
        // `setsid --ctty` makes the stdin of the shell its controlling terminal, which would
        // otherwise need `unsafe` code.
        let shell = Command::new("setsid")
            .args(["--ctty", "--wait", "sh", "-m", "-i"])
            .env("PS1", "$ ")
            .env("XDG_STATE_HOME", store.folder())
            .env("LOCKREG", env!("CARGO_BIN_EXE_lockreg"))
            .env_remove("ENV")
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .spawn()
            .expect("setsid of util-linux");
        let mut master = File::from(pty.master);
        let keyboard = master.try_clone().unwrap();
        let (tell, screen) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 1_024];
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                if tell.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { keyboard, screen, seen: String::new(), shell }
    }

    fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows `text`, and discards the output up to there.
    #[track_caller]
    fn shows(&mut self, text: &str) {
        let began = Instant::now();
        while !self.seen.contains(text) {
            match self.screen.recv_timeout(PATIENCE.saturating_sub(began.elapsed())) {
                Ok(more) => self.seen.push_str(&more),
                Err(error) => panic!("no {text:?} on the screen ({error}), only {:?}", self.seen),
            }
        }
        let end = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..end);
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // When the shell ends, all processes on its terminal get SIGHUP.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };

// The quotes distinguish the echo of the typed command from the output for which the test waits.
const COMMAND: &str = r#"'trap "echo in''t" INT; echo u''p; while test "$line" != bye; do read -r line && echo "got ${line}!"; done; exit 5'"#;

#[test]
fn the_command_reads_the_terminal_and_gets_ctrl_c_once() {
    let store = Store::new();
    let mut shell = Shell::start(&store);
    shell.types(&format!("$LOCKREG run key -- sh -c {COMMAND}; echo \"status $?.\"\n"));
    shell.shows("up\r\n");
    shell.types("hello\n");
    shell.shows("got hello!");
    shell.types("\x03");
    shell.shows("int\r\n");
    shell.types("more\n");
    shell.shows("got more!");
    assert!(!shell.seen.contains("int\r\n"));
    shell.types("bye\n");
    shell.shows("status 5.");
}

#[test]
fn ctrl_z_stops_the_job_and_fg_goes_on_with_it() {
    let store = Store::new();
    let mut shell = Shell::start(&store);
    shell.types(&format!("$LOCKREG run --lease 5m key -- sh -c {COMMAND}\n"));
    shell.shows("up\r\n");
    shell.types("\x1a");
    shell.shows("Stopped");
    // The shell has its terminal back.
    shell.types("echo he''re\n");
    shell.shows("here");
    shell.types("fg\n");
    shell.shows("run --lease 5m key");
    shell.types("again\n");
    shell.shows("got again!");
    shell.types("bye\n");
    shell.shows("got bye!");
}

#[test]
fn a_job_that_was_stopped_for_longer_than_its_lease_is_lost() {
    let store = Store::new();
    let mut shell = Shell::start(&store);
    shell.types(&format!("$LOCKREG run --lease 2s --grace 1s key -- sh -c {COMMAND}\n"));
    shell.shows("up\r\n");
    shell.types("\x1a");
    shell.shows("Stopped");
    shell.types("$LOCKREG run --wait 80s key -- echo mi''ne\n");
    shell.shows("mine");
    shell.types("fg; echo \"status $?.\"\n");
    shell.shows("was lost");
    shell.shows("status 76.");
}

#[test]
fn in_a_pipeline_the_command_gets_the_terminal_when_it_asks_for_it() {
    let store = Store::new();
    let mut shell = Shell::start(&store);
    let script = r#"'echo u''p; read -r line < /dev/tty; echo "got ${line}!"'"#;
    shell.types(&format!("$LOCKREG run key -- sh -c {script} | cat\n"));
    shell.shows("up\r\n");
    shell.types("hello\n");
    shell.shows("got hello!");
    shell.types("echo do''ne\n");
    shell.shows("done");
}

#[test]
fn in_a_pipeline_ctrl_c_ends_the_command() {
    let store = Store::new();
    let mut shell = Shell::start(&store);
    shell.types("$LOCKREG run key -- sh -c 'echo u''p; exec sleep 1000' | cat\n");
    shell.shows("up\r\n");
    shell.types("\x03");
    shell.types("$LOCKREG show key; echo \"status $?.\"\n");
    shell.shows("key is not locked");
    shell.shows("status 1.");
}

#[test]
fn waiting_shows_one_live_line() {
    let store = Store::new();
    let holder = store.start(["hold", "--label", "worker 7", "key"]);
    holder.says();
    let mut shell = Shell::start(&store);
    shell.types("$LOCKREG run key -- echo mi''ne\n");
    shell.shows(" for key, held by worker 7 (for ");
    shell.shows("waited ");
    assert_eq!(holder.finish(), 0);
    shell.shows("mine");
}
