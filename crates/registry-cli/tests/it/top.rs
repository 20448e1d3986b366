//! `lockreg top` in a real terminal: what it shows, what its keys do, and how it leaves the
//! terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;

use crate::support::{
    TEST_TIMEOUT, TestProcess, TestStore, children, is_alive, screenshot_path, wait_until,
};

/// `lockreg top` on a terminal of its own, and the content of its screen.
struct Top {
    input: File,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    /// The settings of the terminal before the start of `lockreg`.
    settings: Termios,
    child: Child,
}

impl Top {
    fn start(store: &TestStore, arguments: &[&str]) -> Self {
        let (rows, columns) = (24, 80);
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let slave = || File::from(pty.slave.try_clone().unwrap());
        let settings = tcgetattr(&pty.slave).unwrap();
        let lockreg = store.lockreg([]);
        // `setsid --ctty` makes stdin the controlling terminal, which would otherwise need `unsafe`
        // code.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(lockreg.get_program()).arg("top").args(arguments);
        for (name, value) in lockreg.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let child = command
            .env("TERM", "xterm-256color")
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .spawn()
            .expect("setsid of util-linux");
        drop(pty.slave);
        let mut master = File::from(pty.master);
        let input = master.try_clone().unwrap();
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4_096];
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { input, output, screen: vt100::Parser::new(rows, columns, 0), settings, child }
    }

    /// Returns the process id of `lockreg`. `setsid` either executes `lockreg` in its own process,
    /// or waits for it as its only child.
    fn pid(&self) -> Pid {
        let parent = Pid::from_raw(self.child.id().cast_signed());
        children(parent).first().map_or(parent, |child| Pid::from_raw(child.parse().unwrap()))
    }

    fn press(&mut self, keys: &str) {
        self.input.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `is_expected` returns true for the text of the screen, and returns this text.
    /// `expected` describes the awaited screen.
    #[track_caller]
    fn wait_for_screen(&mut self, expected: &str, is_expected: impl Fn(&str) -> bool) -> String {
        let started = Instant::now();
        loop {
            let text = self.screen.screen().contents();
            if is_expected(&text) {
                return text;
            }
            match self.output.recv_timeout(TEST_TIMEOUT.saturating_sub(started.elapsed())) {
                Ok(more) => self.screen.process(&more),
                Err(error) => panic!("waited for {expected} ({error}), but the screen is:\n{text}"),
            }
        }
    }

    #[track_caller]
    fn wait_for(&mut self, text: &str) -> String {
        self.wait_for_screen(&format!("{text:?}"), |screen| screen.contains(text))
    }

    /// Waits for the end. Asserts that the screen, the cursor and the settings of the terminal are
    /// as before, and that the exit status is zero.
    #[track_caller]
    fn assert_ends_well(&mut self) {
        let status = self.child.wait().unwrap();
        while let Ok(rest) = self.output.recv_timeout(TEST_TIMEOUT) {
            self.screen.process(&rest);
        }
        assert!(!self.screen.screen().alternate_screen(), "the alternate screen is still active");
        assert!(!self.screen.screen().hide_cursor(), "the cursor is still hidden");
        // The settings of the slave, also after its last file descriptor was closed.
        let settings = tcgetattr(&self.input).unwrap();
        assert_eq!(settings.local_flags, self.settings.local_flags);
        assert_eq!(settings.input_flags, self.settings.input_flags);
        assert_eq!(status.code(), Some(0));
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn holders_and_waiters_are_shown_and_disappear() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--label", "worker 7", "orders/42"]);
    holder.next_line();
    let mut top = Top::start(&store, &[]);
    let screen = top.wait_for("1 held");
    let row = screen.lines().find(|line| line.contains("orders/42")).unwrap();
    for part in ["exclusive", "worker 7", &store.holder("orders/42").unwrap().to_string()] {
        assert!(row.contains(part), "{part}: {row}");
    }
    let waiter = store.start(["hold", "--label", "worker 8", "orders/42"]);
    top.wait_for("1 waiting");
    top.press("\r");
    top.wait_for("worker 8 waits, exclusive, for ");
    top.press("\x1b");
    top.wait_for_screen("closed details", |screen| !screen.contains("worker 8 waits"));
    assert_eq!(holder.finish(), 0);
    top.wait_for_screen("the waiter as the holder", |screen| {
        screen.contains("worker 8") && screen.contains("0 waiting")
    });
    waiter.next_line();
    assert_eq!(waiter.finish(), 0);
    top.wait_for("0 held");
    top.press("q");
    top.assert_ends_well();
}

#[test]
fn the_picture_of_the_book_is_created() {
    let store = TestStore::new();
    let mut processes = Vec::new();
    for (label, key) in [
        ("billing-2:311", "invoices/11"),
        ("web-1:4711", "orders/42"),
        ("web-2:4712", "orders/43"),
        ("worker-7:1290", "reports/daily"),
    ] {
        let holder = store.start(["hold", "--label", label, key]);
        holder.next_line();
        processes.push(holder);
    }
    for label in ["web-2:4712", "web-3:4713"] {
        processes.push(store.start(["hold", "--label", label, "orders/42"]));
    }
    let mut top = Top::start(&store, &[]);
    top.wait_for("2 waiting");
    top.wait_for("q quit");
    let picture = picture(top.screen.screen(), 12);
    assert!(picture.contains("worker-7:1290") && picture.ends_with("</svg>\n"), "{picture}");
    std::fs::write(screenshot_path("top.svg"), picture).unwrap();
    top.press("q");
    top.assert_ends_well();
}

/// Draws the text of the first `rows` rows of the screen and of its last row as SVG.
fn picture(screen: &vt100::Screen, rows: u16) -> String {
    const CELL: (f32, f32) = (8.4, 18.0);
    let (height, columns) = screen.size();
    let size = (f32::from(columns) * CELL.0 + 20.0, f32::from(rows + 1) * CELL.1 + 20.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\">\n\
         <style>text {{ font: 14px monospace; white-space: pre; fill: #e6edf3 }}</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#161b22\"/>\n",
        size.0, size.1
    );
    for (line, row) in (0..rows).chain([height - 1]).enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a screen has few rows")]
        let y = line as f32 * CELL.1 + 24.0;
        let cells: Vec<_> = (0..columns).filter_map(|column| screen.cell(row, column)).collect();
        let mut column = 0_u16;
        for run in cells.chunk_by(|a, b| (a.inverse(), a.bold()) == (b.inverse(), b.bold())) {
            let text: String = run
                .iter()
                .map(|cell| if cell.has_contents() { cell.contents() } else { " " })
                .collect();
            let (x, length) = (f32::from(column) * CELL.0 + 10.0, run.len() as u16);
            let width = f32::from(length) * CELL.0;
            column += length;
            if run[0].inverse() {
                svg += &format!(
                    "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"#e6edf3\"/>\n",
                    y - 14.0,
                    CELL.1
                );
            }
            if !text.trim().is_empty() {
                let text = text.replace('&', "&amp;").replace('<', "&lt;");
                let colour = if run[0].inverse() { " style=\"fill: #161b22\"" } else { "" };
                let weight = if run[0].bold() { " font-weight=\"bold\"" } else { "" };
                svg += &format!(
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" textLength=\"{width:.1}\" xml:space=\"preserve\"{weight}{colour}>{text}</text>\n"
                );
            }
        }
    }
    svg + "</svg>\n"
}

#[test]
fn a_selected_lock_is_released_by_force_after_a_confirmation() {
    let store = TestStore::new();
    let [first, second] = ["a/1", "b/2"].map(|key| {
        let holder = store.start(["hold", "--lease", "3s", "--label", key, key]);
        holder.next_line();
        holder
    });
    let mut top = Top::start(&store, &["--interval", "50ms"]);
    top.wait_for("2 held");
    top.press("/b/2\r");
    top.wait_for("1 shown");
    top.press("b");
    top.wait_for("b/2 is held by b/2.");
    top.press("n");
    top.wait_for_screen("a closed question", |screen| !screen.contains("is held by"));
    top.press("b");
    top.wait_for("y: release it by force");
    top.press("y");
    top.wait_for("b/2 was released");
    top.wait_for("1 held");
    assert!(second.next_line().contains("lost"));
    assert_eq!(store.holder("b/2"), None);
    assert_eq!(first.finish(), 0);
    top.press("\x03");
    top.assert_ends_well();
}

#[test]
fn a_signal_restores_the_terminal() {
    let store = TestStore::new();
    let mut top = Top::start(&store, &[]);
    top.wait_for("0 held");
    kill(top.pid(), Signal::SIGTERM).unwrap();
    top.assert_ends_well();
}

#[test]
fn a_signal_ends_top_even_if_its_terminal_is_not_read() {
    let store = TestStore::new();
    let mut command = store.lockreg(["hold", "first"]);
    for index in 0..21 {
        command.args(["--also", &format!("{index:02}{}", "k".repeat(30))]);
    }
    let holder = TestProcess::start(&mut command);
    holder.next_line();
    let mut top = Top::start(&store, &[]);
    top.wait_for("22 held");
    let pid = top.pid();
    // The thread that reads the terminal ends, because nothing receives its next bytes.
    top.output = channel().1;
    wait_until("a blocked terminal", || {
        // Each `r` redraws all rows, so few keys fill the output queue. If the input queue became
        // full first, `press` would block.
        top.press("rr");
        std::fs::read_to_string(format!("/proc/{pid}/wchan"))
            .is_ok_and(|place| place == "n_tty_write" || place == "wait_woken")
    });
    kill(pid, Signal::SIGTERM).unwrap();
    wait_until("the end of lockreg", || !is_alive(&pid.to_string()));
}

#[test]
fn without_a_terminal_it_is_refused() {
    let store = TestStore::new();
    for (arguments, problem) in
        [(["top", "--local"], "needs a terminal"), (["--json", "top"], "has no JSON output")]
    {
        let done = store.run(arguments);
        assert_eq!(done.status, 64, "{done:?}");
        assert!(done.stderr.contains(problem), "{done:?}");
    }
    let done = store.run(["top", "--interval", "1ms"]);
    assert_eq!(done.status, 64);
    assert!(done.stderr.contains("50ms"), "{done:?}");
}
