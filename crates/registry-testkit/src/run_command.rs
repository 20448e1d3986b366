//! Runs short-lived programs, such as those that create a server's data folder or query a server.

use std::io;
use std::process::{Command, Stdio};

use tokio::io::AsyncWriteExt;

/// Runs `command` with `input` and returns its output without trailing newlines. Dropping the
/// future kills the program.
pub(crate) async fn run(command: Command, input: &str) -> io::Result<String> {
    let program = command.get_program().to_owned();
    let mut command = tokio::process::Command::from(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| {
        io::Error::new(error.kind(), format!("{} cannot be run: {error}", program.display()))
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // The input fits into the pipe buffer, so this write never blocks. A program that ends
        // without reading it reports why on its stderr.
        _ = stdin.write_all(input.as_bytes()).await;
    }
    let done = child.wait_with_output().await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\n').to_owned();
    if !done.status.success() {
        let (stderr, stdout) = (text(&done.stderr), text(&done.stdout));
        let program = program.display();
        return Err(io::Error::other(format!("{program} ({}): {stderr}\n{stdout}", done.status)));
    }
    Ok(text(&done.stdout))
}
