//! A file that cannot be opened returns an error with the cause and a remedy. Other files can be
//! opened by many processes at once.
#![cfg(all(feature = "sqlite", target_os = "linux"))]
#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Claim, Finding, Key, LockBackend, Release, Renewal,
};
use registry_jdbc::sqlx::sqlite::SqliteConnectOptions;
use registry_jdbc::sqlx::{self, ConnectOptions, Executor, Row};
use registry_jdbc::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

use BackendErrorKind::{Misconfigured, Protocol};

async fn open(path: impl Into<PathBuf>) -> Result<SqliteBackend, BackendError> {
    SqliteBackend::open(SqliteConfig::new(path)).await
}

/// Checks that opening fails with this kind, and that the message names the file and contains
/// `says`.
async fn refused(path: impl Into<PathBuf>, kind: BackendErrorKind, says: &str) -> BackendError {
    let path = path.into();
    let error = open(&path).await.unwrap_err();
    assert_eq!(error.kind(), kind, "{path:?}: {error} {error:?}");
    assert!(error.to_string().contains(says), "{path:?}: {error}");
    error
}

fn claim(key: &str) -> Claim {
    Claim::new(Key::new(key).unwrap(), Duration::from_secs(30))
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn paths_that_cannot_work_are_refused_and_nothing_is_made() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "").unwrap();
    fs::create_dir(at("dir")).unwrap();
    std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
    let before = fs::read_dir(folder.path()).unwrap().count();

    refused(at("missing/locks.db"), Misconfigured, "does not exist; make it first").await;
    refused(at("dir"), Misconfigured, "is a folder; name a file").await;
    refused(at("new/"), Misconfigured, "name a file, not a folder").await;
    refused(at("file/locks.db"), Misconfigured, "not a folder").await;
    refused(at("dangling"), Misconfigured, "leads nowhere").await;
    refused("/dev/null", Misconfigured, "no regular file").await;
    refused(at("nul\0nul"), Misconfigured, "NUL").await;
    refused(at(&"x".repeat(300)), Misconfigured, "").await;
    refused("", Misconfigured, "in memory").await;
    refused(":memory:", Misconfigured, "in memory").await;
    use std::os::unix::ffi::OsStringExt;
    let odd = std::ffi::OsString::from_vec(vec![b'x', 0xff]);
    refused(folder.path().join(odd), Misconfigured, "UTF-8").await;
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), before);
}

#[tokio::test]
async fn odd_names_are_just_names() {
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
async fn a_link_leads_to_the_same_locks() {
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
    let mut data = SqliteConnectOptions::new().filename(at("other/two")).connect().await.unwrap();
    let held = "SELECT count(*) FROM lock_registry_locks WHERE claim IS NOT NULL";
    let row = sqlx::query(held).fetch_one(&mut data).await.unwrap();
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
        assert!(refused(path, Misconfigured, "hard link").await.refused());
    }
    assert_eq!(fs::read(&file).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "no log was made");

    fs::remove_file(&file).unwrap();
    assert!(matches!(
        open(&second).await.unwrap().try_acquire(&claim("k")).await.unwrap(),
        Attempt::Granted(_)
    ));
}

#[test]
fn of_two_processes_the_one_whose_log_was_removed_holds_no_more() {
    for lost in [&["-wal"][..], &["-shm"], &["-wal", "-shm"]] {
        let folder = folder();
        let path = folder.path().join("locks.db");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let backend = open(&path).await.unwrap();
            let held = claim("k");
            assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
            for suffix in lost {
                fs::remove_file(folder.path().join(format!("locks.db{suffix}"))).unwrap();
            }
            // Without both files it creates them anew and is granted the lock. Without one, the
            // remaining file may be unreadable.
            let other = child("child_opens_and_locks", &path).output().unwrap();
            let granted = String::from_utf8_lossy(&other.stdout).contains("GRANTED");
            assert!(granted || lost.len() < 2, "{other:?}");
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
async fn what_is_no_database_is_refused_and_left_alone() {
    let folder = folder();
    let path = folder.path().join("notes.txt");
    let text = "dear diary, ".repeat(1_000);
    fs::write(&path, &text).unwrap();
    refused(&path, Protocol, "no SQLite database").await;
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

#[tokio::test]
async fn a_damaged_database_is_told_as_such() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    open(&path).await.unwrap().close().await;
    let mut bytes = fs::read(&path).unwrap();
    for byte in &mut bytes[100..4_096] {
        *byte = 0xa5;
    }
    fs::write(&path, &bytes).unwrap();
    refused(&path, Protocol, "damaged").await;
}

#[tokio::test]
async fn newer_tables_are_refused_and_left_alone() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    open(&path).await.unwrap().close().await;
    let mut data = SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
    data.execute("UPDATE lock_registry_meta SET version = 2").await.unwrap();
    data.execute("PRAGMA journal_mode = DELETE").await.unwrap();
    sqlx::Connection::close(data).await.unwrap();
    let before = fs::read(&path).unwrap();
    let error = refused(&path, Misconfigured, "version 2").await;
    assert!(error.to_string().contains("update the program"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn a_database_with_other_tables_keeps_them() {
    let folder = folder();
    let path = folder.path().join("shop.db");
    let mut data = SqliteConnectOptions::new()
        .filename(&path)
        .create_if_missing(true)
        .connect()
        .await
        .unwrap();
    data.execute("PRAGMA user_version = 7; PRAGMA application_id = 8; CREATE TABLE sale (n); INSERT INTO sale VALUES (9)")
        .await
        .unwrap();
    let backend = open(&path).await.unwrap();
    assert!(matches!(backend.try_acquire(&claim("k")).await.unwrap(), Attempt::Granted(_)));
    for (question, answer) in
        [("PRAGMA user_version", 7), ("PRAGMA application_id", 8), ("SELECT n FROM sale", 9)]
    {
        let row = sqlx::query(question).fetch_one(&mut data).await.unwrap();
        assert_eq!(row.get::<i64, _>(0), answer, "{question}");
    }
}

#[tokio::test]
async fn tables_that_somebody_else_made_from_the_schema_are_used() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let mut dba = SqliteConnectOptions::new()
        .filename(&path)
        .create_if_missing(true)
        .connect()
        .await
        .unwrap();
    for _ in 0..2 {
        sqlx::raw_sql(SqliteBackend::schema()).execute(&mut dba).await.unwrap();
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
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        granted += usize::from(said.contains("GRANTED"));
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

/// This test program, which runs only the test `test`.
fn child(test: &str, path: &Path) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--ignored", "--nocapture"]).env("LOCKS_DB", path);
    child
}

#[test]
fn without_write_access_opening_is_denied() {
    let folder = folder();
    let path = folder.path().join("locks.db");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { open(&path).await.unwrap().close().await });
    let set =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();

    // Root can write everywhere, so the child runs as the user `nobody`. That user may have no
    // access to the folder of the original program.
    let program = folder.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    set(&program, 0o755);
    let run = || {
        let mut child = Command::new(&program);
        child
            .args(["--exact", "child_tells_the_outcome", "--ignored", "--nocapture"])
            .env("LOCKS_DB", &path)
            .current_dir("/");
        if nix::unistd::geteuid().is_root() {
            child.uid(65_534).gid(65_534);
        }
        String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned()
    };
    for (folder_mode, file_mode) in [(0o777, 0o444), (0o555, 0o666)] {
        set(folder.path(), folder_mode);
        set(&path, file_mode);
        let said = run();
        assert!(
            said.contains("Denied") && said.contains("write access"),
            "folder {folder_mode:o}, file {file_mode:o}: {said}"
        );
    }
    set(folder.path(), 0o777);
    set(&path, 0o666);
    let said = run();
    assert!(said.contains("OPENED"), "{said}");
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_tells_the_outcome() {
    match open(std::env::var_os("LOCKS_DB").unwrap()).await {
        Ok(_) => println!("OPENED"),
        Err(error) => println!("{:?}: {error}", error.kind()),
    }
}

/// Runs [`child_meets_the_end_of_its_room`] behind the shell commands `shell`. Returns its output.
fn without_room(room: &str, shell: &str) -> String {
    let folder = folder();
    let test = child("child_meets_the_end_of_its_room", folder.path());
    let output = Command::new("sh")
        .args(["-c", &format!("{shell} \"$@\""), "sh"])
        .arg(test.get_program())
        .args(test.get_args())
        .env("LOCKS_DB", folder.path())
        .env("ROOM", room)
        .output()
        .unwrap();
    [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat()
}

#[test]
fn a_full_disk_is_told_by_opening_and_by_locking() {
    // A separate small disk, in a mount namespace that ends with the child.
    let said = without_room("disk", "exec unshare --mount --map-root-user");
    if said.contains("MOUNTED") {
        assert!(said.contains("TOLD"), "{said}");
        return;
    }
    // Without the right to mount, a file size limit stands for the full disk.
    eprintln!(
        "no disk to fill, as this process may not mount; files that may not grow instead: {said}"
    );
    let said = without_room("limit", "trap '' XFSZ; exec");
    assert!(said.contains("TOLD"), "{said}");
}

#[test]
fn files_that_may_not_grow_are_told_by_opening_and_by_locking() {
    // SIGXFSZ would kill the child. With the signal ignored, a write fails as on a full disk or
    // with an exceeded quota.
    let said = without_room("limit", "trap '' XFSZ; exec");
    assert!(said.contains("TOLD"), "{said}");
}

/// A way to limit the space of the child.
trait Room {
    fn fill(&self);
    fn empty(&self);
    /// Whether `error` reports the exhausted space.
    fn is_told(&self, error: &BackendError) -> bool;
}

/// A disk of one megabyte, mounted at the path.
struct Disk(PathBuf);

impl Room for Disk {
    fn fill(&self) {
        let mut left = fs::File::create(self.0.join("ballast")).unwrap();
        while std::io::Write::write(&mut left, &[0; 4_096]).is_ok_and(|written| written > 0) {}
    }

    fn empty(&self) {
        fs::remove_file(self.0.join("ballast")).unwrap();
    }

    fn is_told(&self, error: &BackendError) -> bool {
        error.kind() == Misconfigured && error.to_string().contains("space")
    }
}

/// A file size limit: no file may grow beyond the largest one in this folder.
struct Limit(PathBuf);

impl Limit {
    fn set(bytes: u64) {
        let hard = getrlimit(Resource::RLIMIT_FSIZE).unwrap().1;
        setrlimit(Resource::RLIMIT_FSIZE, bytes.min(hard), hard).unwrap();
    }
}

impl Room for Limit {
    fn fill(&self) {
        let sizes =
            fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        Self::set(sizes.max().unwrap_or(0));
    }

    fn empty(&self) {
        Self::set(u64::MAX);
    }

    fn is_told(&self, error: &BackendError) -> bool {
        error.kind() == Misconfigured && error.to_string().contains("-shm")
            || error.kind() == Protocol && error.to_string().contains("quota")
    }
}

#[tokio::test]
#[ignore = "the child of another test"]
async fn child_meets_the_end_of_its_room() {
    let folder = PathBuf::from(std::env::var_os("LOCKS_DB").unwrap());
    let room: &dyn Room = if std::env::var_os("ROOM").is_some_and(|room| room == "disk") {
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), &folder, Some("tmpfs"), flags, Some("size=1m")).unwrap();
        println!("MOUNTED");
        &Disk(folder.clone())
    } else {
        &Limit(folder.clone())
    };
    let path = folder.join("locks.db");

    room.fill();
    let error = open(&path).await.unwrap_err();
    assert!(room.is_told(&error), "{error} {error:?}");
    room.empty();

    let backend = open(&path).await.unwrap();
    let held = claim("held");
    assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
    room.fill();
    // The log may still have space for some grants.
    let mut granted = Vec::new();
    let error = loop {
        let next = claim(&format!("k{}", granted.len()));
        match backend.try_acquire(&next).await {
            Ok(attempt) => granted.push((next, attempt)),
            Err(error) => break error,
        }
    };
    assert!(room.is_told(&error), "{error} {error:?}");
    // Every grant that was returned is in the file.
    let listed = backend.list().await.unwrap();
    assert_eq!(listed.len(), granted.len() + 1);
    let warns = |finding: &Finding| finding.message.contains("MiB left");
    assert!(
        std::env::var_os("ROOM").is_some_and(|room| room != "disk")
            || backend.diagnose().await.unwrap().iter().any(warns)
    );

    room.empty();
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    assert!(matches!(backend.try_acquire(&claim("new")).await.unwrap(), Attempt::Granted(_)));
    println!("TOLD");
}

#[test]
fn a_file_that_is_mounted_by_itself_is_refused() {
    let folder = folder();
    let test = child("child_mounts_a_file", folder.path());
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user"])
        .arg(test.get_program())
        .args(test.get_args())
        .env("LOCKS_DB", folder.path())
        .output();
    let said = output.map_or_else(
        |error| error.to_string(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    );
    if said.contains("MOUNTED") {
        assert!(said.contains("TOLD"), "{said}");
        return;
    }
    // A unit test covers the detection of a mount. Here, an ordinary file must not be taken for
    // one.
    eprintln!("nothing is mounted, as this process may not: {said}");
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
    assert!(refused(&mounted, Misconfigured, "mount its folder instead").await.refused());
    assert!(open(&file).await.is_ok());
    println!("TOLD");
}

#[tokio::test]
async fn an_open_that_is_dropped_half_way_leaves_a_usable_file() {
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
fn a_config_tells_all_of_itself() {
    let config = SqliteConfig::new("locks.db")
        .with_namespace("jobs")
        .with_purge_after(Duration::from_secs(5));
    let text = format!("{config:?}");
    for part in ["locks.db", "jobs", "5s"] {
        assert!(text.contains(part), "{text}");
    }
}
