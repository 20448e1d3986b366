//! Opening an unusable SQLite file returns an error with the cause and a remedy. Many processes can
//! open a usable file at once.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Claim, Finding, Key, LockAdmin, LockBackend, Release,
    Renewal,
};
use registry_jdbc::sqlx::sqlite::SqliteConnectOptions;
use registry_jdbc::sqlx::{self, ConnectOptions, Executor, Row, SqliteConnection};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

use BackendErrorKind::{Misconfigured, Protocol};

async fn open(path: impl Into<PathBuf>) -> Result<SqliteBackend, BackendError> {
    SqliteBackend::open(SqliteConfig::new(path)).await
}

/// Checks that opening fails with this kind, and that the message names the file and contains
/// `message`.
async fn expect_refusal(
    path: impl Into<PathBuf>,
    kind: BackendErrorKind,
    message: &str,
) -> BackendError {
    let path = path.into();
    let error = open(&path).await.unwrap_err();
    assert_eq!(error.kind(), kind, "{path:?}: {error} {error:?}");
    assert!(error.to_string().contains(message), "{path:?}: {error}");
    error
}

fn claim(key: &str) -> Claim {
    Claim::new(Key::new(key).unwrap(), Duration::from_secs(30))
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

async fn create(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new().filename(path).create_if_missing(true).connect().await.unwrap()
}

#[tokio::test]
async fn an_invalid_namespace_is_refused_and_no_file_is_created() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let config = SqliteConfig::new(&path).with_namespace("n".repeat(256));
    let error = SqliteBackend::open(config).await.unwrap_err();
    assert_eq!(error.kind(), Misconfigured, "{error}");
    assert!(error.to_string().contains("namespace"), "{error}");
    assert!(!path.exists());
}

#[tokio::test]
async fn unusable_paths_are_refused_and_no_file_is_created() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "").unwrap();
    fs::create_dir(at("dir")).unwrap();
    std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
    let before = fs::read_dir(folder.path()).unwrap().count();

    expect_refusal(at("missing/locks.db"), Misconfigured, "does not exist; create it first").await;
    expect_refusal(at("dir"), Misconfigured, "is a folder; name a file").await;
    expect_refusal(at("new/"), Misconfigured, "name a file, not a folder").await;
    expect_refusal(at("file/locks.db"), Misconfigured, "not a folder").await;
    expect_refusal(at("dangling"), Misconfigured, "link to a missing file").await;
    expect_refusal("/dev/null", Misconfigured, "no regular file").await;
    expect_refusal(at("nul\0nul"), Misconfigured, "NUL").await;
    expect_refusal(at(&"x".repeat(300)), Misconfigured, "").await;
    expect_refusal("", Misconfigured, "in memory").await;
    expect_refusal(":memory:", Misconfigured, "in memory").await;
    use std::os::unix::ffi::OsStringExt;
    let invalid = std::ffi::OsString::from_vec(vec![b'x', 0xff]);
    expect_refusal(folder.path().join(invalid), Misconfigured, "UTF-8").await;
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), before);
}

#[tokio::test]
async fn unusual_file_names_are_accepted() {
    let folder = folder();
    for name in ["a b", "file:x?mode=memory", "ä🔒", "100%25", "it's", "-wal", "x\ny"] {
        let path = folder.path().join(name);
        let backend = open(&path).await.unwrap();
        assert!(path.is_file());
        assert!(matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
        backend.close().await;
    }
}

#[tokio::test]
async fn a_symbolic_link_leads_to_the_same_locks() {
    let folder = folder();
    let (file, link) = (folder.path().join("locks.db"), folder.path().join("link"));
    let direct = open(&file).await.unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let linked = open(&link).await.unwrap();
    assert_eq!(direct.path(), linked.path());
    assert!(matches!(direct.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
    assert!(matches!(linked.try_acquire(&claim("k")).await.unwrap(), Attempt::Busy(_)));
}

#[tokio::test]
async fn two_links_to_the_same_file_exclude_each_other() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("data")).unwrap();
    // One link points to the file through a link to its folder, the other points to that link from
    // a third folder.
    fs::create_dir_all(at("other")).unwrap();
    std::os::unix::fs::symlink(at("data"), at("linked")).unwrap();
    fs::write(at("data/locks.db"), "").unwrap();
    std::os::unix::fs::symlink(at("linked/locks.db"), at("one")).unwrap();
    std::os::unix::fs::symlink("../one", at("other/two")).unwrap();
    let (one, two) = (open(at("one")).await.unwrap(), open(at("other/two")).await.unwrap());
    assert!(matches!(one.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
    assert!(matches!(two.try_acquire(&claim("k")).await.unwrap(), Attempt::Busy(_)));

    // SQLite itself, which resolves links too, reads the lock through every link, because all of
    // them share the log of the file.
    let mut connection =
        SqliteConnectOptions::new().filename(at("other/two")).connect().await.unwrap();
    let held = "SELECT count(*) FROM lock_registry_locks WHERE claim IS NOT NULL";
    let row = sqlx::query(held).fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<i64, _>(0), 1);
    let logs = [at(""), at("other"), at("data")].map(|folder| {
        let names = fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().ends_with("-wal")).count()
    });
    assert_eq!(logs, [0, 0, 1]);
}

#[tokio::test]
async fn a_file_with_a_hard_link_is_refused_under_either_name() {
    let folder = folder();
    let (file, second) = (folder.path().join("locks.db"), folder.path().join("second"));
    open(&file).await.unwrap().close().await;
    fs::hard_link(&file, &second).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&second, &link).unwrap();
    let before = fs::read(&file).unwrap();
    for path in [&file, &second, &link] {
        assert!(expect_refusal(path, Misconfigured, "hard link").await.refused());
    }
    assert_eq!(fs::read(&file).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "no log was created");

    fs::remove_file(&file).unwrap();
    assert!(matches!(
        open(&second).await.unwrap().try_acquire(&claim("k")).await.unwrap(),
        Attempt::Granted(_)
    ));
}

#[test]
fn a_process_whose_log_was_removed_loses_its_locks() {
    for removed in [&["-wal"][..], &["-shm"], &["-wal", "-shm"]] {
        let folder = folder();
        let path = folder.path().join("locks.db");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let backend = open(&path).await.unwrap();
            let held = claim("k");
            assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
            for suffix in removed {
                fs::remove_file(folder.path().join(format!("locks.db{suffix}"))).unwrap();
            }
            // If both files are missing, the other process creates them anew and is granted the
            // lock. If one is missing, the remaining file may be unreadable.
            let other = child("child_opens_and_locks", &path).output().unwrap();
            let granted = String::from_utf8_lossy(&other.stdout).contains("GRANTED");
            assert!(granted || removed.len() < 2, "{other:?}");
            assert_eq!(
                backend.renew(std::slice::from_ref(&held)).await.remove(0).unwrap(),
                Renewal::Gone
            );
            assert!(backend.try_acquire(&claim("k")).await.is_err());
            assert!(backend.try_acquire(&claim("other")).await.is_err());
        });
    }
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused_and_unchanged() {
    let folder = folder();
    let path = folder.path().join("notes.txt");
    let text = "dear diary, ".repeat(1_000);
    fs::write(&path, &text).unwrap();
    expect_refusal(&path, Protocol, "no SQLite database").await;
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[tokio::test]
async fn a_damaged_database_is_reported_as_damaged() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    open(&path).await.unwrap().close().await;
    let mut bytes = fs::read(&path).unwrap();
    for byte in &mut bytes[100..4_096] {
        *byte = 0xa5;
    }
    fs::write(&path, &bytes).unwrap();
    expect_refusal(&path, Protocol, "damaged").await;
}

#[tokio::test]
async fn newer_tables_are_refused_and_unchanged() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    open(&path).await.unwrap().close().await;
    let mut connection = SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
    connection.execute("UPDATE lock_registry_meta SET version = 2").await.unwrap();
    connection.execute("PRAGMA journal_mode = DELETE").await.unwrap();
    sqlx::Connection::close(connection).await.unwrap();
    let before = fs::read(&path).unwrap();
    let error = expect_refusal(&path, Misconfigured, "version 2").await;
    assert!(error.to_string().contains("update the program"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn opening_keeps_other_tables_of_the_database() {
    let folder = folder();
    let path = folder.path().join("shop.db");
    let mut connection = create(&path).await;
    connection.execute("PRAGMA user_version = 7; PRAGMA application_id = 8; CREATE TABLE sale (n); INSERT INTO sale VALUES (9)")
        .await
        .unwrap();
    let backend = open(&path).await.unwrap();
    assert!(matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
    for (query, expected) in
        [("PRAGMA user_version", 7), ("PRAGMA application_id", 8), ("SELECT n FROM sale", 9)]
    {
        let row = sqlx::query(query).fetch_one(&mut connection).await.unwrap();
        assert_eq!(row.get::<i64, _>(0), expected, "{query}");
    }
}

#[tokio::test]
async fn tables_created_from_the_schema_by_another_program_are_used() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let mut connection = create(&path).await;
    for _ in 0..2 {
        sqlx::raw_sql(SqliteBackend::schema()).execute(&mut connection).await.unwrap();
    }
    let backend = open(&path).await.unwrap();
    assert!(matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_file_is_opened_by_many_tasks_at_once() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let config = SqliteConfig::new(&path).with_busy_timeout(Duration::from_secs(60));
        tasks.spawn(async move {
            let backend = SqliteBackend::open(config).await.unwrap();
            matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_))
        });
    }
    let granted = tasks.join_all().await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 1);
}

#[test]
fn a_fresh_file_is_opened_by_many_processes_at_once() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let children: Vec<_> = (0..6)
        .map(|_| child("child_opens_and_locks", &path).stdout(Stdio::piped()).spawn().unwrap())
        .collect();
    let mut granted = 0;
    for child in children {
        let output = child.wait_with_output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{stdout}");
        granted += usize::from(stdout.contains("GRANTED"));
    }
    assert_eq!(granted, 1);
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_opens_and_locks() {
    let path = std::env::var_os("LOCKS_DB").unwrap();
    let config = SqliteConfig::new(path).with_busy_timeout(Duration::from_secs(60));
    let backend = SqliteBackend::open(config).await.unwrap();
    let granted = matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_));
    println!("{}", if granted { "GRANTED" } else { "BUSY" });
    backend.close().await;
}

/// Returns a command that runs only the test `test` of this file.
fn child(test: &str, path: &Path) -> Command {
    let test = format!("sqlite::opening::{test}");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &test, "--ignored", "--nocapture"]).env("LOCKS_DB", path);
    child
}

#[test]
fn without_write_access_opening_is_denied() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { open(&path).await.unwrap().close().await });
    let set_mode =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();

    // Root can write everywhere, so the child runs as the user `nobody`. That user may be unable to
    // read the original program, so it runs a copy.
    let program = folder.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    set_mode(&program, 0o755);
    let test = "sqlite::opening::child_opens_and_prints_the_result";
    let run_child = || {
        let mut child = Command::new(&program);
        child
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("LOCKS_DB", &path)
            .current_dir("/");
        if nix::unistd::geteuid().is_root() {
            child.uid(65_534).gid(65_534);
        }
        String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned()
    };
    for (folder_mode, file_mode) in [(0o777, 0o444), (0o555, 0o666)] {
        set_mode(folder.path(), folder_mode);
        set_mode(&path, file_mode);
        let stdout = run_child();
        assert!(
            stdout.contains("Denied") && stdout.contains("write access"),
            "folder {folder_mode:o}, file {file_mode:o}: {stdout}"
        );
    }
    set_mode(folder.path(), 0o777);
    set_mode(&path, 0o666);
    let stdout = run_child();
    assert!(stdout.contains("OPENED"), "{stdout}");
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_opens_and_prints_the_result() {
    match open(std::env::var_os("LOCKS_DB").unwrap()).await {
        Ok(_) => println!("OPENED"),
        Err(error) => println!("{:?}: {error}", error.kind()),
    }
}

/// Runs [`child_with_limited_space`] in a shell, with the text `shell` before its command. Returns
/// its output.
fn run_with_limited_space(limit: &str, shell: &str) -> String {
    let folder = folder();
    let test = child("child_with_limited_space", folder.path());
    let output = Command::new("sh")
        .args(["-c", &format!("{shell} \"$@\""), "sh"])
        .arg(test.get_program())
        .args(test.get_args())
        .env("LOCKS_DB", folder.path())
        .env("SPACE_LIMIT", limit)
        .output()
        .unwrap();
    [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat()
}

#[test]
fn open_and_try_acquire_report_a_full_disk() {
    // A separate small disk, in a mount namespace that ends with the child.
    let stdout = run_with_limited_space("disk", "exec unshare --mount --map-root-user");
    if stdout.contains("MOUNTED") {
        assert!(stdout.contains("REPORTED"), "{stdout}");
        return;
    }
    // Without the right to mount a disk, a file size limit stands for the full disk.
    eprintln!("this process may not mount a disk, so a file size limit is used: {stdout}");
    let stdout = run_with_limited_space("limit", "trap '' XFSZ; exec");
    assert!(stdout.contains("REPORTED"), "{stdout}");
}

#[test]
fn open_and_try_acquire_report_a_file_size_limit() {
    // SIGXFSZ would kill the child. With the signal ignored, a write fails as on a full disk or
    // with an exceeded quota.
    let stdout = run_with_limited_space("limit", "trap '' XFSZ; exec");
    assert!(stdout.contains("REPORTED"), "{stdout}");
}

/// Limits the disk space of the child.
trait SpaceLimit {
    fn fill(&self);
    fn free(&self);
    /// Returns whether `error` reports the exhausted space.
    fn is_reported_by(&self, error: &BackendError) -> bool;
}

/// A disk of one megabyte, mounted at the path.
struct SmallDisk(PathBuf);

impl SpaceLimit for SmallDisk {
    fn fill(&self) {
        let mut ballast = fs::File::create(self.0.join("ballast")).unwrap();
        while std::io::Write::write(&mut ballast, &[0; 4_096]).is_ok_and(|written| written > 0) {}
    }

    fn free(&self) {
        fs::remove_file(self.0.join("ballast")).unwrap();
    }

    fn is_reported_by(&self, error: &BackendError) -> bool {
        error.kind() == Misconfigured && error.to_string().contains("space")
    }
}

/// A file size limit: no file may grow beyond the largest one in this folder.
struct FileSizeLimit(PathBuf);

impl FileSizeLimit {
    fn set(bytes: u64) {
        let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
        setrlimit(Resource::RLIMIT_FSIZE, bytes.min(hard), hard).unwrap();
    }
}

impl SpaceLimit for FileSizeLimit {
    fn fill(&self) {
        let sizes =
            fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        Self::set(sizes.max().unwrap_or(0));
    }

    fn free(&self) {
        Self::set(u64::MAX);
    }

    fn is_reported_by(&self, error: &BackendError) -> bool {
        error.kind() == Misconfigured && error.to_string().contains("-shm")
            || error.kind() == Protocol && error.to_string().contains("quota")
    }
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_with_limited_space() {
    let folder = PathBuf::from(std::env::var_os("LOCKS_DB").unwrap());
    let limit: &dyn SpaceLimit = if std::env::var_os("SPACE_LIMIT")
        .is_some_and(|limit| limit == "disk")
    {
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), &folder, Some("tmpfs"), flags, Some("size=1m")).unwrap();
        println!("MOUNTED");
        &SmallDisk(folder.clone())
    } else {
        &FileSizeLimit(folder.clone())
    };
    let path = folder.join("locks.db");

    limit.fill();
    let error = open(&path).await.unwrap_err();
    assert!(limit.is_reported_by(&error), "{error} {error:?}");
    limit.free();

    let backend = open(&path).await.unwrap();
    let held = claim("held");
    assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
    limit.fill();
    // The log may still have space for some grants.
    let mut granted = Vec::new();
    let error = loop {
        let next = claim(&format!("k{}", granted.len()));
        match backend.try_acquire(&next).await {
            Ok(attempt) => granted.push((next, attempt)),
            Err(error) => break error,
        }
    };
    assert!(limit.is_reported_by(&error), "{error} {error:?}");
    // Every grant that was returned is in the file.
    let listed = backend.list().await.unwrap();
    assert_eq!(listed.len(), granted.len() + 1);
    let is_disk_warning = |finding: &Finding| finding.message.contains("MiB left");
    assert!(
        std::env::var_os("SPACE_LIMIT").is_some_and(|limit| limit != "disk")
            || backend.diagnose().await.unwrap().iter().any(is_disk_warning)
    );

    limit.free();
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    assert!(matches!(backend.try_acquire(&claim("new")).await.unwrap(), Attempt::Granted(_)));
    println!("REPORTED");
}

#[test]
fn a_file_that_is_a_mount_point_is_refused() {
    let folder = folder();
    let test = child("child_mounts_a_file", folder.path());
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user"])
        .arg(test.get_program())
        .args(test.get_args())
        .env("LOCKS_DB", folder.path())
        .output();
    let stdout = output.map_or_else(
        |error| error.to_string(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    );
    if stdout.contains("MOUNTED") {
        assert!(stdout.contains("REPORTED"), "{stdout}");
        return;
    }
    // A unit test covers the detection of a mount point. Here, an ordinary file must not be refused
    // as a mount point.
    eprintln!("this process may not mount a file: {stdout}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { open(folder.path().join("locks.db")).await.unwrap().close().await });
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_mounts_a_file() {
    let folder = PathBuf::from(std::env::var_os("LOCKS_DB").unwrap());
    let (file, mounted) = (folder.join("locks.db"), folder.join("a mounted one"));
    open(&file).await.unwrap().close().await;
    fs::write(&mounted, "").unwrap();
    let (flags, none) = (nix::mount::MsFlags::MS_BIND, None::<&str>);
    nix::mount::mount(Some(&file), &mounted, none, flags, none).unwrap();
    println!("MOUNTED");
    assert!(expect_refusal(&mounted, Misconfigured, "mount its folder instead").await.refused());
    assert!(open(&file).await.is_ok());
    println!("REPORTED");
}

#[tokio::test]
async fn a_dropped_open_leaves_a_usable_file() {
    use std::future::Future;
    use std::task::{Context, Waker};

    let folder = folder();
    for polls in 0..40 {
        let path = folder.path().join(format!("{polls}.db"));
        let mut opening = Box::pin(open(&path));
        for _ in 0..polls {
            if opening.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        drop(opening);
        let backend = open(&path).await.unwrap();
        assert!(matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
    }
}

#[test]
fn a_config_prints_all_of_its_fields() {
    let config = SqliteConfig::new("locks.db")
        .with_namespace("jobs")
        .with_purge_after(Duration::from_secs(5));
    let text = format!("{config:?}");
    for part in ["locks.db", "jobs", "5s"] {
        assert!(text.contains(part), "{text}");
    }
}
